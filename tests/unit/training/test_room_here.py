"""How much memory a rank may plan with."""

from types import SimpleNamespace
from typing import Any

import pytest

from accept_mpi.device import compute
from accept_mpi.device.compute import Compute
from accept_mpi.device.memory import planned
from accept_mpi.training.auto_plan import _room, _sharers

ROOM = 8e9


class Placed(Compute):
    """A device with a memory of that name."""

    def __init__(self, memory: str) -> None:
        super().__init__()
        self._memory = memory

    @property
    def memory(self) -> str:
        return self._memory

    def room(self) -> float:
        return ROOM


@pytest.mark.parametrize(
    ("placed", "shares"),
    [
        (["a/", "a/", "b/"], [2, 2, 1]),
        (["a/cuda:0", "a/cuda:1", "b/cuda:0", "b/"], [1, 1, 1, 2]),
        (["a/cuda:0", "a/cuda:1", "a/cuda:0", "a/cuda:1"], [2, 2, 2, 2]),
    ],
)
def test_who_shares_a_memory(monkeypatch: pytest.MonkeyPatch, placed: list[str], shares: list[int]) -> None:
    """Ranks of a host share its memory, those on a GPU that GPU's: with eight GPUs in a host each had an eighth of one."""
    everyone = [one.split("/") for one in placed]
    for rank, (_, memory) in enumerate(everyone):
        monkeypatch.setattr(compute, "_here", Placed(memory))
        runtime: Any = SimpleNamespace(
            rank=rank, startup_seconds=1.0, hosts=[{"machine_id": host} for host, _ in everyone],
            messenger=SimpleNamespace(allgather=lambda *_: everyone),
        )  # fmt: skip
        assert _sharers(runtime) == shares[rank]
        assert _room(1e18, _sharers(runtime)) == planned(ROOM / shares[rank])

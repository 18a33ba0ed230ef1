"""Ranks that have the data compare it before training."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from accept_mpi.data import ArrayDataset, Dataset, MapDataset
from accept_mpi.data.base import begin_epoch
from accept_mpi.data.mixing import Mixed
from accept_mpi.errors import Agreed
from accept_mpi.job import Mix
from accept_mpi.job_file import parse
from accept_mpi.training.data_here import Sizes, agree_on_data, turns

JOB = 'model.name = "m:m"\ndata.name = "d:d"\ntrain.steps = 1\noutput.directory = "r"\n'


def agreed(
    sets: list[tuple[Dataset | None, Dataset | None]], evaluates: bool = True, first: Sequence[int] = (), known: Any = None
) -> set[Sizes]:
    """What all ranks agree on, or what they raise. Ranks are threads here, one of which runs at a time: they have the same
    random numbers."""
    barrier, told, turn = threading.Barrier(len(sets), timeout=60), dict[int, Any](), threading.Lock()

    def meet() -> None:
        turn.release()
        try:
            barrier.wait()
        finally:
            turn.acquire()

    def of(rank: int) -> Sizes:
        def allgather(value: Any, deadline: float, what: str) -> list[Any]:
            told[rank] = msgspec.msgpack.encode(value)
            meet()
            found = [msgspec.msgpack.decode(told[one], strict=False) for one in range(len(sets))]
            meet()
            return found

        runtime: Any = SimpleNamespace(messenger=SimpleNamespace(allgather=allgather), startup_seconds=1.0, rank=rank)
        runtime.agree, runtime.at = lambda what, do: do(), lambda one: f"rank {one} on host edge{one}"
        with turn:
            return agree_on_data(runtime, sets[rank], evaluates, first, None if known is None else known[rank])

    with ThreadPoolExecutor(len(sets)) as pool:
        return set(pool.map(of, range(len(sets))))


def rows(y: torch.Tensor) -> ArrayDataset:
    return ArrayDataset(torch.zeros(len(y)), y)


def test_all_learn_the_names_of_classes() -> None:
    class Named(torch.utils.data.TensorDataset):
        classes = ("cat", "d\udcf6g")  # folders' names may be any bytes

    data = MapDataset(Named(torch.zeros(4, 2), torch.arange(4)))
    assert agreed([(data, data), (None, None)]) == {(4, 4, ("cat", "d\ufffdg"))}
    mixed = Mixed(data, Mix(classes=4, mixup=0.2))
    assert agreed([(mixed, data)], evaluates=False) == {(4, 4, ("cat", "d\ufffdg"))}


def test_rows_late_in_either_set_are_compared() -> None:
    y = torch.arange(400)
    other = torch.cat([y[:64], y[64:].flip(0)])
    assert agreed([(rows(y), rows(y)), (None, None), (rows(y), rows(y))]) == {(400, 400, ())}
    assert agreed([(rows(y), rows(y)), (rows(y), rows(other))], evaluates=False) == {(400, 400, ())}
    for which, last in (("training", (rows(other), rows(y))), ("test", (rows(y), rows(other)))):
        with pytest.raises(
            Agreed, match=rf"have different data: sample \d+ of the {which} set has another target on rank 0 t"
        ):
            agreed([(rows(y), rows(y)), last])


def test_inputs_are_compared_where_the_first_stage_is_and_with_where_it_was() -> None:
    """Targets are alike. A rank that takes the first stage over after a loss goes on with the same samples."""
    y = torch.arange(80)
    these, others = ((ArrayDataset(x, y),) * 2 for x in (torch.zeros(80, 2), torch.ones(80, 2)))
    assert agreed([these, others], first=[0]) == {(80, 80, ())}
    with pytest.raises(
        Agreed, match="sample 0 of the training set has other inputs on rank 1 on host edge1 than on rank 0 on"
    ):
        agreed([these, others], first=[0, 1])
    known: list[Any] = [{}, {}]
    assert agreed([these, others], first=[0], known=known) == {(80, 80, ())}
    assert agreed([these, these], first=[1], known=known) == {(80, 80, ())}
    with pytest.raises(Agreed, match="other inputs on rank 1 on host edge1 than on rank 0 on host edge0"):
        agreed([these, others], first=[1], known=known)


@pytest.mark.parametrize("own", [True, False])
def test_samples_that_change_are_told_once(caplog: pytest.LogCaptureFixture, own: bool) -> None:
    """If a data set draws with a generator of its own; the global random numbers are seeded for each sample."""

    class Noisy(torch.utils.data.Dataset[Any]):
        generator = torch.Generator().manual_seed(1) if own else None

        def __len__(self) -> int:
            return 8

        def __getitem__(self, n: int) -> Any:
            return torch.randn(4, generator=self.generator), n % 2

    data = MapDataset(Noisy())
    for _ in range(2):
        assert agreed([(data, rows(torch.arange(3)))]) == {(8, 3, ())}  # ranks here are threads, with the same generators
    said = [one.message for one in caplog.records if "is another one whenever it is asked for" in one.message]
    assert len(said) == own


@pytest.mark.parametrize("kind", ["kept", "made ready", "anew"])
def test_samples_that_are_drawn_once_are_told(caplog: pytest.LogCaptureFixture, kind: str) -> None:
    """A data set that keeps what it has drawn has other samples on each rank: whoever asks first draws."""

    class Noisy(torch.utils.data.Dataset[Any]):
        def __init__(self) -> None:
            self.kept: dict[int, torch.Tensor] = {}

        def __len__(self) -> int:
            return 8

        def __getitem__(self, n: int) -> Any:
            if kind == "kept" and n not in self.kept:
                self.kept[n] = torch.randn(4)
            if kind == "made ready" and not self.kept:
                self.kept[0] = torch.randn(4)
            return self.kept[n if kind == "kept" else 0] if self.kept else torch.randn(4), n % 2

    data = MapDataset(Noisy())
    agreed([(data, rows(torch.arange(3)))])
    said = [one.message for one in caplog.records if "is drawn at random when it is first asked for" in one.message]
    assert len(said) == (kind == "kept")


def test_other_lengths_are_no_matter_of_random_numbers() -> None:
    y = torch.arange(400)
    with pytest.raises(
        Agreed, match=r"400 training and 400 test samples on rank 0, 399 and 400 on rank 2; give both the sa"
    ) as no:
        agreed([(rows(y), rows(y)), (None, None), (rows(y[1:]), rows(y))])
    assert "random" not in str(no.value)


def test_targets_may_vary_in_length_and_are_not_kept() -> None:
    class Varying:
        calls = 0

        def __len__(self) -> int:
            return 1000

        def __getitem__(self, n: int) -> Any:
            self.calls += 1
            return torch.zeros(1), torch.full((1 + n % 5,), n)

    first, last = Varying(), Varying()
    of_first, of_last = ((MapDataset(varying), rows(torch.arange(3))) for varying in (first, last))
    assert agreed([of_first, of_last]) == {(1000, 3, ())}
    assert (first.calls, last.calls) == (64 + 4, 64 + 4)  # two of them are asked for twice
    assert agreed([(MapDataset(last), of_last[1])]) == {(1000, 3, ())}
    assert last.calls == 68 + 4  # nobody to compare with


@pytest.mark.parametrize(
    ("hosts", "load", "wanted"),
    [
        ("aab", [True, True, True], [[True, False], [False, True], [True, False]]),
        ("aaab", [False, True, True, True], [[False, False], [True, False], [False, True], [True, False]]),
        ("aab", [True, False, True], [[True], [False], [True]]),
        ("ab", [False, False], [[False], [False]]),
    ],
)
def test_one_rank_of_each_host_loads_the_data_first(hosts: str, load: list[bool], wanted: list[list[bool]]) -> None:
    job = parse(JOB, "job")
    for rank, mine in enumerate(wanted):
        runtime: Any = SimpleNamespace(
            messenger=SimpleNamespace(allgather=lambda *rest: load), startup_seconds=1.0, rank=rank,
            hosts=[{"machine_id": host} for host in hosts],
        )  # fmt: skip
        assert turns(runtime, job, load[rank]) == mine


class Shifting(list[Any]):
    """A data set whose samples depend on the epoch."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, n: Any) -> Any:
        return torch.full((2,), float(n + self.epoch)), n + self.epoch


def test_samples_are_compared_as_they_are_in_the_first_epoch() -> None:
    """One rank may have trained already, and the other have loaded its data just now."""
    sets = [MapDataset(Shifting([0] * 9)) for _ in range(2)]
    begin_epoch(sets[0], 3, 0)
    assert agreed([(one, one) for one in sets], evaluates=False, first=(0, 1)) == {(9, 9, ())}

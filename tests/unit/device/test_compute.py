"""Where a stage is computed: chosen by name, and nothing of it is left where the host's tensors are."""

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from accept_mpi import tree
from accept_mpi.device import compute
from accept_mpi.device.compute import Compute, here, select
from accept_mpi.errors import UserError
from accept_mpi.job_file import parse
from accept_mpi.models.layers import Layers
from accept_mpi.models.losses import find_loss
from accept_mpi.pipeline.stage import Stage
from accept_mpi.recovery.layer_state import load, states

BASE = '[model]\nname="m"\n[data]\nname="d"\n[train]\nsteps=1\n[output]\ndirectory="r"\n'


class Apart(Compute):
    """Stands for a GPU: what crosses is copied, and counted, and backwards run in a thread of their own."""

    alone = "it is computed apart"
    backward_in_thread = False

    def __init__(self) -> None:
        super().__init__()
        self.taken, self.given = 0, 0

    def take(self, tensors: compute.Tensors) -> compute.Tensors:
        self.taken += len(tensors)
        return tuple(None if one is None else self._copy(one) for one in tensors)

    def take_value(self, value: Any) -> Any:
        return value if value is None else tree.replace(value, torch.clone)

    def give(self, tensors: Sequence[torch.Tensor | None]) -> compute.Tensors:
        self.given += len(tensors)
        return tuple(None if one is None else self._copy(one) for one in tensors)

    def _copy(self, one: torch.Tensor) -> torch.Tensor:
        return one.detach().clone().requires_grad_(one.requires_grad)


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> Apart:
    device, backward = Apart(), torch.Tensor.backward

    def in_a_thread(tensor: torch.Tensor) -> None:
        thread = threading.Thread(target=backward, args=(tensor,))
        thread.start()
        thread.join()

    monkeypatch.setattr(torch.Tensor, "backward", in_a_thread)
    monkeypatch.setattr(compute, "_here", device)
    return device


def layers() -> list[nn.Module]:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return [nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.3), nn.Linear(5, 3)]


def train(schedule: str) -> dict[str, torch.Tensor]:
    """Two stages, three steps of two micro-batches, a checkpoint taken over in the middle."""

    def made() -> list[Stage]:
        job = parse(BASE, "job", [f"pipeline.schedule={schedule}", "train.optimizer={name='adamw', lr=0.01}"])
        every, names = layers(), ["0", "1", "2", "3"]
        cut = [Layers(0, names[:2], every[:2]), Layers(2, names[2:], every[2:])]
        return [Stage(cut[0], job, None, False), Stage(cut[1], job, find_loss("cross_entropy"), False)]

    first, last = made()
    for step in range(3):
        for k in range(2):
            x, y = torch.randn(4, 6, generator=torch.Generator().manual_seed(9 * step + k)), torch.tensor([0, 2, 1, 0])
            out = first.forward(step, k, (x,), step).outputs
            last.forward(step, k, (out[0].detach().requires_grad_(),), step, target=y, share=0.5)
            first.backward(step, k, last.backward(step, k, ()))
            for stage in (first, last) if schedule == "zero-bubble" else ():
                stage.weight_gradient(step, k)
        for stage in (first, last):
            stage.update(0.01, step)
        if step == 1:
            for stage in (first, last):
                stage.drained()
            kept = states(first) | states(last)
            first, last = made()
            options = first.job.train.optimizer
            for stage in (first, last):
                load(stage, {n: kept[n] for n in range(stage.start, stage.start + 2)}, options)
    with last.evaluating():
        last.evaluate((torch.randn(4, 5),), torch.tensor([0, 1, 2, 0]))
    return first.weights() | last.weights()


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_results_do_not_depend_on_it(apart: Apart, monkeypatch: pytest.MonkeyPatch, schedule: str) -> None:
    there = train(schedule)
    assert apart.taken == 3 * 2 * (1 + 1 + 1 + 0) + 1  # inputs of both stages, one gradient; the evaluation's
    assert apart.given == 3 * 2 * (1 + 1)  # outputs of the first stage, gradients of the second
    monkeypatch.undo()
    on_host = train(schedule)
    assert all(torch.equal(value, on_host[name]) for name, value in there.items())
    assert set(there) == set(on_host)


def test_nothing_is_shared_there(apart: Apart) -> None:
    stage = Stage(Layers(0, ["0"], [nn.Linear(2, 2)]), parse(BASE, "job"), None, False)
    with pytest.raises(UserError, match="cannot be held by several ranks: it is computed apart"):
        stage.join_group()


def test_what_there_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for asked in ("cuda", "cuda:1"):
        with pytest.raises(UserError, match=f'train.device: pi4 has no "{asked}": torch sees no GPU there'):
            select(asked, "pi4", 0)
    for asked in ("auto", "cpu", {"jetson*": "cuda"}, {}):
        select(asked, "pi4", 0)
        assert here().device.type == "cpu"
    with pytest.raises(UserError, match="jetson2 has no"):
        select({"jetson*": "cuda"}, "jetson2", 0)
    for wrong in ("tpu", "cuda:x", "cuda:-1"):
        monkeypatch.setenv("ACCEPT_MPI_DEVICE", wrong)
        with pytest.raises(UserError, match=f'^ACCEPT_MPI_DEVICE = "{wrong}": expected "cpu", "auto", "cuda" or "cuda:1"$'):
            select("cpu", "pi4", 0)


def test_ranks_of_a_host_share_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(compute.Gpu, "generators", Compute.generators)
    monkeypatch.setattr(compute, "_here", Compute())
    for asked, place, index in (("auto", 0, 0), ("cuda", 3, 1), ("cuda:1", 0, 1)):
        select(asked, "jetson", place)
        assert here().device == torch.device("cuda", index)
        assert here().alone
    with pytest.raises(UserError, match="torch sees 2 GPUs there"):
        select("cuda:2", "jetson", 0)


def test_what_a_gpu_measures_takes_no_memory_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many bytes as pieces take there, three times over, and for good: a host may have far less than its GPU."""
    taken: list[int] = []
    monkeypatch.setattr(compute, "take_memory", taken.append)
    Compute().reserve(5)
    gpu = compute.Gpu("cuda:1")
    gpu.reserve(1 << 40)
    assert taken == [5]
    assert (Compute().memory, gpu.memory) == ("", "cuda:1")

"""State that forwards write into in place, with several micro-batches in flight: each backward uses what its own forward
saw, as in a plain loop, where the next forward comes after it."""

import copy
from typing import Any

import pytest
import torch
from probing import probe
from torch import nn
from torch.nn import functional

from accept_mpi.job_file import parse
from accept_mpi.models.layers import Layers
from accept_mpi.models.losses import Loss
from accept_mpi.pipeline.stage import Stage

BASE = '[model]\nname="m"\n[data]\nname="d"\n[train]\nsteps=1\n[output]\ndirectory="r"\n'


class Late(nn.Module):
    """Makes its state in a forward, and anew where a batch has another size. Torch does not count writes to ``data``."""

    def __init__(self, by_data: bool) -> None:
        super().__init__()
        self.by_data = by_data
        self.state: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.state is None or self.state.shape != x.shape:
            self.state = torch.ones_like(x)
        (self.state.data if self.by_data else self.state).mul_(0.9).add_(x.detach(), alpha=0.1)
        return x * self.state


class Kept:
    def __init__(self) -> None:
        self.mean = torch.ones(4)

    def __getitem__(self, place: int) -> torch.Tensor:
        return self.mean


class Collected(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.state: Any = {"list": [torch.ones(4)], "dict": {0: torch.ones(4)}, "object": Kept()}[kind]

    def forward(self, x: torch.Tensor) -> Any:
        self.state[0].mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x * self.state[0]


class Counting(nn.Module):
    """Divides by a whole number, to which autograd refers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return x / self.count


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([True, False, True, False]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mask.logical_not_()
        return x * self.mask


class Last(nn.Module):
    """Writes into what it gave last, which may be still to be sent."""

    def __init__(self) -> None:
        super().__init__()
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.last is not None and self.last.shape == x.shape:
            x = x + self.last.mul_(0.5)
        out = x * 1
        self.last = out.detach()
        return out


@pytest.mark.parametrize("sizes", [(3, 3, 3), (3, 2, 2, 3)])
@pytest.mark.parametrize(
    "layer",
    [Late(False), Late(True), Collected("list"), Collected("dict"), Collected("object"), Counting(), Masked(), Last()],
    ids=lambda layer: type(layer).__name__,
)
def test_a_backward_uses_what_its_forward_saw(layer: nn.Module, sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), copy.deepcopy(layer))
    stage = Stage(Layers(0, ["a", "b"], [*copy.deepcopy(plain)]), parse(BASE, "job"), None, False)
    for size in sorted(set(sizes), reverse=True):
        probe(stage, (torch.randn(size, 4),), None, lambda specs, of, n=size: (torch.ones(n, 4),))
    assert stage.found.in_turn
    batches = [torch.randn(size, 4) for size in sizes]
    outs = [stage.forward(0, k, (x,)).outputs[0] for k, x in enumerate(batches)]
    for k, x in enumerate(batches):
        stage.backward(0, k, (torch.ones_like(x),))
        expected = plain(x)
        assert torch.equal(outs[k], expected)  # type: ignore[arg-type]
        expected.sum().backward()
    for parameter, other in zip(stage.parameters, plain.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad)  # type: ignore[arg-type]


class Weighing(nn.Module):
    """A loss that weighs classes by how often they came."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(4))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.weight.mul_(0.9).add_(torch.bincount(target, minlength=4), alpha=0.1)
        return functional.cross_entropy(output, target, weight=self.weight)


def test_so_does_that_of_a_loss() -> None:
    torch.manual_seed(0)
    plain, loss, job = nn.Linear(4, 4), Weighing(), parse(BASE, "job", ["pipeline.schedule=gpipe"])
    stage = Stage(Layers(0, ["a"], [copy.deepcopy(plain)]), job, Loss("own", copy.deepcopy(loss)), False)
    batches = [(torch.randn(3, 4), torch.tensor(classes)) for classes in ([0, 1, 2], [1, 1, 2], [3, 3, 2])]
    probe(stage, (batches[0][0],), batches[0][1], lambda specs, of: ())
    for k, (x, target) in enumerate(batches):
        stage.forward(0, k, (x,), target=target)
    for k, (x, target) in enumerate(batches):
        stage.backward(0, k, ())
        loss(plain(x), target).backward()
    for parameter, other in zip(stage.parameters, plain.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad)  # type: ignore[arg-type]

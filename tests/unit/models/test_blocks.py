"""Modules that stay whole, since what they compute depends on values: the record takes nothing for granted that only made-up
values show."""

import pytest
import torch
from recorded_models import check, recorded
from torch import nn
from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver, default_weight_fake_quant
from torch.nn import functional as F

from accept_mpi.models.shared import uncuttable


def every_cut(count: int) -> list[list[int]]:
    return [[], *([n] for n in range(1, count)), list(range(1, count))]


def mean_square(result: torch.Tensor) -> torch.Tensor:
    return result.square().mean()


class Guard(nn.Module):
    """Gives back what it is given, unless values are large."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / x.abs().max() if x.abs().max() > 50 else x


class Residual(nn.Module):
    """Uses what a block gives, and what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.guard, self.last = nn.Linear(4, 4), Guard(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return x + self.last(self.guard(x))


class Constrained(nn.Module):
    """A block is given a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.guard, self.last = nn.Linear(4, 4), Guard(), nn.Linear(4, 4)
        with torch.no_grad():
            self.first.weight.mul_(200)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.linear(x, self.guard(self.first.weight), self.first.bias)
        return self.last(x)


class Quantized(nn.Module):
    """As torch's quantization-aware training: flags in buffers say what is done."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.weight, self.values = default_weight_fake_quant(), FakeQuantize(MovingAverageMinMaxObserver)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.values(F.linear(x, self.weight(self.first.weight), self.first.bias)))


@pytest.mark.parametrize("model", [Residual, Constrained, Quantized])
def test_what_is_given_back_for_made_up_values(model: type[nn.Module]) -> None:
    """It was taken for what the block had been given: that was used in its place, or the other way round."""
    check(model, [torch.randn(3, 4), 500 * torch.randn(3, 4)], mean_square, every_cut)


class Normalizer(nn.Module):
    """Keeps a mean of what it sees, for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and self.count < 3:
            self.count += 1
            self.mean += (x.detach().mean(0) - self.mean) / int(self.count)
        return x - self.mean


class Normalized(nn.Module):
    """What follows from inputs alone is used by several layers."""

    def __init__(self) -> None:
        super().__init__()
        self.normalizer = Normalizer()
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.normalizer(x)
        h = x
        for part in self.parts:
            h = torch.tanh(part(h)) + x
        return h


def test_a_block_is_called_once() -> None:
    """Each layer that used what it gives called it, so that it counted several times."""
    check(Normalized, [torch.randn(3, 4) for _ in range(5)], mean_square, every_cut)


class Twice(Normalized):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, last = self.parts
        return last(self.normalizer(second(self.normalizer(first(x)))))


def test_a_block_that_writes_into_its_buffers_is_in_one_stage() -> None:
    chain = check(Twice, [torch.randn(3, 4) for _ in range(3)], mean_square, lambda count: [[], [count - 1]])
    assert uncuttable(chain.shared(), len(chain), True) == {1}


class Largest(nn.Module):
    """As many of the largest numbers as a buffer says."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.topk(int(self.count), dim=1).values


def test_shapes_that_depend_on_buffers() -> None:
    """The block was tried with a count of 0, and then refused in the first step."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.largest, self.last = nn.Linear(4, 4), Largest(), nn.Linear(2, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.largest(self.first(x)))

    assert recorded(Model, torch.randn(3, 4)).undivided == ["largest"]
    check(Model, [torch.randn(3, 4)], mean_square, every_cut)


class Attending(nn.Module):
    """Keeps a mask for each length."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.masks = nn.Linear(6, 6), nn.LayerNorm(6), dict[int, torch.Tensor]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.size(1) not in self.masks:
            self.masks[x.size(1)] = torch.ones(x.size(1), x.size(1)).tril()
        return x + self.norm(self.masks[x.size(1)] @ self.one(x))


def test_modules_that_keep_tables_stay_whole() -> None:
    """The model was one layer: its second record met a table of the first one."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
            self.blocks = nn.ModuleList([Attending(), Attending()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
            return self.last(x)

    chain = check(Model, [torch.randn(2, 4, 6), torch.randn(2, 3, 6), torch.randn(2, 4, 6)], mean_square, every_cut)
    assert chain.undivided == ["blocks.*"]
    assert len(chain) == 4


class CountingBlock(nn.Module):
    """Counts its calls in its class, and takes a way that depends on values."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        CountingBlock.calls += 1
        return self.one(x) if x.mean() > 0 else self.other(x)


class AroundIt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(6, 6), CountingBlock(), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.block(self.first(x)).tanh())


def test_what_a_block_counts_outside_it_counts_in_training_alone() -> None:
    assert len(recorded(AroundIt, torch.randn(4, 6))) == 3
    assert CountingBlock.calls == 0

"""Forwards that set attributes of their model train as they do in one process, where what an earlier forward has left does
not matter; otherwise they are refused."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from recorded_models import check, recorded
from torch import nn
from torch.nn import functional as F

from accept_mpi.errors import UserError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 6)
        self.seen: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.tanh(self.one(x)))


class ShowsAttention(Net):
    """Some in attributes that __init__ does not make."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(x)
        self.seen = F.softmax(x @ x.transpose(-2, -1), -1)
        self.both, self.count = (self.seen.detach(), x), len(x)
        return self.two(self.seen @ x)


class WritesIntoWhatItMakes(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(x)
        self.seen = x.mean()
        sums = torch.zeros(x.shape).index_add_(0, torch.arange(len(x)).flip(0), x)
        return self.two(sums)


class LastLoss(Net):
    """As llama2.c has it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.loss_of(self.scores(x))
        return self.seen

    def loss_of(self, x: torch.Tensor) -> None:
        self.seen = x.square().mean()


class Normalizer(nn.Module):
    """RevIN, as models of time series have it: called twice, with an attribute in between."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((6,), 1.5))

    def forward(self, x: torch.Tensor, mode: str) -> torch.Tensor:
        if mode == "norm":
            self.mean = x.mean(1, keepdim=True).detach()
            return (x - self.mean) * self.weight
        return x / self.weight + self.mean


class Reversible(Net):
    def __init__(self) -> None:
        super().__init__()
        self.normalizer = Normalizer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.normalizer(self.scores(self.normalizer(x, "norm")), "denorm")


class MaskOfASize(Net):
    """As PyTorch's example of a language model keeps it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.seen is None or self.seen.size(0) != x.size(1):
            mask = torch.triu(torch.ones(x.size(1), x.size(1)), 1)
            mask[0] = 0
            self.seen = mask.masked_fill(mask == 1, float("-inf"))
        return self.two(F.softmax(self.one(x) @ self.one(x).transpose(-2, -1) + self.seen, -1) @ self.one(x))


class GrowingTable(Net):
    """Rotary positions, as labml keeps them; and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: float | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.seen is None or self.seen.size(0) < x.size(1):
            self.seen = torch.outer(torch.arange(x.size(1)).float(), torch.arange(8).float() / 8).cos()
        if self.scale is None:
            self.scale = 0.5
        return self.two(self.one(x) * self.seen[: x.size(1)] * self.scale)


class TakesAnArray(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x.mean()
        return self.scores(x[..., np.array([1, 0, 2, 3, 4, 5])])


class GridInEvaluation(Net):
    """As YOLO has it."""

    def __init__(self) -> None:
        super().__init__()
        self.grid, self.stride = torch.zeros(1), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.stride, x = 12 // x.size(1), self.scores(x)
        if not self.training:
            if self.grid.shape[:1] != x.shape[1:2]:
                self.grid = torch.arange(float(x.size(1)))[:, None].expand(-1, 6).contiguous()
            x = (x + self.grid) * self.stride
        return x


def squares(result: Any) -> torch.Tensor:
    return result.square().mean()


def every_cut(layers: int) -> list[list[int]]:
    return [[], *([n] for n in range(1, layers)), list(range(1, layers))]


@pytest.mark.parametrize(
    "net",
    [
        ShowsAttention, LastLoss, WritesIntoWhatItMakes, Reversible, MaskOfASize, GrowingTable, TakesAnArray,
        GridInEvaluation,
    ],
)  # fmt: skip
def test_what_does_not_matter_later(net: type[Net]) -> None:
    check(net, [torch.randn(2, length, 6) for length in (4, 4, 6, 3, 4)], squares, every_cut)


def test_nobody_reads_what_layers_do_not_set() -> None:
    chain = recorded(ShowsAttention, torch.randn(2, 4, 6))
    made: list[Net] = []
    chain = recorded(lambda: made.append(ShowsAttention()) or made[-1], torch.randn(2, 4, 6))  # type: ignore[func-returns-value]
    chain.build_range(0, len(chain), 0)
    with pytest.raises(TypeError, match="not there"):
        bool(made[-1].seen)


class Counts(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = (self.seen or 0) + 1
        return self.scores(x)


class CountsInATensor(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = torch.zeros(1) if self.seen is None else self.seen + 1
        return self.scores(x) + (self.seen > 100).float()


class OnlyAtFirst(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.scores(x) if self.seen else self.scores(x) * 2
        self.seen = True
        return x


class Alternates(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = not self.seen
        return self.scores(x)


class Recurrent(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.one(x) if self.seen is None else self.one(x) + self.seen.detach()
        return self.two(self.seen)


class RecurrentWithoutInit(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "hidden"):
            self.hidden = (torch.zeros(2, 4, 8), torch.zeros(1))
        self.hidden = (torch.tanh(self.one(x) + self.hidden[0].detach()), self.hidden[1])
        return self.two(self.hidden[0])


class MaskOfTheFirstBatch(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.seen is None:
            self.seen = (x > 0).float()
        return self.scores(x * self.seen)


class ReadInEvaluation(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen = x.mean(0).detach()
        elif self.seen is not None:
            x = x - self.seen
        return self.scores(x)


class CollectsInAList(Net):
    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.mean())
        return self.scores(x)


class FadesAConstant(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.seen is None:
            self.seen = torch.ones(6)
        x = x * self.seen
        self.seen.mul_(0.5)
        return self.scores(x)


class Keeps(Net):
    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.zeros(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = 0.9 * self.seen + 0.1 * x.detach().mean((0, 1))
        return self.scores(x - self.seen)


class CountsUnderAKey(Net):
    def __init__(self) -> None:
        super().__init__()
        self.seen = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen["forwards"] = self.seen.get("forwards", 0) + 1
        return self.scores(x) * self.seen.get("forwards", 0)


class CountsInSlots(Net):
    class Count:
        __slots__ = ("n",)

    def __init__(self) -> None:
        super().__init__()
        self.seen = self.Count()
        self.seen.n = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.n += self.training
        return self.scores(x) * self.seen.n


class AsksAnIterator(Net):
    def __init__(self) -> None:
        super().__init__()
        self.seen = itertools.cycle([1.0, 0.5])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scores(x * next(self.seen))


class AsksARange(AsksAnIterator):
    def __init__(self) -> None:
        super().__init__()
        self.seen = iter(range(1, 100))


class CountsInBytes(Net):
    def __init__(self) -> None:
        super().__init__()
        self.seen = b""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += b"."
        return self.scores(x * len(self.seen))


class AsksAGenerator(AsksAnIterator):
    def __init__(self) -> None:
        super().__init__()
        self.seen = (0.1 * n for n in range(1, 100))


@pytest.mark.parametrize(
    "net",
    [
        AsksAnIterator, AsksARange, CountsInBytes, AsksAGenerator, CountsUnderAKey, CountsInSlots,
        Counts, CountsInATensor, OnlyAtFirst, Alternates, Recurrent, RecurrentWithoutInit, MaskOfTheFirstBatch,
        ReadInEvaluation, CollectsInAList, FadesAConstant, Keeps,
    ],
)  # fmt: skip
def test_what_matters_later(net: type[Net]) -> None:
    with pytest.raises(UserError, match=r"forward (sets (seen|hidden) of the model|writes to a tensor that is no buffer)"):
        recorded(net, torch.randn(2, 4, 6))


_forwards = 0


class CountsInAVariable(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global _forwards
        _forwards += 1
        return self.scores(x) * min(1.0, _forwards / 10)


class CountsInItsClass(Net):
    forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        CountsInItsClass.forwards += 1
        return self.scores(x) * min(1.0, self.forwards / 10)


class AsksAFunction(Net):
    def __init__(self) -> None:
        super().__init__()
        count = 0

        def share() -> float:
            nonlocal count
            count += 1
            return min(1.0, count / 10)

        self.share = share

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scores(x) * self.share()


@pytest.mark.parametrize(
    ("net", "name"), [(CountsInAVariable, "_forwards"), (CountsInItsClass, "forwards"), (AsksAFunction, r"share\.count")]
)
def test_what_is_counted_outside_of_modules(net: type[Net], name: str) -> None:
    with pytest.raises(UserError, match=f"forward sets .*{name}, a variable outside of the model"):
        recorded(net, torch.randn(2, 4, 6))


class OfTheFirstLength(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.seen is None:
            self.seen = torch.arange(8.0) / x.size(1)
        return self.two(self.one(x) * self.seen)


class OfTheGreatestLength(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.seen is None or len(self.seen) < x.size(1):
            self.seen = torch.arange(float(x.size(1)))[:, None] / x.size(1)
        return self.two(self.one(x) * self.seen[: x.size(1)])


@pytest.mark.parametrize("net", [OfTheFirstLength, OfTheGreatestLength])
def test_what_matters_to_other_lengths(net: Callable[[], nn.Module]) -> None:
    chain = recorded(net, torch.randn(2, 4, 6))
    (layer, *_) = chain.build_range(0, len(chain), 0)
    layer(torch.randn(2, 4, 6))
    with pytest.raises(UserError, match="forward sets seen of the model"):
        layer(torch.randn(2, 5, 6))

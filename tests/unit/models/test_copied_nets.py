"""Models of many kinds, as people copy them, train as they are, cut anywhere, with the job's default settings."""

from collections.abc import Callable
from typing import Any

import copied_nets as nets
import pytest
import torch
from recorded_models import check
from torch import nn

from accept_mpi import tree

Draw = Callable[[int], Any]


def images(size: int) -> torch.Tensor:
    return torch.randn(size, 3, 20, 20)


def texts(size: int) -> torch.Tensor:
    return torch.randint(0, 50, (size, 9))


VALUES: list[tuple[type[nn.Module], Draw]] = [
    (nets.WithAuxiliary, images),
    (nets.Dense, images),
    (nets.PaddedUNet, lambda size: torch.randn(size, 3, 21, 18)),
    (nets.VectorQuantized, images),
    (nets.RotaryLlama, texts),
    (nets.SelectiveScan, texts),
    (nets.Translator, lambda size: (texts(size), texts(size)[:, :4])),
    (nets.PatchForecast, lambda size: torch.randn(size, 24, 3)),
    (nets.Recommender, lambda size: {"dense": torch.rand(size, 3), "sparse": torch.randint(0, 20, (size, 4))}),
    (nets.GraphAttention, lambda size: torch.randn(size, 10, 4)),
    (nets.Mixture, texts),
]


def squares(result: Any) -> torch.Tensor:
    parts = [one for one in tree.leaves(result) if one.is_floating_point()]
    return sum((one.square().mean() for one in parts), torch.zeros(()))


@pytest.mark.parametrize(("net", "draw"), VALUES, ids=lambda one: one.__name__ if isinstance(one, type) else "")
def test_equal_to_the_plain_model(net: type[nn.Module], draw: Draw) -> None:
    chain = check(net, [draw(4), draw(3)], squares, lambda layers: [[layers // 2], list(range(1, layers))])
    assert len(chain) >= 3

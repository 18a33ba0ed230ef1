"""Models that people copy train as they are, cut anywhere, with the job's default settings."""

from typing import Any

import pytest
import torch
from recorded_models import check, recorded
from torch import nn
from tutorial_nets import IMAGES, TEXTS, Points

from accept_mpi import tree
from accept_mpi.models.layers import build_layers
from accept_mpi.profiling.outline import outline

VALUES: list[tuple[type[nn.Module], tuple[torch.Tensor, ...]]] = [
    *((net, tuple(torch.randn(size, 3, 32, 32) for size in (4, 2))) for net in IMAGES),
    *((net, tuple(torch.randint(0, 50, (size, 12)) for size in (4, 2))) for net in TEXTS),
    (Points, tuple(torch.randn(size, 3, 20) for size in (4, 2))),
]


def squares(result: Any) -> torch.Tensor:
    return sum((one.square().mean() for one in tree.leaves(result)), torch.zeros(()))


@pytest.mark.parametrize(("net", "values"), VALUES, ids=lambda one: one.__name__ if isinstance(one, type) else "")
def test_equal_to_the_plain_model(net: type[nn.Module], values: tuple[torch.Tensor, ...]) -> None:
    check(net, values, squares, lambda layers: [[], *([n] for n in range(1, layers)), list(range(1, layers))])


@pytest.mark.parametrize("net", IMAGES, ids=lambda one: one.__name__)
def test_images_in_the_format_that_is_chosen(net: type[nn.Module]) -> None:
    x = torch.randn(2, 3, 32, 32)
    chain = recorded(net, x)
    assert outline(chain, 0, (x,)).channels_last
    value: Any = x.contiguous(memory_format=torch.channels_last)
    for layer in build_layers(chain, 0, len(chain), 0).modules:
        value = layer.to(memory_format=torch.channels_last)(value)  # type: ignore[call-overload]
    torch.manual_seed(7)
    assert torch.allclose(value, net()(x), atol=1e-5)

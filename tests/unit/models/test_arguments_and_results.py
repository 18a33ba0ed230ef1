"""What a model's forward gets of a sample, and what of its result is the loss."""

from typing import Any

import pytest
import torch
from recorded_models import recorded
from torch import nn
from torch.nn import functional as F

from accept_mpi.errors import UserError
from accept_mpi.models.base import Chain


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 3)

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.tanh(self.one(x)))


class TakesABatch(Net):
    def forward(self, batch: Any) -> torch.Tensor:
        return self.scores(batch["x"] if isinstance(batch, dict) else batch[0] + batch[1])


class TakesNames(Net):
    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        return self.scores(x if scale is None else x * scale)


class GivesScoresAndLoss(Net):
    """As nanoGPT does."""

    def forward(self, x: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        scores = self.scores(x)
        return scores, None if targets is None else F.cross_entropy(scores, targets)


def computed(chain: Chain, value: Any) -> Any:
    for layer in chain.build_range(0, len(chain), 0):
        value = layer(value)
    return value


def fresh(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(7)
    return kind()


@pytest.mark.parametrize("value", [{"x": torch.randn(4, 6), "name": torch.ones(4)}, (torch.randn(4, 6), torch.ones(4, 6))])
def test_a_forward_that_takes_a_whole_batch(value: Any) -> None:
    assert torch.equal(computed(recorded(TakesABatch, value), value), fresh(TakesABatch)(value))


@pytest.mark.parametrize(
    ("value", "wrong"),
    [
        ({"image": torch.randn(4, 6)}, r"\(missing a required argument: 'x'\).* a dict becomes its keyword arguments"),
        ((torch.randn(4, 6), torch.ones(6), torch.ones(6)), r"\(too many positional arguments\).* a tuple its arguments"),
    ],
)
def test_a_forward_that_takes_something_else(value: Any, wrong: str) -> None:
    with pytest.raises(UserError, match=wrong):
        recorded(TakesNames, value)


def test_the_loss_among_other_parts() -> None:
    value = {"x": torch.randn(4, 6), "targets": torch.randint(0, 3, (4,))}
    assert torch.equal(computed(recorded(GivesScoresAndLoss, value, "loss"), value), fresh(GivesScoresAndLoss)(**value)[1])
    with pytest.raises(UserError, match=r'no tensors under "loss", but 2 values; .* where samples are dicts'):
        recorded(GivesScoresAndLoss, torch.randn(4, 6), "loss")

"""What a user's own ``train`` does, a plain loop calls for before it begins; so does training here."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from accept_mpi.job_file import parse
from accept_mpi.models import chain_of
from accept_mpi.models.modes import _tell


class KeepsStatistics(nn.Module):
    """Its norm stays in evaluation mode while it trains, and its first part is frozen then."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)

    def train(self, mode: bool = True) -> "KeepsStatistics":
        super().train(mode)
        self.norm.eval()
        self.first.requires_grad_(False)
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.norm(self.first(x)))


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part, self.last = KeepsStatistics(), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.part(x))


def with_a_part_in_evaluation() -> Around:
    model = Around()
    model.part.drop.eval()
    return model


def sequence() -> nn.Sequential:
    return nn.Sequential(KeepsStatistics(), nn.Linear(6, 3))


def pretrained() -> nn.Module:
    """As libraries give models that are trained already."""
    return Around().eval()


def pretrained_sequence() -> nn.Module:
    return sequence().eval()


def functions() -> list[Callable[[], nn.Module]]:
    return [KeepsStatistics, lambda: nn.Linear(6, 3)]


JOB = """
data.name = "digits"
train.steps = 1
output.directory = "run"
"""


KINDS = (
    "Around", "KeepsStatistics", "sequence", "functions", "with_a_part_in_evaluation", "pretrained", "pretrained_sequence",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_models_own_train_is_called(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    _tell.cache_clear()
    with caplog.at_level("INFO"):
        chain = chain_of(parse(JOB, "job", [f"model.name=test_modes:{kind}"]), lambda: torch.randn(4, 6))
    assert ("is in evaluation mode" in caplog.text) == kind.startswith("pretrained")
    layers: list[Any] = chain.build_range(0, len(chain), 0)
    modes = {type(part).__name__: part.training for layer in layers for part in layer.modules()}
    assert not modes["BatchNorm1d"]
    assert modes["Dropout"] == (kind != "with_a_part_in_evaluation")
    frozen = [name for layer in layers for name, one in layer.named_parameters() if not one.requires_grad]
    assert len(frozen) == 2

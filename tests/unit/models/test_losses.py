"""What of targets counts in torch's losses, and in those that inherit from them."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from accept_mpi.errors import UserError
from accept_mpi.models.losses import Loss, find_loss


class Focal(nn.CrossEntropyLoss):
    """A plain mean over samples."""

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, target, weight=self.weight, reduction="none").mean()


def test_a_sum_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("summing")
    module.loss = nn.CrossEntropyLoss(reduction="sum")
    monkeypatch.setitem(sys.modules, "summing", module)
    with pytest.raises(UserError, match='reduction="sum"'):
        find_loss("summing:loss")


def test_whoever_inherits_may_count_otherwise() -> None:
    targets, weight = [torch.tensor([0, 0]), torch.tensor([1, 1])], torch.tensor([1.0, 3.0])
    assert Loss("own", Focal(weight=weight)).shares(targets, [2, 2]) == [0.5, 0.5]
    assert Loss("torch's", nn.CrossEntropyLoss(weight=weight)).shares(targets, [2, 2]) == [0.25, 0.75]


@pytest.mark.parametrize("loss", [nn.L1Loss(), nn.BCEWithLogitsLoss(), nn.functional.smooth_l1_loss])
def test_elements_count_where_lengths_differ(loss: Any) -> None:
    assert Loss("elements", loss).shares([torch.zeros(2, 3), torch.zeros(2, 1)], [2, 2]) == [0.75, 0.25]


def test_what_a_loss_counts_it_counts_apart_in_a_trial() -> None:
    class Counting(nn.Module):
        calls = 0

        def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return output.mean()

    loss = Loss("counting", Counting())
    loss.apart()(torch.ones(2), torch.ones(2), 2)
    assert loss.function.calls == 0

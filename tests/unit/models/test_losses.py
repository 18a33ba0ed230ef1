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


class Tempered(nn.Module):
    """With a temperature that is to be trained."""

    def __init__(self, trained: bool = True) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()), requires_grad=trained)

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output / self.temperature, target)

    def other(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self(output, target)


def test_a_loss_with_parameters_of_its_own_is_refused() -> None:
    for loss in (Tempered(), Tempered().other):
        with pytest.raises(UserError, match=r'^train.loss: "own" has parameters of its own that are to be trained'):
            Loss("own", loss)
    Loss("own", Tempered(trained=False))


def test_two_losses_are_no_sum_and_count() -> None:
    def adversarial(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return output.mean(), output.square().mean()

    with pytest.raises(UserError, match=r'^train.loss: "own": it gives two values that need gradients'):
        Loss("own", adversarial)(torch.ones(2, requires_grad=True), torch.ones(2), 2)


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

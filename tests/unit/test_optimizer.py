"""Learning rates and optimizers."""

import pytest
import torch
from torch import nn

from accept_mpi.config import Optimizer
from accept_mpi.optimizer import learning_rate, make_optimizer


def rates(options: Optimizer, steps: int = 10) -> list[float]:
    return [learning_rate(options, 1.0, step, steps) for step in range(steps)]


def test_constant_step_cosine() -> None:
    assert rates(Optimizer()) == [1.0] * 10
    assert rates(Optimizer(schedule="step", decay_every=4, decay=0.5)) == [1.0] * 4 + [0.5] * 4 + [0.25] * 2
    cosine = rates(Optimizer(schedule="cosine", final_lr=0.1))
    assert cosine == pytest.approx(_torch_cosine(10, 0.1))


def _torch_cosine(steps: int, last: float) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, last)
    found = []
    for _ in range(steps):
        found.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return found


def test_warmup() -> None:
    assert rates(Optimizer(warmup_steps=4))[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_kinds() -> None:
    parameters = [nn.Parameter(torch.zeros(2))]
    assert isinstance(make_optimizer(Optimizer(name="adamw"), 0.1, parameters), torch.optim.AdamW)
    assert isinstance(make_optimizer(Optimizer(name="adam"), 0.1, parameters), torch.optim.Adam)
    sgd = make_optimizer(Optimizer(momentum=0.9, nesterov=True), 0.1, parameters)
    assert isinstance(sgd, torch.optim.SGD)
    assert sgd.param_groups[0]["nesterov"]
    assert make_optimizer(Optimizer(), 0.1, []) is None

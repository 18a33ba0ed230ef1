"""What a user's code raises is told as the user's."""

import re
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from accept_mpi.data.base import adapt, fetch
from accept_mpi.errors import UserError, UsersBug
from accept_mpi.job_file import parse
from accept_mpi.models import chain_of
from accept_mpi.models.losses import Loss
from accept_mpi.models.metrics import Metric
from accept_mpi.users_code import call_layer


def ends(*given: Any, **more: Any) -> Any:
    sys.exit(3)


class Layer(nn.Module):
    forward = ends


class Samples:
    __getitem__ = ends

    def __len__(self) -> int:
        return 1


CALLS = {
    'layer 1 "middle" raised': lambda: call_layer(1, "middle", Layer(), torch.zeros(2)),
    'the loss "own" raised': lambda: Loss("own", ends)(torch.zeros(2, 3), torch.zeros(2), 2),
    'the metric "test_users_code:ends" raised': (
        lambda: Metric("test_users_code:ends").part(torch.zeros(2, 3), torch.zeros(2), 2, (0.0, 2.0))
    ),
    "the data set, asked for samples 0, raised": (
        lambda: fetch(adapt(Samples()), np.zeros(1, np.int64), 0, inputs=True, targets=True)
    ),
}


@pytest.mark.parametrize("said", CALLS)
def test_exits_are_told_as_mistakes(said: str) -> None:
    """They were shown with the whole traceback of this package."""
    with pytest.raises(UsersBug, match="SystemExit: 3") as found:
        CALLS[said]()
    assert said in str(found.value)


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Any) -> Any:
        return ends(self.b(self.a(x)))


def chain() -> Any:
    return [nn.Linear(3, 3), ends]


JOB = """
model.name = "m"
data.name = "d"
train.steps = 1
output.directory = "r"
"""


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("Whole", "model.name: the forward cannot be recorded: SystemExit: 3"),
        ("chain", 'model: layer 1 "1" cannot be built: SystemExit: 3'),
    ],
)
def test_exits_of_a_model_that_is_set_up(function: str, said: str) -> None:
    job = parse(JOB, "job", [f"model.name=test_users_code:{function}"])
    with pytest.raises(UserError, match=re.escape(said)):
        chain_of(job, lambda: torch.zeros(2, 3)).build_range(0, 2, 0)

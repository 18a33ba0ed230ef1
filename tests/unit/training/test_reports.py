import logging
import math
from collections import deque
from typing import Any

import pytest

from accept_mpi.comm.messages import StepMade
from accept_mpi.data.calendar import Calendar
from accept_mpi.logs.recorder import Clock
from accept_mpi.models.losses import Result
from accept_mpi.training.reports import Reports


def test_steps_in_which_nothing_counts_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """A run whose targets were all -100 said "loss nan" and no more."""
    posted: list[Any] = []
    reports = Reports(Calendar(8, 4, 2, 0, False), Clock(0.0), None, lambda rank, control: posted.append(control), deque())
    counts = ((2.0, 1.0), (0.0, 0.0), (0.0, 0.0))
    with caplog.at_level(logging.WARNING):
        for step, both in enumerate(counts, 1):
            reports.add(step, False, {k: Result(count, count, 0, 0, 2) for k, count in enumerate(both)})
            reports.made(step, False, 2, 0.1)
            assert len(caplog.records) == min(1, step - 1)
    assert "no target of step 2 counts in the loss" in caplog.text
    losses = [made.report.loss for made in posted if isinstance(made, StepMade)]
    assert losses[0] == 1.0
    assert all(map(math.isnan, losses[1:]))

"""The end of a run that no longer gets better."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

from accept_mpi.job_file import parse
from accept_mpi.logs.observers import Evaluated
from accept_mpi.training.best import Best
from accept_mpi.training.run_log import RunLog

JOB = '[model]\nname = "m"\n[data]\nname = "d"\n[train]\nsteps = 9\n[output]\ndirectory = "r"\n'


def test_a_loss_before_the_end_does_not_make_the_run_go_on(tmp_path: Path) -> None:
    """Whoever was asked to end it may be the rank that is lost: each deployment's first stage is asked, once."""
    log: Any = RunLog(Mock(), parse(JOB, "job"), True, Mock())
    log.controller = Mock()
    log.best = Best(tmp_path, "loss", 1, 0, log._enough)
    first, second = Mock(), Mock()
    log.connect(first)
    for step, loss in ((1, 1.0), (2, 2.0), (3, 3.0)):
        assert first.ask_to_replan.call_count == (step > 2)
        log.best.evaluated(Evaluated(step=step, epoch=0, samples=8, loss=loss, accuracy=0.5, end=1.0))
    log.connect(second)
    assert (first.ask_to_replan.call_count, second.ask_to_replan.call_count) == (1, 1)

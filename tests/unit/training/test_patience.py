"""The end of a run that no longer gets better."""

import json
import math
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from accept_mpi.data.calendar import Milestones
from accept_mpi.errors import UserError
from accept_mpi.job_file import parse
from accept_mpi.logs.observers import Evaluated
from accept_mpi.recovery.checkpoint import BEST, directory_of
from accept_mpi.training import best
from accept_mpi.training.best import Best
from accept_mpi.training.run_log import RunLog

JOB = '[model]\nname = "m"\n[data]\nname = "d"\n[train]\nsteps = 9\n[output]\ndirectory = "r"\n'


def test_a_loss_before_the_end_does_not_make_the_run_go_on(tmp_path: Path) -> None:
    """Whoever was asked to end it may be the rank that is lost: each deployment's first stage is asked, once."""
    log: Any = RunLog(Mock(), parse(JOB, "job"), True, Mock())
    log.controller = Mock()
    log.best = Best(tmp_path, "this", "loss", 1, {}, log._enough)
    first, second = Mock(), Mock()
    log.connect(first)
    for step, loss in ((1, 1.0), (2, 2.0), (3, 3.0)):
        assert first.ask_to_replan.call_count == (step > 2)
        log.best.evaluated(Evaluated(step=step, epoch=0, samples=8, loss=loss, accuracy=0.5, end=1.0))
    log.connect(second)
    assert (first.ask_to_replan.call_count, second.ask_to_replan.call_count) == (1, 1)


def evaluations(best: Best, values: list[float]) -> list[int | None]:
    """The best step after each of some losses."""
    found = []
    for step, loss in enumerate(values, 1):
        best.evaluated(Evaluated(step=step, epoch=0, samples=8, loss=loss, accuracy=math.nan, end=1.0))
        found.append(best.at)
    return found


def test_nan_is_never_better(tmp_path: Path) -> None:
    end = Mock()
    assert evaluations(Best(tmp_path, "this", "loss", 2, {}, end), [math.nan, math.nan, 2.0, math.nan, 1.0, math.nan]) == [
        1,
        1,
        3,
        3,
        5,
        5,
    ]
    end.assert_not_called()
    evaluations(Best(tmp_path, "this", "loss", 2, {}, end), [math.nan] * 4)
    end.assert_called_once()


def test_a_best_accuracy_where_there_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r'^output.keep_best: "accuracy" makes no sense'):
        evaluations(Best(tmp_path, "this", "accuracy", None, {}, Mock()), [1.0])


def test_what_is_told_again_counts_if_its_checkpoint_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a loss of rank 0. Else the best one could be one that is on no disk."""
    monkeypatch.setattr(best, "made_by", lambda run, who: [directory_of(run, 2)])
    for steps, at, kept in (((1, 3), None, 3), ((1, 2, 3), 2, 2)):
        (tmp_path / BEST).parent.mkdir(exist_ok=True)
        (tmp_path / BEST).unlink(missing_ok=True)
        found = Best(tmp_path, "this", "loss", None, {}, Mock(), first=3)
        for step in steps:
            found.evaluated(Evaluated(step=step, epoch=0, samples=8, loss=1.0, accuracy=math.nan, end=1.0))
            if step < 3:
                assert found.at == (at if step == 2 else None)
        found.kept(3)
        assert json.loads((tmp_path / BEST).read_text())["step"] == kept


def test_a_resumed_run_counts_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From where it resumes: what came after that is repeated. Without its checkpoint nothing is the best one."""
    monkeypatch.setattr(best, "made_by", lambda run, who: [directory_of(run, 1)] if who == "first" else [])
    first = Best(tmp_path, "first", "loss", 3, {}, Mock())
    evaluations(first, [2.0])
    assert not (tmp_path / BEST).exists()
    assert first.keeps == {1, None}
    first.kept(1)
    assert json.loads((tmp_path / BEST).read_text())["step"] == 1
    for step, loss in ((2, 3.0), (3, 3.0), (4, 1.0)):
        first.evaluated(Evaluated(step=step, epoch=0, samples=8, loss=loss, accuracy=math.nan, end=1.0))
    first.kept(3)
    assert first.keeps == {1, 4}
    left_by_first = (tmp_path / BEST).read_text()
    assert json.loads(left_by_first)["worse"] == [2, 3]
    for resumed, left in ((2, 2), (3, 1), (4, 1)):
        end = Mock()
        second = Best(tmp_path, "second", "loss", 3, {"first": resumed}, end)
        assert second.at == 1
        for n in range(left):
            end.assert_not_called()
            second.evaluated(Evaluated(step=resumed + 1 + n, epoch=0, samples=8, loss=3.0, accuracy=math.nan, end=1.0))
        end.assert_called_once()
        (tmp_path / BEST).write_text(left_by_first)
    end = Mock()
    Best(tmp_path, "second", "loss", 2, {"first": 4}, end).check()
    end.assert_called_once()
    first.kept(4)
    assert json.loads((tmp_path / BEST).read_text())["step"] == 4


def test_one_more_evaluation_at_a_runs_end_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with more patience that goes on from there has as many left as one that went on; but it may be the best one."""
    monkeypatch.setattr(best, "made_by", lambda run, who: [directory_of(run, 5), directory_of(run, 12)])
    course = Milestones(0, 100, 5, 0, True)

    def evaluate(found: Best, values: dict[int, float]) -> None:
        for step, loss in values.items():
            found.kept(step)
            found.evaluated(Evaluated(step=step, epoch=0, samples=8, loss=loss, accuracy=math.nan, end=1.0))

    ends = Mock(), Mock()
    first = Best(tmp_path, "first", "loss", 1, {}, ends[0], 0, course.evaluates_anyway)
    evaluate(first, {5: 1.0, 10: 2.0, 12: 2.0})
    ends[0].assert_called_once()
    second = Best(tmp_path, "second", "loss", 3, {"first": 12}, ends[1], 12, course.evaluates_anyway)
    second.check()
    evaluate(second, {15: 2.0})
    ends[1].assert_not_called()
    evaluate(second, {20: 2.0})
    ends[1].assert_called_once()
    evaluate(second, {22: 0.5})
    assert second.at == 22

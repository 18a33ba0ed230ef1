"""Checkpoints as rank 0 hears of them: the end of a run that a signal has asked for, and what goes to the disk with each."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from accept_mpi.errors import Stopped, UserError
from accept_mpi.training.controller import Controller


def test_a_checkpoint_that_fails_while_it_is_looked_for_is_none() -> None:
    """The disk is full: "go on with --resume" would have nothing to go on with."""
    writer: Any = Mock(error=None, run=Path("run"))

    def has(step: int) -> bool:
        writer.wait.side_effect = writer.error = UserError("no space")
        return True

    controller = Controller({}, writer)
    controller._stop_at = 7
    with pytest.raises(Stopped):
        controller.deliver()
    writer.has = has
    with pytest.raises(UserError, match="no space"):
        controller.deliver()


def test_observers_hear_of_each_checkpoint_once() -> None:
    """The log's rows go to the disk with it: a run that goes on after kill -9 lacked those of the last second."""
    writer: Any = Mock(error=None, made=0)
    observer: Any = Mock()
    controller = Controller({"log": observer}, writer)
    for made, heard in ((0, 0), (1, 1), (1, 1), (2, 2)):
        writer.made = made
        controller.deliver()
        assert observer.persist.call_count == heard
    controller.renew(Mock(error=None, made=1))
    controller.deliver()
    assert observer.persist.call_count == 3

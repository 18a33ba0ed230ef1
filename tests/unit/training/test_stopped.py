"""The end of a run that a signal has asked for."""

from typing import Any
from unittest.mock import Mock

import pytest

from accept_mpi.errors import Stopped, UserError
from accept_mpi.training.controller import Controller


def test_a_checkpoint_that_fails_while_it_is_looked_for_is_none() -> None:
    """The disk is full: "go on with --resume" would have nothing to go on with."""
    writer: Any = Mock(error=None, run="run")

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

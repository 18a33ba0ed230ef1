"""Sends a stage's checkpoints to rank 0, in the background, and never more than one at a time."""

import time
import weakref
from collections.abc import Callable
from typing import Any

from accept_mpi.comm.data_plane import DataPlane
from accept_mpi.comm.messages import Event
from accept_mpi.logs.recorder import Recorder
from accept_mpi.pipeline.stage import Stage
from accept_mpi.recovery.checkpoint_writer import chunks

_POLL = 0.01  # seconds between two looks at whether the one before has been sent
_LONG = 1.0  # seconds of waiting that are told of


class CheckpointSender:
    """One rank's part: that of a stage's leader."""

    def __init__(self, plane: DataPlane, recorder: Recorder, stage: int) -> None:
        """``stage``: its number."""
        self._plane, self._recorder, self._stage = plane, recorder, stage
        self._last: Callable[[], Any] = lambda: None
        """Gives the last piece of the newest checkpoint, until that has been sent: then nothing refers to it any more."""
        self._told = False

    def send(self, step: int, stage: Stage, deadline: float) -> None:
        """Copy the state after ``step`` steps, and queue it. If the checkpoint before still waits in the queue, wait for it
        first, since copies of the state must not pile up in memory; at most half of the ``deadline`` (seconds), by which
        others may be waiting for this rank."""
        with self._recorder.span("checkpoint", step):
            self._wait(step, deadline / 2)
            for chunk in chunks(step, self._stage, stage.weights(), stage.optimizer_state()):
                self._plane.post(0, chunk)
            self._last = weakref.ref(chunk.data)

    def _wait(self, step: int, most: float) -> None:
        began = time.monotonic()
        while self._last() is not None and time.monotonic() - began < most:
            self._plane.check()
            time.sleep(_POLL)
        if time.monotonic() - began > _LONG and not self._told:
            self._told = True
            text = f"stage {self._stage} waits until its last checkpoint is with rank 0: they are made faster than sent"
            self._plane.post(0, Event(self._recorder.clock.now(), step, text))

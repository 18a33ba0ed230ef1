"""Handlers of control messages: ``Controller`` collects on rank 0 what all ranks report, ``Follower`` serves the others."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from accept_mpi.comm.messages import (
    CheckpointChunk,
    Control,
    EvaluationMade,
    Event,
    Leaving,
    Message,
    PlanOver,
    Speed,
    StepMade,
    Stopping,
    TraceRows,
)
from accept_mpi.errors import DeadlineError, Stopped, UserError
from accept_mpi.files.start_directory import near
from accept_mpi.logs.format import EVALS, STEPS, TRACE
from accept_mpi.logs.observers import Evaluated, Observer, StepDone
from accept_mpi.recovery.checkpoint_writer import CheckpointWriter

_HANDLED = StepMade | EvaluationMade | TraceRows | Event | Stopping | Leaving | Speed


class Controller:
    """Takes rank 0's control messages on the data-plane thread, and hands them to the observers on the main thread."""

    def __init__(self, observers: dict[str, Observer], writer: CheckpointWriter) -> None:
        self.writer = writer
        self.last_evaluation: Evaluated | None = None
        self._observers = observers
        self._mail: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._mistake: UserError | None = None
        self._left = 0
        self.steps_made = 0
        """Number of steps made when this deployment ended, once all ranks have left it."""
        self.over = False
        """True if this deployment has ended the run before its time."""
        self._stop_at: int | None = None
        """Step after which a signal ends the run, with a checkpoint."""
        self._persisted = 0
        """Number of checkpoints on the disk when observers last heard of one."""
        self._chunk = 0.0
        """Time (monotonic seconds) at which the newest piece of a checkpoint arrived."""
        self._newest: dict[type[Control], int] = {}
        """The last step that observers have been given, by kind of report."""

    def wait_for_disk(self, deadline: float) -> None:
        """Deliver all messages after a deployment, and wait up to ``deadline`` seconds until checkpoints that have arrived
        completely are on the disk."""
        self.deliver()
        self.writer.wait_for_begun(deadline)

    def renew(self, writer: CheckpointWriter) -> None:
        """Begin another deployment, which writes checkpoints with ``writer``."""
        self.writer, self._left, self.steps_made, self.over, self._persisted = writer, 0, 0, False, 0

    def handle(self, message: Message) -> bool:
        """Take a message on the data-plane thread: checkpoints go to the disk at once, other messages wait for ``deliver``.

        Returns False if the message is not for the controller.
        """
        control = message.control
        if isinstance(control, CheckpointChunk):
            self._chunk = time.monotonic()
            if self._mistake is None:
                try:
                    self.writer.take(control)
                except UserError as mistake:
                    self._mistake = mistake
        elif isinstance(control, _HANDLED):
            self._mail.put(message)
        else:
            return False
        return True

    def deliver(self) -> None:
        """Give the observers what has arrived; on the main thread. Raises UserError if a checkpoint could not be written,
        Stopped if a signal's checkpoint is on the disk."""
        mistake = self._mistake or self.writer.error
        if mistake is not None:
            raise mistake
        while not self._mail.empty():
            self._deliver(self._mail.get())
        if self.writer.made != self._persisted:
            self._persisted = self.writer.made
            self.each("persist")
        at = self._stop_at
        if at is not None and self.writer.has(at) and self.writer.wait(at, 0.0):  # which raises if it failed just now
            raise Stopped(f"stopped by a signal after step {at}; go on with --resume {near(self.writer.run)}")

    def wait_for_all(self, ranks: int, deadline: float, check: Callable[[], None]) -> None:
        """Deliver until each of ``ranks`` ranks has sent its last message. Raises DeadlineError after ``deadline`` seconds
        without a piece of a checkpoint, and whatever ``check`` raises.

        The deadline may be infinite while others train: their own waits are limited, and the lifeline reports lost ranks.
        """
        began = time.monotonic()
        while self._left < ranks:
            check()
            self.deliver()
            with contextlib.suppress(queue.Empty):
                self._deliver(self._mail.get(timeout=0.1))
            if time.monotonic() > max(began, self._chunk) + deadline:
                raise DeadlineError(
                    f"waited {deadline:.0f} s for the last results; {self._left} of {ranks} ranks sent theirs"
                )

    @property
    def newest_step(self) -> int:
        """The last step that observers know of."""
        return self._newest.get(StepMade, 0)

    def watch(self, name: str, observer: Observer) -> None:
        """Add an observer, or replace the one that has this name."""
        self._observers[name] = observer

    def each(self, what: str, *arguments: Any) -> None:
        """Call the method ``what`` of every observer."""
        for observer in self._observers.values():
            getattr(observer, what)(*arguments)

    def _deliver(self, message: Message) -> None:
        control = message.control
        if isinstance(control, StepMade | EvaluationMade):
            # After a loss steps are repeated, in synchronous schedules with the same results; observers get each step once.
            if control.report.step <= self._newest.get(type(control), 0):
                return
            self._newest[type(control)] = control.report.step
        if isinstance(control, StepMade):
            self.each("step", control.report)
        elif isinstance(control, EvaluationMade):
            self.last_evaluation = control.report
            self.each("evaluated", self.last_evaluation)
        elif isinstance(control, TraceRows):
            self.each("trace", np.frombuffer(control.rows, TRACE))
        elif isinstance(control, Speed):
            self.each("speed", message.source, control.factor)
        elif isinstance(control, Stopping):
            self._stop_at = control.step
        elif isinstance(control, Event):
            self.each("event", control.seconds, control.step, control.text)
        elif isinstance(control, Leaving):
            self._left += 1
            self.steps_made = max(self.steps_made, control.steps_made)
            self.over |= control.over


class Follower:
    """Takes the control messages of a rank other than rank 0. A rank that the plan leaves idle waits here for the end."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._steps_made = 0

    def handle(self, message: Message) -> bool:
        """Take a message on the data-plane thread. Returns False if the message is not for this class."""
        if not isinstance(message.control, PlanOver):
            return False
        self._steps_made = message.control.steps_made
        self._over.set()
        return True

    def deliver(self) -> None:
        """Nothing: what this class takes is for whoever waits."""

    def wait(self, check: Callable[[], None]) -> int:
        """Wait until rank 0 says that the deployment is over; returns the number of steps made by then.

        There is no deadline, since those of the other ranks and the lifeline end this wait if something fails. Raises
        whatever ``check`` raises.
        """
        while not self._over.wait(0.5):
            check()
        return self._steps_made


assert set(StepDone.__dataclass_fields__) == set(STEPS.names or ())
assert set(Evaluated.__dataclass_fields__) - {"metrics"} == set(EVALS.names or ())

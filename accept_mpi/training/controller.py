"""Rank 0's second job: what is decided for all ranks, and what comes in from all of them."""

import contextlib
import json
import math
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from accept_mpi.comm.messenger import Message
from accept_mpi.errors import DeadlineError, Stopped, UserError
from accept_mpi.job import Job
from accept_mpi.logs.log import EVALS, STEPS, TRACE, LogWriter, Rows, open_log
from accept_mpi.logs.observers import Evaluated, Observer, StepDone
from accept_mpi.plan import Plan
from accept_mpi.profiling.cluster_profile import Survey
from accept_mpi.recovery.checkpoint import CheckpointWriter


def prepare_directory(directory: Path) -> None:
    """Make the output directory. Raises UserError where it cannot be written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / ".writable"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise UserError(f"output.directory: cannot write to {directory}: {error.strerror}") from error


def begin_log(
    directory: Path,
    job: Job,
    plan: Plan,
    facts: dict[str, Any],
    resumed_step: int,
    survey: Survey | None = None,
    run: str | None = None,
) -> LogWriter:
    """A new log in ``directory``, with the ``survey`` that the plan rests on.

    A log that is there already is kept under another name; a resumed run's begins with the steps and evaluations that led to
    its checkpoint. ``run``: after a loss, this run's name: a log that bears it is its own, whose writer was lost, and all of
    it goes on here.
    """
    path = directory / "log.h5"
    earlier: dict[str, Rows] = {}
    try:
        if path.exists():
            if resumed_step or run:
                with contextlib.suppress(UserError):  # kept under its other name, whatever it is
                    earlier = _earlier(path, resumed_step, run)
            number = 1
            while (kept := directory / f"log.{number}.h5").exists():
                number += 1
            path.rename(kept)

        def more(file: Any) -> None:
            if survey is not None:
                survey.write(file.create_group("survey"))

        return LogWriter(path, job.to_json(), plan.to_json(), facts, earlier, more)
    except OSError as error:
        raise UserError(f"output.directory: cannot write {path}: {error}") from error


def _earlier(path: Path, step: int, run: str | None) -> dict[str, Rows]:
    """What led to a checkpoint, or to the loss of the writer. Raises UserError where it cannot be read."""
    with open_log(path) as old:
        earlier = {name: old[name][old[name]["step"] <= step] for name in ("steps", "evals")}
        if run and json.loads(old.attrs["facts"]).get("run") == run:
            return earlier | {name: old[name][:] for name in ("trace", "events", "plans") if name in old}
    # Times count from the beginning of this run: what came before it happened at negative times.
    ends = [rows["end"].max() for rows in earlier.values() if len(rows)]
    for rows in earlier.values():
        rows["end"] -= max(ends, default=0.0)
    return earlier


class Controller:
    """Takes control messages on the data-plane thread and hands them to observers on the main one."""

    def __init__(self, observers: dict[str, Observer], writer: CheckpointWriter) -> None:
        self.writer = writer
        self.last_evaluation: Evaluated | None = None
        self._observers = observers
        self._mail: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._mistake: UserError | None = None
        self._left = 0
        self.steps_made = 0
        """In this term, once all ranks have left it."""
        self._stop_at: int | None = None
        """After which step a signal wants a checkpoint and the end."""
        self._newest = {"step": 0, "evaluated": 0}
        self.on_pulse: Callable[[int, float], None] = lambda rank, factor: None
        """Called with what an idle rank says of its speed (``pulse``)."""

    def wait_for_disk(self, deadline: float) -> None:
        """After a term: checkpoints that have come in whole get to the disk, what has come in besides to the observers."""
        self.deliver()
        self.writer.wait_for_begun(deadline)

    def renew(self, writer: CheckpointWriter) -> None:
        """Another term begins."""
        self.writer, self._left, self.steps_made = writer, 0, 0

    def handle(self, message: Message) -> bool:
        """Data-plane thread: checkpoints go to disk at once, what else is the controller's waits for ``deliver``.

        Returns whether it was the controller's.
        """
        if message.kind not in ("chunk", "step", "evaluated", "trace", "event", "stopping", "leaving", "pulse"):
            return False
        if message.kind != "chunk":
            self._mail.put(message)
        elif self._mistake is None:
            try:
                self.writer.take(message.body)
            except UserError as mistake:
                self._mistake = mistake
        return True

    def deliver(self) -> None:
        """Main thread: tell the observers what has come in. Raises UserError where a disk is full."""
        mistake = self._mistake or self.writer.error
        if mistake is not None:
            raise mistake
        while not self._mail.empty():
            self._deliver(self._mail.get())
        if self._stop_at is not None and self.writer.has(self._stop_at):
            raise Stopped(f"stopped by a signal after step {self._stop_at}; go on with --resume {self.writer.run}")

    def wait_for_all(self, ranks: int, deadline: float, check: Callable[[], None]) -> None:
        """Deliver until every rank has sent its last. Raises DeadlineError, and whatever ``check`` raises.

        While others train, ``deadline`` may be infinite: theirs are not, and the lifeline tells who is gone.
        """
        until = time.monotonic() + deadline
        while self._left < ranks:
            check()
            self.deliver()
            with contextlib.suppress(queue.Empty):
                self._deliver(self._mail.get(timeout=0.1))
            if time.monotonic() > until:
                raise DeadlineError(
                    f"waited {deadline:.0f} s for the last results; {self._left} of {ranks} ranks sent theirs"
                )

    def watch(self, name: str, observer: Observer) -> None:
        """Add an observer, or put another in its place."""
        self._observers[name] = observer

    def each(self, what: str, *arguments: Any) -> None:
        """Call the method ``what`` of every observer."""
        for observer in self._observers.values():
            getattr(observer, what)(*arguments)

    def _deliver(self, message: Message) -> None:
        if message.kind in self._newest:
            # After a loss steps are made once more: in synchronous schedules with the same results.
            if message.body["step"] <= self._newest[message.kind]:
                return
            self._newest[message.kind] = message.body["step"]
        if message.kind == "step":
            self.each("step", StepDone(**message.body))
        elif message.kind == "evaluated":
            self.last_evaluation = Evaluated(**message.body)
            self.each("evaluated", self.last_evaluation)
        elif message.kind == "trace":
            self.each("trace", np.frombuffer(message.body, TRACE))
        elif message.kind == "pulse":
            self.on_pulse(message.source, message.body)
        elif message.kind == "stopping":
            self._stop_at = message.body
        elif message.kind == "event":
            self.each("event", *(message.body[key] for key in ("seconds", "step", "text")))
        else:
            self._left += 1
            self.steps_made = max(self.steps_made, message.body or 0)


class Bystander:
    """Takes the control messages of a rank that is not rank 0. One that the plan leaves idle waits here for the end."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._steps_made = 0

    def handle(self, message: Message) -> bool:
        """Data-plane thread. Returns whether it was for the bystander."""
        if message.kind == "over":
            self._steps_made = message.body
            self._over.set()
        return message.kind == "over"

    def wait(self, check: Callable[[], None]) -> int:
        """Until rank 0 says that the term is over; how many steps are made then. Others' deadlines and the lifeline end this
        wait where nothing else does; raises whatever ``check`` raises."""
        while not self._over.wait(0.5):
            check()
        return self._steps_made


assert set(StepDone.__dataclass_fields__) == set(STEPS.names or ())
assert set(Evaluated.__dataclass_fields__) == set(EVALS.names or ())


def summary_line(result: Evaluated | None) -> str:
    """The last evaluation as text."""
    if result is None:
        return "no evaluation"
    accuracy = "" if math.isnan(result.accuracy) else f"test accuracy {100 * result.accuracy:.2f} %, "
    return f"{accuracy}test loss {result.loss:.4f}"


def facts_of(hosts: list[dict[str, Any]], plan: Plan, layers: list[str], parameters: int, **more: Any) -> dict[str, Any]:
    """A run's facts for the log."""
    unlisted = ("machine_id", "versions")
    return {
        "versions": hosts[0]["versions"],
        "hosts": [
            {k: v for k, v in host.items() if k not in unlisted} | {"stage": plan.place(host["rank"]).stage}
            for host in hosts
        ],
        "layers": layers,
        "parameters": parameters,
        **more,
    }

"""The observer that prints progress: a live bar on a terminal, plain lines elsewhere."""

import math
import os
import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn

from accept_mpi.logs.observers import Evaluated, Observer, StepDone

_LINE_SECONDS = 5.0
_WITHOUT_SPEED, _WITHOUT_BAR = 70, 75
"""Columns of a terminal below which there is no speed, or no bar."""


class ProgressObserver(Observer):
    """Prints step, loss, samples/s, time left, evaluations and events."""

    def __init__(self, steps: int, first_step: int) -> None:
        self._steps, self._first = steps, first_step
        self._began = time.monotonic()
        self._last_line = -math.inf
        self._rate = 0.0
        self._bar: Progress | None = None
        self._narrow = False
        if on_terminal():
            console = _Console(file=sys.stdout, force_terminal=True, width=_terminal_width())
            self._narrow = console.width < _WITHOUT_SPEED
            self._bar = Progress(*_columns(console.width), console=console, refresh_per_second=4)
            self._task = self._bar.add_task("starting", total=steps, completed=first_step)
            self._bar.start()

    def step(self, done: StepDone) -> None:
        if done.step <= self._first:
            return  # told again, since rank 0 was lost
        # A moving average over about ten steps: the raw figure changes too fast to read.
        self._rate = done.samples_per_s if not self._rate else 0.9 * self._rate + 0.1 * done.samples_per_s
        text = f"loss {done.loss:.4f}" + ("" if self._narrow else f"  {self._rate:.1f} samples/s")
        if self._bar:
            self._bar.update(self._task, completed=done.step, description=text)
            return
        now = time.monotonic()
        if now - self._last_line < _LINE_SECONDS and done.step != self._steps:
            return
        self._last_line = now
        left = (now - self._began) / max(1, done.step - self._first) * (self._steps - done.step)
        print(f"step {done.step}/{self._steps}  epoch {done.epoch}  {text}  ETA {duration(left)}", flush=True)

    def evaluated(self, result: Evaluated) -> None:
        accuracy = "" if math.isnan(result.accuracy) else f"  accuracy {100 * result.accuracy:.2f} %"
        more = "".join(f"  {name.rpartition(':')[2]} {value:.4g}" for name, value in result.metrics.items())
        self._say(f"step {result.step}  test loss {result.loss:.4f}{accuracy}{more}  ({result.samples} samples)")

    def event(self, seconds: float, step: int, text: str) -> None:
        self._last_line = -math.inf  # print the next step at once, which shows that training continues
        self._say(f"step {step}  {text}")

    def close(self) -> None:
        if self._bar:
            self._bar.stop()

    def _say(self, line: str) -> None:
        if self._bar:
            self._bar.console.print(line, highlight=False, markup=False, emoji=False)
        else:
            print(line, flush=True)


class _Console(Console):
    """A console that leaves the cursor where it can be seen, however the process ends."""

    def show_cursor(self, show: bool = True) -> bool:
        return False


def _columns(width: int) -> list[ProgressColumn]:
    """Parts of the line for a terminal of so many columns: numbers come before the bar, and both before labels."""
    labels, bar = width >= _WITHOUT_SPEED, min(40, width - _WITHOUT_BAR)
    return [
        *([TextColumn("step")] if labels else []),
        MofNCompleteColumn(),
        *([BarColumn(bar)] if bar > 0 else []),
        TextColumn("{task.description}"),
        *([TextColumn("ETA")] if labels else []),
        TimeRemainingColumn(),
    ]


def on_terminal() -> bool:
    """True if this process's output appears on a terminal.

    mpirun gives its ranks pseudo-terminals even if it has no terminal itself, so under mpirun its own output decides.
    """
    if not sys.stdout.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        return False
    if not any(name.startswith(("OMPI_COMM_WORLD_", "PMI_")) for name in os.environ):
        return True
    try:
        parents = os.readlink(f"/proc/{os.getppid()}/fd/1")
    except OSError:
        return False
    return parents.startswith(("/dev/pts/", "/dev/tty"))


def _terminal_width() -> int | None:
    """Columns of the terminal that mpirun writes to: the ranks' own pseudo-terminals have no width. None if unknown, as in
    containers whose terminal nobody has told its size, which is 0."""
    try:
        with open(f"/proc/{os.getppid()}/fd/1") as terminal:
            return os.get_terminal_size(terminal.fileno()).columns or None
    except OSError:
        return None


def duration(seconds: float) -> str:
    """Seconds as "1:02:03" or "2:03"."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"

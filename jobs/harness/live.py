"""Observes runs from outside while they train, by the lines that they print and by their log."""

import os
import queue
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from accept_mpi.errors import UserError
from accept_mpi.launch import mpirun
from accept_mpi.logs.figures import pyplot
from accept_mpi.logs.format import Rows
from accept_mpi.logs.reader import open_log
from edgelab.laboratory import Laboratory, Running

SECONDS = 300.0
"""Deadline of any wait."""


class Lines:
    """Lines that a command prints, with the time at which each arrived."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.text = ""
        self._lines: queue.SimpleQueue[tuple[float, str]] = queue.SimpleQueue()
        self._process = process
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put((time.monotonic(), line))

    @staticmethod
    def now() -> float:
        """Seconds of the clock by which lines arrive."""
        return time.monotonic()

    def wait(self, wanted: Callable[[str], Any]) -> float:
        """Wait for a line for which ``wanted`` is true; returns the time (``now``) of its arrival. Raises UserError if none
        comes."""
        until = time.monotonic() + SECONDS
        while (left := until - time.monotonic()) > 0:
            try:
                at, line = self._lines.get(timeout=min(left, 1.0))
            except queue.Empty:
                if self._process.poll() is not None:
                    break
                continue
            self.text += line
            if wanted(line):
                return at
        raise UserError(f"the run ended, or said nothing of what was awaited:\n{self.text[-2000:]}")


def step_of(line: str) -> int:
    """The step in a line of progress; 0 for other lines."""
    found = re.match(r"step (\d+)/", line)
    return int(found[1]) if found else 0


def anew(directory: Path) -> Path:
    """Remove the directory, whose files of an earlier experiment could pass for the new run's; returns its path."""
    shutil.rmtree(directory, ignore_errors=True)
    return directory


def start(lab: Laboratory, job: Path, directory: Path, *more: str, ulfm: bool = False, drain: bool = False) -> Running:
    """Start this job in the lab, one rank per host, with its output piped, or discarded (``drain``)."""
    command = [mpirun.path(), *(["--with-ft", "ulfm"] if ulfm else []), "-n", len(lab.hosts)]
    command += ["-hostfile", lab.hostfile, sys.executable, "-m", "accept_mpi", "train", job]
    command += ["--set", f"output.directory={directory.resolve()}", *more]
    return begin(lab, command, drain)


def begin(lab: Laboratory, command: Sequence[object], drain: bool = False) -> Running:
    """Start a command in the lab, with its output piped, or discarded (``drain``)."""
    out = subprocess.DEVNULL if drain else subprocess.PIPE
    return lab.start(
        command,
        env=mpirun.ENVIRONMENT | os.environ,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_step(directory: Path, step: int) -> int:
    """Wait until a growing log has at least ``step``; returns its last step. Raises UserError if no step comes for
    ``SECONDS``."""
    until, made = time.monotonic() + SECONDS, 0
    while made < step:
        if time.monotonic() > until:
            raise UserError(f"{directory}: no step after {made}, and {step} were awaited")
        time.sleep(0.1)
        try:
            with open_log(directory / "log.h5") as log:
                last = int(log["steps"]["step"][-1]) if len(log["steps"]) else 0
        except (UserError, OSError):
            continue
        if last > made:
            until, made = time.monotonic() + SECONDS, last
    return made


def rate(steps: Rows, first: int, last: int) -> float:
    """samples/s from the end of step ``first`` to the end of step ``last``."""
    rows = steps[(steps["step"] >= first) & (steps["step"] <= last)]
    return float(rows["samples"][1:].sum() / (rows["end"][-1] - rows["end"][0]))


def plot_rates(path: Path, runs: dict[str, Rows], moments: Sequence[float] = ()) -> None:
    """Plot samples/s over seconds since the first step, one line per run. ``moments``: seconds to mark by dashed lines."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(9, 4.2), layout="constrained")
    for colour, (name, steps) in zip(("#0072B2", "#D55E00", "#009E73", "#999999"), runs.items(), strict=False):
        axes.plot(steps["end"] - steps["end"][0], steps["samples_per_s"], color=colour, label=name, linewidth=1.3)
    for moment in moments:
        axes.axvline(moment, color="#777777", linestyle="--", linewidth=1)
    axes.set_xlabel("seconds")
    axes.set_ylabel("samples/s")
    axes.set_ylim(0, 1.1 * max(float(np.percentile(steps["samples_per_s"], 99)) for steps in runs.values()))
    axes.legend(frameon=False, fontsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=110)

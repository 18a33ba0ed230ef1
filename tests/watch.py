"""Watching a run that goes on, by the log that it writes."""

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from conftest import HANGS, environment, python

from accept_mpi.errors import UserError
from accept_mpi.logs.reader import open_log


def steps_done(directory: Path) -> int:
    """The last step that a run's log has; 0 before the first, or while it cannot be read."""
    try:
        with open_log(directory / "log.h5") as log:
            return int(log["steps"]["step"][-1]) if len(log["steps"]) else 0
    except (UserError, OSError):
        return 0


def wait_for_step(
    directory: Path, step: int, process: "subprocess.Popen[str] | subprocess.Popen[bytes]", deadline: float = 600.0
) -> int:
    """Wait until the log has this step; the last that it has. The test fails where the process ends or takes too long."""
    until = time.monotonic() + deadline
    while (done := steps_done(directory)) < step:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < until, f"{directory}: no step {step}"
        time.sleep(0.05)
    return done


def slowed_after_ten_steps(job: Path, command: Sequence[str]) -> str:
    """Start a job of ``slow_layers`` (tests/programs), which rank 1 slows down after ten steps; returns its output."""
    return slowed_after(10, job, command)


def slowed_after(step: int, job: Path, command: Sequence[str], *more: str, directory: str = "run") -> str:
    """The same after ``step``, with ``more`` on the command line. Once there is another plan no layer sleeps any more: what
    is saved by yet another one would never pay."""
    process = subprocess.Popen(
        [*command, *python(), "-m", "accept_mpi", "train", str(job), *more], cwd=job.parent, env=environment(), text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    wait_for_step(job.parent / directory, step, process)
    (job.parent / "slow-1").touch()
    until = time.monotonic() + HANGS
    while process.poll() is None and time.monotonic() < until and not planned_anew(job.parent / directory, step):
        time.sleep(0.1)
    (job.parent / "awake").touch()
    out, _ = process.communicate(timeout=HANGS)
    assert process.returncode == 0, out
    for name in ("slow-1", "awake"):
        (job.parent / name).unlink()
    return out


def planned_anew(directory: Path, step: int) -> bool:
    """Whether the log says that ranks have gone over to another plan after ``step``."""
    try:
        with open_log(directory / "log.h5") as log:
            newest = [row["text"] for row in log["events"][:] if row["step"] >= step]
    except (UserError, OSError):
        return False
    return any(text.startswith((b"moved layers", b"dealt micro-batches anew")) for text in newest)

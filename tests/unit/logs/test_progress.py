"""The line on a terminal: numbers stay where there is little room, and the cursor can always be seen."""

import io
import os
import re
import subprocess

import pytest

from accept_mpi.logs import progress
from accept_mpi.logs.observers import StepDone
from accept_mpi.logs.progress import ProgressObserver


@pytest.mark.parametrize(
    ("width", "parts"),
    [
        (36, ["123456/900000", "loss 1.2345", "0:"]),
        (40, ["123456/900000", "loss 1.2345", "0:"]),
        (72, ["step", "123456/900000", "loss 1.2345", "12345.6 samples/s", "ETA", "0:"]),
        (120, ["step", "123456/900000", "━━━", "loss 1.2345", "12345.6 samples/s", "ETA", "0:"]),
    ],
)
def test_a_terminals_line(monkeypatch: pytest.MonkeyPatch, width: int, parts: list[str]) -> None:
    monkeypatch.setattr(progress, "on_terminal", lambda: True)
    monkeypatch.setattr(progress, "_terminal_width", lambda: width)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    observer = ProgressObserver(900000, 123000)
    for step in (123400, 123456):
        observer.step(StepDone(step, 3, 8, 1.2345, 0.5, 0.1, 2.0, 12345.6))
    observer.close()
    written = progress.sys.stdout.getvalue()
    assert "\x1b[?25l" not in written
    last = re.split(r"[\r\n]+", re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", written).strip())[-1]
    assert len(last) <= width
    at = [last.find(part) for part in parts]
    assert -1 not in at, last
    assert at == sorted(at), last


def test_a_terminal_without_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a new pseudo-terminal is: nothing at all was shown there."""
    primary, secondary = os.openpty()
    process = subprocess.Popen(["sleep", "60"], stdout=secondary)
    try:
        monkeypatch.setattr(os, "getppid", lambda: process.pid)
        assert os.get_terminal_size(secondary).columns == 0
        monkeypatch.setattr(progress, "on_terminal", lambda: True)
        monkeypatch.setattr("sys.stdout", io.StringIO())
        observer = ProgressObserver(10, 0)
        observer.event(1.0, 4, "lost rank 1")
        observer.close()
        assert "step 4  lost rank 1\n" in progress.sys.stdout.getvalue()
    finally:
        process.kill()
        process.wait()
        os.close(primary)
        os.close(secondary)


def test_steps_before_a_loss_are_not_printed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last stage tells a new rank 0 of all of them: "step 1" came after "step 16  lost rank 0"."""
    monkeypatch.setattr(progress, "on_terminal", lambda: False)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    observer = ProgressObserver(80, 16)
    observer.event(4.0, 16, "lost rank 0")
    for step in (1, 15, 16, 17):
        observer.step(StepDone(step, 3, 8, 1.2345, 0.5, 0.1, 2.0, 12345.6))
    assert [line.split()[1] for line in progress.sys.stdout.getvalue().splitlines()] == ["16", "17/80"]


def test_texts_on_a_terminal_are_only_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """No markup and no pictures, whatever folders and functions are called."""
    monkeypatch.setattr(progress, "on_terminal", lambda: True)
    monkeypatch.setattr(progress, "_terminal_width", lambda: 120)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    observer = ProgressObserver(80, 16)
    for text in ("resumed from runs/[a]/step-16", "a loss [/data/runs]", "of :smile:f"):
        observer.event(4.0, 16, text)
        assert text in progress.sys.stdout.getvalue()
    observer.close()

"""Output goes on where its reader is gone, or its disk full; a command whose result it is says so."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import HANGS, ROOT, environment

from accept_mpi.cli import watch

PROGRAM = """
import sys
from accept_mpi.cli.terminal import outlive_terminal
outlive_terminal()
print("seen", flush=True)
sys.stdin.read()
for stream in (sys.stdout, sys.stderr):
    print("x" * 100_000, file=stream, flush=True)
sys.exit(7)
"""


def test_nobody_reads() -> None:
    source, target = os.pipe()
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=target, stderr=target)
    os.close(target)
    assert os.read(source, 100) == b"seen\n"
    os.close(source)
    process.communicate(timeout=60)
    assert process.returncode == 7


def test_a_full_disk() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", PROGRAM], input=b"", stdout=full, stderr=full, timeout=60)
    assert done.returncode == 7


@pytest.mark.parametrize("words", ["bench codec bf16 --sizes 4K --repeats 1", "doctor"])
def test_a_result_that_a_full_disk_refuses(words: str) -> None:
    command = [sys.executable, "-m", "accept_mpi", *words.split()]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=HANGS, env=environment()
        )
    assert (done.returncode, done.stderr) == (2, "accept_mpi: cannot write the output: No space left on device\n")


def test_doctor_whose_reader_leaves() -> None:
    """As in "doctor | head": the links are measured, and there was a traceback."""
    source, target = os.pipe()
    os.close(source)
    command = [sys.executable, "-m", "accept_mpi", "doctor"]
    done = subprocess.run(
        command, cwd=ROOT, stdout=target, stderr=subprocess.PIPE, text=True, timeout=HANGS, env=environment()
    )
    os.close(target)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_mistake_that_cannot_be_told(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "accept_mpi", "report", str(tmp_path / "no.h5")]
    with open("/dev/full", "w") as full:
        assert subprocess.run(command, cwd=ROOT, stdout=full, stderr=full, timeout=HANGS, env=environment()).returncode == 2


@pytest.mark.parametrize("error", [BrokenPipeError, ConnectionResetError])
def test_a_browser_that_leaves_before_its_answer_comes(monkeypatch: pytest.MonkeyPatch, error: type[OSError]) -> None:
    """It was a traceback on the terminal."""

    def leaves(self: object) -> None:
        raise error

    monkeypatch.setattr(watch.BaseHTTPRequestHandler, "handle", leaves)
    object.__new__(watch._Answers).handle()

"""A run's directory has one owner at a time."""

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from accept_mpi.errors import UserError
from accept_mpi.launch import ownership
from accept_mpi.launch.ownership import Lock, Ownership, is_held

HOLD = """
import sys
from pathlib import Path
from accept_mpi.launch.ownership import Ownership
Ownership(Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "supervised").take()
print("taken", flush=True)
sys.stdin.read()
"""


@contextmanager
def held(directory: Path, run: str, supervised: bool = False) -> Iterator["subprocess.Popen[str]"]:
    """Another process that owns a directory."""
    words = [sys.executable, "-c", HOLD, str(directory), run, "supervised" if supervised else "alone"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "taken\n"
        yield other
        other.kill()


def test_a_second_owner_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    with held(tmp_path, "one") as other:
        for supervised in (False, True):
            with pytest.raises(
                UserError, match=rf"{tmp_path} is in use by process {other.pid} on host .* since 20"
            ) as error:
                Ownership(tmp_path, "two", supervised).take()
            assert "\n" not in str(error.value)
        with pytest.raises(UserError, match="is in use"):
            Lock(tmp_path, "launch").take("two")
        other.kill()
        other.wait()
        mine = Ownership(tmp_path, "two", False)
        mine.take()
        mine.take()  # once more: it has it
        mine.release()
        assert all(path.read_bytes() == b"" for path in tmp_path.iterdir())


def test_a_supervisor_owns_it_also_between_its_starts(tmp_path: Path) -> None:
    lock = Lock(tmp_path, "launch")
    lock.take("one")
    with held(tmp_path, "one", supervised=True):
        pass
    done = subprocess.run([sys.executable, "-c", HOLD, str(tmp_path), "two", "alone"], capture_output=True, text=True)
    assert "is in use by process" in done.stderr
    lock.release()


def test_whether_a_run_is_left_is_seen_from_outside(tmp_path: Path) -> None:
    assert is_held(tmp_path)  # there are no locks, so nobody can tell
    for supervised in (True, False):
        with held(tmp_path, "one", supervised) as other:
            assert is_held(tmp_path)
            other.kill()
            other.wait()
            assert not is_held(tmp_path)


def test_one_of_the_same_run_is_about_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who takes a run over does not wait for ever for one that was cut off."""
    monkeypatch.setattr(ownership, "_GONE_SECONDS", 0.2)
    with held(tmp_path, "one", supervised=True):
        Ownership(tmp_path, "one", True).take()


@pytest.mark.parametrize("text", [b"", b"\xff", b"[" * 5000, b'{"host": 3}', b'{"host":"\\n","pid":1,"since":"","run":""}'])
def test_what_a_lock_says_may_be_anything(tmp_path: Path, text: bytes) -> None:
    with held(tmp_path, "one"):
        (tmp_path / ".owner-launch").write_bytes(text)
        with pytest.raises(UserError, match="is in use by another run;") as error:
            Ownership(tmp_path, "two", False).take()
        assert "\n" not in str(error.value)


def test_without_locks_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    Ownership(tmp_path, "one", True).take()
    assert "a file system without locks" in capsys.readouterr().err


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / ".owner-run").symlink_to("/dev/zero")
    with pytest.raises(UserError, match="cannot write to"):
        Ownership(tmp_path, "one", True).take()


def test_whether_a_directory_can_be_made_is_told_without_making_it(tmp_path: Path) -> None:
    Ownership(tmp_path / "a" / "b", "one", True).begin()
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    for wrong, why in (
        (tmp_path / "file", "file is not a directory"), (tmp_path / "file" / "a", "file is not a directory"),
        (tmp_path / "link", "is a link to nowhere"), (tmp_path / "link" / "a", "is a link to nowhere"),
        (tmp_path / ("x" * 300), "File name too long"), (Path("/proc/a/b"), "cannot write to /proc/a/b"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=why):
            Ownership(wrong, "one", True).begin()

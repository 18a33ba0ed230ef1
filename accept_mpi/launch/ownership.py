"""Locks that give a run's directory to one run at a time.

There are two, both files in the directory: one for the run itself (the process that is rank 0) and one for the process that
may restart it (``launch``; ``train`` without it takes both). They are POSIX record locks, which end with their process,
however it ends, work over NFS, and are not inherited by children. The files are never removed: that could pull a lock from
under another process that has just opened it. On a file system without locks a run prints a note and goes on.
"""

import contextlib
import errno
import fcntl
import os
import socket
import struct
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from accept_mpi.errors import UserError
from accept_mpi.files.start_directory import near

_HELD = (errno.EACCES, errno.EAGAIN)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)
_MOST_BYTES = 4096
_GONE_SECONDS = 5.0
_FLOCK = "hhqqi"  # Linux's struct flock: kind, whence, start, length (0: all), process


class Owner(msgspec.Struct, frozen=True):
    """Content of a lock's file: the process that holds the lock."""

    host: str
    pid: int
    since: str
    """Time at which it took the lock (ISO 8601, UTC)."""
    run: str
    """Name of the run, equal for all its processes: a supervisor's starts, and ranks that take over after a loss."""


class Lock:
    """One lock of a run directory: ``Lock(directory, "run").take(run)`` holds it until ``release`` or the process's end."""

    def __init__(self, directory: Path, what: str) -> None:
        """``what``: "run" or "launch"."""
        self.directory, self.path = directory, directory / f".owner-{what}"
        self._file: int | None = None

    def take(self, run: str) -> None:
        """Take the lock, unless this process holds it already.

        If another process of the same run holds it, wait a few seconds: it is lost and about to end. Raises UserError if
        another run holds the lock, OSError if the directory is not writable.
        """
        if self._file is not None:
            return
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0), 0o644)
        until = time.monotonic() + _GONE_SECONDS
        while True:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    text = f"{self.directory} is on a file system without locks: take care that no other run writes there"
                    print(f"accept_mpi: note: {text}", file=sys.stderr, flush=True)
                    break
                if error.errno not in _HELD:
                    os.close(file)
                    raise
            owner = _owner(file)
            if owner is None or owner.run != run:
                os.close(file)
                raise UserError(_in_use(self.directory, owner))
            if time.monotonic() > until:
                break  # held by a rank of this run that was cut off from the others and does not know it
            time.sleep(0.1)
        self._file = file
        me = Owner(socket.gethostname(), os.getpid(), datetime.now(UTC).isoformat(timespec="seconds"), run)
        with contextlib.suppress(OSError):  # the lock is held even if a full disk does not take its content
            os.ftruncate(file, 0)
            os.pwrite(file, msgspec.json.encode(me), 0)

    def release(self) -> None:
        """Release the lock, if this process holds it."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, 0)
            os.close(self._file)
            self._file = None


class Ownership:
    """The locks that one process of a run takes: the run's and, without a supervisor, the launcher's. It holds them until
    ``release`` or its end."""

    def __init__(self, directory: Path, run: str, supervised: bool) -> None:
        self.directory, self.run = directory, run
        self._locks = [Lock(directory, what) for what in (("run",) if supervised else ("launch", "run"))]

    def begin(self) -> None:
        """Take the locks if the directory is there; else see whether it can be made, as far as can be told without making
        it: a job that is refused leaves none. Raises UserError."""
        if os.path.isdir(self.directory):
            self.take()
            return
        try:
            with contextlib.suppress(FileNotFoundError):
                self.directory.lstat()  # tells of a name that is too long, too
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            above = next(path for path in self.directory.parents if os.path.lexists(path))
            os.rmdir(tempfile.mkdtemp(prefix=".writable-", dir=above))
        except OSError as error:
            raise unwritable(self.directory, error) from error

    def take(self) -> None:
        """Take the locks. The directory must exist. Raises UserError if another run has it or it is not writable."""
        try:
            for lock in self._locks:
                lock.take(self.run)
        except OSError as error:
            raise unwritable(self.directory, error) from error

    def release(self) -> None:
        """Release the locks that this process holds."""
        for lock in self._locks:
            lock.release()


def is_held(directory: Path) -> bool:
    """True if another process has a run's directory, or if that cannot be told. It disturbs nobody who is about to take
    it."""
    found = False
    for what in ("launch", "run"):
        try:
            file = os.open(Lock(directory, what).path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
        found = True
        try:
            answer = fcntl.fcntl(file, fcntl.F_GETLK, struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
            if struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK:
                return True
        except OSError:
            return True
        finally:
            os.close(file)
    return not found


def _owner(file: int) -> Owner | None:
    try:
        owner = msgspec.json.decode(os.pread(file, _MOST_BYTES, 0), type=Owner)
    except (OSError, ValueError, RecursionError):
        return None
    return owner if (owner.host + owner.since).isprintable() else None


def unwritable(directory: Path, error: OSError) -> UserError:
    """The mistake that an output directory which cannot be written is."""
    why = error.strerror
    for path in (directory, *directory.parents):
        if os.path.islink(path) and not os.path.exists(path):
            why = f"{near(path)} is a link to {os.readlink(path)}, which is not there"
        elif os.path.exists(path) and not os.path.isdir(path):
            why = f"{near(path)} is not a directory"
    return UserError(f"output.directory: cannot write to {near(directory)}: {why}")


def _in_use(directory: Path, owner: Owner | None) -> str:
    who = f"by process {owner.pid} on host {owner.host} since {owner.since}" if owner else "by another run"
    return (
        f"output.directory: {near(directory)} is in use {who}; wait for that run to end, or give this one another directory"
    )

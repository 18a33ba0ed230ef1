"""A run's directory belongs to one run at a time.

Two locks, files of the directory: one of the run itself (the process that is rank 0), one of whoever may begin it again
(``launch``; a ``train`` without it takes both). They are POSIX record locks, which end with the process that holds them,
however it ends, also over NFS, and which its children do not inherit. The files stay: who removed one could take it from
under another who has just opened it. Where a file system knows no locks a run goes on without, and says so.
"""

import contextlib
import errno
import fcntl
import os
import socket
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from accept_mpi.errors import UserError

if TYPE_CHECKING:  # it starts MPI
    pass

_HELD = (errno.EACCES, errno.EAGAIN)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)
_MOST_BYTES = 4096
_GONE_SECONDS = 5.0


class Owner(msgspec.Struct, frozen=True):
    """What a lock's file says of who holds it."""

    host: str
    pid: int
    since: str
    """UTC."""
    run: str
    """The same for all that belong to one run: a supervisor's starts, and ranks that take over after a loss."""


class Lock:
    """``Lock(directory, "run").take(run)``; held until ``release`` or the process's end."""

    def __init__(self, directory: Path, what: str) -> None:
        """``what``: "run" or "launch"."""
        self.directory, self.path = directory, directory / f".owner-{what}"
        self._file: int | None = None

    def take(self, run: str) -> None:
        """Take it, if this process does not hold it already. Raises UserError where another run does; OSError where the
        directory cannot be written. A process of the same run is waited for, some seconds: it is lost, and about to end.
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
                break  # one of our own that was cut off, and cannot be told
            time.sleep(0.1)
        self._file = file
        me = Owner(socket.gethostname(), os.getpid(), datetime.now(UTC).isoformat(timespec="seconds"), run)
        with contextlib.suppress(OSError):  # a full disk: the lock is held all the same
            os.ftruncate(file, 0)
            os.pwrite(file, msgspec.json.encode(me), 0)

    def release(self) -> None:
        """Let others have it."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, 0)
            os.close(self._file)
            self._file = None


class Ownership:
    """The locks that one process of a run takes. They are held until ``release``, or the process's end."""

    def __init__(self, directory: Path, run: str, supervised: bool) -> None:
        self.directory, self.run = directory, run
        self._locks = [Lock(directory, what) for what in (("run",) if supervised else ("launch", "run"))]

    def take(self) -> None:
        """The directory exists. Raises UserError where it is another run's, or cannot be written."""
        try:
            for lock in self._locks:
                lock.take(self.run)
        except OSError as error:
            raise UserError(f"output.directory: cannot write to {self.directory}: {error.strerror}") from error

    def release(self) -> None:
        """Let others have it."""
        for lock in self._locks:
            lock.release()


def _owner(file: int) -> Owner | None:
    try:
        owner = msgspec.json.decode(os.pread(file, _MOST_BYTES, 0), type=Owner)
    except (OSError, ValueError, RecursionError):
        return None
    return owner if (owner.host + owner.since).isprintable() else None


def _in_use(directory: Path, owner: Owner | None) -> str:
    who = f"by process {owner.pid} on host {owner.host} since {owner.since}" if owner else "by another run"
    return f"output.directory: {directory} is in use {who}; wait for that run to end, or give this one another directory"

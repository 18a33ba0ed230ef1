"""The user's cache directory, and a lock that processes share."""

import errno
import fcntl
import os
import stat
import time
from pathlib import Path
from typing import IO


def cache_directory() -> Path:
    """``$ACCEPT_MPI_CACHE``, or accept_mpi in the user's cache directory."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("ACCEPT_MPI_CACHE") or Path(home) / "accept_mpi")


def open_lock(path: Path) -> IO[bytes]:
    """Open a file to lock, creating it if it does not exist. Raises OSError for a link, a pipe or a device."""
    number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.EINVAL, "something else than a file has this name", os.fspath(path))
    return open(number, "r+b")


def hold(lock: int, seconds: float) -> None:
    """Take an exclusive lock on an open file. Raises BlockingIOError if others hold it for longer than ``seconds``."""
    until = time.monotonic() + seconds
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)

"""The one place for Numba's options, and for its disk cache.

``nogil``: kernels run on the data-plane thread beside the computing one. No ``fastmath``: results must not depend on the
CPU. The error model is NumPy's, since a test for division by zero stops vectorization. Signatures are explicit, so kernels
compile when their module is imported, before any clock starts.
"""

import contextlib
import errno
import fcntl
import grp
import hashlib
import importlib
import logging
import os
import platform
import pwd
import shutil
import stat
import sys
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import IO, Any

log = logging.getLogger(__name__)

NJIT: dict[str, Any] = {"nogil": True, "cache": False, "boundscheck": False, "error_model": "numpy"}

_LOCK_SECONDS = 120.0


def compiled(name: str, directory: Path | None = None) -> ModuleType:
    """The module of kernels ``name``, its machine code from the cache in ``directory`` or put there.

    Numba's cache alone is not safe for ranks that start together (numba#4807), and does not see that a kernel's callee in
    another file has changed. So one process at a time holds the cache, and each version of sources, Numba and CPU has its
    own. Where the directory cannot be written, or what is in it cannot be read, kernels are compiled as without a cache.
    """
    if name in sys.modules:
        return sys.modules[name]
    with contextlib.suppress(Exception):
        with _cache(directory or cache_directory()):
            return importlib.import_module(name)
    return importlib.import_module(name)


def cache_directory() -> Path:
    """``$ACCEPT_MPI_CACHE``, or accept_mpi in the user's cache directory."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("ACCEPT_MPI_CACHE") or Path(home) / "accept_mpi")


@contextlib.contextmanager
def _cache(directory: Path) -> Iterator[None]:
    import llvmlite.binding as llvm  # a quarter of a second of CPU, that a run without kernels need not spend
    import numba as nb

    sources = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    kind = [nb.__version__, llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten(), sys.version]
    digest = hashlib.sha256(sources + "\0".join(kind).encode()).hexdigest()[:16]
    own = directory / f"kernels-{platform.machine()}-{digest}"
    own.mkdir(parents=True, exist_ok=True, mode=0o700)
    config: Any = nb.config
    earlier = config.CACHE_DIR
    with open_lock(own / "lock") as lock:
        hold(lock.fileno(), _LOCK_SECONDS)
        own.mkdir(exist_ok=True, mode=0o700)  # who had the lock may have thrown all away
        if why := foreign(own):
            _warn(f"{directory}: compiled kernels that are kept there are not used, since {why}")
            raise PermissionError(why)
        config.CACHE_DIR, NJIT["cache"] = str(own), True
        try:
            yield
        except BaseException:
            shutil.rmtree(own, ignore_errors=True)  # unreadable, or half written
            raise
        finally:
            config.CACHE_DIR, NJIT["cache"] = earlier, False


def foreign(folder: Path) -> str:
    """Why what lies in a folder may not be the user's own; empty where nobody else can have put it there.

    Machine code is run as it is found. So the folder and what is in it belong to the user, others cannot write there, and
    nobody else can put another folder in its place. A group that is the user's own is nobody else.
    """
    folder = folder.resolve()
    for path in (folder, *(found for found in sorted(folder.rglob("*")))):
        about = path.lstat()
        if about.st_uid != os.getuid():
            return f"{path} is another user's"
        if stat.S_ISLNK(about.st_mode) or _others_write(about):
            return f"others can write {path} (mode {stat.S_IMODE(about.st_mode):04o})"
    for path in folder.parents:
        about = path.stat()
        if about.st_uid not in (os.getuid(), 0):
            return f"{path} is another user's"
        if _others_write(about) and not about.st_mode & stat.S_ISVTX:
            return f"others can write {path} (mode {stat.S_IMODE(about.st_mode):04o})"
    return ""


def _others_write(about: os.stat_result) -> bool:
    if about.st_mode & stat.S_IWOTH:
        return True
    return bool(about.st_mode & stat.S_IWGRP) and not _own_group(about.st_gid)


@lru_cache
def _own_group(number: int) -> bool:
    """Whether a group has only this user in it, as far as one can see: named as the user is, without other members."""
    try:
        me, group = pwd.getpwuid(os.getuid()), grp.getgrgid(number)
    except KeyError:
        return False
    return number == me.pw_gid and group.gr_name == me.pw_name and set(group.gr_mem) <= {me.pw_name}


@lru_cache
def _warn(text: str) -> None:
    """Once."""
    log.warning("%s", text)


def open_lock(path: Path) -> IO[bytes]:
    """A file to lock, made where there is none. Raises OSError for a link, a pipe, a device."""
    number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.EINVAL, "something else than a file has this name", os.fspath(path))
    return open(number, "r+b")


def hold(lock: int, seconds: float) -> None:
    """Take an exclusive lock on an open file. Raises BlockingIOError where others keep it for so long."""
    until = time.monotonic() + seconds
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)

"""The kernels' disk cache: a folder for each version of sources, Numba, Python and CPU, and in it one for each module.

Numba's cache alone is not safe for ranks that start together (numba#4807), and does not notice that a kernel's callee in
another file has changed. So one process at a time holds a module's folder. What lies in it is of use on every machine with
the same ``version``: ranks send it to each other (``comm.machine_code``).
"""

import contextlib
import errno
import gc
import hashlib
import importlib
import logging
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from accept_mpi.kernels.options import INNER, NJIT

from accept_mpi.files.cache import cache_directory, hold, open_lock
from accept_mpi.files.regular import foreign

log = logging.getLogger(__name__)

_LOCK_SECONDS = 120.0
_ROOM = 1 << 22  # bytes that must be free where machine code is to be kept
_FILE = re.compile(r"[\w.-]+\.nb[ci]")  # Numba's machine code, and its index


def compiled(module: str, directory: Path | None = None) -> ModuleType:
    """Import a module of kernels, such as "uniform", with machine code from the cache in ``directory``, which is filled if
    necessary. If the directory cannot be written or its content cannot be read, kernels are compiled as without a cache."""
    name = f"accept_mpi.kernels.{module}"
    if name in sys.modules:
        return sys.modules[name]
    with contextlib.suppress(Exception):
        with _held(module, directory) as own:
            if not _files(own) and shutil.disk_usage(own).free < _ROOM:
                raise OSError(errno.ENOSPC, "machine code could not be kept")  # which shows only once it is made
            config: Any = _numba().config
            earlier = config.CACHE_DIR
            config.CACHE_DIR, NJIT["cache"], INNER["cache"] = str(own), True, True
            try:
                return _import(name)
            except Exception:
                _clear(own)  # it is unreadable, or the disk is full
                return _import(name)
            finally:
                config.CACHE_DIR, NJIT["cache"], INNER["cache"] = earlier, False, False
    return _import(name)


def _import(name: str) -> ModuleType:
    """Import a module, which may compile. The compiler makes millions of objects, so looking for garbage among them and all
    that torch has loaded would take a sixth of its time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        if collecting:
            gc.enable()


def at_hand(module: str) -> bool:
    """True if this process has imported a module of kernels."""
    return f"accept_mpi.kernels.{module}" in sys.modules


def is_stored(module: str, directory: Path | None = None) -> bool:
    """True if machine code of a module is in the cache."""
    with contextlib.suppress(Exception), _held(module, directory) as own:
        return bool(_files(own))
    return False


def stored(module: str, directory: Path | None = None) -> dict[str, bytes]:
    """The files with a module's machine code that are in the cache, by name; none if there are none, or they cannot be
    read."""
    with contextlib.suppress(Exception), _held(module, directory) as own:
        return {path.name: path.read_bytes() for path in _files(own)}
    return {}


def store(module: str, files: Mapping[str, bytes], directory: Path | None = None) -> None:
    """Put another machine's files (``stored``) into the cache, if this machine has none of that module. An index goes last,
    since it names the others. Does nothing if that is impossible."""
    with contextlib.suppress(Exception), _held(module, directory) as own:
        names = sorted(filter(_FILE.fullmatch, files))
        if _files(own):
            return
        try:
            folder = own / _subfolder(module)
            folder.mkdir(mode=0o700, exist_ok=True)
            for name in names:  # ".nbc" comes before ".nbi"
                (folder / name).write_bytes(files[name])
        except Exception:
            _clear(own)
            raise


@cache
def version() -> str:
    """What machine code depends on, as a digest: sources, Numba, Python and the CPU."""
    import llvmlite.binding as llvm  # imported late: a quarter of a second of CPU

    sources = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    kind = [_numba().__version__, llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten(), sys.version]
    return hashlib.sha256(sources + "\0".join(kind).encode()).hexdigest()[:16]


def where(directory: Path | None = None) -> list[int]:
    """Device and inode of the folder for this version: processes with the same ones on one machine share a cache. Raises
    OSError if there is none."""
    facts = os.stat(_folder(directory))
    return [facts.st_dev, facts.st_ino]


def _numba() -> Any:
    import numba as nb

    return nb


def _folder(directory: Path | None) -> Path:
    """The folder for this version, made if it is missing."""
    own = (directory or cache_directory()) / f"kernels-{platform.machine()}-{version()}"
    own.mkdir(parents=True, exist_ok=True, mode=0o700)
    return own


def _subfolder(module: str) -> str:
    """Where Numba looks within its cache directory for what belongs to the source files of kernels."""
    from numba.core.caching import UserProvidedCacheLocator

    source = Path(__file__).with_name(f"{module}.py")
    return str(UserProvidedCacheLocator.get_suitable_cache_subpath(str(source)))


@contextlib.contextmanager
def _held(module: str, directory: Path | None) -> Iterator[Path]:
    """Hold the cache of a module within the context; yields its folder. Raises OSError."""
    own = _folder(directory) / module
    own.mkdir(exist_ok=True, mode=0o700)
    with open_lock(own / "lock") as lock:
        hold(lock.fileno(), _LOCK_SECONDS)
        if why := foreign(own):
            _warn(f"{own.parent.parent}: compiled kernels that are kept there are not used, since {why}")
            raise PermissionError(why)
        yield own


def _files(own: Path) -> list[Path]:
    """The files with machine code in a module's folder."""
    return [path for path in own.rglob("*") if _FILE.fullmatch(path.name)]


def _clear(own: Path) -> None:
    """Remove what is in a module's folder but its lock, on which others may be waiting."""
    for path in own.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != "lock":
            path.unlink(missing_ok=True)


@lru_cache
def _warn(text: str) -> None:
    """Log a warning, each text only once."""
    log.warning("%s", text)

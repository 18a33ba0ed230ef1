"""The one place for Numba's options, and for its disk cache.

``nogil``: kernels run on the data-plane thread while another thread computes. No ``fastmath``: results must not depend on
the CPU. The error model is NumPy's, since a test for division by zero prevents vectorization. Signatures are explicit, so
that kernels compile when their module is imported, before any clock starts.
"""

import contextlib
import hashlib
import importlib
import logging
import platform
import shutil
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from accept_mpi.files.cache import cache_directory, hold, open_lock
from accept_mpi.files.regular import foreign

log = logging.getLogger(__name__)

NJIT: dict[str, Any] = {"nogil": True, "cache": False, "boundscheck": False, "error_model": "numpy"}

_LOCK_SECONDS = 120.0


def compiled(name: str, directory: Path | None = None) -> ModuleType:
    """Import the module of kernels ``name``, with machine code from the cache in ``directory``, which is filled if
    necessary.

    Numba's cache alone is not safe for ranks that start together (numba#4807), and does not notice that a kernel's callee in
    another file has changed. So one process at a time holds the cache, and each version of sources, Numba and CPU has its
    own. If the directory cannot be written or its content cannot be read, kernels are compiled as without a cache.
    """
    if name in sys.modules:
        return sys.modules[name]
    with contextlib.suppress(Exception):
        with _cache(directory or cache_directory()) as own:
            try:
                return importlib.import_module(name)
            except Exception:
                _clear(own)  # it is unreadable, or the disk is full
                return importlib.import_module(name)
    return importlib.import_module(name)


@contextlib.contextmanager
def _cache(directory: Path) -> Iterator[Path]:
    """Hold the cache that is in ``directory``; yields the place of the machine code."""
    import llvmlite.binding as llvm  # imported late: a quarter of a second of CPU
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
        if why := foreign(own):
            _warn(f"{directory}: compiled kernels that are kept there are not used, since {why}")
            raise PermissionError(why)
        config.CACHE_DIR, NJIT["cache"] = str(own), True
        try:
            yield own
        finally:
            config.CACHE_DIR, NJIT["cache"] = earlier, False


def _clear(own: Path) -> None:
    """Remove what is in a cache but its lock, on which others may be waiting."""
    for path in own.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != "lock":
            path.unlink(missing_ok=True)


@lru_cache
def _warn(text: str) -> None:
    """Log a warning, each text only once."""
    log.warning("%s", text)

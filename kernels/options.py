"""The one place for Numba's options, and for its disk cache.

``nogil``: kernels run on the data-plane thread beside the computing one. No ``fastmath``: results must not depend on the
CPU. The error model is NumPy's, since a test for division by zero stops vectorization. Signatures are explicit, so kernels
compile when their module is imported, before any clock starts.
"""

import contextlib
import fcntl
import hashlib
import importlib
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

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
    with contextlib.suppress(Exception), _cache(directory or cache_directory()):
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
    if own.stat().st_uid != os.getuid():
        raise PermissionError(f"{own} is another user's")
    config: Any = nb.config
    earlier = config.CACHE_DIR
    with open(own / "lock", "w") as lock:
        hold(lock.fileno(), _LOCK_SECONDS)
        config.CACHE_DIR, NJIT["cache"] = str(own), True
        try:
            yield
        except BaseException:
            shutil.rmtree(own, ignore_errors=True)  # unreadable, or half written
            raise
        finally:
            config.CACHE_DIR, NJIT["cache"] = earlier, False


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

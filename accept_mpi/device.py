"""Settings that make one device compute faster: threads, and how glibc's allocator keeps memory."""

import contextlib
import ctypes
import logging
import math
import os
import platform
from pathlib import Path

import torch

log = logging.getLogger(__name__)

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8
_MIB = 1 << 20


def keep_memory() -> bool:
    """Tell glibc to keep freed memory instead of giving it back: page faults cost a tenth of MobileNetV2's speed.

    The mmap threshold goes to its ceiling of 32 MiB, trimming is all but switched off, and one arena serves all threads, so
    that what the data-plane thread allocates and the computing thread frees is used again. Returns False where the C
    library is not glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    settings = (
        (_M_ARENA_MAX, 1),
        (_M_MMAP_THRESHOLD, 32 * _MIB),
        (_M_TRIM_THRESHOLD, 1024 * _MIB),
        (_M_TOP_PAD, 64 * _MIB),
    )
    return [mallopt(parameter, value) for parameter, value in settings] == [1] * len(settings)


def cpu_name() -> str:
    """What the processor calls itself."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip().lower() in ("model name", "model", "hardware") and not value.strip().isdigit():
                return value.strip()
    return platform.processor() or platform.machine()


def available_memory() -> float:
    """Bytes that this process may still take: of the machine's memory and of what its control groups allow."""
    found = [_physical_memory()]
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(1024.0 * int(line.split()[1]))
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            found += _room_in_groups(controllers, path)
    return max(0.0, min(found))


def _physical_memory() -> float:
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (ValueError, OSError):
        return math.inf


def _room_in_groups(controllers: str, path: str, root: Path = Path("/sys/fs/cgroup")) -> list[float]:
    """Limit less use of a control group (version 2: no ``controllers``; 1: "memory" among them) and of those above it."""
    if controllers and "memory" not in controllers.split(","):
        return []
    top = root / "memory" if controllers else root
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
    found = []
    group = top / path.lstrip("/")
    for folder in (group, *group.parents):
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            limit, used = (float((folder / name).read_text()) for name in names)
            found.append(limit - used)
        if folder == top:
            break
    return found


def set_threads(asked: int | str, cores: int, ranks_on_host: int) -> int:
    """Set torch's threads and return their number: as asked, or OMP_NUM_THREADS, or a fair share of the host's cores."""
    said = os.environ.get("OMP_NUM_THREADS", "")
    if asked != "auto":
        threads = int(asked)
        if said.isdigit() and int(said) != threads:
            log.warning("train.threads = %d wins over OMP_NUM_THREADS = %s", threads, said)
    elif said.isdigit():
        threads = int(said)
    else:
        threads = max(1, cores // ranks_on_host)
    torch.set_num_threads(threads)
    return threads

"""Memory that this process may have, by the machine's and by its control groups' limits."""

import contextlib
import math
import os
from pathlib import Path

from accept_mpi.device import cgroups

_PLANNED = 0.8  # share of the memory left to a process that plans may use: its allocator cannot use all of it
_WORKING = 144 << 20  # bytes not in tensors: code run for the first time, scratch, buffers. MobileNetV2: 35 to 190 MiB


def planned(available: float) -> float:
    """Bytes of weights, activations and the like that a plan may give to a process that can still take ``available``
    bytes."""
    return max(0.0, _PLANNED * available - _WORKING)


def total_memory() -> int:
    """Bytes that this process may take in total; 0 if unknown."""
    found = min([_physical(), *(limit for limit, _ in _limits())])
    return 0 if math.isinf(found) else int(found)


def available_memory() -> float:
    """Bytes that this process may still take; infinite if unknown."""
    found = [_physical(), *(limit - used for limit, used in _limits())]
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(1024.0 * int(line.split()[1]))
    return max(0.0, min(found))


def _physical() -> float:
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (ValueError, OSError):
        return math.inf


def _limits() -> list[tuple[float, float]]:
    """Limit and use, in bytes, of each of this process's control groups that has a limit."""
    first, second = ("memory.limit_in_bytes", "memory.usage_in_bytes"), ("memory.max", "memory.current")
    return limits(cgroups.own("memory", (*first, "memory.stat"), (*second, "memory.stat")))


def limits(groups: list[list[str]]) -> list[tuple[float, float]]:
    """Limit and use as numbers, for each of the groups that has a limit. Contents of files that were read or written once do
    not count as used, though the kernel counts them: it drops them when somebody needs the memory."""
    found = []
    for limit, used, *stat in groups:
        with contextlib.suppress(ValueError):  # "max": no limit
            kept = dict(line.split(" ", 1) for line in "".join(stat).splitlines())
            droppable = kept.get("total_inactive_file", kept.get("inactive_file", "0"))  # in version 1, with groups below
            found.append((float(limit), float(used) - float(droppable)))
    return found

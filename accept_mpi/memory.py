"""How much memory this process may have: the machine's, and what its control groups allow."""

import contextlib
import math
import os
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")


def total_memory() -> int:
    """Bytes that this process may take in all; 0 where nobody says."""
    found = min([_physical(), *(limit for limit, _ in _limits())])
    return 0 if math.isinf(found) else int(found)


def available_memory() -> float:
    """Bytes that this process may still take; infinite where nobody says."""
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
    """Of this process's control groups: limit and use in bytes."""
    found = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            found += limits_of_group(controllers, path, _GROUPS)
    return found


def limits_of_group(controllers: str, path: str, root: Path) -> list[tuple[float, float]]:
    """Limit and use of a control group (version 2: no ``controllers``; 1: "memory" among them) and of those above it."""
    if controllers and "memory" not in controllers.split(","):
        return []
    top = root / "memory" if controllers else root
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
    found = []
    group = top / path.lstrip("/")
    for folder in (group, *group.parents):
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            limit, used = (float((folder / name).read_text()) for name in names)
            found.append((limit, used))
        if folder == top:
            break
    return found

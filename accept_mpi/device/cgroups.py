"""Limits that this process's control groups, of version 1 or 2, set: its own group and those above it count."""

import contextlib
import math
from collections.abc import Sequence
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


def own(controller: str, first: Sequence[str], second: Sequence[str]) -> list[list[str]]:
    """Contents of a controller's files (``first``: their names in version 1, ``second``: in version 2), for each group of
    this process that has them all."""
    found = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            found += of_group(controllers, path, _ROOT, controller, first, second)
    return found


def of_group(
    controllers: str, path: str, root: Path, controller: str, first: Sequence[str], second: Sequence[str]
) -> list[list[str]]:
    """Contents of a controller's files, as in ``own``, for one group and those above it. ``controllers`` is empty for
    version 2; for version 1 it must contain ``controller``."""
    if controllers and controller not in controllers.split(","):
        return []
    top = root / controller if controllers else root
    found = []
    group = top / path.lstrip("/")
    for folder in (group, *group.parents):
        with contextlib.suppress(OSError):
            found.append([(folder / name).read_text() for name in (first if controllers else second)])
        if folder == top:
            break
    return found


def cpu_share() -> float:
    """Cores that this process may use on average; infinite without a limit."""
    return min(map(quota, own("cpu", ("cpu.cfs_quota_us", "cpu.cfs_period_us"), ("cpu.max",))), default=math.inf)


def quota(texts: Sequence[str]) -> float:
    """Cores that a quota allows, such as 0.4 for "40000", "100000" or "40000 100000"; infinite if it is "max"."""
    words = " ".join(texts).split()
    with contextlib.suppress(ValueError, ZeroDivisionError):  # "max": no limit
        allowed, period = map(float, words)
        if allowed > 0:
            return allowed / period
    return math.inf

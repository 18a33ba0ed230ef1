"""Facts that a rank reports about its host."""

import math
import os
import platform
import socket
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from accept_mpi.device.cgroups import cpu_share
from accept_mpi.device.compute import gpus
from accept_mpi.device.memory import total_memory
from accept_mpi.version import __version__


def package_version(name: str) -> str:
    """Installed version of a package, or "not installed"."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def release(found: str) -> str:
    """A version without what tells one build of it from others, such as "2.13.0" of "2.13.0+cpu"."""
    return found.partition("+")[0]


def host_facts(rank: int, mpi: str) -> dict[str, Any]:
    """Facts about this rank's host as plain values, ready for JSON. ``mpi``: the MPI library's name and version."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        cores = os.cpu_count() or 1
    if (share := cpu_share()) < cores:  # a container's quota
        cores = max(1, math.ceil(share))
    host = socket.gethostname()
    return {
        "rank": rank,
        "host": host,
        "machine_id": f"{host}/{_boot_id()}",
        "pid": os.getpid(),
        "cores": cores,
        "memory_bytes": total_memory(),
        "machine": platform.machine(),
        "gpus": gpus(),
        "versions": {
            "accept_mpi": __version__,
            "python": platform.python_version(),
            **{name: package_version(name) for name in ("torch", "numpy", "numba", "h5py", "mpi4py")},
            "mpi": mpi,
        },
    }


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""

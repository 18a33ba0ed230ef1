"""The processor: its name, its threads, and whether computing leaves a core free."""

import contextlib
import logging
import os
import platform
from pathlib import Path

import torch

from accept_mpi.errors import UserError
from accept_mpi.job import MOST_THREADS

log = logging.getLogger(__name__)


def computing_takes_all(cores: float) -> bool:
    """True if the threads that compute leave none of a rank's ``cores`` to another thread."""
    return cores < torch.get_num_threads() + 1


def cpu_name() -> str:
    """Name that the processor gives itself, or its architecture."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip().lower() in ("model name", "model", "hardware") and not value.strip().isdigit():
                return value.strip()
    return platform.processor() or platform.machine()


def set_threads(asked: int | str, cores: int, ranks_on_host: int) -> int:
    """Set torch's threads and return their number: as asked, else OMP_NUM_THREADS, else a fair share of the host's cores.

    Raises UserError if OMP_NUM_THREADS is out of range.
    """
    said = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # "4,1": of threads within threads, too
    said = said if said.isascii() else ""
    if asked != "auto":
        threads = int(asked)
        if said.isdigit() and int(said) != threads:
            log.warning("train.threads = %d wins over OMP_NUM_THREADS = %s", threads, said)
    elif said.isdigit():
        threads = int(said)
        if not 1 <= threads <= MOST_THREADS:
            raise UserError(f"OMP_NUM_THREADS = {said}: expected 1 to {MOST_THREADS} threads")
    else:
        threads = max(1, cores // ranks_on_host)
    torch.set_num_threads(threads)
    return threads


def set_own_threads(count: int) -> None:
    """Set torch's threads for the thread that calls this. In a thread's first parallel region torch gives it the number that
    any thread has set last; asking for the number has torch do that before."""
    torch.get_num_threads()
    torch.set_num_threads(count)

"""glibc's allocator: keep freed memory, take memory in advance, give it back."""

import contextlib
import ctypes
import resource

import torch

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8
_MIB = 1 << 20
_BLOCK, _PAGE = 16 * _MIB, 4096


def share_arena() -> bool:
    """Have one arena serve all threads, so that memory that one of them frees is there for the others (activations of lanes,
    messages of the data plane). Only threads that start afterwards share it: to be called before MPI starts its own, whose
    arenas later threads would take else. Returns False if the C library is not glibc.
    """
    return _set((_M_ARENA_MAX, 1))


def keep_memory() -> bool:
    """Make glibc keep freed memory instead of giving it back: page faults cost a tenth of MobileNetV2's speed.

    The mmap threshold is raised to its maximum of 32 MiB, and nothing is trimmed (a first stage frees more than 1 GiB when
    the pipeline drains). Threads that start from now on share an arena. Returns False if the C library is not glibc.
    """
    return share_arena() and _set((_M_MMAP_THRESHOLD, 32 * _MIB), (_M_TRIM_THRESHOLD, -1), (_M_TOP_PAD, 64 * _MIB))


def _set(*settings: tuple[int, int]) -> bool:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return [mallopt(parameter, value) for parameter, value in settings] == [1] * len(settings)


def take_memory(nbytes: int) -> None:
    """Take ``nbytes`` from the kernel now, and keep them for the next allocations (after ``keep_memory``)."""
    blocks = [torch.empty(_BLOCK, dtype=torch.uint8) for _ in range(-(-nbytes // _BLOCK))]
    for block in blocks:
        block[::_PAGE] = 0


def memory_taken() -> int:
    """Number of pages that this process has taken from the kernel so far (minor page faults)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def give_back_memory() -> None:
    """Return kept memory that is free to the kernel, as far as the C library can."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)

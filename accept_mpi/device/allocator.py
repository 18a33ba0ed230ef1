"""glibc's allocator: keep freed memory, take it ahead, give it back."""

import contextlib
import ctypes
import resource

import torch

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8
_MIB = 1 << 20
_BLOCK, _PAGE = 16 * _MIB, 4096


def keep_memory() -> bool:
    """Tell glibc to keep freed memory instead of giving it back: page faults cost a tenth of MobileNetV2's speed.

    The mmap threshold goes to its ceiling of 32 MiB, nothing is trimmed (a first stage frees more than 1 GiB when the
    pipeline drains), and one arena serves all threads, so that what the data-plane thread allocates and the computing thread
    frees is used again. Returns False where the C library is not glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    settings = (
        (_M_ARENA_MAX, 1),
        (_M_MMAP_THRESHOLD, 32 * _MIB),
        (_M_TRIM_THRESHOLD, -1),
        (_M_TOP_PAD, 64 * _MIB),
    )
    return [mallopt(parameter, value) for parameter, value in settings] == [1] * len(settings)


def take_memory(nbytes: int) -> None:
    """Have the kernel give so much memory now, and keep it for what is allocated next (after ``keep_memory``)."""
    blocks = [torch.empty(_BLOCK, dtype=torch.uint8) for _ in range(-(-nbytes // _BLOCK))]
    for block in blocks:
        block[::_PAGE] = 0


def memory_taken() -> int:
    """How often memory had to come from the kernel, page by page, since this process began."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def give_back_memory() -> None:
    """What has been kept and is free goes back to the kernel, as far as the C library can."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)

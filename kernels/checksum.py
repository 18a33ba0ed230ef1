"""A position-sensitive checksum of a byte buffer, fast enough to vanish beside the copy it guards."""

import numba as nb
import numpy as np
import numpy.typing as npt
from accept_mpi.kernels.options import NJIT


@nb.njit("uint64(uint32[::1])", **NJIT)
def _sums(words):  # type: ignore[no-untyped-def]
    # Two plain integer reductions, which LLVM vectorizes: Fletcher's pair without his modulus.
    plain = np.uint64(0)
    weighted = np.uint64(0)
    for i in range(words.size):
        word = np.uint64(words[i])
        plain += word
        weighted += word * np.uint64(np.uint32(i + 1))
    return weighted ^ (plain << np.uint64(29)) ^ (plain >> np.uint64(35))


def checksum(data: npt.NDArray[np.uint8]) -> int:
    """64-bit checksum of a contiguous uint8 array whose data is 4-byte aligned, of any length.

    After Fletcher (1982): the plain and the position-weighted sum of its little-endian 32-bit words (the last padded with
    zeros), folded together with the length. Every single-word error and every swap of unequal words changes it.
    """
    if data.dtype != np.uint8 or data.ndim != 1 or not data.flags.c_contiguous:
        raise ValueError(f"expected a contiguous 1-D uint8 array, got {data.dtype} with {data.ndim} dimensions")
    whole = data.size & ~3
    total = int(_sums(data[:whole].view(np.uint32)))
    if tail := data[whole:].tobytes():
        total += int.from_bytes(tail, "little") * (whole // 4 + 1)
    return (total ^ data.size * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF

"""Groups of values that share parameters: their extremes, and whether they can be coded."""

import numba as nb
import numpy as np
from accept_mpi.kernels.options import INNER, U

CODED, NOT_FINITE, TOO_LARGE = 0, 1, 2

LARGEST_KEY = np.int32(0x7F7FFFFF)  # key of the largest finite float32
SMALLEST_KEY = np.int32(-0x7F800000)


@nb.njit("void(int32[::1], uint64, uint64, uint64, int32[::1], int32[::1])", **INNER)
def extremes(bits, begin, end, group, low, high):  # type: ignore[no-untyped-def]
    """Smallest and largest of values ``begin`` to ``end`` - 1 of each group as keys: integers in the same order as the
    float32 numbers that they stand for."""
    g = U(0)
    for first in range(begin, end, group):
        least, most = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
        for i in range(first, min(first + group, end)):
            key = np.int32(bits[i] ^ (bits[i] >> 31) & 0x7FFFFFFF)
            least, most = np.int32(min(least, key)), np.int32(max(most, key))
        low[g], high[g] = least, most
        g += U(1)

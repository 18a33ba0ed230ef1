"""Groups of values that share parameters: their extremes, and whether they can be coded."""

import numba as nb
import numpy as np
from accept_mpi.kernels.options import INNER

CODED, NOT_FINITE, TOO_LARGE = 0, 1, 2

LARGEST_KEY = np.int32(0x7F7FFFFF)  # key of the largest finite float32
SMALLEST_KEY = np.int32(-0x7F800000)


@nb.njit("void(int32[::1], int64, int32[::1], int32[::1])", **INNER)
def extremes(bits, group, low, high):  # type: ignore[no-untyped-def]
    """Smallest and largest value of each group as keys: integers in the same order as the float32 numbers that they stand
    for."""
    for g in range(low.size):
        part = bits[g * group : min(g * group + group, bits.size)]
        least = np.int32(0x7FFFFFFF)
        most = np.int32(-0x80000000)
        for i in range(part.size):
            key = np.int32(part[i] ^ np.int32(np.int32(part[i] >> np.int32(31)) & np.int32(0x7FFFFFFF)))
            least = np.int32(min(least, key))
            most = np.int32(max(most, key))
        low[g] = least
        high[g] = most

"""Groups of values that share parameters: their sizes, their extremes, and whether they can be coded."""

import numba as nb
import numpy as np
import numpy.typing as npt
from accept_mpi.kernels.options import NJIT
from accept_mpi.kernels.packing import BLOCK, packed_bytes

CODED, NOT_FINITE, TOO_LARGE = 0, 1, 2

LARGEST_KEY = np.int32(0x7F7FFFFF)  # key of the largest finite float32
SMALLEST_KEY = np.int32(-0x7F800000)


def grouping(values: int, group: int) -> tuple[int, int]:
    """Group size that the kernels use, and the number of groups. Raises ValueError."""
    if group == 0:
        return max(values, 1), min(values, 1)
    if group < 8 or BLOCK % group:
        raise ValueError(f"group must be 0 (the whole tensor) or a power of two from 8 to {BLOCK}, got {group}")
    # A tensor that fits in one group is coded by the kernels as a whole; that gives the same bytes.
    return group, -(-values // group)


def coded_bytes(values: int, bits: int, group: int, per_group: int) -> int:
    """Bytes that ``values`` values take: ``per_group`` bytes of parameters per group, then the packed codes."""
    return per_group * grouping(values, group)[1] + packed_bytes(values, bits)


def parts(
    x: npt.NDArray[np.float32], data: npt.NDArray[np.uint8], bits: int, group: int, per_group: int
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8], int]:
    """Parameters and codes in ``data``, the coded form of ``x``, and the group size that the kernels use.

    Raises ValueError unless ``x`` is a contiguous 1-D float32 array and ``data`` has the right length.
    """
    if x.dtype != np.float32 or x.ndim != 1 or not x.flags.c_contiguous:
        raise ValueError(f"expected a contiguous 1-D float32 array, got {x.dtype} with {x.ndim} dimensions")
    size, groups = grouping(x.size, group)
    if data.size != (expected := coded_bytes(x.size, bits, group, per_group)):
        raise ValueError(f"{x.size} values at {bits} bits take {expected} bytes, got {data.size}")
    return data[: per_group * groups], data[per_group * groups :], size


@nb.njit("void(int32[::1], int64, int32[::1], int32[::1])", **NJIT)
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

"""Where coded values lie: the sizes of groups and blocks, and what part of the bytes they take. Nothing here is compiled."""

import numpy as np
import numpy.typing as npt

BLOCK = 16384
"""Codes that are packed together."""
SMALLEST_GROUP = 8


def packed_bytes(codes: int, bits: int) -> int:
    """Bytes that ``codes`` codes take when packed."""
    blocks, rest = divmod(codes, BLOCK)
    return blocks * BLOCK * bits // 8 + -(-rest // 8) * bits


def grouping(values: int, group: int) -> tuple[int, int]:
    """Group size that the kernels use, and the number of groups. Raises ValueError."""
    if group == 0:
        return max(values, 1), min(values, 1)
    if group < SMALLEST_GROUP or BLOCK % group:
        raise ValueError(
            f"group must be 0 (the whole tensor) or a power of two from {SMALLEST_GROUP} to {BLOCK}, got {group}"
        )
    # A tensor that fits in one group is coded by the kernels as a whole; that gives the same bytes.
    return group, -(-values // group)


def coded_bytes(values: int, bits: int, group: int, per_group: int) -> int:
    """Bytes that ``values`` values take: ``per_group`` bytes of parameters per group, then the packed codes."""
    return per_group * grouping(values, group)[1] + packed_bytes(values, bits)


def parts(
    x: npt.NDArray[np.float32], data: npt.NDArray[np.uint8], bits: int, group: int, per_group: int, most: int
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8], int]:
    """Parameters and codes in ``data``, the coded form of ``x``, and the group size that the kernels use.

    Raises ValueError unless ``x`` is a contiguous 1-D float32 array, there are 1 to ``most`` bits, and ``data`` has the
    right length.
    """
    if not 1 <= bits <= most:
        raise ValueError(f"bits must be 1..{most}, got {bits}")
    if x.dtype != np.float32 or x.ndim != 1 or not x.flags.c_contiguous:
        raise ValueError(f"expected a contiguous 1-D float32 array, got {x.dtype} with {x.ndim} dimensions")
    size, groups = grouping(x.size, group)
    if data.size != (expected := coded_bytes(x.size, bits, group, per_group)):
        raise ValueError(f"{x.size} values at {bits} bits take {expected} bytes, got {data.size}")
    return data[: per_group * groups], data[per_group * groups :], size

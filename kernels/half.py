"""Conversion of float32 to bfloat16 and back."""

import numba as nb
import numpy as np
from accept_mpi.kernels.options import NJIT


@nb.njit("void(uint32[::1], uint16[::1])", **NJIT)
def to_bf16(bits, out):  # type: ignore[no-untyped-def]
    """Round float32 numbers, given as bits, to the nearest bfloat16, ties to even; NaN stays NaN."""
    for i in range(out.size):
        word = bits[i]
        odd = np.uint32(np.uint32(word >> np.uint32(16)) & np.uint32(1))
        rounded = np.uint32(np.uint32(word + np.uint32(0x7FFF) + odd) >> np.uint32(16))
        is_nan = np.uint32(word & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        out[i] = np.uint16(np.uint32(0x7FC0) if is_nan else rounded)


@nb.njit("void(uint16[::1], uint32[::1])", **NJIT)
def from_bf16(halves, out):  # type: ignore[no-untyped-def]
    """Convert bfloat16 numbers to float32, both as bits."""
    for i in range(out.size):
        out[i] = np.uint32(np.uint32(halves[i]) << np.uint32(16))

"""Conversion of float32 to bfloat16 and back."""

import numba as nb
import numpy as np
from accept_mpi.kernels.options import INNER, NJIT

_INFINITE = np.uint32(0x7F800000)
_TOO_LARGE = np.uint32(0x7F7F8000)
"""Bits of the smallest number that is rounded to infinity."""


@nb.njit("uint16(uint32)", **INNER)
def _rounded(word):  # type: ignore[no-untyped-def]
    odd = np.uint32(np.uint32(word >> np.uint32(16)) & np.uint32(1))
    return np.uint16(np.uint32(np.uint32(word + np.uint32(0x7FFF) + odd) >> np.uint32(16)))


@nb.njit("boolean(uint32[::1], uint16[::1])", **INNER)
def _special(bits, out):  # type: ignore[no-untyped-def]
    """As ``to_bf16``, for numbers some of which are not finite or too large."""
    for i in range(out.size):
        size = np.uint32(bits[i] & np.uint32(0x7FFFFFFF))
        if size > _INFINITE:
            out[i] = np.uint16(0x7FC0)
        elif _TOO_LARGE <= size < _INFINITE:
            return False
    return True


@nb.njit("boolean(uint32[::1], uint16[::1])", **NJIT)
def to_bf16(bits, out):  # type: ignore[no-untyped-def]
    """Round float32 numbers, given as bits, to the nearest bfloat16, ties to even; what is not finite stays so. Returns
    False if a finite number is too large.

    What is special is looked for by the largest number alone: to look at each costs a sixth more.
    """
    most = np.uint32(0)
    for i in range(out.size):
        word = bits[i]
        out[i] = _rounded(word)
        most = np.uint32(max(most, np.uint32(word & np.uint32(0x7FFFFFFF))))
    return most < _TOO_LARGE or _special(bits, out)


@nb.njit("void(uint16[::1], uint32[::1])", **NJIT)
def from_bf16(halves, out):  # type: ignore[no-untyped-def]
    """Convert bfloat16 numbers to float32, both as bits."""
    for i in range(out.size):
        out[i] = np.uint32(np.uint32(halves[i]) << np.uint32(16))

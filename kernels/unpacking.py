"""Unpacks the bit planes that kernels/packing.py writes: a module of its own, since a rank may compile one of the two."""

import numba as nb
from accept_mpi.kernels.options import INNER, U


@nb.njit("uint64(uint8[::1], uint64, int64, uint8[::1], uint64)", **INNER)
def unpack(packed, at, bits, codes, n):  # type: ignore[no-untyped-def]
    """Unpack the ``n`` codes that ``pack`` wrote at ``packed[at]``, and return where they end. Narrow planes come first,
    since they hold the high bits."""
    end = at + (n >> U(3)) * U(bits)
    if bits == 8:
        for i in range(n):
            codes[i] = packed[at + i]
        return end
    for i in range(n):
        codes[i] = 0
    last = end
    if bits & 1:
        h = n >> U(3)
        last -= h
        for j in range(U(8)):
            for i in range(h):
                codes[j * h + i] = (packed[last + i] >> j) & 1
    if bits & 2:
        h = n >> U(2)
        last -= h
        for j in range(U(4)):
            for i in range(h):
                codes[j * h + i] = codes[j * h + i] << 2 | (packed[last + i] >> 2 * j) & 3
    if bits & 4:
        h = n >> U(1)
        for i in range(h):
            codes[i] = codes[i] << 4 | packed[at + i] & 15
            codes[h + i] = codes[h + i] << 4 | packed[at + i] >> 4
    return end

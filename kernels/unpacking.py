"""Unpacks the bit planes that kernels/packing.py writes: a module of its own, since a rank may compile one of the two."""

import numba as nb
import numpy as np
from accept_mpi.kernels.options import INNER


@nb.njit("int64(uint8[::1], int64, uint8[::1])", **INNER)
def unpack(packed, bits, codes):  # type: ignore[no-untyped-def]
    """Unpack what ``pack`` wrote, and return the bytes read. Narrow planes come first, since they hold the high bits."""
    n = codes.size
    total = n * bits // 8
    if bits == 8:
        plane = packed[:n]
        for i in range(plane.size):
            codes[i] = plane[i]
        return total
    at = total
    for i in range(codes.size):
        codes[i] = np.uint8(0)
    if bits & 1:
        h = n // 8
        at -= h
        plane = packed[at : at + h]
        for j in range(8):
            part, down = codes[j * h : j * h + h], np.uint8(j)
            for i in range(plane.size):
                part[i] = np.uint8(np.uint8(plane[i] >> down) & np.uint8(1))
    if bits & 2:
        h = n // 4
        at -= h
        plane = packed[at : at + h]
        for j in range(4):
            part, down = codes[j * h : j * h + h], np.uint8(2 * j)
            for i in range(plane.size):
                bits_now = np.uint8(np.uint8(plane[i] >> down) & np.uint8(3))
                part[i] = np.uint8(np.uint8(part[i] << np.uint8(2)) | bits_now)
    if bits & 4:
        h = n // 2
        plane, a, b = packed[:h], codes[:h], codes[h:n]
        for i in range(plane.size):
            a[i] = np.uint8(np.uint8(a[i] << np.uint8(4)) | np.uint8(plane[i] & np.uint8(15)))
            b[i] = np.uint8(np.uint8(b[i] << np.uint8(4)) | np.uint8(plane[i] >> np.uint8(4)))
    return total

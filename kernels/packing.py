"""Codes of 1..8 bits, packed without a wasted bit, in blocks of 16,384 codes. A block is stored as its bit planes.

A plane holds w = 8, 4, 2 or 1 bits of each code (3 bits are a plane of 2 and one of 1; low bits first, wide planes first).
Byte i of a plane holds the bits of codes i, i + h, i + 2h, ..., h = codes * w / 8, so that packing is plain byte arithmetic
on runs of memory, which LLVM vectorizes. A last block is padded to a multiple of 8 codes.
"""

import numba as nb
import numpy as np
from accept_mpi.kernels.options import INNER


@nb.njit("int64(uint8[::1], int64, uint8[::1])", **INNER)
def pack(codes, bits, out):  # type: ignore[no-untyped-def]
    """Pack a block (a multiple of 8 codes) into bit planes, and return the bytes used. The block's codes are destroyed."""
    n, at = codes.size, 0
    if bits == 8:
        plane = out[:n]
        for i in range(plane.size):
            plane[i] = codes[i]
        return n
    if bits & 4:
        h = n // 2
        plane, a, b = out[at : at + h], codes[:h], codes[h:n]
        for i in range(plane.size):
            plane[i] = np.uint8((a[i] & np.uint8(15)) | np.uint8(b[i] << np.uint8(4)))
        at += h
        if bits > 4:
            for i in range(codes.size):
                codes[i] = np.uint8(codes[i] >> np.uint8(4))
    if bits & 2:
        h = n // 4
        plane, a, b, c, d = out[at : at + h], codes[:h], codes[h : 2 * h], codes[2 * h : 3 * h], codes[3 * h : n]
        for i in range(plane.size):
            low = np.uint8((a[i] & np.uint8(3)) | np.uint8(np.uint8(b[i] & np.uint8(3)) << np.uint8(2)))
            high = np.uint8((c[i] & np.uint8(3)) | np.uint8(np.uint8(d[i] & np.uint8(3)) << np.uint8(2)))
            plane[i] = np.uint8(low | np.uint8(high << np.uint8(4)))
        at += h
        if bits & 1:
            for i in range(codes.size):
                codes[i] = np.uint8(codes[i] >> np.uint8(2))
    if bits & 1:
        h = n // 8
        plane = out[at : at + h]
        a, b, c, d = codes[:h], codes[h : 2 * h], codes[2 * h : 3 * h], codes[3 * h : 4 * h]
        e, f, g, k = codes[4 * h : 5 * h], codes[5 * h : 6 * h], codes[6 * h : 7 * h], codes[7 * h : n]
        one = np.uint8(1)
        for i in range(plane.size):
            ab = np.uint8((a[i] & one) | np.uint8(np.uint8(b[i] & one) << np.uint8(1)))
            cd = np.uint8((c[i] & one) | np.uint8(np.uint8(d[i] & one) << np.uint8(1)))
            ef = np.uint8((e[i] & one) | np.uint8(np.uint8(f[i] & one) << np.uint8(1)))
            gk = np.uint8((g[i] & one) | np.uint8(np.uint8(k[i] & one) << np.uint8(1)))
            low, high = np.uint8(ab | np.uint8(cd << np.uint8(2))), np.uint8(ef | np.uint8(gk << np.uint8(2)))
            plane[i] = np.uint8(low | np.uint8(high << np.uint8(4)))
        at += h
    return at

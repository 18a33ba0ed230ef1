"""Codes of 1..8 bits, packed without a wasted bit, in blocks of 16,384 codes. A block is stored as its bit planes.

A plane holds w = 8, 4, 2 or 1 bits of each code (3 bits are a plane of 2 and one of 1; low bits first, wide planes first).
Byte i of a plane holds the bits of codes i, i + h, i + 2h, ..., h = codes * w / 8, so that packing is plain byte arithmetic
on runs of memory, which LLVM vectorizes. A last block is padded to a multiple of 8 codes.
"""

import numba as nb
from accept_mpi.kernels.options import INNER, U


@nb.njit("uint64(uint8[::1], uint64, int64, uint8[::1], uint64)", **INNER)
def pack(codes, n, bits, out, at):  # type: ignore[no-untyped-def]
    """Pack a block of the first ``n`` codes (a multiple of 8) into bit planes at ``out[at]``, and return where they end. The
    block's codes are destroyed."""
    if bits == 8:
        for i in range(n):
            out[at + i] = codes[i]
        return at + n
    if bits & 4:
        h = n >> U(1)
        for i in range(h):
            out[at + i] = (codes[i] & 15) | (codes[h + i] & 15) << 4
        at += h
        if bits > 4:
            for i in range(n):
                codes[i] = codes[i] >> 4
    if bits & 2:
        h = n >> U(2)
        c, d = h + h, h + h + h
        for i in range(h):
            low, high = (codes[i] & 3) | (codes[h + i] & 3) << 2, (codes[c + i] & 3) | (codes[d + i] & 3) << 2
            out[at + i] = low | high << 4
        at += h
        if bits & 1:
            for i in range(n):
                codes[i] = codes[i] >> 2
    if bits & 1:
        h = n >> U(3)
        c, d = h + h, h + h + h
        e, f, g, k = c + c, c + d, d + d, c + c + d
        for i in range(h):
            low = (codes[i] & 1) | (codes[h + i] & 1) << 1 | (codes[c + i] & 1) << 2 | (codes[d + i] & 1) << 3
            high = (codes[e + i] & 1) | (codes[f + i] & 1) << 1 | (codes[g + i] & 1) << 2 | (codes[k + i] & 1) << 3
            out[at + i] = low | high << 4
        at += h
    return at

"""Uniform quantization to 1..8 bits: a zero point and a scale per group in bfloat16, codes packed without a wasted bit.

A value x of a group becomes q = floor((x - zero) / scale + 1/2), or for stochastic rounding + u with u uniform in [0, 1)
instead of 1/2, which makes zero + scale * q unbiased (u and the quotient are multiples of 1/65,536). ``zero`` is the group's
minimum rounded down, ``scale`` its range over 2^bits - 1 rounded up, so the error is at most half a scale (nearest) or a
scale (stochastic).

Layout: one uint32 per group (zero's bfloat16 above, scale's below), then the codes (kernels/packing.py). What decodes it is
kernels/uniform_decoder.py.

Speed comes from plain loops over indices that cannot be negative (``options.U``): others cost Numba's wrap-around test and
the vectorization with it (statistics 5 GB/s instead of 60). A block is large enough for the cost of each loop's start and
end to vanish: with 4,096 values encoding runs at 0.67 of memcpy, with 16,384 at 0.80. While a block is rounded, the next one
is fetched, run by run.
"""

import numba as nb
import numpy as np
import numpy.typing as npt
from accept_mpi.kernels.groups import CODED, LARGEST_KEY, NOT_FINITE, SMALLEST_KEY, TOO_LARGE, extremes
from accept_mpi.kernels.hashing import WEYL, random_bits
from accept_mpi.kernels.layout import BLOCK, SMALLEST_GROUP, coded_bytes, parts
from accept_mpi.kernels.options import INNER, NJIT, U
from accept_mpi.kernels.packing import pack
from accept_mpi.kernels.prefetch import LINE, prefetch

_PER_GROUP = 4  # bytes of parameters
PAIR = BLOCK // 2  # values i and i + PAIR of a block share one hash, 16 bits each
RUN = 256  # values rounded at a time, while as many of the next block are fetched: 128 or 512 are slower


_LARGEST = np.float32(np.finfo(np.float32).max)


@nb.njit(
    "int64(int32[::1], int32[::1], float32[::1], float32[::1], uint64, float32, uint32[::1], uint64, float32[::1], "
    "float32[::1])",
    **INNER,
)
def _parameters(low, high, lows, highs, count, levels, packed, at, zero, inverse):  # type: ignore[no-untyped-def]
    """Compute zero point and 1 / scale of ``count`` groups, and both in bfloat16 as they are sent, at ``packed[at]``.
    Returns CODED, NOT_FINITE or TOO_LARGE.

    ``low`` and ``high`` are keys, and serve as scratch; ``lows`` and ``highs`` are the same memory. The loops have no
    branches; they work on the bits and on the floats that these stand for in turn.
    """
    inverse_levels = np.float32(1.0) / levels
    bad = False
    for g in range(count):
        least, most = low[g], high[g]
        bad |= (most > LARGEST_KEY) | (least < SMALLEST_KEY)
        below = least >> 31
        low[g] = np.int32((least ^ below & 0x7FFFFFFF) + (below & 0xFFFF)) & -0x10000  # towards minus infinity
        high[g] = most ^ (most >> 31) & 0x7FFFFFFF
    if bad:
        return NOT_FINITE
    for g in range(count):
        zero[g] = lows[g]
        highs[g] = (highs[g] - lows[g]) * inverse_levels
    for g in range(count):
        bits = np.int32((high[g] + 0xFFFF) & -0x10000)  # away from zero
        bad |= (bits >= 0x7F800000) | (bits < 0)
        high[g] = 0 if bits < 0x00800000 else bits  # subnormal: a single level suffices
        packed[at + g] = np.uint32(low[g]) | np.uint32(high[g]) >> 16
    for g in range(count):
        inverse[g] = np.float32(1.0) / highs[g] if highs[g] > np.float32(0.0) else np.float32(0.0)
        bad |= zero[g] + highs[g] * levels > _LARGEST  # the highest level, rounded up
    return TOO_LARGE if bad else CODED


@nb.njit("int32(float32, float32, float32, float32)", **INNER)
def _nearest(x, zero, inverse, levels):  # type: ignore[no-untyped-def]
    return np.int32(min((x - zero) * inverse + np.float32(0.5), levels))


@nb.njit("int32(float32, float32, float32, float32, uint32)", **INNER)
def _drawn(x, zero, inverse, levels, bits):  # type: ignore[no-untyped-def]
    """Round by 16 random bits, in fixed point: doing half of it in floats would take two more conversions per value."""
    one = np.float32(65536)
    fixed = np.int32(min((x - zero) * inverse * one + np.float32(0.5), levels * one))
    return np.int32(np.int32(fixed + np.int32(bits)) >> 16)


@nb.njit("void(float32[::1], uint64, uint64)", **INNER)
def _fetch(x, begin, end):  # type: ignore[no-untyped-def]
    for i in range(begin, min(end, U(x.size)), U(LINE)):
        prefetch(x, i)


# Codes of 4 and 2 bits in a whole block are packed as they are made: 2 or 4 streams of values, one stream of bytes. In two
# separate loops, the bytes' cache misses would not hide behind arithmetic (23 GB/s instead of 29). The block is values
# ``begin`` to ``end`` - 1 of ``x``; ``run`` divides the length of a stream.


@nb.njit(
    "void(float32[::1], uint64, uint64, uint64, int64, float32[::1], float32[::1], int64, boolean, uint32, uint32, "
    "uint8[::1])",
    **INNER,
)
def _round(x, begin, end, run, shift, zero, inverse, top, stochastic, first, key, codes):  # type: ignore[no-untyped-def]
    levels, size = np.float32(top), end - begin
    for at in range(U(0), size, run):
        _fetch(x, end + at, end + at + run)
        z, s = zero[at >> U(shift)], inverse[at >> U(shift)]
        if stochastic:
            product = np.uint32(np.uint32(first + np.uint32(at & U(PAIR - 1))) * WEYL)
            down = np.uint32(16 if at & U(PAIR) else 0)
            for i in range(at, min(at + run, size)):
                bits = np.uint32(random_bits(product, key) >> down)
                codes[i] = _drawn(x[begin + i], z, s, levels, bits & np.uint32(0xFFFF))
                product = np.uint32(product + WEYL)
        else:
            for i in range(at, min(at + run, size)):
                codes[i] = _nearest(x[begin + i], z, s, levels)


@nb.njit(
    "void(float32[::1], uint64, uint64, int64, float32[::1], float32[::1], boolean, uint32, uint32, uint8[::1], uint64)",
    **INNER,
)
def _round_4bit(x, begin, run, shift, zero, inverse, stochastic, first, key, out, to):  # type: ignore[no-untyped-def]
    h, levels, low = U(BLOCK // 2), np.float32(15.0), np.uint32(0xFFFF)
    for at in range(U(0), h, run):
        after = begin + U(BLOCK) + at + at
        _fetch(x, after, after + run + run)
        a, b, mine = begin + at, begin + h + at, to + at
        za, zb = zero[at >> U(shift)], zero[(h + at) >> U(shift)]
        sa, sb = inverse[at >> U(shift)], inverse[(h + at) >> U(shift)]
        if stochastic:
            product = np.uint32(np.uint32(first + np.uint32(at)) * WEYL)
            for i in range(run):
                bits = random_bits(product, key)
                qa, qb = _drawn(x[a + i], za, sa, levels, bits & low), _drawn(x[b + i], zb, sb, levels, bits >> 16)
                out[mine + i] = qa | qb << 4
                product = np.uint32(product + WEYL)
        else:
            for i in range(run):
                out[mine + i] = _nearest(x[a + i], za, sa, levels) | _nearest(x[b + i], zb, sb, levels) << 4


@nb.njit(
    "void(float32[::1], uint64, uint64, int64, float32[::1], float32[::1], boolean, uint32, uint32, uint8[::1], uint64)",
    **INNER,
)
def _round_2bit(x, begin, run, shift, zero, inverse, stochastic, first, key, out, to):  # type: ignore[no-untyped-def]
    h, levels, low = U(BLOCK // 4), np.float32(3.0), np.uint32(0xFFFF)
    further = np.uint32(np.uint32(h) * WEYL)
    for at in range(U(0), h, run):
        after = begin + U(BLOCK) + U(4) * at
        _fetch(x, after, after + U(4) * run)
        a, b, c, d, mine = begin + at, begin + h + at, begin + h + h + at, begin + h + h + h + at, to + at
        ga, gb, gc, gd = at >> U(shift), (h + at) >> U(shift), (h + h + at) >> U(shift), (h + h + h + at) >> U(shift)
        za, zb, zc, zd = zero[ga], zero[gb], zero[gc], zero[gd]
        sa, sb, sc, sd = inverse[ga], inverse[gb], inverse[gc], inverse[gd]
        if stochastic:
            product = np.uint32(np.uint32(first + np.uint32(at)) * WEYL)
            for i in range(run):
                ac, bd = random_bits(product, key), random_bits(np.uint32(product + further), key)
                qa, qb = _drawn(x[a + i], za, sa, levels, ac & low), _drawn(x[b + i], zb, sb, levels, bd & low)
                qc, qd = _drawn(x[c + i], zc, sc, levels, ac >> 16), _drawn(x[d + i], zd, sd, levels, bd >> 16)
                out[mine + i] = qa | qb << 2 | qc << 4 | qd << 6
                product = np.uint32(product + WEYL)
        else:
            for i in range(run):
                qa, qb = _nearest(x[a + i], za, sa, levels), _nearest(x[b + i], zb, sb, levels)
                qc, qd = _nearest(x[c + i], zc, sc, levels), _nearest(x[d + i], zd, sd, levels)
                out[mine + i] = qa | qb << 2 | qc << 4 | qd << 6


@nb.njit(
    "int64(float32[::1], int32[::1], int64, uint64, boolean, uint64, uint32[::1], uint8[::1], int32[:, ::1], "
    "float32[:, ::1], uint8[::1])",
    **NJIT,
)
def _encode(x, ints, bits, group, stochastic, key, parameters, out, scratch, floats, codes):  # type: ignore[no-untyped-def]
    """``ints`` is ``x`` and ``floats`` is ``scratch`` (4, groups of a block), as other types: views made here would take a
    fifth longer to compile, and so would scratch that is allocated here."""
    top, n = (1 << bits) - 1, U(x.size)
    whole = group >= n
    low, high = scratch[0], scratch[1]
    lows, highs, zero, inverse = floats[0], floats[1], floats[2], floats[3]
    span, shift = U(BLOCK) if whole else group, 0
    while U(1) << U(shift) < span:
        shift += 1  # a shift, since a division costs as much as rounding 50 values
    low_key, high_key = np.uint32(key & U(0xFFFFFFFF)), np.uint32(key >> U(32))
    done, at = U(0), U(0)
    for begin in range(U(0), n, U(BLOCK)):
        end = min(begin + U(BLOCK), n)
        if begin == 0 or not whole:
            last = n if whole else end
            count = U(1) if whole else (end - begin + group - U(1)) >> U(shift)
            extremes(ints, begin, last, group, low, high)
            status = _parameters(low, high, lows, highs, count, np.float32(top), parameters, done, zero, inverse)
            if status != CODED:
                return status
            done += count
        number = np.uint32(np.uint32(begin) + low_key)
        if end - begin == U(BLOCK) and bits == 4:
            run = min(span, U(RUN // 2))
            _round_4bit(x, begin, run, shift, zero, inverse, stochastic, number, high_key, out, at)
            at += U(BLOCK // 2)
        elif end - begin == U(BLOCK) and bits == 2:
            run = min(span, U(RUN // 4))
            _round_2bit(x, begin, run, shift, zero, inverse, stochastic, number, high_key, out, at)
            at += U(BLOCK // 4)
        else:
            run = min(span, U(RUN))
            _round(x, begin, end, run, shift, zero, inverse, top, stochastic, number, high_key, codes)
            padded = (end - begin + U(7)) & ~U(7)
            for i in range(end - begin, padded):
                codes[i] = 0
            at = pack(codes, padded, bits, out, at)
    return CODED


def encoded_bytes(values: int, bits: int, group: int) -> int:
    """Bytes that ``encode`` writes for ``values`` values."""
    return coded_bytes(values, bits, group, _PER_GROUP)


def encode(x: npt.NDArray[np.float32], bits: int, group: int, out: npt.NDArray[np.uint8], key: int | None = None) -> int:
    """Quantize ``x`` (float32, 1-D, contiguous) into ``out`` (uint8, 4-byte aligned, ``encoded_bytes`` long).

    ``group``: number of values that share a zero point and a scale; 0: all. ``key``: 64 bits that determine stochastic
    rounding; None: round to nearest. Returns CODED, or NOT_FINITE or TOO_LARGE, after which the content of ``out`` is
    meaningless.
    """
    parameters, packed, size = parts(x, out, bits, group, _PER_GROUP, 8)
    scratch = np.empty((4, min(parameters.size // _PER_GROUP, BLOCK // SMALLEST_GROUP)), np.int32)
    views = x.view(np.int32), parameters.view(np.uint32), scratch.view(np.float32)
    codes = np.empty(BLOCK, np.uint8)
    stochastic, number = key is not None, np.uint64(key or 0)
    return int(_encode(x, views[0], bits, size, stochastic, number, views[1], packed, scratch, views[2], codes))

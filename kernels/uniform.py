"""Uniform quantization to 1..8 bits: a zero point and a scale per group in bfloat16, codes packed without a wasted bit.

A value x of a group becomes q = floor((x - zero) / scale + 1/2), or for stochastic rounding + u with u uniform in [0, 1)
instead of 1/2, which makes zero + scale * q unbiased (u and the quotient are multiples of 1/65,536). ``zero`` is the group's
minimum rounded down, ``scale`` its range over 2^bits - 1 rounded up, so the error is at most half a scale (nearest) or a
scale (stochastic).

Layout: one uint32 per group (zero's bfloat16 above, scale's below), then the codes (kernels/packing.py). What decodes it is
kernels/uniform_decoder.py.

Speed comes from plain loops over slices: an index into a slice is known not to be negative, while ``a[g * n + i]`` costs
Numba's wrap-around test and the vectorization with it (statistics 5 GB/s instead of 60). A block is large enough for the
cost of each loop's start and end to vanish: with 4,096 values encoding runs at 0.67 of memcpy, with 16,384 at 0.80. While a
block is rounded, the next one is fetched, run by run.
"""

import numba as nb
import numpy as np
import numpy.typing as npt
from accept_mpi.kernels.groups import CODED, LARGEST_KEY, NOT_FINITE, SMALLEST_KEY, TOO_LARGE, extremes
from accept_mpi.kernels.hashing import WEYL, random_bits
from accept_mpi.kernels.layout import BLOCK, SMALLEST_GROUP, coded_bytes, parts
from accept_mpi.kernels.options import INNER, NJIT
from accept_mpi.kernels.packing import pack
from accept_mpi.kernels.prefetch import LINE, prefetch

_PER_GROUP = 4  # bytes of parameters
PAIR = BLOCK // 2  # values i and i + PAIR of a block share one hash, 16 bits each
RUN = 256  # values rounded at a time, while as many of the next block are fetched: 128 or 512 are slower


_LARGEST = np.float32(np.finfo(np.float32).max)


@nb.njit(
    "int64(int32[::1], int32[::1], float32[::1], float32[::1], float32, uint32[::1], float32[::1], float32[::1])", **INNER
)
def _parameters(low, high, lows, highs, levels, packed, zero, inverse):  # type: ignore[no-untyped-def]
    """Compute zero point and 1 / scale of each group, and both in bfloat16 as they are sent. Returns CODED, NOT_FINITE or
    TOO_LARGE.

    ``low`` and ``high`` are keys, and serve as scratch; ``lows`` and ``highs`` are the same memory. The loops have no
    branches; they work on the bits and on the floats that these stand for in turn.
    """
    inverse_levels = np.float32(1.0) / levels
    bad = np.int32(0)
    for g in range(low.size):
        least, most = low[g], high[g]
        bad |= np.int32(most > LARGEST_KEY) | np.int32(least < SMALLEST_KEY)
        below = np.int32(least >> np.int32(31))
        bits = np.int32(least ^ np.int32(below & np.int32(0x7FFFFFFF)))
        bits = np.int32(bits + np.int32(below & np.int32(0xFFFF)))  # towards minus infinity
        low[g] = np.int32(bits & np.int32(-0x10000))
        high[g] = np.int32(most ^ np.int32(np.int32(most >> np.int32(31)) & np.int32(0x7FFFFFFF)))
    if bad:
        return NOT_FINITE
    for g in range(low.size):
        zero[g] = lows[g]
        highs[g] = (highs[g] - lows[g]) * inverse_levels
    for g in range(low.size):
        bits = np.int32(np.int32(high[g] + np.int32(0xFFFF)) & np.int32(-0x10000))  # away from zero
        bad |= np.int32(bits >= np.int32(0x7F800000)) | np.int32(bits < np.int32(0))
        bits = np.int32(0) if bits < np.int32(0x00800000) else bits  # subnormal: a single level suffices
        packed[g] = np.uint32(np.uint32(low[g]) | np.uint32(np.uint32(bits) >> np.uint32(16)))
        high[g] = bits
    for g in range(low.size):
        inverse[g] = np.float32(1.0) / highs[g] if highs[g] > np.float32(0.0) else np.float32(0.0)
        bad |= np.int32(zero[g] + highs[g] * levels > _LARGEST)  # the highest level, rounded up
    return TOO_LARGE if bad else CODED


@nb.njit("int32(float32, float32, float32, float32)", **INNER)
def _nearest(x, zero, inverse, levels):  # type: ignore[no-untyped-def]
    return np.int32(min((x - zero) * inverse + np.float32(0.5), levels))


@nb.njit("int32(float32, float32, float32, float32, uint32)", **INNER)
def _drawn(x, zero, inverse, levels, bits):  # type: ignore[no-untyped-def]
    """Round by 16 random bits, in fixed point: doing half of it in floats would take two more conversions per value."""
    one = np.float32(65536)
    fixed = np.int32(min((x - zero) * inverse * one + np.float32(0.5), levels * one))
    return np.int32(np.int32(fixed + np.int32(bits)) >> np.int32(16))


@nb.njit("uint32(uint32)", **INNER)
def _low(bits):  # type: ignore[no-untyped-def]
    return np.uint32(bits & np.uint32(0xFFFF))


@nb.njit("uint32(uint32)", **INNER)
def _high(bits):  # type: ignore[no-untyped-def]
    return np.uint32(bits >> np.uint32(16))


@nb.njit("void(float32[::1], int64, int64)", **INNER)
def _fetch(x, begin, end):  # type: ignore[no-untyped-def]
    for i in range(begin, min(end, x.size), LINE):
        prefetch(x, i)


# Codes of 4 and 2 bits in a whole block are packed as they are made: 2 or 4 streams of values, one stream of bytes. In two
# separate loops, the bytes' cache misses would not hide behind arithmetic (23 GB/s instead of 29). ``run`` divides the
# length of a stream; ``after`` is the next block.


@nb.njit(
    "void(float32[::1], int64, int64, float32[::1], float32[::1], int64, boolean, uint32, uint32, float32[::1], uint8[::1])",
    **INNER,
)
def _round(x, run, shift, zero, inverse, top, stochastic, first, key, after, codes):  # type: ignore[no-untyped-def]
    levels = np.float32(top)
    for begin in range(0, x.size, run):
        _fetch(after, begin, begin + run)
        part, out = x[begin : min(begin + run, x.size)], codes[begin : min(begin + run, x.size)]
        z, s = zero[begin >> shift], inverse[begin >> shift]
        if stochastic:
            product = np.uint32(np.uint32(first + np.uint32(begin & (PAIR - 1))) * WEYL)
            down = np.uint32(16 if begin & PAIR else 0)
            for i in range(part.size):
                bits = np.uint32(random_bits(product, key) >> down)
                out[i] = np.uint8(_drawn(part[i], z, s, levels, _low(bits)))
                product = np.uint32(product + WEYL)
        else:
            for i in range(part.size):
                out[i] = np.uint8(_nearest(part[i], z, s, levels))


@nb.njit(
    "void(float32[::1], int64, int64, float32[::1], float32[::1], boolean, uint32, uint32, float32[::1], uint8[::1])",
    **INNER,
)
def _round_4bit(x, run, shift, zero, inverse, stochastic, first, key, after, out):  # type: ignore[no-untyped-def]
    h, levels = BLOCK // 2, np.float32(15.0)
    for begin in range(0, h, run):
        _fetch(after, 2 * begin, 2 * (begin + run))
        a, b, mine = x[begin : begin + run], x[h + begin : h + begin + run], out[begin : begin + run]
        za, sa = zero[begin >> shift], inverse[begin >> shift]
        zb, sb = zero[(h + begin) >> shift], inverse[(h + begin) >> shift]
        if stochastic:
            product = np.uint32(np.uint32(first + np.uint32(begin)) * WEYL)
            for i in range(mine.size):
                bits = random_bits(product, key)
                low, high = _drawn(a[i], za, sa, levels, _low(bits)), _drawn(b[i], zb, sb, levels, _high(bits))
                mine[i] = np.uint8(np.int32(low | np.int32(high << np.int32(4))))
                product = np.uint32(product + WEYL)
        else:
            for i in range(mine.size):
                low, high = _nearest(a[i], za, sa, levels), _nearest(b[i], zb, sb, levels)
                mine[i] = np.uint8(np.int32(low | np.int32(high << np.int32(4))))


@nb.njit(
    "void(float32[::1], int64, int64, float32[::1], float32[::1], boolean, uint32, uint32, float32[::1], uint8[::1])",
    **INNER,
)
def _round_2bit(x, run, shift, zero, inverse, stochastic, first, key, after, out):  # type: ignore[no-untyped-def]
    h, levels = BLOCK // 4, np.float32(3.0)
    for begin in range(0, h, run):
        _fetch(after, 4 * begin, 4 * (begin + run))
        a, b = x[begin : begin + run], x[h + begin : h + begin + run]
        c, d = x[2 * h + begin : 2 * h + begin + run], x[3 * h + begin : 3 * h + begin + run]
        mine = out[begin : begin + run]
        ga, gb, gc, gd = begin >> shift, (h + begin) >> shift, (2 * h + begin) >> shift, (3 * h + begin) >> shift
        za, zb, zc, zd = zero[ga], zero[gb], zero[gc], zero[gd]
        sa, sb, sc, sd = inverse[ga], inverse[gb], inverse[gc], inverse[gd]
        if stochastic:
            product = np.uint32(np.uint32(first + np.uint32(begin)) * WEYL)
            further = np.uint32(np.uint32(h) * WEYL)
            for i in range(mine.size):
                ac, bd = random_bits(product, key), random_bits(np.uint32(product + further), key)
                qa, qb = _drawn(a[i], za, sa, levels, _low(ac)), _drawn(b[i], zb, sb, levels, _low(bd))
                qc, qd = _drawn(c[i], zc, sc, levels, _high(ac)), _drawn(d[i], zd, sd, levels, _high(bd))
                low, high = np.int32(qa | np.int32(qb << np.int32(2))), np.int32(qc | np.int32(qd << np.int32(2)))
                mine[i] = np.uint8(np.int32(low | np.int32(high << np.int32(4))))
                product = np.uint32(product + WEYL)
        else:
            for i in range(mine.size):
                qa, qb = _nearest(a[i], za, sa, levels), _nearest(b[i], zb, sb, levels)
                qc, qd = _nearest(c[i], zc, sc, levels), _nearest(d[i], zd, sd, levels)
                low, high = np.int32(qa | np.int32(qb << np.int32(2))), np.int32(qc | np.int32(qd << np.int32(2)))
                mine[i] = np.uint8(np.int32(low | np.int32(high << np.int32(4))))


@nb.njit(
    "int64(float32[::1], int32[::1], int64, int64, boolean, uint64, uint32[::1], uint8[::1], int32[:, ::1], "
    "float32[:, ::1], uint8[::1])",
    **NJIT,
)
def _encode(x, ints, bits, group, stochastic, key, parameters, out, scratch, floats, codes):  # type: ignore[no-untyped-def]
    """``ints`` is ``x`` and ``floats`` is ``scratch`` (4, groups of a block), as other types: views made here would take a
    fifth longer to compile, and so would scratch that is allocated here."""
    top = (1 << bits) - 1
    levels = np.float32(top)
    whole = group >= x.size
    low, high = scratch[0], scratch[1]
    lows, highs, zero, inverse = floats[0], floats[1], floats[2], floats[3]
    span, shift = BLOCK if whole else group, 0
    while 1 << shift < span:
        shift += 1  # a shift, since a division costs as much as rounding 50 values
    low_key, high_key = np.uint32(key & np.uint64(0xFFFFFFFF)), np.uint32(key >> np.uint64(32))
    if whole and x.size > 0:
        extremes(ints, x.size, low, high)
        status = _parameters(low, high, lows, highs, levels, parameters, zero, inverse)
        if status != CODED:
            return status
    at = 0
    for begin in range(0, x.size, BLOCK):
        block = x[begin : min(begin + BLOCK, x.size)]
        if not whole:
            count = (block.size + group - 1) // group
            extremes(ints[begin : begin + block.size], group, low[:count], high[:count])
            mine = parameters[begin // group : begin // group + count]
            status = _parameters(low[:count], high[:count], lows[:count], highs[:count], levels, mine, zero, inverse)
            if status != CODED:
                return status
        number = np.uint32(np.uint32(begin) + low_key)
        size = (block.size + 7) // 8 * bits
        packed = out[at : at + size]
        after = x[min(begin + BLOCK, x.size) : min(begin + 2 * BLOCK, x.size)]
        if block.size == BLOCK and bits == 4:
            _round_4bit(block, min(span, RUN // 2), shift, zero, inverse, stochastic, number, high_key, after, packed)
        elif block.size == BLOCK and bits == 2:
            _round_2bit(block, min(span, RUN // 4), shift, zero, inverse, stochastic, number, high_key, after, packed)
        else:
            padded = codes[: (block.size + 7) // 8 * 8]
            _round(block, min(span, RUN), shift, zero, inverse, top, stochastic, number, high_key, after, padded)
            for i in range(block.size, padded.size):
                padded[i] = np.uint8(0)
            pack(padded, bits, packed)
        at += size
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

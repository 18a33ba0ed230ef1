"""Uniform quantization to 1..8 bits: per group a zero point and a scale in bfloat16, codes packed without a wasted bit.

A value x of a group becomes q = floor((x - zero) / scale + 1/2), or + u with u uniform in [0, 1) for stochastic rounding,
which makes zero + scale * q unbiased. ``zero`` is the group's minimum rounded down, ``scale`` its range over 2^bits - 1
rounded up, so the error is at most half a scale (nearest) or a scale (stochastic).

Layout: a uint32 for each group (zero's bfloat16 above, scale's below), then for each block of 16,384 values its bit planes.
A plane holds w = 8, 4, 2 or 1 bits of each code (3 bits are a plane of 2 and one of 1; low bits first, wide planes first).
Byte i of a plane holds the bits of values i, i + h, i + 2h, ..., h = values * w / 8, so that packing is plain byte
arithmetic on runs of memory, which LLVM vectorizes. A last block is padded to a multiple of 8 values.

Speed lies in plain loops over slices: an index into a slice is known not to be negative, while ``a[g * n + i]`` costs
Numba's wrap-around test and the vectorization with it (statistics 5 GB/s instead of 60). The block is large enough that the
cost of each loop's start and end vanishes: with 4,096 values encoding ran at 0.67 of memcpy, with 16,384 at 0.80.
"""

import numba as nb
import numpy as np
import numpy.typing as npt
from accept_mpi.kernels.options import NJIT

BLOCK = 16384
CODED, NOT_FINITE, TOO_LARGE = 0, 1, 2

_LARGEST_KEY = np.int32(0x7F7FFFFF)  # of the largest finite float32
_SMALLEST_KEY = np.int32(-0x7F800000)


@nb.njit("void(int32[::1], int64, int32[::1], int32[::1])", **NJIT)
def _extremes(bits, group, low, high):  # type: ignore[no-untyped-def]
    """Smallest and largest value of each group as keys: float32 bits with the order of the numbers they stand for."""
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


@nb.njit("int64(int32[::1], int32[::1], float32, uint32[::1], float32[::1], float32[::1])", **NJIT)
def _parameters(low, high, inverse_levels, packed, zero, inverse):  # type: ignore[no-untyped-def]
    """Zero point and 1 / scale of each group, and both in bfloat16 as they are sent. Returns CODED or why not.

    ``low`` and ``high`` are keys, and scratch. Loops without branches, on the bits and on the floats they stand for in turn.
    """
    lows, highs = low.view(np.float32), high.view(np.float32)
    bad = np.int32(0)
    for g in range(low.size):
        least, most = low[g], high[g]
        bad |= np.int32(most > _LARGEST_KEY) | np.int32(least < _SMALLEST_KEY)
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
        bits = np.int32(0) if bits < np.int32(0x00800000) else bits  # below a normal number: one level is all
        packed[g] = np.uint32(np.uint32(low[g]) | np.uint32(np.uint32(bits) >> np.uint32(16)))
        high[g] = bits
    for g in range(low.size):
        inverse[g] = np.float32(1.0) / highs[g] if highs[g] > np.float32(0.0) else np.float32(0.0)
    return TOO_LARGE if bad else CODED


@nb.njit("void(float32[::1], int64, float32[::1], float32[::1], float32, uint8[::1])", **NJIT)
def _round_nearest(x, group, zero, inverse, levels, codes):  # type: ignore[no-untyped-def]
    for g in range(zero.size):
        part = x[g * group : min(g * group + group, x.size)]
        out = codes[g * group : min(g * group + group, x.size)]
        z, s = zero[g], inverse[g]
        for i in range(part.size):
            out[i] = np.uint8(np.int32(min((part[i] - z) * s + np.float32(0.5), levels)))


@nb.njit("void(float32[::1], int64, float32[::1], float32[::1], float32, uint8[::1], uint32, uint32)", **NJIT)
def _round_stochastically(x, group, zero, inverse, levels, codes, first, key):  # type: ignore[no-untyped-def]
    """The random bits of value i come from hashing its number ``first`` + i with ``key`` (two rounds of multiply, shift)."""
    for g in range(zero.size):
        part = x[g * group : min(g * group + group, x.size)]
        out = codes[g * group : min(g * group + group, x.size)]
        z, s = zero[g], inverse[g]
        begin = np.uint32(first + np.uint32(g * group))
        for i in range(part.size):
            h = np.uint32(np.uint32(begin + np.uint32(i)) * np.uint32(0x9E3779B1))
            h = np.uint32(np.uint32(h ^ np.uint32(h >> np.uint32(15))) ^ key)
            h = np.uint32(h * np.uint32(0x85EBCA77))
            h = np.uint32(h ^ np.uint32(h >> np.uint32(13)))
            h = np.uint32(h * np.uint32(0xC2B2AE3D))
            u = np.float32(np.int32(h >> np.uint32(8))) * np.float32(1.0 / (1 << 24))
            out[i] = np.uint8(np.int32(min((part[i] - z) * s + u, levels)))


@nb.njit("int64(uint8[::1], int64, uint8[::1])", **NJIT)
def _pack(codes, bits, out):  # type: ignore[no-untyped-def]
    """Pack a block (a multiple of 8 codes, shifted away meanwhile) into bit planes; returns the bytes used."""
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


@nb.njit("int64(uint8[::1], int64, uint8[::1])", **NJIT)
def _unpack(packed, bits, codes):  # type: ignore[no-untyped-def]
    """The inverse of ``_pack``: narrow planes first, since they hold the high bits. Returns the bytes read."""
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


@nb.njit("int64(float32[::1], int64, int64, boolean, uint64, uint32[::1], uint8[::1])", **NJIT)
def _encode(x, bits, group, stochastic, key, parameters, out):  # type: ignore[no-untyped-def]
    ints = x.view(np.int32)
    levels = (1 << bits) - 1
    top = np.float32(levels)
    inverse_levels = np.float32(1.0) / top
    whole = group >= x.size
    groups = parameters.size if whole else BLOCK // group
    low, high = np.empty(groups, np.int32), np.empty(groups, np.int32)
    zero, inverse = np.empty(groups, np.float32), np.empty(groups, np.float32)
    codes = np.zeros(BLOCK, np.uint8)
    low_key, high_key = np.uint32(key & np.uint64(0xFFFFFFFF)), np.uint32(key >> np.uint64(32))
    if whole and x.size > 0:
        _extremes(ints, x.size, low, high)
        status = _parameters(low, high, inverse_levels, parameters, zero, inverse)
        if status != CODED:
            return status
    at = 0
    for begin in range(0, x.size, BLOCK):
        end = min(begin + BLOCK, x.size)
        part = x[begin:end]
        size, count = part.size, 1
        if not whole:
            size, count = group, (part.size + group - 1) // group
            _extremes(ints[begin:end], group, low[:count], high[:count])
            mine = parameters[begin // group : begin // group + count]
            status = _parameters(low[:count], high[:count], inverse_levels, mine, zero, inverse)
            if status != CODED:
                return status
        if stochastic:
            first = np.uint32(np.uint32(begin) + low_key)
            _round_stochastically(part, size, zero[:count], inverse[:count], top, codes, first, high_key)
        else:
            _round_nearest(part, size, zero[:count], inverse[:count], top, codes)
        padded = (part.size + 7) // 8 * 8
        for i in range(part.size, padded):
            codes[i] = np.uint8(0)
        at += _pack(codes[:padded], bits, out[at:])
    return CODED


@nb.njit("void(uint32[::1], uint8[::1], int64, int64, float32[::1])", **NJIT)
def _decode(parameters, packed, bits, group, x):  # type: ignore[no-untyped-def]
    codes = np.empty(BLOCK, np.uint8)
    words = np.empty(2, np.uint32)
    numbers = words.view(np.float32)
    whole = group >= x.size
    at = 0
    for begin in range(0, x.size, BLOCK):
        part = x[begin : min(begin + BLOCK, x.size)]
        at += _unpack(packed[at:], bits, codes[: (part.size + 7) // 8 * 8])
        size = part.size if whole else group
        for g in range((part.size + size - 1) // size):
            word = parameters[0 if whole else begin // group + g]
            words[0] = word & np.uint32(0xFFFF0000)
            words[1] = np.uint32(word << np.uint32(16))
            zero, scale = numbers[0], numbers[1]
            out = part[g * size : min(g * size + size, part.size)]
            mine = codes[g * size : min(g * size + size, part.size)]
            for i in range(out.size):
                out[i] = zero + scale * np.float32(np.int32(mine[i]))


def _groups(values: int, group: int) -> tuple[int, int]:
    """The group size that the kernels take, and the number of groups. Raises ValueError."""
    if group == 0:
        return max(values, 1), min(values, 1)
    if group < 8 or BLOCK % group:
        raise ValueError(f"group must be 0 (the whole tensor) or a power of two from 8 to {BLOCK}, got {group}")
    # One group that holds all is the same on the wire; the kernels take that path for any tensor that fits in a group.
    return group, -(-values // group)


def encoded_bytes(values: int, bits: int, group: int) -> int:
    """Bytes that ``encode`` writes for ``values`` values."""
    _, groups = _groups(values, group)
    blocks, rest = divmod(values, BLOCK)
    return 4 * groups + blocks * BLOCK * bits // 8 + -(-rest // 8) * bits


def encode(x: npt.NDArray[np.float32], bits: int, group: int, out: npt.NDArray[np.uint8], key: int | None = None) -> int:
    """Quantize ``x`` (float32, 1-D, contiguous) into ``out`` (uint8, 4-byte aligned, ``encoded_bytes`` long).

    ``group``: values that share a zero point and scale; 0: all. ``key``: 64 bits that decide the random ones of stochastic
    rounding; None: round to nearest. Returns CODED, or NOT_FINITE or TOO_LARGE, and then ``out`` means nothing.
    """
    _check(x, bits, out.size, group)
    size, groups = _groups(x.size, group)
    parameters, codes = out[: 4 * groups].view(np.uint32), out[4 * groups :]
    return int(_encode(x, bits, size, key is not None, np.uint64(key or 0), parameters, codes))


def decode(data: npt.NDArray[np.uint8], bits: int, group: int, x: npt.NDArray[np.float32]) -> None:
    """The values that ``encode`` wrote, into ``x`` (float32, 1-D, contiguous)."""
    _check(x, bits, data.size, group)
    size, groups = _groups(x.size, group)
    _decode(data[: 4 * groups].view(np.uint32), data[4 * groups :], bits, size, x)


def _check(x: npt.NDArray[np.float32], bits: int, nbytes: int, group: int) -> None:
    if x.dtype != np.float32 or x.ndim != 1 or not x.flags.c_contiguous:
        raise ValueError(f"expected a contiguous 1-D float32 array, got {x.dtype} with {x.ndim} dimensions")
    if not 1 <= bits <= 8:
        raise ValueError(f"bits must be 1..8, got {bits}")
    if nbytes != encoded_bytes(x.size, bits, group):
        raise ValueError(f"{x.size} values at {bits} bits take {encoded_bytes(x.size, bits, group)} bytes, got {nbytes}")

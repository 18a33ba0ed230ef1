"""Multi-bit quantization: a group's values as a center plus or minus B scales each, x = c + sum a_k b_k, b_k in {-1, 1}.

AccEPT's forward codec after Xu et al. 2018 (arXiv 1802.00150; reconstruction): scales are found greedily
(a_k = mean |r|, r -= a_k sign(r)), then refined in rounds: each value is assigned to its nearest level, and c and a_k are
moved towards the least squares fit of that assignment. Two rounds, each of two sweeps of coordinate descent, which unlike
solving the normal equations cannot meet a singular matrix. Here c, the mean at first, is refined along with the scales.

Fitting works on integers, (x - min) / range in 16 bits, so sums are exact in any order: they vectorize, and give the same
bytes on every CPU. The last assignment is to the nearest level as the decoder computes it.

Layout: for each group c and a_1..a_B in bfloat16, then each value's rank of level, B bits per value (kernels/packing.py).
"""

import numba as nb
import numpy as np
import numpy.typing as npt
from accept_mpi.kernels.groups import CODED, LARGEST_KEY, NOT_FINITE, SMALLEST_KEY, TOO_LARGE, extremes
from accept_mpi.kernels.layout import BLOCK, coded_bytes, parts
from accept_mpi.kernels.options import INNER, NJIT, U
from accept_mpi.kernels.packing import pack
from accept_mpi.kernels.unpacking import unpack

MOST_BITS = 4  # each group searches 2^B levels; with 4 bits or more, uniform quantization loses less
ROUNDS, SWEEPS = 2, 2

_STEPS = np.float32(65535.0)


# Work that occurs once per group is done for all groups of a block in one loop (the last axis of their arrays), so that it
# vectorizes too. One group at a time, mbq:2 encodes at 1.6 GB/s instead of 4.3: a few dozen dependent operations cost more
# than 256 values.


@nb.njit("void(float32[::1], float32[::1], int32[::1], int32[::1])", **INNER)
def _in_order(low, high, low_code, high_code):  # type: ignore[no-untyped-def]
    """Swap two rows of levels, with their codes, in each group where they are not in rising order."""
    for g in range(low.size):
        a, b, c, d = low[g], high[g], low_code[g], high_code[g]
        swap = (a > b) | ((a == b) & (c > d))  # ties have one order, too, in any sorting network
        low[g], high[g] = (b if swap else a), (a if swap else b)
        low_code[g], high_code[g] = (d if swap else c), (c if swap else d)


@nb.njit("void(float32[:, ::1], float32[:, ::1], int32[:, ::1])", **INNER)
def _levels(fit, level, code):  # type: ignore[no-untyped-def]
    """Compute the 2^B levels of center and scales ``fit`` (one row each), in rising order; bit k - 1 of ``code`` is set if
    b_k is 1."""
    for g in range(fit.shape[1]):
        level[0, g] = fit[0, g]
        code[0, g] = np.int32(0)
    many = 1
    for k in range(1, fit.shape[0]):
        scale = fit[k]
        for i in range(many):
            low, high, low_code, high_code = level[i], level[many + i], code[i], code[many + i]
            for g in range(scale.size):
                high[g] = low[g] + scale[g]
                low[g] = low[g] - scale[g]
                high_code[g] = np.int32(low_code[g] | np.int32(many))
        many *= 2
    p = 1  # Batcher's odd-even merge sort
    while p < many:
        k = p
        while k > 0:
            for j in range(k % p, many - k, 2 * k):
                for i in range(j, min(j + k, many - k)):
                    if i // (2 * p) == (i + k) // (2 * p):
                        _in_order(level[i], level[i + k], code[i], code[i + k])
            k //= 2
        p *= 2


@nb.njit("void(int32[::1], int64, int32[::1], int32[::1], float64[::1])", **INNER)
def _deviations(v, group, middle, w, total):  # type: ignore[no-untyped-def]
    """Write |``v`` - ``middle``| to ``w``, and its sum per group to ``total``. 16,384 numbers of 16 bits fit into an
    int32."""
    for g in range(total.size):
        m = middle[g]
        total[g] = 0.0
        for begin in range(g * group, min(g * group + group, v.size), BLOCK):
            end = min(begin + BLOCK, g * group + group, v.size)
            a, b = v[begin:end], w[begin:end]
            part = np.int32(0)
            for i in range(a.size):
                difference = np.int32(a[i] - m)
                difference = max(difference, np.int32(-difference))
                b[i] = difference
                part = np.int32(part + difference)
            total[g] += part


@nb.njit("void(int32[::1], int64, int32[::1], float64[::1], float64[::1])", **INNER)
def _above(v, group, threshold, number, total):  # type: ignore[no-untyped-def]
    """Compute number and sum of the values of each group above its ``threshold``."""
    for g in range(total.size):
        t = threshold[g]
        number[g] = total[g] = 0.0
        for begin in range(g * group, min(g * group + group, v.size), BLOCK):
            a = v[begin : min(begin + BLOCK, g * group + group, v.size)]
            n, part = np.int32(0), np.int32(0)
            for i in range(a.size):
                mask = np.int32(a[i] > t)
                n = np.int32(n + mask)
                part = np.int32(part + np.int32(a[i] & np.int32(-mask)))
            number[g] += n
            total[g] += part


@nb.njit("void(float64[:, ::1], float64[:, ::1], int32[:, ::1], int64, float64[::1], float64[::1], float32[::1])", **INNER)
def _descend(number, distance, code, k, share, move, parameter):  # type: ignore[no-untyped-def]
    """Move ``parameter`` k of each group to its least squares value, and update the distances to the levels."""
    bit, one = (np.int32(1 << k) >> np.int32(1)), np.int32(k == 0)  # b_0 is 1
    for g in range(move.size):
        move[g] = 0.0
    for q in range(code.shape[0]):
        for g in range(move.size):
            up = np.int32(np.int32(code[q, g] & bit) | one) > np.int32(0)
            move[g] += distance[q, g] if up else -distance[q, g]
    for g in range(move.size):
        move[g] *= share[g]
        parameter[g] = np.float32(parameter[g] + move[g])
    for q in range(code.shape[0]):
        for g in range(move.size):
            up, by = np.int32(np.int32(code[q, g] & bit) | one) > np.int32(0), number[q, g] * move[g]
            distance[q, g] -= by if up else -by


@nb.njit(
    "void(int32[::1], int32[:, ::1], int64, float32[:, ::1], float32[:, ::1], int32[:, ::1], float64[:, :, ::1],int32[::1])",
    **INNER,
)
def _fit(v, w, group, fit, level, code, sums, at):  # type: ignore[no-untyped-def]
    """Fit center and scales ``fit`` to the integers ``v`` of each group. ``w`` and all arguments after ``fit`` are scratch.

    ``sums``: number and sum of the values above each threshold, 2^B + 1 of them, then three rows of temporaries.
    """
    levels, groups = level.shape[0], fit.shape[1]
    number, total, share, move, all_ = sums[0], sums[1], sums[2, 0], sums[2, 1], sums[2, 2]
    for g in range(groups):
        share[g] = 1.0 / float(min(group, v.size - g * group))
        at[g] = np.int32(0)
    source = v
    for k in range(fit.shape[0]):
        found, out = all_ if k == 0 else move, fit[k]
        _deviations(source, group, at, w[k % 2, : v.size], found)
        for g in range(groups):
            out[g] = np.float32(found[g] * share[g])
            at[g] = np.int32(out[g] + np.float32(0.5))
        source = w[k % 2, : v.size]
    for _round in range(ROUNDS):
        _levels(fit, level, code)
        for g in range(groups):
            number[0, g], total[0, g] = float(min(group, v.size - g * group)), all_[g]
        for q in range(1, levels):
            low, high = level[q - 1], level[q]
            for g in range(groups):
                at[g] = np.int32((low[g] + high[g]) * np.float32(0.5))
            _above(v, group, at, number[q], total[q])
        for g in range(groups):
            number[levels, g] = total[levels, g] = 0.0
        for q in range(levels):  # from here on: number of values at a level, and the sum of their distances to it
            many, more, distance, further, value = number[q], number[q + 1], total[q], total[q + 1], level[q]
            for g in range(groups):
                many[g] -= more[g]
                distance[g] = (distance[g] - further[g]) - many[g] * float(value[g])
        for _sweep in range(SWEEPS):
            for k in range(fit.shape[0]):
                _descend(number, total, code, k, share, move, fit[k])


@nb.njit("boolean(int32[::1], int32[::1])", **INNER)
def _to_floats(low, high):  # type: ignore[no-untyped-def]
    """Turn the keys that ``extremes`` gives into the bits of their floats; False if one is not finite."""
    bad = np.int32(0)
    for g in range(low.size):
        least, most = low[g], high[g]
        bad |= np.int32(most > LARGEST_KEY) | np.int32(least < SMALLEST_KEY)
        low[g] = np.int32(least ^ np.int32(np.int32(least >> np.int32(31)) & np.int32(0x7FFFFFFF)))
        high[g] = np.int32(most ^ np.int32(np.int32(most >> np.int32(31)) & np.int32(0x7FFFFFFF)))
    return bad == np.int32(0)


@nb.njit("boolean(float32[::1], int64, float32[::1], float32[::1], float32[::1], int32[::1])", **INNER)
def _to_integers(x, group, least, most, step, v):  # type: ignore[no-untyped-def]
    """Turn each group's values into 16-bit steps between its extremes, and compute the size of a step; False if too
    large."""
    for g in range(step.size):
        if most[g] * np.float32(0.5) - least[g] * np.float32(0.5) > np.float32(1e38):
            return False
    for g in range(step.size):
        extent = np.float32(most[g] - least[g])
        fine = extent > np.float32(1e-30)
        step[g] = extent / _STEPS if fine else np.float32(0.0)
        scale, low = (_STEPS / extent if fine else np.float32(0.0)), least[g]
        a, b = x[g * group : min(g * group + group, x.size)], v[g * group : min(g * group + group, x.size)]
        for i in range(a.size):
            b[i] = np.int32((a[i] - low) * scale)
    return True


@nb.njit("boolean(float32[::1], float32[::1], float32[:, ::1], uint32[:, ::1], uint16[::1])", **INNER)
def _send(least, step, fit, fit_bits, out):  # type: ignore[no-untyped-def]
    """Write the parameters of the fits, and round the fits to what the decoder will read; False if they are too large.

    ``fit_bits`` is a view of ``fit``.
    """
    for g in range(step.size):
        fit[0, g] = least[g] + (fit[0, g] + np.float32(0.5)) * step[g]
    reach = np.float32(0.0)
    for k in range(fit.shape[0]):
        number, bits = fit[k], fit_bits[k]
        for g in range(step.size if k > 0 else 0):
            number[g] = np.abs(number[g]) * step[g]
        for g in range(step.size):  # to the nearest bfloat16, ties to even
            odd = np.uint32(np.uint32(bits[g] >> np.uint32(16)) & np.uint32(1))
            bits[g] = np.uint32(np.uint32(bits[g] + np.uint32(np.uint32(0x7FFF) + odd)) & np.uint32(0xFFFF0000))
        for g in range(step.size):
            reach = max(reach, np.abs(number[g]))
            out[g * fit.shape[0] + k] = np.uint16(bits[g] >> np.uint32(16))
    return reach < np.float32(1e37)  # so that their sums are finite


@nb.njit("void(float32[::1], int64, float32[:, ::1], uint8[::1])", **INNER)
def _assign(x, group, level, ranks):  # type: ignore[no-untyped-def]
    """Compute the rank of each value's nearest level."""
    for g in range(level.shape[1]):
        a, b = x[g * group : min(g * group + group, x.size)], ranks[g * group : min(g * group + group, x.size)]
        first = (level[0, g] + level[1, g]) * np.float32(0.5)
        for i in range(a.size):
            b[i] = np.uint8(a[i] > first)
        for q in range(2, level.shape[0]):
            threshold = (level[q - 1, g] + level[q, g]) * np.float32(0.5)
            for i in range(a.size):
                b[i] = np.uint8(b[i] + np.uint8(a[i] > threshold))


@nb.njit("int64(float32[::1], int64, int64, uint16[::1], uint8[::1])", **NJIT)
def _encode(x, bits, group, parameters, out):  # type: ignore[no-untyped-def]
    whole = group >= x.size
    span = max(x.size, 1) if whole else BLOCK
    size = min(span, group)
    many = (span + size - 1) // size
    v, w, at = np.empty(span, np.int32), np.empty((2, span), np.int32), np.empty(many, np.int32)
    fit, level = np.empty((bits + 1, many), np.float32), np.empty((1 << bits, many), np.float32)
    code, sums = np.empty((1 << bits, many), np.int32), np.empty((3, (1 << bits) + 1, many), np.float64)
    low, high, step = np.empty(many, np.int32), np.empty(many, np.int32), np.empty(many, np.float32)
    ranks = np.empty(BLOCK, np.uint8)
    written = U(0)
    for begin in range(0, x.size, span):
        piece = x[begin : min(begin + span, x.size)]
        groups = (piece.size + size - 1) // size
        if groups < many:  # smaller arrays for the last piece
            many = groups
            fit, level = np.empty((bits + 1, many), np.float32), np.empty((1 << bits, many), np.float32)
            code, sums = np.empty((1 << bits, many), np.int32), np.empty((3, (1 << bits) + 1, many), np.float64)
            low, high, step, at = low[:many], high[:many], step[:many], at[:many]
        extremes(piece.view(np.int32), U(0), U(piece.size), U(size), low, high)
        if not _to_floats(low, high):
            return NOT_FINITE
        least, most = low.view(np.float32), high.view(np.float32)
        a = v[: piece.size]
        if not _to_integers(piece, size, least, most, step, a):
            return TOO_LARGE
        _fit(a, w, size, fit, level, code, sums, at)
        first = begin // size * (bits + 1)
        if not _send(least, step, fit, fit.view(np.uint32), parameters[first : first + groups * (bits + 1)]):
            return TOO_LARGE
        _levels(fit, level, code)
        for start in range(0, piece.size, BLOCK):  # a piece is a block, or the whole tensor
            block = piece[start : min(start + BLOCK, piece.size)]
            padded = ranks[: (block.size + 7) // 8 * 8]
            _assign(block, size, level, padded[: block.size])
            for i in range(block.size, padded.size):
                padded[i] = np.uint8(0)
            written = pack(ranks, U(padded.size), bits, out, written)
    return CODED


@nb.njit("void(uint16[::1], uint8[::1], int64, int64, float32[::1])", **NJIT)
def _decode(parameters, packed, bits, group, x):  # type: ignore[no-untyped-def]
    whole = group >= x.size
    many = 1 if whole else BLOCK // group
    fit, level = np.empty((bits + 1, many), np.float32), np.empty((1 << bits, many), np.float32)
    fit_bits, code = fit.view(np.uint32), np.empty((1 << bits, many), np.int32)
    table = np.empty(1 << bits, np.float32)
    ranks = np.empty(BLOCK, np.uint8)
    at = U(0)
    for begin in range(0, x.size, BLOCK):
        block = x[begin : min(begin + BLOCK, x.size)]
        at = unpack(packed, at, bits, ranks, U((block.size + 7) // 8 * 8))
        size = block.size if whole else group
        groups = (block.size + size - 1) // size
        first = 0 if whole else begin // group
        for k in range(bits + 1):
            for g in range(many):  # entries past the last group are never read
                mine = min((first + g) * (bits + 1) + k, parameters.size - 1)
                fit_bits[k, g] = np.uint32(np.uint32(parameters[mine]) << np.uint32(16))
        _levels(fit, level, code)
        for g in range(groups):
            for q in range(table.size):
                table[q] = level[q, g]
            part = block[g * size : min(g * size + size, block.size)]
            mine = ranks[g * size : min(g * size + size, block.size)]
            for i in range(part.size):
                part[i] = table[mine[i]]


def encoded_bytes(values: int, bits: int, group: int) -> int:
    """Bytes that ``encode`` writes for ``values`` values."""
    return coded_bytes(values, bits, group, 2 * (bits + 1))


def encode(x: npt.NDArray[np.float32], bits: int, group: int, out: npt.NDArray[np.uint8]) -> int:
    """Quantize ``x`` (float32, 1-D, contiguous) into ``out`` (uint8, 2-byte aligned, ``encoded_bytes`` long).

    ``group``: number of values that share center and scales; 0: all. ``bits``: 1..4. Returns CODED, or NOT_FINITE or
    TOO_LARGE, after which the content of ``out`` is meaningless.
    """
    parameters, codes, size = _parts(x, bits, group, out)
    return int(_encode(x, bits, size, parameters, codes))


def decode(data: npt.NDArray[np.uint8], bits: int, group: int, x: npt.NDArray[np.float32]) -> None:
    """Decode the values that ``encode`` wrote into ``x`` (float32, 1-D, contiguous)."""
    parameters, codes, size = _parts(x, bits, group, data)
    _decode(parameters, codes, bits, size, x)


def _parts(
    x: npt.NDArray[np.float32], bits: int, group: int, data: npt.NDArray[np.uint8]
) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint8], int]:
    parameters, codes, size = parts(x, data, bits, group, 2 * (bits + 1), MOST_BITS)
    return parameters.view(np.uint16), codes, size

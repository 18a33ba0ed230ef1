"""Uniform quantization with one step for a whole tensor, entropy-coded: what is frequent takes few bits.

A value x becomes q = floor((x - offset) / step + 1/2), or + u with u uniform in [0, 1) for stochastic rounding, and
|q| <= 16383. The step is the smallest found with which all fits into the bytes that the tensor may take, so that the length
of a message is known beforehand. Of normally distributed values the error at 4.5 bits is a third of that of ``uniform:4``,
which takes as many, since rare values far out do not widen the step.

Decoded it is offset + step * q. After stochastic rounding, the decoder may draw the same u and make it offset + step *
(q - u + 1/2) (subtractive dither: Schuchman 1964; Gray and Stockham 1993): the error is then uniform within half a step,
whatever x is, and half as large in the square. Where most values are near whole steps, as zeros are, it would be more: so
each class of blocks has it or not.

Symbols of q are coded by ``rans``. Blocks of 64 values have up to four classes by their size, each with probabilities of
its own (``blocks``).

Layout: float32 step and offset, the states (uint32), the key of u (two uint32), the number of classes and a bit for each in
which the decoder draws u (4 bits each), the class of each block, if there are several (2 bits), a table of symbols for each
class, then words of 16 bits as the decoder needs them.
"""

import math

import numba as nb
import numpy as np
import numpy.typing as npt
from accept_mpi.kernels.blocks import BLOCK, classify, read_classes, write_classes
from accept_mpi.kernels.groups import CODED, LARGEST_KEY, NOT_FINITE, SMALLEST_KEY, TOO_LARGE, extremes
from accept_mpi.kernels.hashing import WEYL, random_bits
from accept_mpi.kernels.options import INNER, NJIT, U
from accept_mpi.kernels.rans import (
    BLOCK_WORDS,
    MOST,
    STATES,
    SYMBOLS,
    TOTAL,
    bits_of,
    count,
    read,
    write,
    write_tables,
)

LEAST_BYTES = 128
"""Bytes that even a single value takes: header, a table of all symbols, and room to spare."""
LEAST_BITS, MOST_BITS = 1.5, 10.0
_KEY, _CLASSES = 8 + 4 * STATES, 16 + 4 * STATES  # bytes before the key, before the number of classes
_WORTHWHILE = 1024  # values of which there are classes at least
_TINY = np.float32(1e-30)  # values closer to each other than this count as equal
_HUGE = np.float32(1e37)
_RUN, _RUNS = 16, 256  # values of a sample that lie side by side, and how many times as many
_SPARE = 0.01  # bits a value that a message may leave unused; twice as many after each try beyond the first three
_TRIES = 3
_WANTED = _SPARE / 4
_NO_TABLES = -1.0  # bits a value that count as lacking where not even the tables fit
_APART = 0.1  # octaves between two steps that tell how bits depend on them


@nb.njit("float32(int64, uint32, uint32)", **INNER)
def _drawn(i, number, key):  # type: ignore[no-untyped-def]
    """A number from [0, 1) for the value ``i`` behind the one whose number is ``number``."""
    bits = random_bits(np.uint32(np.uint32(np.uint32(i) + number) * WEYL), key)
    return np.float32(np.int32(np.uint32(bits >> np.uint32(8)))) * np.float32(2.0**-24)


@nb.njit("void(float32[::1], float32, float32, uint32, uint32, boolean, int16[::1])", **INNER)
def _quantize(x, offset, inverse, number, key, stochastic, q):  # type: ignore[no-untyped-def]
    """``number``: of the first value, from which its random bits follow, with ``key``."""
    limit = np.float32(MOST)
    if not stochastic:
        for i in range(x.size):
            q[i] = np.int16(min(max(np.floor((x[i] - offset) * inverse + np.float32(0.5)), -limit), limit))
        return
    for i in range(x.size):
        q[i] = np.int16(min(max(np.floor((x[i] - offset) * inverse + _drawn(i, number, key)), -limit), limit))


@nb.njit("int64(int64)", **INNER)
def _skip(values):  # type: ignore[no-untyped-def]
    """One of how many runs belongs to a sample."""
    return max(1, values // (_RUNS * _RUN), min(4, values // (8 * _RUN)))


@nb.njit("float32[::1](float32[::1])", **INNER)
def _sample(x):  # type: ignore[no-untyped-def]
    """Up to a quarter of the values, and some thousand at most, in runs from all over."""
    skip = _skip(x.size)
    some = np.empty(min(x.size, (_RUNS + 1) * _RUN), np.float32)
    taken = 0
    for begin in range(0, x.size, skip * _RUN):
        part = x[begin : min(begin + _RUN, x.size)]
        if taken + part.size <= some.size:
            into = some[taken : taken + part.size]
            for i in range(part.size):  # Numba takes 1.5 s to compile an assignment to a slice
                into[i] = part[i]
            taken += part.size
    return some[:taken]


@nb.njit("UniTuple(float64, 2)(float32[::1])", **INNER)
def _moments(some):  # type: ignore[no-untyped-def]
    """Mean and standard deviation."""
    sums, squares = np.zeros(8, np.float64), np.zeros(8, np.float64)  # since each addition waits for the one before
    for i in range(some.size):
        sums[i & 7] += np.float64(some[i])
    mean = sums.sum() / some.size
    for i in range(some.size):
        squares[i & 7] += (np.float64(some[i]) - mean) ** 2
    return mean, np.sqrt(squares.sum() / some.size)


@nb.njit(
    "UniTuple(float64, 2)(float32[::1], uint8[::1], int64, float64, float32, float64, uint32, uint32, boolean)", **INNER
)
def _find_step(some, runs, of, bits, offset, step, number, key, stochastic):  # type: ignore[no-untyped-def]
    """The step with which a sample of the values takes about ``bits`` each, found from a first one, and the bits that a step
    twice as large saves. ``runs``: the class of each run of the sample."""
    q, symbols = np.empty(some.size, np.int16), np.empty(some.size, np.uint8)
    counts = np.empty(of * SYMBOLS, np.int64)
    slope, change, before = 1.0, 0.0, 0.0
    for _ in range(6):
        _quantize(some, offset, np.float32(1.0 / step), number, key, stochastic, q)
        count(q, runs, of, _RUN, symbols, counts)
        over = bits_of(counts, counts, 0) / some.size - bits
        if abs(change) > _APART:
            slope = min(max((before - over) / change, 0.1), 1.0)
        if abs(over) < 0.03:
            break
        change, before = min(max(over / slope, -4.0), 4.0), over
        step = max(step * 2.0**change, np.float64(_TINY) / 1000)
    return step, slope


@nb.njit(
    "int64(float32[::1], float32[::1], float64, int64, uint32, uint32, boolean, uint8[::1], uint8[::1], float64[::1])",
    **INNER,
)
def _choose(x, some, bits, size, number, key, stochastic, classes, runs, chosen):  # type: ignore[no-untyped-def]
    """Find the classes of the blocks of ``x`` and of the runs of a sample of it, and, in ``chosen``, step, offset, and the
    bits a value that a step twice as large saves. Returns the number of classes."""
    mean, spread = _moments(some)
    offset = np.float32(0.0) if abs(mean) < 4.0 * spread else np.float32(mean)  # 0 stays 0 where many values are
    first = max(spread * 2.0 ** (2.05 - bits), np.float64(_TINY) / 1000)
    of = classify(x, offset, first, classes) if x.size >= _WORTHWHILE else 1
    for n in range(runs.size):
        runs[n] = classes[n * _skip(x.size) * _RUN // BLOCK]
    side = _CLASSES + 40 * of + (classes.size // 4 if of > 1 else 0)
    room = (size - side) * 8.0 / x.size
    chosen[0], chosen[2] = _find_step(some, runs, of, room, offset, first, number, key, stochastic)
    chosen[1] = np.float64(offset)
    return of


@nb.njit("int64(float32[::1], uint8[::1], int64, float32, float32)", **INNER)
def _gain_by_dither(some, classes, of, offset, inverse):  # type: ignore[no-untyped-def]
    """The classes, as bits, in which stochastic rounding by itself, whose square error is f * (1 - f) where f is what a
    value of the sample has beyond a whole number of steps, has a larger one than the 1/12 that is left where the decoder
    subtracts u again."""
    squares, apart = np.zeros(of, np.float64), np.zeros(_RUN, np.float64)
    for n in range(classes.size):
        run = some[n * _RUN : min((n + 1) * _RUN, some.size)]
        for i in range(run.size):
            value = np.float64((run[i] - offset) * inverse)
            beyond = value - np.floor(value)
            apart[i] = beyond * (1.0 - beyond) - 1.0 / 12.0
        for i in range(run.size):
            squares[classes[n]] += apart[i]
    found = 0
    for c in range(of):
        found |= np.int64(squares[c] > 0.0) << c
    return found


@nb.njit("float64(float64[::1], float64, float64, float64, int64)", **INNER)
def _next(tried, octave, spare, slope, attempts):  # type: ignore[no-untyped-def]
    """The logarithm of the next step to try. ``tried``: those of the largest step that is too small and of the smallest that
    is not (infinite if there is none), each with the bits a value that it left. The last step, which is made one of them,
    left ``spare``; a step twice as large leaves ``slope`` more."""
    before, bits_before = tried[0], tried[1]
    side = 2 if spare >= 0.0 else 0
    tried[side], tried[side + 1] = octave, spare
    tried[2] = tried[2] if tried[0] < tried[2] else np.inf  # what seemed to fit did not
    if np.isfinite(tried[0]) and np.isfinite(tried[2]):
        share = min(max((_WANTED - tried[1]) / (tried[3] - tried[1]), 0.02), 0.98) if attempts < 6 else 0.5
        return tried[0] + (share if attempts < 12 else 1.0) * (tried[2] - tried[0])
    if side == 0 and _APART < octave - before < np.inf:
        slope = (spare - bits_before) / (octave - before)
    larger = (_WANTED - spare) / min(max(slope, 0.3), 1.2)
    return octave + (max(larger, 0.002 * 2.0**attempts) if side == 0 else larger)


@nb.njit("int64(float32[::1], float64, boolean, uint64, uint8[::1])", **NJIT)
def _encode(x, bits, stochastic, key, out):  # type: ignore[no-untyped-def]
    head, states, words = out[:8].view(np.float32), out[8:_KEY].view(np.uint32), out[: out.size // 2 * 2].view(np.uint16)
    keys = out[_KEY:_CLASSES].view(np.uint32)
    low, high = np.empty(1, np.int32), np.empty(1, np.int32)
    extremes(x.view(np.int32), U(0), U(x.size), U(x.size), low, high)
    if high[0] > LARGEST_KEY or low[0] < SMALLEST_KEY:
        return NOT_FINITE
    for k in range(2):  # back from keys to the numbers that they stand for
        ends = high if k else low
        ends[0] = ends[0] ^ np.int32(np.int32(ends[0] >> np.int32(31)) & np.int32(0x7FFFFFFF))
    least, most = low.view(np.float32)[0], high.view(np.float32)[0]
    if max(-least, most) > _HUGE:
        return TOO_LARGE
    number, high_key = np.uint32(key & np.uint64(0xFFFFFFFF)), np.uint32(key >> np.uint64(32))
    flat = most - least < _TINY
    step, offset, least_step, slope, of = np.float32(0.0), least, np.float32(0.0), 1.0, 1
    some, classes = _sample(x), np.zeros((x.size + BLOCK - 1) // BLOCK, np.uint8)
    runs, chosen = np.zeros((some.size + _RUN - 1) // _RUN, np.uint8), np.empty(3, np.float64)
    if not flat:
        of = _choose(x, some, bits, out.size, number, high_key, stochastic, classes, runs, chosen)
        offset, slope = np.float32(chosen[1]), chosen[2]
        least_step = max(most - offset, offset - least) / np.float32(MOST)
        step = max(np.float32(chosen[0]), least_step)
    q, symbols = np.empty(x.size, np.int16), np.empty(x.size, np.uint8)
    counts, frequency = np.empty(of * SYMBOLS, np.int64), np.empty(of * SYMBOLS, np.int64)
    start, coded = np.empty(of * SYMBOLS, np.int64), np.empty(words.size + BLOCK_WORDS, np.uint16)
    tables = write_classes(classes, of, out, _CLASSES)
    attempts, tried = 0, np.array([-np.inf, 0.0, np.inf, 0.0])
    while True:
        inverse = np.float32(0.0) if flat else np.float32(1.0) / step
        _quantize(x, offset, inverse, number, high_key, stochastic and not flat, q)
        count(q, classes, of, BLOCK, symbols, counts)
        end = write_tables(counts, of, out, tables, frequency, start)
        begin, spare = (end + 1) // 2, _NO_TABLES
        if end >= 0:
            spare = ((words.size - begin) * 16.0 - 32.0 - bits_of(counts, frequency, TOTAL)) / x.size
        if spare >= 0.0 and (spare < _SPARE * 2.0 ** max(attempts - _TRIES, 0) or step <= least_step):
            spare = -_SPARE  # if it turns out not to fit
            place = write(q, symbols, classes, frequency, start, coded, states)
            taken = coded.size - place
            if place >= 0 and taken <= words.size - begin:
                for i in range(taken):
                    words[begin + i] = coded[place + i]
                for i in range(begin + taken, words.size):
                    words[i] = np.uint16(0)
                if end & 1:
                    out[end] = np.uint8(0)
                if out.size & 1:
                    out[out.size - 1] = np.uint8(0)
                head[0], head[1] = step, offset
                dithered = _gain_by_dither(some, runs, of, offset, inverse) if stochastic and not flat else 0
                out[_CLASSES] |= np.uint8(dithered << 4)
                keys[0], keys[1] = number, high_key
                return CODED
        attempts += 1
        step = max(np.float32(2.0 ** _next(tried, np.log2(step), spare, slope, attempts)), least_step)


@nb.njit("void(uint8[::1], float32[::1])", **NJIT)
def _decode(data, x):  # type: ignore[no-untyped-def]
    head, states = data[:8].view(np.float32), data[8:_KEY].view(np.uint32)
    keys = data[_KEY:_CLASSES].view(np.uint32)
    step, offset, number, high_key = head[0], head[1], keys[0], keys[1]
    dithered = np.int64(data[_CLASSES]) >> 4
    classes = np.empty((x.size + BLOCK - 1) // BLOCK, np.uint8)
    of, at = read_classes(data, _CLASSES, classes)
    if not read(data, at, classes, of, states, x):
        x[:] = np.float32(0.0)
        return
    for b in range(classes.size):
        block = x[b * BLOCK : min((b + 1) * BLOCK, x.size)]
        first = np.uint32(number + np.uint32(b * BLOCK))
        if (dithered >> np.int64(classes[b])) & 1:
            for i in range(block.size):
                block[i] = offset + step * (block[i] + (np.float32(0.5) - _drawn(i, first, high_key)))
        else:
            for i in range(block.size):
                block[i] = offset + step * block[i]


def encoded_bytes(values: int, bits: float, group: int = 0) -> int:
    """Bytes that ``encode`` writes for ``values`` values."""
    return max(LEAST_BYTES, math.ceil(bits * values / 8)) if values else 0


def encode(x: npt.NDArray[np.float32], bits: float, group: int, out: npt.NDArray[np.uint8], key: int | None = None) -> int:
    """Code ``x`` (float32, 1-D, contiguous) into ``out`` (uint8, 4-byte aligned, ``encoded_bytes`` long).

    ``group`` is always 0. ``key``: 64 bits that determine stochastic rounding; None: round to nearest. Returns CODED, or
    NOT_FINITE or TOO_LARGE, after which the content of ``out`` is meaningless.
    """
    _check(x, bits, out)
    return int(_encode(x, bits, key is not None, np.uint64(key or 0), out)) if x.size else CODED


def decode(data: npt.NDArray[np.uint8], bits: float, group: int, x: npt.NDArray[np.float32]) -> None:
    """Decode the values that ``encode`` wrote into ``x`` (float32, 1-D, contiguous)."""
    _check(x, bits, data)
    if x.size:
        _decode(data, x)


def _check(x: npt.NDArray[np.float32], bits: float, data: npt.NDArray[np.uint8]) -> None:
    if not LEAST_BITS <= bits <= MOST_BITS:
        raise ValueError(f"bits must be {LEAST_BITS} to {MOST_BITS}, got {bits}")
    if x.dtype != np.float32 or x.ndim != 1 or not x.flags.c_contiguous:
        raise ValueError(f"expected a contiguous 1-D float32 array, got {x.dtype} with {x.ndim} dimensions")
    if data.size != (expected := encoded_bytes(x.size, bits)):
        raise ValueError(f"{x.size} values at {bits} bits take {expected} bytes, got {data.size}")

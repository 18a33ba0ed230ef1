"""Uniform quantization with one step for a whole tensor, entropy-coded: what is frequent takes few bits.

A value x becomes q = floor((x - offset) / step + 1/2), or + u with u uniform in [0, 1) for stochastic rounding, and
|q| <= 16383. The step is the smallest found with which all fits into the bytes that the tensor may take, so that the length
of a message is known beforehand. Of normally distributed values the error at 4.5 bits is a third of that of ``uniform:4``,
which takes as many, since rare values far out do not widen the step.

Decoded it is offset + step * q. After stochastic rounding, the decoder may draw the same u and make it offset + step *
(q - u + 1/2) (subtractive dither: Schuchman 1964; Gray and Stockham 1993): the error is then uniform within half a step,
whatever x is, and half as large in the square. Only where most values are near whole steps, as zeros are, it would be more.

q is coded in a symbol, its sign and size up to 15, or the half octave in which it lies, and the latter's plain low bits.
Symbols are coded by asymmetric numeral systems (Duda 2013, arXiv 1311.2540; rANS), with probabilities of 12 bits, and
with eight states of 32 bits that take turns, a value each, which hides the latency (Giesen 2014, arXiv 1402.3392).

Layout: float32 step and offset, the states (uint32), the key of u (two uint32; 0 if the decoder needs none), the first
and the last symbol that occurs (uint8 each) and a byte for each of these and those between, then words of 16 bits as the
decoder needs them. A byte is a probability's logarithm in eighths of an octave, 0 for none.
"""

import math

import numba as nb
import numpy as np
import numpy.typing as npt
from accept_mpi.kernels.groups import CODED, LARGEST_KEY, NOT_FINITE, SMALLEST_KEY, TOO_LARGE, extremes
from accept_mpi.kernels.hashing import WEYL, random_bits
from accept_mpi.kernels.options import INNER, NJIT

LEAST_BYTES = 128
"""Bytes that even a single value takes: header, a table of all symbols, and room to spare."""
LEAST_BITS, MOST_BITS = 1.5, 10.0
_STATES = 8  # a power of two
# Bytes before the key, before the first symbol and the last, before the table.
_KEY, _ENDS, _HEADER = 8 + 4 * _STATES, 16 + 4 * _STATES, 18 + 4 * _STATES
_DIRECT = 16  # sizes with a symbol of their own
_SIDE = 36  # symbols of one sign, with that of zero
_SYMBOLS = 2 * _SIDE - 1
_FIRST, _LAST = _SIDE - _DIRECT, _SIDE + _DIRECT - 2  # symbols without plain bits
_MOST = 16383
_TOTAL = 4096  # sum of the frequencies
_LOW = 1 << 16  # least value of a state
_TINY = np.float32(1e-30)  # values closer to each other than this count as equal
_HUGE = np.float32(1e37)
_RUN, _RUNS = 16, 256  # values of a sample that lie side by side, and how many times as many
_SPARE = 0.01  # bits a value that a message may leave unused, if an even smaller step can be tried
_TRIES = 3  # of smaller steps
_EIGHTHS = np.array([256, 279, 304, 332, 362, 395, 431, 470], np.int64)  # 256 times powers of 2 ** (1 / 8)


@nb.njit("int64(int64)", **INNER)
def _far_symbol(q):  # type: ignore[no-untyped-def]
    """Symbol of a quantized value beyond those with symbols of their own: that of the half octave in which it lies."""
    size = abs(q)
    octave = 4
    while size >> (octave + 1):
        octave += 1
    place = _DIRECT + 2 * (octave - 4) + ((size >> (octave - 1)) & 1)
    return _SIDE - 1 + (place if q > 0 else -place)


@nb.njit("int64(int64)", **INNER)
def _plain_bits(symbol):  # type: ignore[no-untyped-def]
    """Number of plain bits that follow a symbol."""
    place = abs(symbol - (_SIDE - 1))
    return 0 if place < _DIRECT else 3 + (place - _DIRECT) // 2


@nb.njit("boolean(uint8[::1], int64, int64[::1], int64[::1])", **INNER)
def _frequencies(table, first, frequency, start):  # type: ignore[no-untyped-def]
    """Frequencies of all symbols, and their running sums, from the table of those from ``first`` on. Integers only, since
    both ends must come to the same. False if the table is empty."""
    total, best = 0, first
    for s in range(_SYMBOLS):
        frequency[s] = 0
    for n in range(table.size):
        if table[n]:
            log = min(np.int64(table[n]), 127) - 1
            frequency[first + n] = _EIGHTHS[log & 7] << (log >> 3)
            total += frequency[first + n]
    if total == 0:
        return False
    rest = _TOTAL
    for s in range(_SYMBOLS):
        if frequency[s]:
            frequency[s] = max(1, frequency[s] * _TOTAL // total)
            rest -= frequency[s]
            if frequency[s] > frequency[best]:
                best = s
    frequency[best] += rest
    at = 0
    for s in range(_SYMBOLS):
        start[s] = at
        at += frequency[s]
    return True


@nb.njit("float32(int64, uint32, uint32)", **INNER)
def _drawn(i, number, key):  # type: ignore[no-untyped-def]
    """A number from [0, 1) for the value ``i`` behind the one whose number is ``number``."""
    bits = random_bits(np.uint32(np.uint32(np.uint32(i) + number) * WEYL), key)
    return np.float32(np.int32(np.uint32(bits >> np.uint32(8)))) * np.float32(2.0**-24)


@nb.njit("void(float32[::1], float32, float32, uint32, uint32, boolean, int16[::1])", **INNER)
def _quantize(x, offset, inverse, number, key, stochastic, q):  # type: ignore[no-untyped-def]
    """``number``: of the first value, from which its random bits follow, with ``key``."""
    limit = np.float32(_MOST)
    if not stochastic:
        for i in range(x.size):
            q[i] = np.int16(min(max(np.floor((x[i] - offset) * inverse + np.float32(0.5)), -limit), limit))
        return
    for i in range(x.size):
        q[i] = np.int16(min(max(np.floor((x[i] - offset) * inverse + _drawn(i, number, key)), -limit), limit))


@nb.njit("void(int16[::1], uint8[::1], int64[::1])", **INNER)
def _count(q, symbols, counts):  # type: ignore[no-untyped-def]
    """Find the values' symbols, and count them."""
    apart = np.zeros((4, 256), np.int32)  # since adding one to the same place again waits for the last time
    for i in range(q.size):
        value = np.int64(q[i])
        s = _SIDE - 1 + value if -_DIRECT < value < _DIRECT else _far_symbol(value)
        symbols[i] = np.uint8(s)
        apart[i & 3, s] += 1
    for s in range(_SYMBOLS):
        counts[s] = np.int64(apart[0, s]) + np.int64(apart[1, s]) + np.int64(apart[2, s]) + np.int64(apart[3, s])


@nb.njit("float64(int64[::1], int64[::1], int64)", **INNER)
def _bits(counts, frequency, total):  # type: ignore[no-untyped-def]
    """Bits that so many of each symbol take, plain bits included, where symbols have these frequencies of ``total``."""
    bits = 0.0
    for s in range(_SYMBOLS):
        if counts[s]:
            bits += counts[s] * (np.log2(total / frequency[s]) + _plain_bits(s))
    return bits


@nb.njit("int64(int64[::1], int64, uint8[::1])", **INNER)
def _tabulate(counts, values, out):  # type: ignore[no-untyped-def]
    """Write the first symbol, the last one and the table of those between into a message. Returns the table's length."""
    first, last = 0, _SYMBOLS - 1
    while counts[first] == 0:
        first += 1
    while counts[last] == 0:
        last -= 1
    out[_ENDS], out[_ENDS + 1] = np.uint8(first), np.uint8(last)
    for s in range(first, last + 1):
        share = max(1.0, counts[s] * 32768.0 / values)
        out[_HEADER + s - first] = np.uint8(1 + np.round(8 * np.log2(share))) if counts[s] else np.uint8(0)
    return last - first + 1


@nb.njit("float32[::1](float32[::1])", **INNER)
def _sample(x):  # type: ignore[no-untyped-def]
    """Up to a quarter of the values, and some thousand at most, in runs from all over."""
    skip = max(1, x.size // (_RUNS * _RUN), min(4, x.size // (8 * _RUN)))
    some = np.empty(min(x.size, (_RUNS + 1) * _RUN), np.float32)
    taken = 0
    for begin in range(0, x.size, skip * _RUN):
        part = x[begin : min(begin + _RUN, x.size)]
        if taken + part.size <= some.size:
            for i in range(part.size):  # Numba takes 1.5 s to compile an assignment to a slice
                some[taken + i] = part[i]
            taken += part.size
    return some[:taken]


@nb.njit("void(float32[::1], float64, uint32, uint32, boolean, float32[::1])", **INNER)
def _choose(some, bits, number, key, stochastic, chosen):  # type: ignore[no-untyped-def]
    """Step and offset with which a sample of the values takes about ``bits`` each, and the bits that a step twice as large
    saves."""
    taken = some.size
    mean = square = 0.0
    for i in range(taken):
        mean += np.float64(some[i])
    mean /= taken
    for i in range(taken):
        square += (np.float64(some[i]) - mean) ** 2
    spread = np.sqrt(square / taken)
    offset = np.float32(0.0) if abs(mean) < 4.0 * spread else np.float32(mean)  # 0 stays 0 where many values are
    q, symbols, counts = np.empty(taken, np.int16), np.empty(taken, np.uint8), np.empty(_SYMBOLS, np.int64)
    step = max(spread * 2.0 ** (2.05 - bits), np.float64(_TINY) / 1000)
    slope, change, before = 1.0, 0.0, 0.0
    for _ in range(6):
        _quantize(some, offset, np.float32(1.0 / step), number, key, stochastic, q)
        _count(q, symbols, counts)
        over = _bits(counts, counts, taken) / taken - bits
        if change != 0.0:
            slope = min(max((before - over) / change, 0.1), 1.0)
        if abs(over) < 0.03:
            break
        change, before = min(max(over / slope, -4.0), 4.0), over
        step = max(step * 2.0**change, np.float64(_TINY) / 1000)
    chosen[0], chosen[1], chosen[2] = np.float32(step), offset, np.float32(slope)


@nb.njit("boolean(float32[::1], float32, float32)", **INNER)
def _gains_by_dither(some, offset, inverse):  # type: ignore[no-untyped-def]
    """True if stochastic rounding by itself, whose square error is f * (1 - f) where f is what a value of the sample has
    beyond a whole number of steps, has a larger one than the 1/12 that is left where the decoder subtracts u again."""
    square = 0.0
    for i in range(some.size):
        value = np.float64((some[i] - offset) * inverse)
        beyond = value - np.floor(value)
        square += beyond * (1.0 - beyond)
    return square * 12.0 > some.size


@nb.njit("UniTuple(int64, 2)(int64, int64, uint16[::1], int64)", **INNER)
def _spill(state, limit, words, at):  # type: ignore[no-untyped-def]
    """Where a state has reached its limit, its low bits become the word before ``at``. Returns the state, and the place of
    the last word that is written. There is no branch: which states are full is not to be foreseen."""
    words[at - 1] = np.uint16(state & 0xFFFF)
    full = np.int64(state >= limit)
    return state >> (full << 4), at - full


@nb.njit("UniTuple(int64, 2)(int64, uint16[::1], int64)", **INNER)
def _refill(state, words, at):  # type: ignore[no-untyped-def]
    """Where a state has too few bits left, the word ``at`` fills it (the last one, if a message is damaged). Returns the
    state, and the place of the next word."""
    few = np.int64(state < _LOW)
    return (state << (few << 4)) | (np.int64(words[min(at, words.size - 1)]) & -few), at + few


@nb.njit("int64(int16[::1], uint8[::1], int64[::1], int64[::1], uint16[::1], uint32[::1])", **INNER)
def _write(q, symbols, frequency, start, words, states):  # type: ignore[no-untyped-def]
    """Code values from the last to the first, into ``words`` from its end on. Returns the place of the first word, or -1 if
    there is no room."""
    inverse = np.empty(_SYMBOLS, np.float64)
    for s in range(_SYMBOLS):
        inverse[s] = 1.0 / max(frequency[s], 1)
    now = np.full(_STATES, _LOW, np.int64)
    at = words.size
    for i in range(q.size - 1, -1, -1):
        if at < 2:
            return -1
        state = now[i & (_STATES - 1)]
        s = np.int64(symbols[i])
        if not _FIRST <= s <= _LAST:
            plain = _plain_bits(s)
            state, at = _spill(state, _LOW << (16 - plain), words, at)
            state = (state << plain) | (abs(np.int64(q[i])) & ((1 << plain) - 1))
        f = frequency[s]
        state, at = _spill(state, f << 20, words, at)
        quotient = np.int64((state + 0.5) * inverse[s])
        now[i & (_STATES - 1)] = state + quotient * (_TOTAL - f) + start[s]
    for n in range(_STATES):
        states[n] = np.uint32(now[n])
    return at


@nb.njit("int64(float32[::1], float64, boolean, uint64, uint8[::1])", **NJIT)
def _encode(x, bits, stochastic, key, out):  # type: ignore[no-untyped-def]
    head, states, words = out[:8].view(np.float32), out[8:_KEY].view(np.uint32), out[: out.size // 2 * 2].view(np.uint16)
    keys = out[_KEY:_ENDS].view(np.uint32)
    low, high = np.empty(1, np.int32), np.empty(1, np.int32)
    extremes(x.view(np.int32), x.size, low, high)
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
    step, offset, least_step, slope = np.float32(0.0), least, np.float32(0.0), 1.0
    some = _sample(x)
    if not flat:
        chosen = np.empty(3, np.float32)
        _choose(some, min(bits, (out.size - _HEADER - 40) * 8.0 / x.size), number, high_key, stochastic, chosen)
        offset, slope = chosen[1], np.float64(chosen[2])
        least_step = max(most - offset, offset - least) / np.float32(_MOST)
        step = max(chosen[0], least_step)
    q, symbols, counts = np.empty(x.size, np.int16), np.empty(x.size, np.uint8), np.empty(_SYMBOLS, np.int64)
    frequency, start = np.empty(_SYMBOLS, np.int64), np.empty(_SYMBOLS, np.int64)
    attempt = 0
    while True:
        inverse = np.float32(0.0) if flat else np.float32(1.0) / step
        _quantize(x, offset, inverse, number, high_key, stochastic and not flat, q)
        _count(q, symbols, counts)
        length = _tabulate(counts, x.size, out)
        _frequencies(out[_HEADER : _HEADER + length], np.int64(out[_ENDS]), frequency, start)
        begin = (_HEADER + length + 1) // 2
        spare = ((words.size - begin) * 16.0 - 32.0 - _bits(counts, frequency, _TOTAL)) / x.size
        if spare >= 0.0 and (spare < _SPARE or attempt >= _TRIES or step <= least_step):
            place = _write(q, symbols, frequency, start, words[begin:], states)
            if place >= 0:
                count = words.size - begin - place
                for i in range(count):
                    words[begin + i] = words[begin + place + i]
                for i in range(begin + count, words.size):
                    words[i] = np.uint16(0)
                if length & 1:
                    out[_HEADER + length] = np.uint8(0)
                if out.size & 1:
                    out[out.size - 1] = np.uint8(0)
                head[0], head[1] = step, offset
                dithered = stochastic and not flat and _gains_by_dither(some, offset, inverse)
                keys[0] = number if dithered else np.uint32(0)
                keys[1] = high_key if dithered else np.uint32(0)
                return CODED
        attempt += 1
        at_least = -2.0 if attempt <= _TRIES else 0.002 if attempt < 20 else 0.5
        larger = min(max((0.25 * _SPARE - spare) / slope, at_least), 8.0)  # octaves
        step = max(np.float32(step * 2.0**larger), least_step)


@nb.njit("void(uint8[::1], float32[::1])", **NJIT)
def _decode(data, x):  # type: ignore[no-untyped-def]
    head, states, words = data[:8].view(np.float32), data[8:_KEY].view(np.uint32), data[: data.size // 2 * 2].view(np.uint16)
    keys = data[_KEY:_ENDS].view(np.uint32)
    step, offset, number, high_key = head[0], head[1], keys[0], keys[1]
    dithered = number != np.uint32(0) or high_key != np.uint32(0)
    first = min(np.int64(data[_ENDS]), _SYMBOLS - 1)
    last = max(first, min(np.int64(data[_ENDS + 1]), _SYMBOLS - 1))
    frequency, start = np.empty(_SYMBOLS, np.int64), np.empty(_SYMBOLS, np.int64)
    if not _frequencies(data[_HEADER : _HEADER + last - first + 1], first, frequency, start):
        x[:] = np.float32(0.0)
        return
    slots = np.empty(_TOTAL, np.uint32)  # the symbol, its frequency, and how far into it a state's low bits reach
    for s in range(_SYMBOLS):
        for n in range(frequency[s]):
            slots[start[s] + n] = np.uint32((n << 20) | ((frequency[s] - 1) << 8) | s)
    at = (_HEADER + last - first + 2) // 2
    now = np.empty(_STATES, np.int64)
    for n in range(_STATES):
        now[n] = np.int64(states[n])
    for i in range(x.size):
        state = now[i & (_STATES - 1)]
        slot = np.int64(slots[state & (_TOTAL - 1)])
        state = (((slot >> 8) & 0xFFF) + 1) * (state >> 12) + (slot >> 20)
        state, at = _refill(state, words, at)
        q = (slot & 0xFF) - (_SIDE - 1)
        size = abs(q)
        if size >= _DIRECT:
            plain = _plain_bits(slot & 0xFF)
            size = (2 + (size & 1)) << plain | (state & ((1 << plain) - 1))
            state >>= plain
            state, at = _refill(state, words, at)
            q = size if q > 0 else -size
        now[i & (_STATES - 1)] = state
        x[i] = np.float32(q)
    if dithered:
        for i in range(x.size):
            x[i] = offset + step * (x[i] + (np.float32(0.5) - _drawn(i, number, high_key)))
    else:
        for i in range(x.size):
            x[i] = offset + step * x[i]


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

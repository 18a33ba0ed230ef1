"""Symbols of quantized values, their tables, and the entropy code: asymmetric numeral systems (Duda 2013, arXiv 1311.2540;
rANS), with probabilities of 12 bits, and with eight states of 32 bits that take turns, a value each, which hides the latency
(Giesen 2014, arXiv 1402.3392).

A quantized value becomes a symbol, its sign and size up to 15, or the half octave in which it lies, and the latter's plain
low bits. A table of symbols is the first and the last symbol that occurs (uint8 each) and a byte for each of these and those
between: a probability's logarithm in eighths of an octave, 0 for none.
"""

import numba as nb
import numpy as np
from accept_mpi.kernels.blocks import BLOCK
from accept_mpi.kernels.options import INNER

STATES = 8
"""A power of two."""
MOST = 16383
"""Size of the largest quantized value."""
SYMBOLS = 71
TOTAL = 4096
"""Sum of the frequencies."""
_SIDE = (SYMBOLS + 1) // 2  # symbols of one sign, with that of zero
_DIRECT = 16  # sizes with a symbol of their own
_FIRST, _LAST = _SIDE - _DIRECT, _SIDE + _DIRECT - 2  # symbols without plain bits
_LOW = 1 << 16  # least value of a state
BLOCK_WORDS = 2 * BLOCK
"""Most words that a block takes."""
_ONE, _FOUR, _TURNS = np.uint64(1), np.uint64(4), np.uint64(STATES - 1)
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


@nb.njit("int64(uint8[::1], int64, int64, int64[::1], int64[::1])", **INNER)
def frequencies_of(data, at, c, frequencies, starts):  # type: ignore[no-untyped-def]
    """Frequencies of all symbols in class ``c``, and their running sums, from the table at ``at`` in a message. Integers
    only, since both ends must come to the same. Returns where the table ends, -1 if it is empty or damaged."""
    frequency, start = frequencies[c * SYMBOLS : (c + 1) * SYMBOLS], starts[c * SYMBOLS : (c + 1) * SYMBOLS]
    if at + 2 > data.size:
        return -1
    first, last = np.int64(data[at]), np.int64(data[at + 1])
    end = at + 3 + last - first
    if not first <= last < SYMBOLS or end > data.size:
        return -1
    total, best = 0, first
    for s in range(SYMBOLS):
        frequency[s] = 0
    for s in range(first, last + 1):
        log = min(np.int64(data[at + 2 + s - first]), 127) - 1
        if log >= 0:
            frequency[s] = _EIGHTHS[log & 7] << (log >> 3)
            total += frequency[s]
    if total == 0:
        return -1
    rest = TOTAL
    for s in range(SYMBOLS):
        if frequency[s]:
            frequency[s] = max(1, frequency[s] * TOTAL // total)
            rest -= frequency[s]
            if frequency[s] > frequency[best]:
                best = s
    frequency[best] += rest
    sum_before = 0
    for s in range(SYMBOLS):
        start[s] = sum_before
        sum_before += frequency[s]
    return end


@nb.njit("void(int16[::1], uint8[::1], int64, int64, uint8[::1], int64[::1])", **INNER)
def count(q, classes, of, run, symbols, counts):  # type: ignore[no-untyped-def]
    """Find the values' symbols, and count them by class; there are ``of`` classes, and ``run`` values have the same."""
    middle, far = np.int16(_SIDE - 1), np.int16(_DIRECT)
    for i in range(q.size):
        symbols[i] = np.uint8(min(max(q[i], -far), far) + middle)
    apart = np.zeros((of, 4, 256), np.int32)  # since adding one to the same place again waits for the last time
    for b in range(classes.size):
        c, begin = np.int64(classes[b]), b * run
        block = symbols[begin : min(begin + run, q.size)]
        least, most = np.uint8(255), np.uint8(0)
        for i in range(block.size):
            least, most = min(least, block[i]), max(most, block[i])
        if least < _FIRST or most > _LAST:
            for i in range(block.size):
                if not _FIRST <= block[i] <= _LAST:
                    block[i] = np.uint8(_far_symbol(np.int64(q[begin + i])))
        one, two, three, four = apart[c, 0], apart[c, 1], apart[c, 2], apart[c, 3]
        for i in range(block.size // 4):
            one[block[4 * i]] += 1
            two[block[4 * i + 1]] += 1
            three[block[4 * i + 2]] += 1
            four[block[4 * i + 3]] += 1
        for i in range(block.size // 4 * 4, block.size):
            one[block[i]] += 1
    for c in range(of):
        for s in range(SYMBOLS):
            pair = np.int64(apart[c, 0, s]) + np.int64(apart[c, 1, s])
            counts[c * SYMBOLS + s] = pair + np.int64(apart[c, 2, s]) + np.int64(apart[c, 3, s])


@nb.njit("float64(int64[::1], int64[::1], int64)", **INNER)
def bits_of(counts, frequencies, total):  # type: ignore[no-untyped-def]
    """Bits that so many of each symbol take, plain bits included, where symbols have these frequencies, by class, of
    ``total``; 0: of the class's sum."""
    bits = 0.0
    for begin in range(0, counts.size, SYMBOLS):
        whole = total
        if whole == 0:
            for s in range(SYMBOLS):
                whole += frequencies[begin + s]
        for s in range(SYMBOLS):
            if counts[begin + s]:
                bits += counts[begin + s] * (np.log2(whole / frequencies[begin + s]) + _plain_bits(s))
    return bits


@nb.njit("int64(int64[::1], uint8[::1], int64)", **INNER)
def tabulate(counts, out, at):  # type: ignore[no-untyped-def]
    """Write a class's first symbol, the last one and the table of those between into a message. Returns where it ends, -1 if
    there is no room."""
    first, last, values = 0, SYMBOLS - 1, 0
    while counts[first] == 0:
        first += 1
    while counts[last] == 0:
        last -= 1
    if at + 3 + last - first > out.size:
        return -1
    for s in range(first, last + 1):
        values += counts[s]
    out[at], out[at + 1] = np.uint8(first), np.uint8(last)
    for s in range(first, last + 1):
        share = max(1.0, counts[s] * 32768.0 / values)
        out[at + 2 + s - first] = np.uint8(1 + np.round(8 * np.log2(share))) if counts[s] else np.uint8(0)
    return at + 3 + last - first


@nb.njit("int64(int64[::1], int64, uint8[::1], int64, int64[::1], int64[::1])", **INNER)
def write_tables(counts, of, out, at, frequencies, starts):  # type: ignore[no-untyped-def]
    """Write the tables of all classes into a message, and find the frequencies that they stand for. Returns where they end,
    -1 if there is no room: rare values of all sizes take few bits, but a byte each in a table."""
    for c in range(of):
        if tabulate(counts[c * SYMBOLS : (c + 1) * SYMBOLS], out, at) < 0:
            return -1
        at = frequencies_of(out, at, c, frequencies, starts)
    return at


# Below, indices are unsigned, or into a slice: else Numba asks each time whether they count from the end, and a third of the
# time goes there.


@nb.njit("UniTuple(uint64, 2)(uint64, uint64, uint16[::1], uint64)", **INNER)
def _spill(state, limit, words, at):  # type: ignore[no-untyped-def]
    """Where a state has reached its limit, its low bits become the word before ``at``. Returns the state, and the place of
    the last word that is written. There is no branch: which states are full is not to be foreseen."""
    words[at - _ONE] = np.uint16(state)
    full = np.uint64(state >= limit)
    return state >> (full << _FOUR), at - full


@nb.njit("UniTuple(uint64, 2)(uint64, uint16[::1], uint64)", **INNER)
def _refill(state, words, at):  # type: ignore[no-untyped-def]
    """Where a state has too few bits left, the word ``at`` fills it (the last one, if a message is damaged). Returns the
    state, and the place of the next word."""
    few = np.uint64(state < np.uint64(_LOW))
    word = np.uint64(words[min(at, np.uint64(words.size - 1))])
    return (state << (few << _FOUR)) | (word & (np.uint64(0) - few)), at + few


@nb.njit("int64(int16[::1], uint8[::1], uint8[::1], int64[::1], int64[::1], uint16[::1], uint32[::1])", **INNER)
def write(q, symbols, classes, frequency, start, words, states):  # type: ignore[no-untyped-def]
    """Code values from the last to the first, into ``words`` from its end on. Returns the place of the first word, or -1 if
    there may be no room for another block, which takes ``BLOCK_WORDS`` at most."""
    inverse = np.empty(frequency.size, np.float64)
    for s in range(frequency.size):
        inverse[s] = 1.0 / max(frequency[s], 1)
    now = np.full(STATES, _LOW, np.uint64)
    at = np.uint64(words.size)
    for b in range(classes.size - 1, -1, -1):
        if at <= np.uint64(BLOCK_WORDS):
            return -1
        begin, first = b * BLOCK, np.int64(classes[b]) * SYMBOLS
        own, block = q[begin : min(begin + BLOCK, q.size)], symbols[begin : min(begin + BLOCK, q.size)]
        frequencies, starts = frequency[first : first + SYMBOLS], start[first : first + SYMBOLS]
        inverses = inverse[first : first + SYMBOLS]
        for n in range(block.size):
            i = np.uint64(block.size - 1 - n)
            state, s = now[i & _TURNS], block[i]
            if not _FIRST <= s <= _LAST:
                plain = np.uint64(_plain_bits(np.int64(s)))
                state, at = _spill(state, np.uint64(_LOW << 16) >> plain, words, at)
                state = (state << plain) | (np.uint64(abs(np.int64(own[i]))) & ((_ONE << plain) - _ONE))
            f = np.uint64(frequencies[s])
            state, at = _spill(state, f << np.uint64(20), words, at)
            quotient = np.uint64(np.int64((np.int64(state) + 0.5) * inverses[s]))
            now[i & _TURNS] = state + quotient * (np.uint64(TOTAL) - f) + np.uint64(starts[s])
    for n in range(STATES):
        states[n] = np.uint32(now[n])
    return np.int64(at)


@nb.njit("boolean(uint8[::1], int64, uint8[::1], int64, uint32[::1], float32[::1])", **INNER)
def read(data, at, classes, of, states, x):  # type: ignore[no-untyped-def]
    """Decode the quantized values of a message with these states, whose blocks have these of so many classes; tables begin
    at ``at``. False if it is damaged."""
    words = data[: data.size // 2 * 2].view(np.uint16)
    frequency, start = np.empty(of * SYMBOLS, np.int64), np.empty(of * SYMBOLS, np.int64)
    slots = np.empty(of * TOTAL, np.uint32)  # the symbol, its frequency, and how far into it a state's low bits reach
    for c in range(of):
        at = frequencies_of(data, at, c, frequency, start)
        if at < 0:
            return False
        for s in range(SYMBOLS):
            f, begin = frequency[c * SYMBOLS + s], c * TOTAL + start[c * SYMBOLS + s]
            own = slots[begin : begin + f]
            for n in range(own.size):
                own[n] = np.uint32((n << 20) | ((f - 1) << 8) | s)
    place = np.uint64((at + 1) // 2)
    now = np.empty(STATES, np.uint64)
    for n in range(STATES):
        now[n] = np.uint64(states[n])
    for b in range(classes.size):
        of_class = np.int64(classes[b]) * TOTAL
        table, block = slots[of_class : of_class + TOTAL], x[b * BLOCK : min((b + 1) * BLOCK, x.size)]
        for n in range(block.size):
            i = np.uint64(n)
            state = now[i & _TURNS]
            slot = np.uint64(table[state & np.uint64(TOTAL - 1)])
            f = ((slot >> np.uint64(8)) & np.uint64(0xFFF)) + _ONE
            state, place = _refill(f * (state >> np.uint64(12)) + (slot >> np.uint64(20)), words, place)
            q = np.int64(slot & np.uint64(0xFF)) - (_SIDE - 1)
            size = abs(q)
            if size >= _DIRECT:
                plain = np.uint64(_plain_bits(q + _SIDE - 1))
                size = np.int64((np.uint64(2 + (size & 1)) << plain) | (state & ((_ONE << plain) - _ONE)))
                state, place = _refill(state >> plain, words, place)
                q = size if q > 0 else -size
            now[i & _TURNS] = state
            block[i] = np.float32(q)
    return True

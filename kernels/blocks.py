"""Classes of blocks: 64 values that lie side by side are coded with the probabilities of blocks that are about as large.

In a language model's gradients, tokens differ in size by several octaves. The classes are those that make a message
shortest, if values of a class take bits as the logarithm of their mean size: found by dynamic programming over sizes in
half octaves.
"""

import numba as nb
import numpy as np
from accept_mpi.kernels.options import INNER

BLOCK = 64
"""Values that have one class."""
MOST_CLASSES = 4
_PLACES = 32  # half octaves below the largest block
_CLASS_BITS = 2  # that each block's class takes
_TABLE_BITS = 200.0  # that a class's table takes, about


@nb.njit("float64(float32[::1], float32, float64[::1])", **INNER)
def _sizes(x, offset, sizes):  # type: ignore[no-untyped-def]
    """Mean distance from ``offset`` of every other value of each block. Returns the largest."""
    most = 0.0
    for b in range(sizes.size):
        block = x[b * BLOCK : min((b + 1) * BLOCK, x.size)]
        one = two = three = four = np.float32(0.0)  # apart, since each addition waits for the one before
        for i in range(block.size // 8):
            one += abs(block[8 * i] - offset)
            two += abs(block[8 * i + 2] - offset)
            three += abs(block[8 * i + 4] - offset)
            four += abs(block[8 * i + 6] - offset)
        added = block.size // 8 * 4
        if added == 0:  # the last one
            one, added = abs(block[0] - offset), 1
        sizes[b] = np.float64((one + two) + (three + four)) / added
        most = max(most, sizes[b])
    return most


@nb.njit("int64(int64[::1], float64[::1], int64, float64, int64[::1])", **INNER)
def _divide(counts, sums, places, least, begins):  # type: ignore[no-untyped-def]
    """Divide places, each with so many blocks and the sum of their sizes, into runs, so that bits are fewest. ``least``: a
    size below which none matters. Writes the first place of each run into ``begins``; returns the number of runs."""
    best = np.full((MOST_CLASSES + 1, places + 1), np.inf)
    last = np.zeros((MOST_CLASSES + 1, places + 1), np.int64)
    best[0, 0] = 0.0
    for i in range(places):
        blocks, total = 0, 0.0
        for j in range(i + 1, places + 1):
            blocks += counts[j - 1]
            total += sums[j - 1]
            bits = blocks * BLOCK * np.log2(total / blocks + least)
            for k in range(MOST_CLASSES):
                if best[k, i] + bits < best[k + 1, j]:
                    best[k + 1, j] = best[k, i] + bits
                    last[k + 1, j] = i
    classes, fewest = 1, best[1, places]
    blocks = 0
    for place in range(places):
        blocks += counts[place]
    for k in range(2, MOST_CLASSES + 1):
        bits = best[k, places] + _CLASS_BITS * blocks + (k - 1) * _TABLE_BITS
        if bits < fewest:
            classes, fewest = k, bits
    at = places
    for k in range(classes, 0, -1):
        at = last[k, at]
        begins[k - 1] = at
    return classes


@nb.njit("int64(float32[::1], float32, float64, uint8[::1])", **INNER)
def classify(x, offset, step, classes):  # type: ignore[no-untyped-def]
    """Find the class of each block of ``x``, which will be coded as ``offset`` + whole multiples of about ``step``. Returns
    the number of classes."""
    sizes = np.empty(classes.size, np.float64)
    most = _sizes(x, offset, sizes)
    counts, sums = np.zeros(_PLACES, np.int64), np.zeros(_PLACES, np.float64)
    least = most * 2.0 ** (-_PLACES / 2)
    for b in range(classes.size):
        place = _PLACES - 1
        if sizes[b] > least:
            place = min(np.int64(2.0 * np.log2(most / sizes[b])), place)
        classes[b] = np.uint8(place)
        counts[place] += 1
        sums[place] += sizes[b]
    dense, places = np.zeros(_PLACES, np.int64), 0  # without the empty ones
    for place in range(_PLACES):
        dense[place] = places
        if counts[place]:
            counts[places], sums[places] = counts[place], sums[place]
            places += 1
    begins = np.zeros(MOST_CLASSES, np.int64)
    found = _divide(counts, sums, places, step / 4.0, begins)
    for b in range(classes.size):
        place, c = dense[classes[b]], 0
        while c + 1 < found and place >= begins[c + 1]:
            c += 1
        classes[b] = np.uint8(c)
    return found


@nb.njit("int64(uint8[::1], int64, uint8[::1], int64)", **INNER)
def write_classes(classes, of, out, at):  # type: ignore[no-untyped-def]
    """Write the number of classes and the blocks' classes into a message. Returns where they end."""
    out[at] = np.uint8(of)
    at += 1
    if of == 1:
        return at
    for b in range(0, classes.size, 4):
        four = 0
        for n in range(min(4, classes.size - b)):
            four |= np.int64(classes[b + n]) << (2 * n)
        out[at] = np.uint8(four)
        at += 1
    return at


@nb.njit("UniTuple(int64, 2)(uint8[::1], int64, uint8[::1])", **INNER)
def read_classes(data, at, classes):  # type: ignore[no-untyped-def]
    """Read the number of classes (four bits) and the blocks' classes from a message. Returns it, and where they end."""
    of = min(max(np.int64(data[at]) & 15, 1), MOST_CLASSES)
    at += 1
    for b in range(classes.size):
        four = np.int64(data[min(at + b // 4, data.size - 1)]) if of > 1 else 0
        classes[b] = np.uint8(min((four >> (2 * (b & 3))) & 3, of - 1))
    return of, at + (classes.size + 3) // 4 if of > 1 else at

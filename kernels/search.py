"""Search for the cuts of a model: which devices hold which layers, so that nothing takes longer than a cap.

Stages are placed from the last to the first, so that the number of stages behind a stage, and with it what the stage must
hold in flight, is known. A point is "layer ``i`` and all behind it are placed, and boundary ``i`` has codec ``c``". Between
points that differ in nothing else, one that has placed more layers and crosses with fewer values is at least as good.

Arguments that all kernels share (N devices, L layers, C codecs; seconds and bytes per micro-batch):

* ``prefix`` (N, L+1): seconds of the layers before each;
* ``extra`` (N, L+1, L+1): seconds of layers i..j-1 together beyond their sum; (N, 1, 1) where none are known;
* ``values`` and ``other`` (L+1): values that codecs code, and further bytes, that cross in front of a layer, each way
  (``other`` infinite: no stage begins there);
* ``rate`` (N, N): bytes/s from one device to another; ``nic`` (N): bytes/s of a device's own link, each way;
* ``value_bytes`` (C): bytes per value;
* ``messages`` (N, L+1, C): seconds of a device for a boundary's two messages in front of each layer; they grow with
  ``values`` and ``other``;
* ``state`` and ``held`` (L+1): bytes before each layer of weights and what goes with them, and of activations;
* ``capacity`` (N): bytes; ``kept``, ``alive`` and ``copies`` (N): micro-batches in flight, those of them that hold their
  activations, and versions of the weights, by the number of stages behind;
* ``fixed`` and ``least`` (L+1): bytes before each layer that do not depend on that, and bytes that must fit by themselves.

A stage also holds what it received of each micro-batch in flight, 4 bytes per value.

Letters: ``a`` is the device that is to hold a stage of layers ``j``..``i - 1``, ``first`` the one that holds the stage
behind it (-1: there is none, the model ends), and ``behind`` the number of stages that are placed.
"""

import numba as nb
import numpy as np
from accept_mpi.kernels.options import INNER, NJIT

SHARED = (
    "float64[:,::1], float64[:,:,::1], float64[::1], float64[::1], float64[:,::1], float64[::1], float64[::1], "
    "float64[:,:,::1], float64[::1], float64[::1], float64[::1], float64[::1], float64[::1], float64[::1], float64[::1], "
    "float64[::1]"
)


@nb.njit("float64(float64[:,::1], float64[:,:,::1], int64, int64, int64)", **INNER)
def _computing(prefix, extra, a, j, i):  # type: ignore[no-untyped-def]
    """Seconds that device ``a`` computes layers ``j``..``i - 1``."""
    seconds = prefix[a, i] - prefix[a, j]
    if extra.shape[1] > 1:
        seconds += extra[a, j, i]
    return seconds


@nb.njit(f"int64({SHARED}, float64, boolean, int64, int64, int64, int64, int64, int64, int32[::1], int32[::1])", **INNER)
def extend(  # type: ignore[no-untyped-def]
    prefix, extra, values, other, rate, nic, value_bytes, messages, state, held, capacity, kept, alive,
    copies, fixed, least, cap, every, a, first, i, c, behind, most, out_i, out_c,
):  # fmt: skip
    """Find the points that device ``a`` reaches by holding layers in front of ``i``, where device ``first`` begins with
    codec ``c``. Writes them to ``out_i`` and ``out_c`` and returns their number; without ``every``, only those that could be
    best. The stage begins at layer ``most`` or before it."""
    base, message = 0.0, 0.0
    if first >= 0:
        message = values[i] * value_bytes[c] + other[i]
        if message > cap * rate[a, first] or message > cap * rate[first, a] or message > cap * nic[a]:
            return 0
        base = messages[a, i, c]
    # A stage that begins earlier takes more of everything, so the first layer that it can begin with is found by bisection.
    low, front = 0, i
    while low < front:
        j = (low + front) // 2
        seconds = _computing(prefix, extra, a, j, i) + base
        memory = copies[behind] * (state[i] - state[j]) + alive[behind] * (held[i] - held[j]) + fixed[i] - fixed[j]
        if seconds > cap or memory > capacity[a] or least[i] - least[j] > capacity[a]:
            low = j + 1
        else:
            front = j
    count = 0
    if front == 0:
        out_i[0], out_c[0] = 0, 0
        count = 1
        if not every:
            return count
    for codec in range(value_bytes.size):
        coded, whole_bytes = 1e300, 1e300
        for j in range(max(front, 1), min(i, most + 1)):
            if other[j] == np.inf or (not every and values[j] >= coded and other[j] >= whole_bytes):
                continue
            seconds = _computing(prefix, extra, a, j, i) + base + messages[a, j, codec]
            there = values[j] * value_bytes[codec] + other[j]
            received = 4.0 * values[j] + other[j]
            memory = copies[behind] * (state[i] - state[j]) + alive[behind] * (held[i] - held[j]) + kept[behind] * received
            memory += fixed[i] - fixed[j]
            if seconds > cap or message + there > cap * nic[a] or memory > capacity[a]:
                continue
            if values[j] <= coded and other[j] <= whole_bytes:
                coded, whole_bytes = values[j], other[j]
            out_i[count], out_c[count] = j, codec
            count += 1
    return count


@nb.njit(
    "int64(float64[::1], float64[::1], boolean, boolean, int64, int64, float64, int64, int64, "
    "int32[:,:,::1], float64[:,::1], "
    "int32[::1], int64)", **INNER,
)  # fmt: skip
def insert(values, other, every, relays, i, c, total, from_key, from_point, table, sums, counts, key):  # type: ignore[no-untyped-def]
    """Add a point to the table unless one there is as good, and remove those that it beats. Returns 1 if the point was
    added, 0 if not, -1 if the table is full."""
    p = 0
    while p < counts[key]:
        there = table[key, p, 0]
        if table[key, p, 1] == c and (there == i or not relays):
            if (
                there <= i
                and values[there] <= values[i]
                and other[there] <= other[i]
                and (not every or sums[key, p] <= total)
            ):
                return 0
            if (
                i <= there
                and values[i] <= values[there]
                and other[i] <= other[there]
                and (not every or total <= sums[key, p])
            ):
                counts[key] -= 1
                last = counts[key]
                for field in range(4):
                    table[key, p, field] = table[key, last, field]
                sums[key, p] = sums[key, last]
                continue
        p += 1
    if p == table.shape[1]:
        return -1
    table[key, p, 0], table[key, p, 1], table[key, p, 2], table[key, p, 3] = i, c, from_key, from_point
    sums[key, p] = total
    counts[key] += 1
    return 1


@nb.njit("UniTuple(int64, 4)(int64, int64, boolean)", **INNER)
def _turn(turn, devices, ordered):  # type: ignore[no-untyped-def]
    """What a turn of ``reach`` stands for: its key, first device (-1 in turn 0, when no stage is placed), number of stages
    (-1 if it stands for nothing), and set of devices (0 if ``ordered``)."""
    if not turn:
        return -1, -1, 0, 0
    if ordered:
        first, stages = devices - 1 - (turn - 1) // (devices + 1), (turn - 1) % (devices + 1)
        return first * (devices + 1) + stages, first, stages, 0
    chosen, stages = turn // devices, 0
    for n in range(devices):
        stages += (chosen >> n) & 1
    return turn, turn % devices, (stages if chosen else -1), chosen


@nb.njit("int64(float64[:,::1], int64, float64)", **INNER)
def _most_in_front(floor, left, cap):  # type: ignore[no-untyped-def]
    """Most layers in front that the devices which are ``left`` can hold within the cap."""
    most, beyond = 0, floor.shape[1]
    while beyond - most > 1:
        middle = (most + beyond) // 2
        if floor[left, middle] > cap:
            beyond = middle
        else:
            most = middle
    return most


@nb.njit(
    f"int64({SHARED}, float64, float64, float64, boolean, boolean, float64[:,::1], float64[:,::1], int32[:,:,::1], "
    "float64[:,::1], int32[::1], int32[::1])",
    **NJIT,
)
def reach(  # type: ignore[no-untyped-def]
    prefix, extra, values, other, rate, nic, value_bytes, messages, state, held, capacity, kept, alive,
    copies, fixed, least, cap, fill, most_sum, ordered, relays, floor, rest, table, sums, counts, end,
):  # fmt: skip
    """Find a plan in which nothing takes longer than ``cap``; with ``fill`` > 0, the one with the least sum of ``fill``
    times the stages' seconds and all transfers, below ``most_sum``. Its key, point and first device are written to ``end``.

    Returns 1; 0 if there is no plan; -1 if the table is full. ``ordered``: devices keep their order, some may stay idle, and
    a key is first device * (N + 1) + stages. Otherwise any devices in any order, and a key is set of devices * N + first
    device. ``relays``: a link through a third device may be faster than the direct one, so that a point with more layers
    placed beats no other.

    ``floor`` (first devices or sets, L+1): lower bound of the bottleneck of layers 0..i-1 on the devices that are then left;
    ``rest`` (the same, with ``fill`` and ``ordered`` only): of their part of the sum.
    ``table`` (keys, room, 4): layer, codec, key and point that a point was reached from (-1: the end of the model); ``sums``
    (keys, room): its sum so far; ``counts`` (keys): number of points.
    """
    devices, layers = prefix.shape[0], values.size - 1
    every = fill > 0
    out_i, out_c = np.empty(value_bytes.size * layers + 1, np.int32), np.empty(value_bytes.size * layers + 1, np.int32)
    counts[:] = 0
    best = most_sum
    for turn in range(devices * (devices + 1) + 1 if ordered else (1 << devices) * devices):
        key, first, behind, chosen = _turn(turn, devices, ordered)
        points = counts[key] if turn else 1
        if behind < 0 or behind == devices or not points:
            continue
        for a in range(devices):
            if (turn and ordered and a >= first) or (chosen >> a) & 1:
                continue
            most = _most_in_front(floor, a if ordered else chosen | (1 << a), cap)
            target = a * (devices + 1) + behind + 1 if ordered else (chosen | (1 << a)) * devices + a
            for p in range(points):
                i, c, total = layers, -1, 0.0
                if turn:
                    i, c, total = table[key, p, 0], table[key, p, 1], sums[key, p]
                reached = extend(
                    prefix, extra, values, other, rate, nic, value_bytes, messages, state, held, capacity, kept, alive,
                    copies, fixed, least, cap, every or relays, a, first, i, c, behind, most, out_i, out_c,
                )  # fmt: skip
                for r in range(reached):
                    j, codec = out_i[r], out_c[r]
                    there = total
                    if every:
                        seconds = _computing(prefix, extra, a, j, i)
                        if turn:
                            message = values[i] * value_bytes[c] + other[i]
                            seconds += messages[a, i, c]
                            there += message / rate[a, first] + message / rate[first, a]
                        if j > 0:
                            seconds += messages[a, j, codec]
                        there += fill * seconds
                        if ordered and there + rest[a, j] >= best:
                            continue
                    if j == 0:
                        if there < best:
                            best = there
                            end[0], end[1], end[2] = key, p, a
                        if not every:
                            return 1
                    elif insert(values, other, every, relays, j, codec, there, key, p, table, sums, counts, target) < 0:
                        return -1
    return int(every and best < most_sum)

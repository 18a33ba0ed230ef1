"""Beam search for many devices: the search of ``search``, but only the most promising points are followed. In its own
module, since few problems need it and it takes seconds to compile."""

import numba as nb
import numpy as np
from accept_mpi.kernels.options import INNER, NJIT
from accept_mpi.kernels.search import SHARED, extend


@nb.njit("int64(int32[:,::1], float64[::1], int64, float64, int64, int64)", **INNER)
def _place(table, scores, there, score, j, codec):  # type: ignore[no-untyped-def]
    """Where a point goes in its level, of which ``there`` places are taken: the next one or, if all are, that of the least
    promising point; -1 if the point is no better than that, or is there already."""
    q = there
    if there == scores.size:
        q = 0
        for w in range(1, there):
            if scores[w] > scores[q]:
                q = w
        if scores[q] <= score:
            return -1
    for w in range(there):
        if table[w, 0] == j and table[w, 1] == codec and scores[w] == score:
            return -1
    return q


@nb.njit(
    f"int64({SHARED}, float64, boolean, float64[::1], float64[::1], uint64[:,:,::1], int32[:,:,::1], float64[:,::1], "
    "int32[::1])",
    **NJIT,
)
def beam(  # type: ignore[no-untyped-def]
    prefix, extra, values, other, rate, nic, value_bytes, messages, state, held, capacity, kept, alive,
    copies, fixed, least, cap, ordered, work, speed, used, table, scores, end,
):  # fmt: skip
    """Search as ``search.reach`` does, for many devices: among points with equally many stages, only the most promising are
    followed.

    Promising: little ``work`` (L+1,) before the point, relative to the ``speed`` (N,) of the devices that are left. ``used``
    (levels, width, words): sets of devices, as bits; ``table`` (levels, width, 4): layer, codec, first device, point of the
    level before; ``scores`` (levels, width). Returns 1 and writes level, point and first device to ``end``, or returns 0.
    """
    devices, layers = prefix.shape[0], values.size - 1
    width, words = table.shape[1], used.shape[2]
    out_i, out_c = np.empty(value_bytes.size * layers + 1, np.int32), np.empty(value_bytes.size * layers + 1, np.int32)
    one = np.uint64(1)
    whole = speed.sum()
    here = 1
    used[0, 0, :] = np.uint64(0)
    table[0, 0, 0], table[0, 0, 1], table[0, 0, 2], table[0, 0, 3] = layers, -1, -1, -1
    left = np.empty(width)
    left[0] = whole
    for level in range(devices):
        there = 0
        left_there = np.empty(width)
        for p in range(here):
            i, c, first = table[level, p, 0], table[level, p, 1], table[level, p, 2]
            for a in range(devices):
                if (used[level, p, a >> 6] >> np.uint64(a & 63)) & one or (ordered and first >= 0 and a >= first):
                    continue
                reached = extend(
                    prefix, extra, values, other, rate, nic, value_bytes, messages, state, held, capacity, kept, alive,
                    copies, fixed, least, cap, False, a, first, i, c, level, layers, out_i, out_c,
                )  # fmt: skip
                rest = left[p] - speed[a]
                if ordered:
                    rest = 0.0
                    for n in range(a):
                        rest += speed[n]
                for r in range(reached):
                    j = out_i[r]
                    if j == 0:
                        end[0], end[1], end[2] = level, p, a
                        return 1
                    if rest <= 1e-9 * whole or level + 1 == devices:
                        continue
                    score = work[j] / rest
                    q = _place(table[level + 1], scores[level + 1], there, score, j, out_c[r])
                    if q < 0:
                        continue
                    there = max(there, q + 1)
                    for word in range(words):
                        used[level + 1, q, word] = used[level, p, word]
                    used[level + 1, q, a >> 6] |= one << np.uint64(a & 63)
                    table[level + 1, q, 0], table[level + 1, q, 1] = j, out_c[r]
                    table[level + 1, q, 2], table[level + 1, q, 3] = a, p
                    scores[level + 1, q] = score
                    left_there[q] = rest
        here = there
        left = left_there
    return 0

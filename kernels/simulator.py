"""Inner loop of the simulator, for pipelines of many stages and micro-batches."""

import numba as nb
import numpy as np
from accept_mpi.kernels.options import NJIT

FORWARD, BACKWARD, WEIGHTS, UPDATE, WHOLE_BACKWARD = 0, 1, 2, 3, 4


@nb.njit(
    "boolean(int8[::1], int32[::1], int64[::1], float64[:,::1], float64[:,::1], float64[:,:,::1], float64[::1], "
    "float64[::1])",
    **NJIT,
)
def run(kinds, numbers, begins, seconds, transfers, arrived, starts, ends):  # type: ignore[no-untyped-def]
    """Simulate stages that carry out their actions in order, each as soon as its input has arrived; False if they wait for
    each other.

    Stage s has actions ``begins[s]`` to ``begins[s+1]`` - 1 of ``kinds`` and ``numbers`` (micro-batches, counted over all
    steps); ``seconds`` (stages, 5) by kind; ``transfers`` (stages - 1, 2): seconds of activations forward and gradients
    backward, one message at a time each way. ``arrived`` (2, stages, micro-batches) must be filled with infinity; ``starts``
    and ``ends`` (actions,) are results.
    """
    stages = begins.size - 1
    at = begins[:-1].copy()
    clock = np.zeros(stages)
    free = np.zeros((stages, 2))
    moved = True
    turn = 0
    while moved:
        moved = False
        for place in range(stages):
            s = place if turn % 2 == 0 else stages - 1 - place  # in both directions in turn, as F and B go
            while at[s] < begins[s + 1]:
                action = at[s]
                number = numbers[action]
                kind = BACKWARD if kinds[action] == WHOLE_BACKWARD else kinds[action]
                start = clock[s]
                if (kind == FORWARD and s > 0) or (kind == BACKWARD and s < stages - 1):
                    there = arrived[kind, s, number]
                    if there == np.inf:
                        break
                    start = max(start, there)
                end = start + seconds[s, kinds[action]]
                starts[action], ends[action] = start, end
                clock[s] = end
                at[s] += 1
                moved = True
                peer = s + 1 if kind == FORWARD else s - 1
                if kind <= BACKWARD and 0 <= peer < stages:
                    boundary = min(s, peer)
                    free[boundary, kind] = max(end, free[boundary, kind]) + transfers[boundary, kind]
                    arrived[kind, peer, number] = free[boundary, kind]
        turn += 1
    return bool(np.all(at == begins[1:]))

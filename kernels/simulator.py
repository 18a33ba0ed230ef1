"""Inner loop of the simulator, for pipelines of many stages and micro-batches."""

import numba as nb
import numpy as np
from accept_mpi.kernels.options import INNER, NJIT

FORWARD, BACKWARD, WEIGHTS, UPDATE, WHOLE_BACKWARD = 0, 1, 2, 3, 4


@nb.njit(**INNER)
def begin_of(d, action, stage_of, stages, kinds, numbers, steps, clock, arrived, grouped, left, last_end, sums):  # type: ignore[no-untyped-def]
    """Time at which a device can begin an action; infinity if what it needs has not arrived."""
    kind = BACKWARD if kinds[action] == WHOLE_BACKWARD else kinds[action]
    s, step, start = stage_of[d], steps[action], clock[d]
    if (kind == FORWARD and s > 0) or (kind == BACKWARD and s < stages - 1):
        start = max(start, arrived[kind, d, numbers[action]])
    if kind == UPDATE and grouped[s, step]:
        start = max(start, last_end[s, step] + sums[s]) if left[s, step] == 0 else np.inf
    return start


@nb.njit(**INNER)
def carry_out(  # type: ignore[no-untyped-def]
    d, start, end, at, stage_of, stages, kinds, numbers, steps, clock, holders, transfers, held, free_out, free_in, arrived,
    grouped, left, last_end, starts, ends,
):  # fmt: skip
    """Carry out a device's next action, and send what comes out of it."""
    action, s = at[d], stage_of[d]
    number, step = numbers[action], steps[action]
    kind = BACKWARD if kinds[action] == WHOLE_BACKWARD else kinds[action]
    starts[action], ends[action] = start, end
    clock[d] = end
    at[d] += 1
    if kind in (BACKWARD, WEIGHTS) and grouped[s, step]:
        left[s, step] -= 1
        last_end[s, step] = max(end, last_end[s, step])
    peer_stage = s + 1 if kind == FORWARD else s - 1
    if kind <= BACKWARD and 0 <= peer_stage < stages:
        peer = holders[peer_stage, number]
        begin = max(end, max(free_out[d, kind], free_in[peer, kind]))
        free_out[d, kind] = free_in[peer, kind] = begin + held[d, peer]
        arrived[kind, peer, number] = begin + transfers[d, peer]


@nb.njit(
    "boolean(int8[::1], int32[::1], int32[::1], int64[::1], int32[::1], int32[:,::1], int32[:,::1], float64[:,::1], "
    "float64[:,::1], float64[:,::1], float64[::1], float64[:,:,::1], float64[::1], float64[::1])",
    **NJIT,
)
def run(  # type: ignore[no-untyped-def]
    kinds, numbers, steps, begins, stage_of, holders, left, seconds, transfers, held, sums, arrived, starts, ends
):  # fmt: skip
    """Simulate devices that carry out their actions in order, each as soon as its input has arrived; False if they wait for
    each other.

    Device d holds stage ``stage_of[d]`` and has actions ``begins[d]`` to ``begins[d+1]`` - 1 of ``kinds``, ``numbers``
    (micro-batches, counted over all steps) and ``steps``; ``holders`` (stages, micro-batches): the device that takes one.
    ``left`` (stages, steps): backwards that a group has still to carry out, changed here; ``sums`` (stages,): seconds from
    the last of them to the sum for which U waits. ``seconds`` (devices, 5) by kind; ``transfers`` (devices, devices):
    seconds from one to the other, and ``held``: those of them for which a device sends no other message the same way, and
    the other one receives none. ``arrived`` (2, devices, micro-batches) must be filled with infinity; ``starts`` and
    ``ends`` (actions,) are results.
    """
    devices, stages = begins.size - 1, holders.shape[0]
    at = begins[:-1].copy()
    clock = np.zeros(devices)
    free_out, free_in = np.zeros((devices, 2)), np.zeros((devices, 2))
    grouped = left > 0
    last_end = np.zeros(left.shape)
    in_groups = np.any(grouped)
    moved = True
    turn = 0
    while moved:
        moved = False
        # Where several devices may send to one, actions come in the order in which they end; elsewhere any order will do.
        soonest, its_start, chosen = np.inf, np.inf, -1
        for place in range(devices):
            d = place if turn % 2 == 0 or in_groups else devices - 1 - place  # in both directions, as F and B go
            while at[d] < begins[d + 1]:
                start = begin_of(
                    d, at[d], stage_of, stages, kinds, numbers, steps, clock, arrived, grouped, left, last_end, sums
                )
                if start == np.inf:
                    break
                end = start + seconds[d, kinds[at[d]]]
                if in_groups:
                    if end < soonest or (end == soonest and start < its_start):
                        soonest, its_start, chosen = end, start, d
                    break
                carry_out(
                    d, start, end, at, stage_of, stages, kinds, numbers, steps, clock, holders, transfers, held, free_out,
                    free_in, arrived, grouped, left, last_end, starts, ends,
                )  # fmt: skip
                moved = True
        if chosen >= 0:
            carry_out(
                chosen, its_start, soonest, at, stage_of, stages, kinds, numbers, steps, clock, holders, transfers, held,
                free_out, free_in, arrived, grouped, left, last_end, starts, ends,
            )  # fmt: skip
            moved = True
        turn += 1
    return bool(np.all(at == begins[1:]))

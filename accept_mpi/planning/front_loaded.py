"""Cuts for synchronous schedules in which the first stages take longer than the last ones.

A step lasts until every stage has computed its micro-batches, and what it waits for. Stage k begins when the stages before
it have passed on the first micro-batch, and ends before they have gone back through the last one: P seconds of all of these
for one micro-batch. The stages behind it take Q seconds to give the first micro-batch back. Meanwhile it goes forward with
the others that it may have in flight, w with the first, in f seconds each (ours; c seconds per micro-batch, M of these):

    T = max over k of M c + P + max(0, Q - (w - 1) f)

So the first stage, with P = 0 and most micro-batches in flight, can take longest, and the fastest devices do best in front.
The search (``planning.search``) adds up what all stages take instead, which is right for stages that are equally long. In
zero-bubble, where weight gradients fill gaps, a third of P counts (``Problem.fill``).
"""

import itertools
import math
from collections.abc import Iterator

import numpy as np

from accept_mpi.planning.problem import F64, Problem, Solution, clipped, prefix_sums

_FORWARD = 1 / 3  # part of forward and backward that the forward takes
_FEW = 4  # up to so many devices, all of them are tried in each order
_MOST = 6  # plans
_CLOSE = 1e-3  # relative distance of the bounds at which the bisection ends


def front_loaded(problem: Problem) -> list[Solution]:
    """A few plans of short steps T, the shortest first. Links are not looked at, nor is memory."""
    before = prefix_sums(problem.layer_seconds)
    found: list[tuple[float, Solution]] = []
    for order in _orders(problem):
        seconds, edges = _shortest(problem, before[list(order)])
        if seconds < math.inf:
            codec = int(problem.bytes_per_value.argmin())
            found.append((seconds, Solution(order, tuple(edges), (codec,) * (len(order) - 1))))
    return [one for _, one in sorted(found, key=lambda one: one[0])[:_MOST]]


def _orders(problem: Problem) -> Iterator[tuple[int, ...]]:
    """Yield orders of devices: of a few, all; of many, the fastest, in the order of their speeds."""
    fastest = sorted(range(problem.devices), key=lambda n: (float(clipped(problem.layer_seconds)[n].sum()), n))
    for count in range(2, min(problem.devices, problem.layers) + 1):
        if problem.devices <= _FEW:
            yield from itertools.permutations(fastest, count)
        else:
            yield tuple(fastest[:count])


def _shortest(problem: Problem, before: F64) -> tuple[float, list[int]]:
    """The least T for some devices in their order, and its edges; infinite if there are none. ``before`` (stages, L+1):
    seconds of the layers before each on the device of each stage."""
    whole = float(before[:, -1].min())
    low = problem.real_micro_batches * whole / len(before) / 1e3  # less than any
    high = (problem.real_micro_batches + len(before)) * whole
    best: tuple[float, list[int]] = math.inf, []
    while high - low > _CLOSE * high:
        middle = (low + high) / 2
        edges = _edges(problem, before, middle)
        if edges is None:
            low = middle
        else:
            high, best = middle, (middle, edges)
    return best


def _edges(problem: Problem, before: F64, most: float) -> list[int] | None:
    """Edges with which T is at most ``most``; None if there are none. From the first stage on, each takes as many layers as
    it can; those behind it are taken for nearly as long."""
    count, passed, edges = problem.real_micro_batches, 0.0, [0]
    stages = len(before)
    for k, mine in enumerate(before):
        behind = stages - 1 - k
        meanwhile = (float(problem.in_flight[behind]) - 1) * _FORWARD
        left = most - passed
        returning = behind * left / count * (1 - behind / (2 * (count + behind)))
        longest = left / count
        if returning > meanwhile * longest:
            longest = (left - returning) / max(count - meanwhile, 1e-9)
        stop = int(np.searchsorted(mine, mine[edges[-1]] + longest * (1 + 1e-12), "right")) - 1
        stop = min(stop, problem.layers - behind)
        if not behind:
            return [*edges, stop] if stop == problem.layers else None
        while stop in problem.uncuttable:
            stop -= 1
        if stop <= edges[-1]:
            return None
        passed += problem.fill * float(mine[stop] - mine[edges[-1]])
        edges.append(stop)
    return None

"""Improves plans for few micro-batches by small changes, each of which is simulated.

The search (``planning.search``) adds up what a pipeline costs when it is full, and a share for filling and draining. With
fewer micro-batches than it takes to fill a pipeline, gaps decide instead, and whether other work falls into them.
"""

import itertools
from collections.abc import Callable, Iterator

from accept_mpi.planning.problem import Problem, Solution, cost

_WORTH = 0.995
"""A change must shorten the step to this share."""
_PARTS = 8
"""A stage more is tried with these parts of another one's layers."""
_MOST = 30
"""Plans that are simulated at most from one plan on."""


def refined(problem: Problem, start: Solution, seconds: Callable[[Solution], float]) -> Solution:
    """The best that changes to ``start`` lead to, one at a time. ``seconds``: those of a step, infinite for what does not
    fit."""
    best, least, left, tried = start, seconds(start), _MOST, {start}
    while True:
        # A step takes no less than its bottleneck for each micro-batch; what may come lowest is tried first.
        bounds = {one: _bound(problem, one) for one in _neighbours(problem, best) if one not in tried}
        for one in sorted(bounds, key=lambda one: bounds[one]):
            if bounds[one][0] >= _WORTH * least or not left:
                return best
            left -= 1
            tried.add(one)
            if (reached := seconds(one)) < _WORTH * least:
                best, least = one, reached
                break
        else:
            return best


def _bound(problem: Problem, plan: Solution) -> tuple[float, float]:
    """Seconds that a step takes at least, and those of a micro-batch in all stages."""
    reached = cost(problem, plan)
    return problem.real_micro_batches * reached.bottleneck, sum(reached.stages)


def _neighbours(problem: Problem, plan: Solution) -> Iterator[Solution]:
    """Yield the plans with one stage less or more, another device, or one cut elsewhere; with the codecs of the fewest bits,
    so that no link seems slower than it need be."""
    codec = int(problem.bytes_per_value.argmin())
    for devices, edges in _changed(problem, list(plan.devices), list(plan.edges)):
        yield Solution(tuple(devices), tuple(edges), (codec,) * (len(devices) - 1))


def _changed(problem: Problem, devices: list[int], edges: list[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield these devices and edges (``Solution``), changed in one place."""
    stages = range(len(devices))
    idle = [n for n in range(problem.devices) if n not in devices]
    for s, cut in itertools.product(stages, stages[1:]):
        if cut in (s, s + 1):  # stage s goes, and so does the cut in front of it or behind it
            yield devices[:s] + devices[s + 1 :], edges[:cut] + edges[cut + 1 :]
    for s, device in itertools.product(stages, idle):
        yield [*devices[:s], device, *devices[s + 1 :]], edges
    for s, t in itertools.combinations(stages, 2):
        yield [*devices[:s], devices[t], *devices[s + 1 : t], devices[s], *devices[t + 1 :]], edges
    moves = [way << n for n in range(problem.layers.bit_length()) for way in (-1, 1)]
    for cut, move in itertools.product(stages[1:], moves):
        if edges[cut - 1] < edges[cut] + move < edges[cut + 1]:
            yield devices, [*edges[:cut], edges[cut] + move, *edges[cut + 1 :]]
    for place, device in itertools.product(range(len(devices) + 1), idle):
        for more in _with_stage(edges, place):
            if all(a < b for a, b in itertools.pairwise(more)):
                yield [*devices[:place], device, *devices[place:]], more


def _with_stage(edges: list[int], place: int) -> Iterator[list[int]]:
    """Yield edges with one more stage at ``place``: all others give it a part of their layers, or one next to it does."""
    stages = len(edges) - 1
    yield [(stages * edges[n - (n > place)] + (n > place) * edges[-1]) // (stages + 1) for n in range(stages + 2)]
    for s in {max(place - 1, 0), min(place, stages - 1)}:
        for part in range(1, _PARTS):
            cut = edges[s] + round(part / _PARTS * (edges[s + 1] - edges[s]))
            yield [*edges[: s + 1], cut, *edges[s + 1 :]]

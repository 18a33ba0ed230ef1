"""Improves plans for few micro-batches by small changes, each of which is simulated.

The search (``planning.search``) adds up what a pipeline costs when it is full, and a share for filling and draining. With
fewer micro-batches than it takes to fill a pipeline, gaps decide instead, and whether other work falls into them.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

from accept_mpi.planning.problem import Problem, Solution, cost

_ENOUGH = 3
"""With this many micro-batches for each stage that there could be, the search needs no help."""
_WORTH = 0.995
"""A change must shorten the step to this share."""
_MOST = 30
"""Plans that are simulated at most from one plan on."""


def is_short(problem: Problem) -> bool:
    """True if a step has too few micro-batches to fill a pipeline of all devices for most of it."""
    return problem.devices > 1 and problem.real_micro_batches < _ENOUGH * problem.devices


def refined(problem: Problem, start: Solution, seconds: Callable[[Solution], float]) -> Solution:
    """The best that changes to ``start`` lead to, one at a time. ``seconds``: those of a step, infinite for what does not
    fit."""
    best, least, left, tried = start, seconds(start), _MOST, {start}
    improved = True
    while improved:
        improved = False
        # A step takes no less than its bottleneck for each micro-batch; what may come lowest is tried first.
        bounds = {one: _bound(problem, one) for one in _neighbours(problem, best) if one not in tried}
        for one in sorted(bounds, key=lambda one: bounds[one]):
            if bounds[one][0] >= _WORTH * least or not left:
                break
            left -= 1
            tried.add(one)
            if (reached := seconds(one)) < _WORTH * least:
                best, least, improved = one, reached, True
                break
    return best


def _bound(problem: Problem, plan: Solution) -> tuple[float, float]:
    """Seconds that a step takes at least, and those of a micro-batch in all stages."""
    reached = cost(problem, plan)
    return problem.real_micro_batches * reached.bottleneck, sum(reached.stages)


def _neighbours(problem: Problem, plan: Solution) -> Iterator[Solution]:
    """Yield the plans with one stage less, one device more or another one, or one cut elsewhere."""
    stages, layers = len(plan.devices), problem.layers
    idle = [n for n in range(problem.devices) if n not in plan.devices]
    for s, cut in itertools.product(range(stages), range(1, stages)):
        if cut in (s, s + 1):  # stage s goes, and so does the cut in front of it or behind it
            yield _without(plan, s, cut)
    for s, device in itertools.product(range(stages), idle):
        yield replace(plan, devices=(*plan.devices[:s], device, *plan.devices[s + 1 :]))
    for s, t in itertools.combinations(range(stages), 2):
        order = list(plan.devices)
        order[s], order[t] = order[t], order[s]
        yield replace(plan, devices=tuple(order))
    moves = [way << n for n in range(layers.bit_length()) for way in (-1, 1)]
    for cut, move in itertools.product(range(1, stages), moves):
        to = plan.edges[cut] + move
        if plan.edges[cut - 1] < to < plan.edges[cut + 1]:
            yield replace(plan, edges=(*plan.edges[:cut], to, *plan.edges[cut + 1 :]))
    for s, device, eighths in itertools.product(range(stages + 1), idle, range(1, 8)):
        yield from _with(plan, s, device, eighths / 8)


def _with(plan: Solution, s: int, device: int, share: float) -> Iterator[Solution]:
    """Yield the plan with ``device`` before stage ``s`` (or at the end), between a stage and what it parts with: the layers
    behind ``share`` of them."""
    for split in {max(s - 1, 0), min(s, len(plan.devices) - 1)}:
        start, stop = plan.edges[split], plan.edges[split + 1]
        if start < (at := start + round(share * (stop - start))) < stop:
            edges = (*plan.edges[: split + 1], at, *plan.edges[split + 1 :])
            codecs = (*plan.codecs[:split], 0, *plan.codecs[split:])
            yield Solution((*plan.devices[:s], device, *plan.devices[s:]), edges, codecs)


def _without(plan: Solution, s: int, cut: int) -> Solution:
    """The plan without stage ``s`` and without cut number ``cut``."""
    return Solution(
        (*plan.devices[:s], *plan.devices[s + 1 :]),
        (*plan.edges[:cut], *plan.edges[cut + 1 :]),
        (*plan.codecs[: cut - 1], *plan.codecs[cut:]),
    )

"""Which layers, on which devices, in which order: the plan that should train fastest, as good ones told apart.

Pure: what was measured comes in (``ClusterProfile``), a plan and its forecast go out. ``train`` and ``plan`` share it.
"""

import contextlib
import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import numpy as np

from accept_mpi.errors import UserError
from accept_mpi.job import Job
from accept_mpi.models.shared import uncuttable
from accept_mpi.plan import BoundaryCodecs, Plan, even_cuts, make_plan
from accept_mpi.planning.balance import balance
from accept_mpi.planning.codec_choice import LINK_SHARE
from accept_mpi.planning.estimate import Estimate, estimate
from accept_mpi.planning.formulation import NEVER, problem_of
from accept_mpi.planning.problem import NoPlan, Problem, Solution, cost
from accept_mpi.planning.search import solve
from accept_mpi.profiling.cluster_profile import ClusterProfile

_WORTH = 0.98  # of the step before; measurements are no finer
_ROOM = 1.1  # times the fastest plan's step, at most, for room on links
_ALIKE = 0.9  # so far apart are devices of one kind, measured for a second or two: which is which need not cost a move
_SLOW = 1 / 4  # of the devices' mean speed: one that is slower has been measured worst, in a few rounds
_SPARED = 1.08  # times a step, at most, without such devices
_TRIED = 720  # orders of devices
_STATES = 3.0  # times a layer's parameters: what a layer that changes hands may consist of

Layers = Sequence[Collection[int]]
"""Layers whose state each device has."""


def plan_for(cluster: ClusterProfile, job: Job, held: Layers = ()) -> Estimate:
    """The plan that trains fastest. Raises UserError where none fits. ``held``: in mid-run; among devices that do as well in
    each other's place, those take layers that have most of them."""
    return plans_for(cluster, job, held)[0]


def plans_for(cluster: ClusterProfile, job: Job, held: Layers = ()) -> tuple[Estimate, Estimate]:
    """The plan that trains fastest, and even cuts, whether they fit or not. Raises UserError where no plan fits."""
    problem, loaded = (problem_of(cluster, job, share)[0] for share in (1.0, LINK_SHARE))
    candidates: list[Solution] = []
    why = ""
    for one, ordered in itertools.product((loaded, problem), (True, False)):
        try:  # of many devices in any order a search may miss plans that there are
            candidates.append(balance(one, solve(one, ordered)))
        except NoPlan as error:
            why = str(error)
    if problem.devices <= problem.layers - len(problem.uncuttable):
        candidates.append(_even_solution(problem))
    possible = _possible(problem, candidates, cluster, job)
    evenly = even_plan(cluster, job)
    even = next((found for found, _ in possible if found.plan == evenly), None) or estimate(cluster, job, evenly)
    if not possible:
        have = ", ".join(device.host for device in cluster.devices if device.data)
        if why:
            without = ", or no snapshots (recovery.replicate_every = 0)" if cluster.snapshots else ""
            raise UserError(f"pipeline.cuts: {why}{without}")
        if not have:
            raise UserError("data.name: first and last stage need the data, and no device that is there has it")
        raise UserError(
            f"data.name: first and last stage need the data, only {have} has it, and the model does not fit there"
        )
    best = _spared(problem, _best(possible), cluster, job)
    if held and (near := _nearest(problem, best[1], cluster, job, held)) != best[1]:
        found = estimate(cluster, job, _as_plan(near, job))
        if _ALIKE * found.expected <= best[0].expected:
            return found, even
    return best[0], even


def _possible(
    problem: Problem, candidates: Iterable[Solution], cluster: ClusterProfile, job: Job
) -> list[tuple[Estimate, Solution]]:
    """Those that fit, each once, with what they should do."""
    found = []
    for candidate in dict.fromkeys(candidates):
        reached = cost(problem, candidate)
        if reached.fits and reached.bottleneck < NEVER:
            found.append((estimate(cluster, job, _as_plan(candidate, job)), candidate))
    return found


def _best(possible: Sequence[tuple[Estimate, Solution]]) -> tuple[Estimate, Solution]:
    """Of those that are nearly as fast as the fastest, the best to be expected."""
    longest = _ROOM * min(found.step for found, _ in possible)
    fast = [one for one in possible if one[0].step <= longest]
    best = fast[0]
    for other in fast[1:]:
        # The order that the user gave the hosts in may mean something; another one must be worth it.
        if other[0].expected < _WORTH * best[0].expected:
            best = other
    return best


def _spared(
    problem: Problem, best: tuple[Estimate, Solution], cluster: ClusterProfile, job: Job
) -> tuple[Estimate, Solution]:
    """The best plan, or one without devices far slower than the others that is as good but for what these could save at
    most: a few percent, while a third more than was measured would make the step a third longer."""
    speeds = np.array([1 / max(sum(d.forward) + sum(d.backward), 1e-12) for d in cluster.devices])
    slow = sorted((n for n in best[1].devices if speeds[n] < _SLOW * speeds.mean()), key=lambda n: speeds[n])
    for count in sorted({len(slow), min(len(slow), 1)} - {0}, reverse=True):  # all of them, or the slowest
        left = [n for n in range(problem.devices) if n not in slow[:count]]
        others = problem.take(left)
        candidates = []
        for ordered in (True, False):
            with contextlib.suppress(NoPlan):
                solution = balance(others, solve(others, ordered))
                candidates.append(replace(solution, devices=tuple(left[n] for n in solution.devices)))
        found = _possible(problem, candidates, cluster, job)
        if found and (without := _best(found))[0].expected <= _SPARED * best[0].expected:
            return without
    return best


def _nearest(problem: Problem, solution: Solution, cluster: ClusterProfile, job: Job, held: Layers) -> Solution:
    """The same stages, with devices in each other's place wherever less must move then and a step takes hardly longer: all
    orders of a few devices, else exchange by exchange."""

    def moves(devices: Sequence[int]) -> tuple[float, float]:
        return moving(cluster, _as_plan(replace(solution, devices=tuple(devices)), job), held)

    def as_good(devices: Sequence[int]) -> bool:
        reached = cost(problem, replace(solution, devices=tuple(devices)))
        return reached.fits and _ALIKE * reached.step <= longest

    longest, stages = cost(problem, solution).step, len(solution.devices)
    if math.perm(problem.devices, stages) <= _TRIED:
        orders = itertools.permutations(range(problem.devices), stages)
        found = min((moves(order), order) for order in orders if as_good(order))
        return solution if found[0] == moves(solution.devices) else replace(solution, devices=found[1])
    best = [*solution.devices, *sorted(set(range(problem.devices)) - set(solution.devices))]
    while True:
        swaps = [_swapped(best, i, j) for i in range(stages) for j in range(i + 1, len(best))]
        better = sorted((moves(swap[:stages]), swap) for swap in swaps)
        least = moves(best[:stages])
        best_swap = next((swap for found, swap in better if found < least and as_good(swap[:stages])), None)
        if best_swap is None:
            return replace(solution, devices=tuple(best[:stages]))
        best = best_swap


def _swapped(items: Sequence[int], i: int, j: int) -> list[int]:
    found = list(items)
    found[i], found[j] = found[j], found[i]
    return found


def moving(cluster: ClusterProfile, plan: Plan, held: Layers) -> tuple[float, float]:
    """Seconds in which layers' states get to the devices that do not have them: on the busiest link, and on all together."""
    each = []
    for stage in plan.stages:
        rank = stage.leader
        layers = [layer for layer in range(stage.start, stage.stop) if layer not in held[rank]]
        nbytes = sum(_STATES * cluster.outline.layers[layer].parameter_bytes for layer in layers)
        each.append(nbytes / cluster.host_link(rank))
    return max(each), sum(each)


def _even_solution(problem: Problem) -> Solution:
    """Even cuts with the codec that has fewest bits."""
    edges = (0, *even_cuts(problem.layers, problem.devices, problem.uncuttable), problem.layers)
    strongest = int(np.argmin(problem.bytes_per_value))
    return Solution(tuple(range(problem.devices)), edges, (strongest,) * (problem.devices - 1))


def _as_plan(solution: Solution, job: Job) -> Plan:
    """Codecs stay what the job says: which of an "auto" it is, is settled when stages have measured themselves."""
    codec = BoundaryCodecs(forward=str(job.pipeline.forward), backward=str(job.pipeline.backward))
    cuts = solution.edges[1:-1]
    return make_plan(solution.edges[-1], list(cuts), [codec] * len(cuts), list(solution.devices))


def even_plan(cluster: ClusterProfile, job: Job) -> Plan:
    """All devices in their order, the same number of layers each; layers that must stay together do."""
    layers = len(cluster.outline.layers)
    cuts = even_cuts(layers, len(cluster.devices), uncuttable(cluster.outline.shared, layers))
    codec = BoundaryCodecs(forward=str(job.pipeline.forward), backward=str(job.pipeline.backward))
    return make_plan(layers, cuts, [codec] * len(cuts))

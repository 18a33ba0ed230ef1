"""Finds the plan that should train fastest: which layers go on which devices, in which order.

Pure: a cluster profile and a job go in, a plan with its estimate comes out. The commands ``train`` and ``plan`` share it.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import msgspec
import numpy as np

from accept_mpi.data.calendar import micro_batches_of
from accept_mpi.errors import UserError
from accept_mpi.job import MOST_SLACK, Job
from accept_mpi.models.shared import uncuttable
from accept_mpi.plan import Lanes, Plan, even_cuts, recomputing, with_lanes
from accept_mpi.planning.balance import balance
from accept_mpi.planning.codec_choice import LINK_SHARE
from accept_mpi.planning.estimate import Estimate, estimate, fits, roughly
from accept_mpi.planning.formulation import NEVER, problem_of, stage_counts
from accept_mpi.planning.front_loaded import front_loaded
from accept_mpi.planning.groups import hybrid_plans
from accept_mpi.planning.job_plan import open_plan
from accept_mpi.planning.problem import NoPlan, Problem, Solution, cost
from accept_mpi.planning.refinement import refined
from accept_mpi.planning.search import MOST_FEW, solve
from accept_mpi.planning.ties import kept_together
from accept_mpi.profiling.cluster_profile import ClusterProfile

_MIN_IMPROVEMENT = 0.98
"""A reordering must cut the step time by 2 %, the precision of our measurements."""
_GROUPS_IMPROVE = 0.95
"""Groups must cut it by 5 %: their steps have been up to 5 % longer, against what was foreseen, than those without."""
_LANES_IMPROVE = 0.97
"""Lanes must cut it by 3 %, since they take memory and change what a pass's threads are."""
_ROOM = 1.1
"""A plan may be slower than the fastest one by this factor if it leaves more room on links."""
_ALIKE = 0.9
"""Two equal devices may measure up to 10 % apart. Within that, prefer the assignment that moves less state."""
_SLOW = 1 / 4
"""Devices below this share of the mean speed finish few timing rounds, so their times are the least reliable."""
_SPARED = 1.02
"""Such devices are left idle, and ``1f1b-async`` keeps weights newer, if a step is at most this factor longer then."""
_FRONTS = 3  # plans with longer first stages for which codecs are chosen
_TRIED = 720  # orders of devices that are all tried; with more, devices are exchanged one by one
_STATES = 3.0  # most tensors per parameter that move with a layer: the weight and two moments of the optimizer

Layers = Sequence[Collection[int]]
"""For each device, the layers of whose state it has a copy."""


def planning_kernels(devices: int) -> list[str]:
    """Modules of kernels (``kernels.cache``) that finding a plan for so many devices needs."""
    return ["search", "simulator", *(["beam"] if devices > MOST_FEW else [])]


def plan_for(cluster: ClusterProfile, job: Job, held: Layers = ()) -> Estimate:
    """The plan that trains fastest. Raises UserError if none fits.

    ``held``, during a run: among devices that do equally well in each other's place, those take layers that hold most of
    their state.
    """
    return plans_for(cluster, job, held)[0]


def plans_for(cluster: ClusterProfile, job: Job, held: Layers = ()) -> tuple[Estimate, Estimate]:
    """The plan that trains fastest, and the one with even cuts, whether that fits or not; ``held`` as in ``plan_for``.

    Stages compute forwards again where the job says so, or where memory keeps the fastest plan from being taken and this is
    faster than another. With ``transfer_slack`` "auto" they have fewer micro-batches in flight for the same reason, or where
    that is faster; in ``1f1b-async`` also where a step takes hardly longer. Raises UserError if no plan fits."""
    pipeline = job.pipeline
    jobs = [job]
    if pipeline.transfer_slack == "auto" and pipeline.schedule != "gpipe":  # which has all of a step in flight
        jobs = [_with_slack(job, slack) for slack in range(MOST_SLACK, -1, -1)]
    if pipeline.recompute == "on":
        searches = [partial(_recomputing, cluster, one, held) for one in jobs]
        return _newer(cluster, jobs, _fitting(cluster, jobs[0], _fastest(cluster, searches)))
    again = pipeline.recompute == "auto" and pipeline.schedule != "zero-bubble" and pipeline.lanes != "F+B"
    if len(jobs) == 1 and not again:
        return _fitting(cluster, job, _keeping(cluster, job, held))
    roomy = [msgspec.structs.replace(device, memory=math.inf) for device in cluster.devices]
    found = _keeping(msgspec.structs.replace(cluster, devices=roomy), jobs[0], held)
    if not fits(cluster, found[0]):
        searches = [partial(_keeping, cluster, one, held) for one in jobs]
        searches += [partial(_recomputing, cluster, one, held) for one in (jobs[0], *jobs[1:][-1:]) if again]
        found = _fitting(cluster, jobs[0], _fastest(cluster, searches))
    return _newer(cluster, jobs, found)


def _fitting(cluster: ClusterProfile, job: Job, found: tuple[Estimate, Estimate]) -> tuple[Estimate, Estimate]:
    """What was found, whose plan must have the memory that it needs. Raises UserError if it has not."""
    best = found[0]
    if not fits(cluster, best):
        needs = [
            (need - cluster.devices[rank].memory, need, rank)
            for need, (_, rank) in zip(best.memory, best.plan.holders, strict=True)
        ]
        _, need, rank = max(needs)
        device = cluster.devices[rank]
        lanes = f" with pipeline.lanes = {job.pipeline.lanes}" if best.plan.laned else ""
        raise UserError(
            f"pipeline.cuts: no cuts fit{lanes}: the best ones need {need / 2**20:.1f} MiB on {device.host} (rank {rank}), "
            f"which has {device.memory / 2**20:.1f} MiB; smaller micro-batches or another device would help"
        )
    return found


def _with_slack(job: Job, slack: int) -> Job:
    """The job with this ``transfer_slack``."""
    return msgspec.structs.replace(job, pipeline=msgspec.structs.replace(job.pipeline, transfer_slack=slack))


def _newer(cluster: ClusterProfile, jobs: Sequence[Job], found: tuple[Estimate, Estimate]) -> tuple[Estimate, Estimate]:
    """What was found, with the slack of ``jobs`` with which a step takes least; in ``1f1b-async`` with the least slack with
    which it takes at most ``_SPARED`` times as long: the fewer micro-batches are in flight, the newer the weights that they
    compute with."""
    best, even = found
    fewer = [job for job in jobs if job.pipeline.slack < best.plan.slack]
    with_less = [estimate(cluster, job, msgspec.structs.replace(best.plan, slack=job.pipeline.slack)) for job in fewer]
    if jobs[0].pipeline.schedule == "1f1b-async":
        return next((one for one in reversed(with_less) if one.expected <= _SPARED * best.expected), best), even
    if jobs[0].pipeline.schedule == "1f1b-delayed":
        return found
    return min([best, *with_less], key=lambda one: one.expected), even


def _fastest(
    cluster: ClusterProfile, searches: Iterable[Callable[[], tuple[Estimate, Estimate]]]
) -> tuple[Estimate, Estimate]:
    """What that search found whose plan is expected to train fastest, of those that fit if any do. Raises the first
    UserError if none finds a plan."""
    found: list[tuple[Estimate, Estimate]] = []
    mistakes: list[UserError] = []
    for search in searches:
        try:
            found.append(search())
        except UserError as error:
            mistakes.append(error)
    if not found:
        raise mistakes[0]
    return min(found, key=lambda both: (not fits(cluster, both[0]), both[0].expected))


def _recomputing(cluster: ClusterProfile, job: Job, held: Layers) -> tuple[Estimate, Estimate]:
    """The same with stages that compute forwards again: all of them if the job says so, else those that must."""
    every = msgspec.structs.replace(job, pipeline=msgspec.structs.replace(job.pipeline, recompute="on"))
    found, even = _keeping(cluster, every, held)
    if not fits(cluster, found):
        raise UserError("pipeline.cuts: no plan fits, even if stages compute forwards again")
    again = list(range(len(found.plan.stages)))
    for s in again.copy() if job.pipeline.recompute == "auto" else ():
        fewer = [one for one in again if one != s]
        if fits(cluster, without := estimate(cluster, job, recomputing(found.plan, fewer))):
            again, found = fewer, without
    return found, even


def _keeping(cluster: ClusterProfile, job: Job, held: Layers) -> tuple[Estimate, Estimate]:
    """The same with stages that keep their activations, or all compute forwards again if the job says so."""
    lanes = lanes_for(cluster, job)
    asked = job.pipeline.lanes not in ("auto", "off")
    found = None if asked else _plans_without_lanes(cluster, job, held)
    if not lanes and found:
        return found
    faster = [device.with_lanes(lanes.get(n, 1)) for n, device in enumerate(cluster.devices)]
    best, even = _plans_without_lanes(msgspec.structs.replace(cluster, devices=faster), job, held)
    with_them = estimate(cluster, job, with_lanes(best.plan, lanes))
    if found and not _pays(cluster, with_them, found[0]):
        return found
    return with_them, found[1] if found else estimate(cluster, job, even.plan)


def with_paying_lanes(cluster: ClusterProfile, job: Job, plan: Plan) -> Plan:
    """The plan with the lanes that pay, or the plan itself."""
    with_them = estimate(cluster, job, with_lanes(plan, lanes_for(cluster, job)))
    return with_them.plan if _pays(cluster, with_them, estimate(cluster, job, plan)) else plan


def _pays(cluster: ClusterProfile, with_them: Estimate, without: Estimate) -> bool:
    """True if a plan with lanes fits, and is enough faster than one without."""
    return fits(cluster, with_them) and with_them.expected < _LANES_IMPROVE * without.expected


def lanes_for(cluster: ClusterProfile, job: Job) -> dict[int, Lanes]:
    """The lanes that the job asks for, or with which each device computes fastest, by device; without those of one lane."""
    asked = job.pipeline.lanes
    if asked == "off":
        return {}
    if asked != "auto":
        return dict.fromkeys(range(len(cluster.devices)), asked) if asked != 1 else {}
    found: dict[int, Lanes] = {}
    for n, device in enumerate(cluster.devices):
        possible = {k: factor for k, factor in device.lanes.items() if k <= micro_batches_of(job)}
        if possible and possible[best := min(possible, key=lambda k: possible[k])] < _LANES_IMPROVE:
            found[n] = best
    return found


def _plans_without_lanes(cluster: ClusterProfile, job: Job, held: Layers) -> tuple[Estimate, Estimate]:
    """The same for devices that compute one action after another. Where layers have a parameter in common, the search knows
    nothing of what parting them costs, so plans that keep them together are compared with those that do not."""
    together = kept_together(cluster) if job.parts_ties else None
    if together is None:
        return _searched(cluster, job, held)

    def search(known: ClusterProfile) -> tuple[Estimate, Estimate]:
        best, even = _searched(known, job, held)
        return estimate(cluster, job, best.plan), estimate(cluster, job, even.plan)

    return _fastest(cluster, [partial(search, one) for one in (together, cluster)])


def _searched(cluster: ClusterProfile, job: Job, held: Layers) -> tuple[Estimate, Estimate]:
    """The best plan that the search finds, and the one with even cuts."""
    counts = stage_counts(cluster, job)
    problems = [
        [problem_of(cluster, job, share, most).with_useful_codecs() for share in (1.0, LINK_SHARE)] for most in counts
    ]
    if problems[-1][0].is_roomy:  # with fewer stages, too
        counts, problems = counts[-1:], problems[-1:]
    possible: dict[Solution, Estimate] = {}
    why = ""
    for most, (problem, loaded) in zip(counts, problems, strict=True):
        candidates: list[Solution] = []
        for one, ordered in itertools.product((loaded, problem), (True, False)):
            try:  # for many devices in any order, a search may miss plans that exist
                candidates.append(balance(one, solve(one, ordered)))
            except NoPlan as error:
                why = why or str(error)
        if problem.devices <= problem.layers - len(problem.uncuttable):
            candidates.append(_even_solution(problem))
        candidates += _alone(problem)
        if problem.fill and job.pipeline.schedule != "gpipe":  # there all wait for the last one
            fronts = [one for one in front_loaded(problem) if _holds(problem, one)]
            candidates += sorted(fronts, key=lambda one: roughly(cluster, job, _as_plan(one, job)))[:_FRONTS]
        possible |= _possible(problem, [one for one in candidates if len(one.devices) <= most], cluster, job)
    evenly = even_plan(cluster, job)
    even = next((found for found in possible.values() if found.plan == evenly), None) or estimate(cluster, job, evenly)
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
    best = _best(possible)
    problem = next(one for most, (one, _) in zip(counts, problems, strict=True) if most >= len(best[1].devices))
    if problem.is_short:
        best = _best(possible | _refined(problem, possible, cluster, job))
    best = _spared(problem, best, cluster, job)
    # A plan that is expected to be so much faster is so with links as measured, or with loaded ones.
    limits = _GROUPS_IMPROVE * best[0].step, _GROUPS_IMPROVE * best[0].loaded
    hybrid = next(iter(hybrid_plans(cluster, job, problems, limits)), None)
    if hybrid and hybrid.expected < _GROUPS_IMPROVE * best[0].expected:
        return hybrid, even
    if held and (near := _nearest(problem, best[1], cluster, job, held)) != best[1]:
        found = estimate(cluster, job, _as_plan(near, job))
        if _ALIKE * found.expected <= best[0].expected:
            return found, even
    return best[0], even


def _possible(
    problem: Problem, candidates: Iterable[Solution], cluster: ClusterProfile, job: Job
) -> dict[Solution, Estimate]:
    """The candidates that fit, and their estimates."""
    found: dict[Solution, Estimate] = {}
    for candidate in candidates:
        if candidate not in found and _holds(problem, candidate):
            found[candidate] = estimate(cluster, job, _as_plan(candidate, job))
    return found


def _holds(problem: Problem, candidate: Solution) -> bool:
    """True if each device may have the layers that a solution gives it, and has the memory."""
    reached = cost(problem, candidate)
    return reached.fits and reached.bottleneck < NEVER


def _refined(
    problem: Problem, possible: Mapping[Solution, Estimate], cluster: ClusterProfile, job: Job
) -> dict[Solution, Estimate]:
    """What changes to the fastest plans lead to: to one of each of the three most promising numbers of stages, since most
    changes keep that."""
    known: dict[Solution, float] = {}

    def seconds(one: Solution) -> float:
        if one not in known:
            known[one] = roughly(cluster, job, _as_plan(one, job)) if _holds(problem, one) else math.inf
        return known[one]

    starts: dict[int, Solution] = {}
    for one in sorted(possible, key=lambda one: possible[one].expected):
        starts.setdefault(len(one.devices), one)
    found = [refined(problem, start, seconds) for start in list(starts.values())[:3]]
    return _possible(problem, found, cluster, job)


def _best(possible: Mapping[Solution, Estimate]) -> tuple[Estimate, Solution]:
    """The plan with the best expected time (``Estimate.expected``) among those nearly as fast as the fastest."""
    longest = _ROOM * min(found.step for found in possible.values())
    fast = [(found, one) for one, found in possible.items() if found.step <= longest]
    best = fast[0]
    for other in fast[1:]:
        # The order in which the user named the hosts may be intended, so only a clear gain justifies another one.
        if other[0].expected < _MIN_IMPROVEMENT * best[0].expected:
            best = other
    return best


def _spared(
    problem: Problem, best: tuple[Estimate, Solution], cluster: ClusterProfile, job: Job
) -> tuple[Estimate, Solution]:
    """The best plan, or one without devices far slower than the others if its step is at most ``_SPARED`` times as long.

    Such a device saves a few percent at most, but if it takes a third longer than measured, so does the step.
    """
    speeds = np.array([1 / max(sum(d.forward) + sum(d.backward), 1e-12) for d in cluster.devices])
    slow = sorted((n for n in best[1].devices if speeds[n] < _SLOW * speeds.mean()), key=lambda n: speeds[n])
    for count in sorted({len(slow), min(len(slow), 1)} - {0}, reverse=True):  # leave out all of them, or the slowest
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
    """The same stages with devices exchanged so that less state must move and a step takes hardly longer (``_ALIKE``). Tries
    all orders of a few devices; of many, the exchanges of two, one after another."""

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
    """A copy with items ``i`` and ``j`` exchanged."""
    found = list(items)
    found[i], found[j] = found[j], found[i]
    return found


def moving(cluster: ClusterProfile, plan: Plan, held: Layers) -> tuple[float, float]:
    """Seconds of moving layers' state to the devices that lack it: on the busiest link, and summed over all links.

    ``held``: for each rank, the layers of whose state it has a copy.
    """
    each = []
    for stage in plan.stages:
        for rank in stage.ranks:
            layers = [layer for layer in range(stage.start, stage.stop) if layer not in held[rank]]
            nbytes = sum(_STATES * cluster.outline.layers[layer].parameter_bytes for layer in layers)
            each.append(nbytes / cluster.host_link(rank))
    return max(each), sum(each)


def _alone(problem: Problem) -> list[Solution]:
    """All layers on the fastest device on which they fit, if there is one: the search knows nothing of links' latency, by
    which a single device may be faster than any cuts."""
    every = [Solution((n,), (0, problem.layers), ()) for n in range(problem.devices)]
    return sorted((one for one in every if cost(problem, one).fits), key=lambda one: cost(problem, one).step)[:1]


def _even_solution(problem: Problem) -> Solution:
    """Even cuts, with the codec of the fewest bits."""
    edges = (0, *even_cuts(problem.layers, problem.devices, problem.uncuttable), problem.layers)
    strongest = int(np.argmin(problem.bytes_per_value))
    return Solution(tuple(range(problem.devices)), edges, (strongest,) * (problem.devices - 1))


def _as_plan(solution: Solution, job: Job) -> Plan:
    """The plan of a solution. Its codecs stay what the job says: ``estimate`` chooses those that are "auto"."""
    return open_plan(job, solution.edges[-1], solution.edges[1:-1], solution.devices)


def even_plan(cluster: ClusterProfile, job: Job) -> Plan:
    """The plan with all devices in their order and layers divided evenly, except where layers must stay together."""
    layers = len(cluster.outline.layers)
    cuts = even_cuts(layers, len(cluster.devices), uncuttable(cluster.outline.shared, layers, job.parts_ties))
    return open_plan(job, layers, cuts)

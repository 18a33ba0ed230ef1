"""Finds plans in which groups of devices hold stages (Asteroid): which devices form a group, and what each group holds.

Every way to divide the devices into groups is a problem for the search for pipelines (``planning.search``), in which a group
is one device: as long as its members take for its micro-batches, dealt whole (``pipeline.deal``). Pure data parallelism (one
group of all) and a pure pipeline (groups of one) are its two ends. Divisions that differ only in devices of one kind count
once, and one that cannot beat the best so far is given up after a single search.
"""

import math
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain
from statistics import fmean
from typing import NamedTuple

from accept_mpi.data.calendar import micro_batches_of
from accept_mpi.job import Job
from accept_mpi.plan import Plan
from accept_mpi.planning.codec_choice import TOLERANCE, possible_sums
from accept_mpi.planning.divisions import Division, Group, divisions_of
from accept_mpi.planning.estimate import Estimate, estimate, fits, least_seconds, roughly
from accept_mpi.planning.group_problem import GroupProblems
from accept_mpi.planning.problem import NoPlan, Problem, Solution, cost, few_edges
from accept_mpi.planning.refinement import refined
from accept_mpi.planning.search import CLOSE, improve
from accept_mpi.profiling.cluster_profile import ClusterProfile

MOST_DEVICES = 12  # with more, no groups are tried
_MOST_ESTIMATED = 24  # divisions whose best plans are simulated
_MOST_CHOSEN = 8  # for how many of these codecs are chosen
_MUCH = 1e7  # divisions x layers x layers x codecs, above which all divisions are tried with cuts at few places first
_COARSE = 48  # runs of layers between these
_MOST_PROMISING = 8  # divisions that are then tried with cuts at all places
_ROUGHLY = 0.01  # relative distance from the best cuts at which the search at few places ends

Limits = tuple[float, float]
"""Seconds per step of interest: on links as measured, and on loaded ones."""


def hybrid_plans(cluster: ClusterProfile, job: Job, problems: Sequence[Sequence[Problem]], most: Limits) -> list[Estimate]:
    """Estimates of the most promising plans with groups that may stay below one of the limits, fastest first; with the
    mildest way of summing gradients whose best plan is nearly as fast as the fastest, if the job leaves that open.
    ``problems``: pairs of those of the devices alone, on links as measured and on loaded ones."""
    devices = len(cluster.devices)
    if not job.pipeline.groups or not 1 < devices <= MOST_DEVICES or micro_batches_of(job) < 2:
        return []
    if most[1] <= least_seconds(cluster, job):
        return []
    names, tried = possible_sums(job), [list(divisions_of(cluster, problem)) for problem, _ in problems]
    by_sums: dict[str, list[Estimate]] = {}
    promising: list[dict[Division, None]] = [{} for _ in problems]
    for name in dict.fromkeys([names[0], names[-1], *names]):  # other sums are tried where the mildest or strongest do well
        among = tried if name in (names[0], names[-1]) else promising
        found = _summed(cluster, job, name, problems, most, among, promising)
        if found:
            by_sums[name] = found
            # A way is chosen if it is the first within TOLERANCE of the fastest.
            share = 1.0 if name == names[0] else 1 + TOLERANCE
            most = min(most[0], share * found[0].step), min(most[1], share * found[0].loaded)
    longest = (1 + TOLERANCE) * min((found[0].expected for found in by_sums.values()), default=0.0)
    return next((by_sums[name] for name in names if name in by_sums and by_sums[name][0].expected <= longest), [])


def _summed(
    cluster: ClusterProfile, job: Job, sums: str, problems: Sequence[Sequence[Problem]], most: Limits,
    among: Sequence[Iterable[Division]], promising: Sequence[dict[Division, None]],
) -> list[Estimate]:  # fmt: skip
    """The same for gradients that are summed as ``sums`` says, with some divisions for each pair of problems. Adds the most
    promising of these to ``promising``."""
    simulations = _Simulations(cluster, job, fmean(most))
    for pair, tried, good in zip(problems, among, promising, strict=True):
        whole = GroupProblems(cluster, job, pair, sums)
        much = len(list(tried)) * pair[0].layers ** 2 * len(pair[0].bytes_per_value) > _MUCH
        coarse = GroupProblems(cluster, job, pair, sums, few_edges(pair[0], _COARSE)) if much else whole
        for load, problem in enumerate(pair):
            divisions = list(dict.fromkeys([*good, *tried]))  # the sooner one is good, the sooner others are given up
            reached = most[load] * 1.02 / problem.real_micro_batches  # seconds per micro-batch
            if much:
                # Where a pipeline fills and drains at each step, the shortest step is not that of the least bottleneck.
                count = _MOST_ESTIMATED if problem.fill else _MOST_PROMISING
                found = _solutions(coarse, load, divisions, 1.05 * reached, 1.1, _ROUGHLY)
                divisions = [one.division for one in _promising(found, count)]
            solutions = _promising(_solutions(whole, load, divisions, reached, 1.05), _MOST_ESTIMATED)
            good |= dict.fromkeys(one.division for one in solutions[:_MOST_CHOSEN])
            if problem.is_short:
                solutions += _alone(whole, load, divisions)
            within = [one for one in solutions if one.seconds * problem.real_micro_batches <= most[load]]
            simulations.run(whole, load, within, problem.is_short)
    return sorted(simulations.estimates.values(), key=lambda one: one.expected)


def _promising(found: Iterable["_Found"], count: int) -> list["_Found"]:
    """The most promising of what was found: those of the least bottlenecks and those of the shortest steps in turn."""
    both = sorted(found, key=lambda one: one.seconds), sorted(found, key=lambda one: one.step)
    return list(dict.fromkeys(chain.from_iterable(zip(*both, strict=True))))[:count]


class _Simulations:
    """Simulations of plans with groups, each of which is made once."""

    def __init__(self, cluster: ClusterProfile, job: Job, most: float) -> None:
        """``most``: seconds per step below which plans are of interest."""
        self._cluster, self._job, self._most = cluster, job, most
        self._rough: dict[Plan, float] = {}
        self.estimates: dict[Plan, Estimate] = {}
        """Those of the most promising plans that fit."""

    def run(self, maker: GroupProblems, load: int, promising: Iterable["_Found"], few: bool) -> None:
        """Find the most promising of these plans, with ``few`` micro-batches also what small changes to the best of them
        lead to, and estimate them."""

        def rough(division: Division, solution: Solution) -> float:
            plan = maker.plan(division, solution)
            if plan not in self._rough:
                self._rough[plan] = roughly(self._cluster, self._job, plan)
            return self._rough[plan]

        each = [(rough(one.division, one.solution), one.division, one.solution) for one in promising]
        each.sort(key=lambda one: one[0])
        if few and each and each[0][0] < math.inf:
            _, division, start = each[0]
            changed = refined(maker.problem(division, load), start, partial(rough, division))
            each.insert(0, (rough(division, changed), division, changed))
        for seconds, division, solution in each[:_MOST_CHOSEN]:
            plan = maker.plan(division, solution)
            if seconds > self._most or not plan.hybrid:  # with the milder codecs of an estimate a step takes no less
                continue
            found = self.estimates.get(plan) or estimate(self._cluster, self._job, plan)
            if fits(self._cluster, found):
                self.estimates[plan] = found
                self._most = min(self._most, found.expected)


class _Found(NamedTuple):
    """The best solution of a division."""

    seconds: float
    """Its bottleneck, per micro-batch."""
    step: float
    """``Cost.step``"""
    division: Division
    solution: Solution


def _solutions(
    maker: GroupProblems, load: int, divisions: Iterable[Division], reached: float, within: float, close: float = CLOSE
) -> list[_Found]:
    """Solutions of divisions that may come below ``reached`` seconds per micro-batch, and were ``within`` this multiple of
    the best before them. Those without a group are left out."""
    found: list[_Found] = []
    for division in divisions:
        virtual = maker.problem(division, load)
        try:
            solution = improve(virtual, reached, close)
        except NoPlan:
            continue
        if solution is None or not any(len(division[v]) > 1 for v in solution.devices):
            continue
        costs = cost(virtual, solution)
        found.append(_Found(costs.bottleneck, costs.step, division, solution))
        reached = min(reached, costs.bottleneck * within)
    return found


def _alone(maker: GroupProblems, load: int, divisions: Iterable[Division]) -> list[_Found]:
    """Each group of these divisions as the only stage, all other devices idle; the fastest first."""
    found: dict[Group, _Found] = {}
    for division in divisions:
        virtual = maker.problem(division, load)
        for v, group in enumerate(division):
            solution = Solution((v,), (0, virtual.layers), ())
            if len(group) > 1 and group not in found and (reached := cost(virtual, solution)).fits:
                found[group] = _Found(reached.bottleneck, reached.step, division, solution)
    return sorted(found.values(), key=lambda one: one.seconds)[:_MOST_ESTIMATED]

"""Finds plans in which groups of devices hold stages (Asteroid): which devices form a group, and what each group holds.

Every way to divide the devices into groups is a problem for the search for pipelines (``planning.search``), in which a group
is one device: as long as its members take for its micro-batches, dealt whole (``pipeline.deal``). Pure data parallelism (one
group of all) and a pure pipeline (groups of one) are its two ends. Divisions that differ only in devices of one kind count
once, and one that cannot beat the best so far is given up after a single search.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np

from accept_mpi.codecs.coding import bits_of
from accept_mpi.data.calendar import micro_batches_of
from accept_mpi.job import Job
from accept_mpi.models.losses import counts_known
from accept_mpi.pipeline.deal import early_sums, early_worth
from accept_mpi.pipeline.schedule import waits_for_sum
from accept_mpi.plan import Plan
from accept_mpi.planning.codec_choice import AUTO, EXACT, TOLERANCE, gradient_codec, possible_sums
from accept_mpi.planning.estimate import Estimate, estimate, fits, least_seconds, roughly
from accept_mpi.planning.forecast import sent_for_sum, sum_handling
from accept_mpi.planning.formulation import NEVER
from accept_mpi.planning.job_plan import open_plan
from accept_mpi.planning.problem import F64, NoPlan, Problem, Solution, cost, few_edges, prefix_sums
from accept_mpi.planning.refinement import refined
from accept_mpi.planning.search import improve
from accept_mpi.planning.ties import trained_in
from accept_mpi.profiling.cluster_profile import ClusterProfile

MOST_DEVICES = 12  # with more, no groups are tried
_MOST_DIVISIONS = 400  # divisions that are tried
_MOST_ESTIMATED = 24  # of the best found, how many are simulated
_MOST_CHOSEN = 8  # for how many of these that fit codecs are chosen
_MUCH = 1e7  # divisions x layers x layers x codecs, above which all divisions are tried with cuts at few places first
_COARSE = 48  # runs of layers between these
_MOST_PROMISING = 8  # divisions that are then tried with cuts at all places
_ALIKE = 0.08  # relative difference of times up to which two devices count as of one kind
_BACKWARD = 2 / 3  # part of forward and backward that the backward takes
_MOST_DEALT = 64  # micro-batches of which the deal is worked out exactly

Group = tuple[int, ...]
Division = tuple[Group, ...]


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
    names, tried = possible_sums(job), [list(_divisions(cluster, problem)) for problem, _ in problems]
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
    found: dict[Plan, Estimate] = {}
    for pair, tried, good in zip(problems, among, promising, strict=True):
        for problem, best in zip(pair, most, strict=True):
            maker, divisions = _Groups(cluster, job, problem, sums), list(tried)
            reached = best * 1.02 / problem.real_micro_batches  # seconds per micro-batch
            if len(divisions) * problem.layers**2 * len(problem.bytes_per_value) > _MUCH:
                coarse = _Groups(cluster, job, problem, sums, few_edges(problem, _COARSE))
                # Where a pipeline fills and drains at each step, the shortest step is not that of the least bottleneck.
                count = _MOST_ESTIMATED if problem.fill else _MOST_PROMISING
                divisions = [one.division for one in _solutions(coarse, divisions, 1.05 * reached, 1.1)[:count]]
            solutions = _solutions(maker, divisions, reached, 1.05)[:_MOST_ESTIMATED]
            good |= dict.fromkeys(one.division for one in solutions)
            few = problem.is_short
            _simulate(found, maker, solutions + (_alone(maker, divisions) if few else []), best, few)
    fitting = [one for one in found.values() if one.plan.hybrid and fits(cluster, one)]
    return sorted(fitting, key=lambda one: one.expected)


def _simulate(found: dict[Plan, Estimate], maker: "_Groups", promising: Iterable["_Found"], best: float, few: bool) -> None:
    """Add to ``found`` the estimates of those that may come below ``best`` seconds per step; with ``few`` micro-batches, of
    what small changes to the fastest lead to, too."""

    def seconds(division: Division, solution: Solution) -> float:
        plan = maker.plan(division, solution)
        if plan not in found:
            found[plan] = estimate(maker.cluster, maker.job, plan)
        return found[plan].expected if fits(maker.cluster, found[plan]) else math.inf

    def rough(one: _Found) -> float:
        return roughly(maker.cluster, maker.job, maker.plan(one.division, one.solution))

    reached: dict[_Found, float] = {}
    left = [one for one in promising if one.seconds * micro_batches_of(maker.job) <= best]  # simulated, it takes as long
    for one in sorted(left, key=rough) if len(left) > _MOST_CHOSEN else left:
        if one.seconds * micro_batches_of(maker.job) <= best and sum(map(math.isfinite, reached.values())) < _MOST_CHOSEN:
            reached[one] = seconds(one.division, one.solution)
            best = min(best, reached[one])
    if few and reached:
        fastest = min(reached, key=lambda one: reached[one])
        refined(maker.problem(fastest.division), fastest.solution, partial(seconds, fastest.division))


class _Found(NamedTuple):
    """The best solution of a division, and its seconds per micro-batch."""

    seconds: float
    division: Division
    solution: Solution


def _solutions(maker: "_Groups", divisions: Iterable[Division], reached: float, within: float) -> list[_Found]:
    """Solutions of divisions that may come below ``reached`` seconds per micro-batch, and were ``within`` this multiple of
    the best before them; the fastest first. Those without a group are left out."""
    found: list[_Found] = []
    for division in divisions:
        virtual = maker.problem(division)
        try:
            solution = improve(virtual, reached)
        except NoPlan:
            continue
        if solution is None or not any(len(division[v]) > 1 for v in solution.devices):
            continue
        seconds = cost(virtual, solution).bottleneck
        found.append(_Found(seconds, division, solution))
        reached = min(reached, seconds * within)
    return sorted(found, key=lambda one: one.seconds)


def _alone(maker: "_Groups", divisions: Iterable[Division]) -> list[_Found]:
    """Each group of these divisions as the only stage, all other devices idle; the fastest first."""
    found: dict[Group, _Found] = {}
    for division in divisions:
        virtual = maker.problem(division)
        for v, group in enumerate(division):
            solution = Solution((v,), (0, virtual.layers), ())
            if len(group) > 1 and group not in found and (reached := cost(virtual, solution)).fits:
                found[group] = _Found(reached.bottleneck, division, solution)
    return sorted(found.values(), key=lambda one: one.seconds)[:_MOST_ESTIMATED]


def _divisions(cluster: ClusterProfile, problem: Problem) -> Iterator[Division]:
    """Yield divisions of the devices into groups, at least one of several; those that differ only in devices of one kind
    count once. Of many unlike devices, only those into neighbours in speed, and those with one group."""
    kinds = _kinds(cluster, problem)
    order = sorted(range(problem.devices), key=lambda n: (float(np.minimum(problem.layer_seconds[n], NEVER).sum()), n))
    some = itertools.chain(_runs(order), _with_one_group(order))
    every = _partitions(order, kinds) if problem.devices <= 6 or len(set(kinds)) <= 2 else some
    seen: set[tuple[tuple[int, ...], ...]] = set()
    for division in every:
        looks = tuple(sorted(tuple(sorted(kinds[n] for n in group)) for group in division))
        if looks in seen or all(len(group) == 1 for group in division):
            continue
        seen.add(looks)
        yield division
        if len(seen) == _MOST_DIVISIONS:
            return


def _partitions(devices: Sequence[int], kinds: Sequence[int] = ()) -> Iterator[Division]:
    """Yield all ways to divide devices into groups. ``kinds``: a number for each device; of ways that differ only in devices
    of one kind most are left out, since of twelve there are four million."""
    if not devices:
        yield ()
        return
    first, rest = devices[0], devices[1:]
    for size in range(len(rest) + 1):
        seen: set[tuple[int, ...]] = set()
        for others in itertools.combinations(rest, size):
            looks = tuple(sorted(kinds[n] if kinds else n for n in others))
            if looks in seen:
                continue
            seen.add(looks)
            left = [n for n in rest if n not in others]
            for division in _partitions(left, kinds):
                yield ((first, *others), *division)


def _runs(devices: Sequence[int]) -> Iterator[Division]:
    """Yield all ways to divide devices into groups of neighbours."""
    for cuts in itertools.product((False, True), repeat=len(devices) - 1):
        edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), len(devices)]
        yield tuple(tuple(devices[a:b]) for a, b in itertools.pairwise(edges))


def _with_one_group(devices: Sequence[int]) -> Iterator[Division]:
    """Yield all divisions into one group and devices alone."""
    for size in range(2, len(devices)):
        for group in itertools.combinations(devices, size):
            yield (group, *((n,) for n in devices if n not in group))


def _kinds(cluster: ClusterProfile, problem: Problem) -> list[int]:
    """A number for each device, the same for those that can stand for each other."""
    firsts: list[int] = []
    found = []
    for n, device in enumerate(cluster.devices):
        for kind, first in enumerate(firsts):
            other = cluster.devices[first]
            both = (
                (float(problem.layer_seconds[n].sum()), float(problem.layer_seconds[first].sum())),
                (float(problem.host_link[n]), float(problem.host_link[first])),
                (device.memory, other.memory),
            )
            same = (device.data, device.alone) == (other.data, other.alone)
            if same and all(math.isclose(a, b, rel_tol=_ALIKE) for a, b in both):
                found.append(kind)
                break
        else:
            found.append(len(firsts))
            firsts.append(n)
    return found


def _ends(runs: F64, dealt: int) -> F64:
    """When members end with so many micro-batches, the next of which goes to whoever would end it first. ``runs`` (members,
    K): seconds of each member for one micro-batch, in K cases."""
    ends, cases = np.zeros_like(runs), np.arange(runs.shape[1])
    for _ in range(dealt):
        then = ends + runs
        member = then.argmin(axis=0)
        ends[member, cases] = then[member, cases]
    return ends


@dataclass(frozen=True)
class _Device:
    """A group as one device of a problem."""

    seconds: F64
    """(L,): per micro-batch, if micro-batches could be split at will."""
    extra: F64
    """(L+1, L+1): what layers i..j-1 take beyond that, since they are dealt whole and gradients are summed."""
    messages: F64 | None
    host_link: float
    capacity: float


class _Groups:
    """Makes problems in which groups are devices, and plans out of their solutions."""

    def __init__(
        self, cluster: ClusterProfile, job: Job, problem: Problem, sums: str, edges: Sequence[int] | None = None
    ) -> None:
        """``edges``: where stages may begin and end; None: anywhere."""
        self.cluster, self.job, self._sums = cluster, job, sums
        layers = cluster.outline.layers
        at = np.arange(len(layers) + 1) if edges is None else np.array(edges)
        self._problem = problem if edges is None else problem.coarse(edges)
        trained = trained_in(cluster.outline, 0, len(layers), job.parts_ties)
        self._gradients = prefix_sums(np.array(trained, float))[at]
        alone = [layer.alone for layer in layers]
        alone[-1] |= not counts_known(job.train.loss)
        self._alone = np.logical_or.reduceat(alone, at[:-1])
        self._made: dict[Group, _Device] = {}

    def problem(self, division: Division) -> Problem:
        """The problem in which each group of a division is a device."""
        base = self._problem
        groups = [self._device(group) for group in division]
        rate = np.array([[self._rate(a, b) for b in division] for a in division])
        np.fill_diagonal(rate, 1e15)
        return replace(
            base,
            layer_seconds=np.array([group.seconds for group in groups]),
            extra_seconds=np.array([group.extra for group in groups]),
            messages=None if base.messages is None else np.array([group.messages for group in groups]),
            host_link=np.array([group.host_link for group in groups]),
            rate=rate,
            capacity=np.array([group.capacity for group in groups]),
        )

    def plan(self, division: Division, solution: Solution) -> Plan:
        """The plan of a solution, with each device's pace in its group."""
        job = self.job
        groups = [division[v] for v in solution.devices]
        plan = open_plan(job, solution.edges[-1], solution.edges[1:-1], groups)
        stages = [
            msgspec.structs.replace(stage, paces=self._paces(stage.ranks, stage.start, stage.stop, solution.codecs, s))
            if len(stage.ranks) > 1
            else stage
            for s, stage in enumerate(plan.stages)
        ]
        gradients = self._sums if job.pipeline.gradients == AUTO else ""
        return msgspec.structs.replace(plan, stages=tuple(stages), gradients=gradients)

    def _paces(self, group: Group, start: int, stop: int, codecs: Sequence[int], s: int) -> tuple[float, ...]:
        """Seconds per micro-batch of each member for layers ``start`` to ``stop`` - 1 and their messages."""
        problem = self._problem
        found = problem.layer_seconds[list(group), start:stop].sum(axis=1)
        if problem.messages is not None:
            for boundary, layer in ((s - 1, start), (s, stop)):
                if 0 < layer < problem.layers:
                    found = found + problem.messages[list(group), layer, codecs[boundary]]
        return tuple(float(f"{seconds:.6g}") for seconds in np.maximum(found, 1e-9))

    def _rate(self, group: Group, other: Group) -> float:
        """Bytes/s from one group to another: each sender has its own link, and so has each receiver."""
        rate = self._problem.rate
        each = [float(np.mean([rate[a, b] for b in other])) for a in group]
        return min(sum(each), len(other) * max(each))

    def _device(self, group: Group) -> _Device:
        if group not in self._made:
            self._made[group] = self._as_device(group)
        return self._made[group]

    def _as_device(self, group: Group) -> _Device:
        problem, n = self._problem, self._problem.layers + 1
        if len(group) == 1:
            (one,) = group
            extra = np.zeros((n, n)) if problem.extra_seconds is None else problem.extra_seconds[one]
            messages = None if problem.messages is None else problem.messages[one]
            return _Device(
                problem.layer_seconds[one], extra, messages, float(problem.host_link[one]), float(problem.capacity[one])
            )
        members = list(group)
        never = self._alone | (problem.layer_seconds[members] >= NEVER).any(axis=0)  # what one must not get, no group gets
        never |= any(self.cluster.devices[n].alone for n in members)
        each = np.where(never, NEVER, problem.layer_seconds[members])
        seconds = np.where(never, NEVER, 1 / (1 / np.maximum(each, 1e-15)).sum(axis=0))
        before = np.concatenate([np.zeros((len(members), 1)), each.cumsum(axis=1)], axis=1)
        runs = np.maximum(before[:, None, :] - before[:, :, None], 0.0)  # (members, i, j): layers i..j-1
        gradients = np.maximum(self._gradients[None, :] - self._gradients[:, None], 0.0)
        whole = self._dealt(runs, gradients, members)
        prefix = np.concatenate([[0.0], seconds.cumsum()])
        extra = np.maximum(whole - np.maximum(prefix[None, :] - prefix[:, None], 0.0), 0.0)
        extra[np.tril_indices(n)] = 0.0
        messages = None
        if problem.messages is not None:
            messages = 1 / (1 / np.maximum(problem.messages[members], 1e-15)).sum(axis=0)
        links, rooms = problem.host_link[members], problem.capacity[members]
        return _Device(seconds, extra, messages, float(links.sum()), float(rooms.min()))

    def _after_backward(self, summing: F64, runs: F64, step: F64, shares_core: bool) -> F64:
        """The part of the seconds of sums (i, j) that is left when the last backward of layers i..j-1 ends, as
        ``Forecast.sum_seconds`` says; ``step``: seconds in which a step's micro-batches are computed."""
        backward = _BACKWARD * runs.max(axis=0)
        to_go = np.concatenate([np.zeros((len(backward), 1)), backward[:, :-1]], axis=1)  # when layer j-1 has gone back
        to_go[np.tril_indices(len(to_go))] = 0.0
        left = np.maximum.accumulate(summing - to_go, axis=1)
        pays = summing > early_worth(shares_core) * (summing + step)
        return np.where(pays, np.minimum(left, summing), summing)

    def _dealt(self, runs: F64, gradients: F64, members: Sequence[int]) -> F64:
        """Seconds per micro-batch of a group for layers i..j-1 (i, j): of its slowest member, with micro-batches dealt whole
        and gradients summed. ``runs`` (members, i, j): of one micro-batch on each member; ``gradients`` (i, j): bytes."""
        problem, devices = self._problem, self.cluster.devices
        count = int(problem.real_micro_batches)
        exact, codec = self._sums == EXACT, gradient_codec(self._sums)
        wire = gradients * bits_of(codec) / 32
        own = count / len(members)  # micro-batches of each member, roughly
        sent = sent_for_sum(wire, len(members), own, exact)
        contributions = 1.0 if exact else 1 / own
        runs = runs + np.array([sum_handling(devices[m], gradients, sent, contributions, codec) for m in members])
        dealt = min(count, _MOST_DEALT)
        ends = np.zeros_like(runs)
        upper = np.triu_indices(runs.shape[1], 1)
        ends[:, *upper] = _ends(runs[:, *upper], dealt)
        whole = ends.max(axis=0) / dealt
        pairs = [float(problem.rate[a, b]) for a, b in itertools.permutations(members, 2)]
        links = problem.host_link[members][:, None, None]
        parts = wire * (len(members) - 1) / len(members)
        summing = 2 * parts / min(*pairs, float(links.min()))
        # Where a sum is not waited for, each member takes one more micro-batch meanwhile; else it may begin in B.
        kind, last = self.job.pipeline.schedule, np.arange(len(self._gradients)) == len(self._gradients) - 1
        waits, early = (np.where(last, says(kind, True), says(kind, False)) for says in (waits_for_sum, early_sums))
        meanwhile = np.minimum(runs.max(axis=0), ends.max(axis=0))
        shares_core = any(devices[m].shared for m in members)
        at_once = np.where(early, self._after_backward(summing, runs, count * whole, shares_core), summing)
        summing = np.where(waits, at_once, np.maximum(0.0, summing - meanwhile))
        taken = ends / np.maximum(runs, 1e-15) * count / dealt
        busy = ((parts * (taken + 1) if exact else 2 * parts) / links).max(axis=0)  # ``summing`` included
        return np.maximum(whole + summing / count, busy / count)

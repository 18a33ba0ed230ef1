"""A group of devices as one device of the partitioner's problem: as long as its members take for its micro-batches, dealt
whole, and for the sum of their gradients."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec
import numpy as np

from accept_mpi.codecs.coding import bits_of
from accept_mpi.job import Job
from accept_mpi.models.losses import counts_known
from accept_mpi.pipeline.deal import early_sums, early_worth
from accept_mpi.pipeline.schedule import waits_for_sum
from accept_mpi.plan import Plan
from accept_mpi.planning.codec_choice import AUTO, EXACT, gradient_codec
from accept_mpi.planning.divisions import Division, Group
from accept_mpi.planning.forecast import sent_for_sum, sum_handling
from accept_mpi.planning.formulation import NEVER
from accept_mpi.planning.job_plan import open_plan
from accept_mpi.planning.problem import F64, Problem, Solution, prefix_sums
from accept_mpi.planning.ties import trained_in
from accept_mpi.profiling.cluster_profile import ClusterProfile

_BACKWARD = 2 / 3  # part of forward and backward that the backward takes
_MOST_DEALT = 64  # micro-batches of which the deal is worked out exactly


def _ends(runs: F64, dealt: int) -> F64:
    """When members end with so many micro-batches, the next of which goes to whoever would end it first. ``runs`` (members,
    K): seconds of each member for one micro-batch, in K cases."""
    each = np.maximum(runs, 1e-300)
    # All that end before the moment at which they would if micro-batches could be split are dealt, and few are left then.
    counts = np.floor(dealt / (1 / each).sum(axis=0) / each)
    left, cases = dealt - counts.sum(axis=0), np.arange(runs.shape[1])
    while (more := left > 0).any():
        member = ((counts + 1) * each).argmin(axis=0)
        counts[member, cases] += more
        left -= more
    return counts * runs


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


def _single(problem: Problem, n: int) -> _Device:
    """A device of the problem as a group of its own."""
    extra = np.zeros((problem.layers + 1,) * 2) if problem.extra_seconds is None else problem.extra_seconds[n]
    messages = None if problem.messages is None else problem.messages[n]
    return _Device(problem.layer_seconds[n], extra, messages, float(problem.host_link[n]), float(problem.capacity[n]))


class _Dealt(NamedTuple):
    """How long the members of a group take for layers i..j-1."""

    runs: F64
    """(members, i, j): seconds of each for a micro-batch, and what sums take of its computing core."""
    ends: F64
    """(members, i, j): when each ends with its share of ``dealt`` micro-batches."""
    dealt: int


class GroupProblems:
    """Makes problems in which groups are devices, and plans out of their solutions."""

    def __init__(
        self, cluster: ClusterProfile, job: Job, problems: Sequence[Problem], sums: str, edges: Sequence[int] | None = None
    ) -> None:
        """``problems``: those of the devices alone, one for each load of the links; ``sums``: how gradients are summed;
        ``edges``: where stages may begin and end; None: anywhere."""
        self._cluster, self._job, self._sums = cluster, job, sums
        layers = cluster.outline.layers
        at = np.arange(len(layers) + 1) if edges is None else np.array(edges)
        self._problems = [problem if edges is None else problem.coarse(edges) for problem in problems]
        trained = trained_in(cluster.outline, 0, len(layers), job.parts_ties)
        self._gradients = prefix_sums(np.array(trained, float))[at]
        alone = [layer.alone for layer in layers]
        alone[-1] |= not counts_known(job.train.loss)
        self._alone = np.logical_or.reduceat(alone, at[:-1])
        self._made: dict[Group, list[_Device]] = {}
        self._between: list[list[list[float]]] = [problem.rate.tolist() for problem in self._problems]
        self._rates: dict[tuple[int, Group, Group], float] = {}

    def problem(self, division: Division, load: int) -> Problem:
        """The problem in which each group of a division is a device, with links of one of the loads."""
        base = self._problems[load]
        groups = [self._devices(group)[load] for group in division]
        rate = np.array([[self._rate(load, a, b) for b in division] for a in division])
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
        job = self._job
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
        problem = self._problems[0]
        found = problem.layer_seconds[list(group), start:stop].sum(axis=1)
        if problem.messages is not None:
            for boundary, layer in ((s - 1, start), (s, stop)):
                if 0 < layer < problem.layers:
                    found = found + problem.messages[list(group), layer, codecs[boundary]]
        return tuple(float(f"{seconds:.6g}") for seconds in np.maximum(found, 1e-9))

    def _rate(self, load: int, group: Group, other: Group) -> float:
        """Bytes/s from one group to another: each sender has its own link, and so has each receiver."""
        if (load, group, other) not in self._rates:
            each = [math.fsum(self._between[load][a][b] for b in other) / len(other) for a in group]
            self._rates[load, group, other] = min(sum(each), len(other) * max(each))
        return self._rates[load, group, other]

    def _devices(self, group: Group) -> "list[_Device]":
        """A group as one device, with links of each load."""
        if group not in self._made:
            self._made[group] = self._as_devices(group) if len(group) > 1 else [_single(p, group[0]) for p in self._problems]
        return self._made[group]

    def _as_devices(self, group: Group) -> "list[_Device]":
        # What computing takes is the same in all problems.
        problem, members = self._problems[0], list(group)
        never = self._alone | (problem.layer_seconds[members] >= NEVER).any(axis=0)  # what one must not get, no group gets
        never |= any(self._cluster.devices[n].alone for n in members)
        each = np.where(never, NEVER, problem.layer_seconds[members])
        seconds = np.where(never, NEVER, 1 / (1 / np.maximum(each, 1e-15)).sum(axis=0))
        gradients = np.maximum(self._gradients[None, :] - self._gradients[:, None], 0.0)
        dealt = self._dealt(each, gradients, members)
        prefix = prefix_sums(seconds)
        alone = np.maximum(prefix[None, :] - prefix[:, None], 0.0)
        found = []
        for problem in self._problems:
            extra = np.triu(np.maximum(self._summed(problem, dealt, gradients, members) - alone, 0.0), 1)
            messages = None
            if problem.messages is not None:
                messages = 1 / (1 / np.maximum(problem.messages[members], 1e-15)).sum(axis=0)
            links, rooms = problem.host_link[members], problem.capacity[members]
            found.append(_Device(seconds, extra, messages, float(links.sum()), float(rooms.min())))
        return found

    def _on_wire(self, gradients: F64) -> F64:
        """Bytes of gradients as they are sent."""
        return gradients * bits_of(gradient_codec(self._sums)) / 32

    def _dealt(self, each: F64, gradients: F64, members: Sequence[int]) -> "_Dealt":
        """Micro-batches dealt whole to members that take so many seconds for ``each`` layer (members, L). ``gradients``
        (i, j): bytes of those of layers i..j-1."""
        before = prefix_sums(each)
        runs = np.maximum(before[:, None, :] - before[:, :, None], 0.0)
        count, exact = int(self._problems[0].real_micro_batches), self._sums == EXACT
        own = count / len(members)  # micro-batches of each member, roughly
        sent = sent_for_sum(self._on_wire(gradients), len(members), own, exact)
        how = sent, 1.0 if exact else 1 / own, gradient_codec(self._sums)
        runs = runs + np.array([sum_handling(self._cluster.devices[m], gradients, *how) for m in members])
        dealt = min(count, _MOST_DEALT)
        ends = np.zeros_like(runs)
        upper = np.triu_indices(runs.shape[1], 1)
        ends[:, *upper] = _ends(runs[:, *upper], dealt)
        return _Dealt(runs, ends, dealt)

    def _after_backward(self, summing: F64, runs: F64, step: F64, shares_core: bool) -> F64:
        """The part of the seconds of sums (i, j) that is left when the last backward of layers i..j-1 ends, as
        ``Forecast.sum_seconds`` says; ``step``: seconds in which a step's micro-batches are computed."""
        backward = _BACKWARD * runs.max(axis=0)
        to_go = np.concatenate([np.zeros((len(backward), 1)), backward[:, :-1]], axis=1)  # when layer j-1 has gone back
        to_go[np.tril_indices(len(to_go))] = 0.0
        left = np.maximum.accumulate(summing - to_go, axis=1)
        pays = summing > early_worth(shares_core) * (summing + step)
        return np.where(pays, np.minimum(left, summing), summing)

    def _summed(self, problem: Problem, dealt: "_Dealt", gradients: F64, members: Sequence[int]) -> F64:
        """Seconds per micro-batch of a group for layers i..j-1 (i, j): of its slowest member, with gradients summed."""
        count = problem.real_micro_batches
        whole = dealt.ends.max(axis=0) / dealt.dealt
        pairs = [float(problem.rate[a, b]) for a, b in itertools.permutations(members, 2)]
        links = problem.host_link[members][:, None, None]
        parts = self._on_wire(gradients) * (len(members) - 1) / len(members)
        summing = 2 * parts / min(*pairs, float(links.min()))
        # Where a sum is not waited for, each member takes one more micro-batch meanwhile; else it may begin in B.
        kind, last = self._job.pipeline.schedule, np.arange(len(self._gradients)) == len(self._gradients) - 1
        waits, early = (np.where(last, says(kind, True), says(kind, False)) for says in (waits_for_sum, early_sums))
        meanwhile = np.minimum(dealt.runs.max(axis=0), dealt.ends.max(axis=0))
        shares_core = any(self._cluster.devices[m].shared for m in members)
        at_once = np.where(early, self._after_backward(summing, dealt.runs, count * whole, shares_core), summing)
        summing = np.where(waits, at_once, np.maximum(0.0, summing - meanwhile))
        taken = dealt.ends / np.maximum(dealt.runs, 1e-15) * count / dealt.dealt
        busy = ((parts * (taken + 1) if self._sums == EXACT else 2 * parts) / links).max(axis=0)  # ``summing`` included
        return np.maximum(whole + summing / count, busy / count)

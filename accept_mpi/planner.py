"""From what devices have measured to a plan: which layers, on which devices, in which order, and what a step should take.

Pure: what is measured comes in (``Survey``), a plan and its forecast go out; ``train`` and the ``plan`` command share it.
"""

import contextlib
import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec
import numpy as np

from accept_mpi import config
from accept_mpi.batches import per_step
from accept_mpi.bits import AUTO, LINK_SHARE, Choice, choose, ladder
from accept_mpi.coding import Coding, parse
from accept_mpi.errors import UserError
from accept_mpi.forecast import Crossing, Direction, Forecast, Profile, bits_of
from accept_mpi.log import Rows
from accept_mpi.outline import LayerOutline
from accept_mpi.partition import NoPlan, Problem, Solution, cost, solve
from accept_mpi.plan import Codec, Plan, even_cuts, make_plan
from accept_mpi.replay import mean_times, rerun
from accept_mpi.schedule import Kind, depth
from accept_mpi.spread import spread
from accept_mpi.survey import Device, Survey

_WORTH = 0.98  # of the step before; measurements are no finer
_ROOM = 1.1  # times the fastest plan's step, at most, for room on links
_ALIKE = 0.9  # so far apart are devices of one kind, measured for a second or two: which is which need not cost a move
_SLOW = 1 / 4  # of the devices' mean speed: one that is slower has been measured worst, in a few rounds
_SPARED = 1.08  # times a step, at most, without such devices
_TRIED = 720  # orders of devices
_MOST_RUNS = 1e7  # of layers on devices, that have a cost of their own
_STATES = 3.0  # times a layer's parameters: what a layer that changes hands may consist of
_NEVER = 1e9  # seconds of a layer that a device must not get
_FILL = {"1f1b-async": 0.0, "1f1b": 1.0, "gpipe": 1.0, "zero-bubble": 1 / 3}  # ZB-H1: Qi et al. 2023, section 2.2
_OPTIMIZER_COPIES = {"sgd": 1, "adam": 2, "adamw": 2}


class Outcome(msgspec.Struct, frozen=True):
    """A plan, and what it should do."""

    plan: Plan
    step: float
    """Seconds."""
    loaded: float
    """Seconds of a step on links that carry ``LINK_SHARE`` of what they were measured to."""
    busy: list[float]
    """Share of a step that each stage computes."""
    computes: list[float]
    """Seconds a micro-batch of each stage."""
    choices: dict[Direction, Choice]
    memory: list[float]
    """Bytes that each stage needs."""

    @property
    def expected(self) -> float:
        """What plans of much the same step are compared by: seconds of a step between those on links as measured and those
        on loaded ones. Cuts that want a link nearly full wait whenever it wavers, or get a stronger codec."""
        return (self.step + self.loaded) / 2


def micro_batches_of(job: config.Job) -> int:
    """Of a whole batch."""
    return per_step(job.train.batch_size, job.train.micro_batches)


def problem_of(survey: Survey, job: config.Job, share: float = 1.0) -> tuple[Problem, list[str]]:
    """The partitioner's problem, and the names of its codecs. Links carry ``share`` of what they were measured to."""
    outline, devices = survey.outline, survey.devices
    count, layers = len(devices), len(outline.layers)
    seconds = np.array([np.add(d.forward, d.backward) + np.array(d.update) / micro_batches_of(job) for d in devices])
    for n, device in enumerate(devices):
        if device.shared:  # two messages a micro-batch less for a stage at an end (``_messages``)
            ends = seconds[n, [0, -1]]
            seconds[n, [0, -1]] = np.maximum(ends / 10, ends - 2 * device.message)
        if not device.data:
            seconds[n, [0, -1]] = _NEVER
    crossings = [outline.crossing(layer) for layer in range(layers)] + [(0, 0)]
    names, pairs = _codecs(job.pipeline)
    rate = np.array(survey.rate, float)
    np.fill_diagonal(rate, 1e15)
    needs = _Needs(job, count)
    return Problem(
        layer_seconds=seconds,
        extra_seconds=_messages(devices, layers),
        values=np.array([values for values, _ in crossings], float),
        other=np.array([other for _, other in crossings], float),
        rate=share * np.minimum(rate, 1e15),
        nic=share * np.array([min(survey.nic(n), 1e15) for n in range(count)]),
        codecs=tuple(names),
        bits=np.array([max(map(bits_of, pair)) / 8 for pair in pairs]),
        coding=np.array([[_handling(device, *pair) for pair in pairs] for device in devices]),
        state=np.array([needs.state(layer) for layer in outline.layers]),
        held=np.array([float(layer.held) for layer in outline.layers]),
        capacity=np.array([device.memory for device in devices], float),
        kept=needs.kept,
        copies=needs.copies,
        micro_batches=float(micro_batches_of(job)) if job.pipeline.schedule != "1f1b-async" else 1e9,
        fill=_FILL[job.pipeline.schedule],
    ), names


def _messages(devices: Sequence[Device], layers: int) -> np.ndarray | None:
    """(devices, layers + 1, layers + 1): seconds that the four messages of a stage between two others take from its device's
    computing core each micro-batch. None where none do, or runs of layers are too many to list."""
    each = np.array([4 * device.message if device.shared else 0.0 for device in devices])
    if not each.any() or len(devices) * (layers + 1) ** 2 >= _MOST_RUNS:
        return None
    return each[:, None, None] * np.triu(np.ones((layers + 1, layers + 1)), 1)


def _codecs(pipeline: config.Pipeline) -> tuple[list[str], list[tuple[str, str]]]:
    """What the partitioner chooses from for each boundary: names, and (forward, backward) of each."""
    if not isinstance(pipeline.forward, str) or not isinstance(pipeline.backward, str):
        raise UserError('pipeline.forward and backward: a list has one codec a boundary, which cuts = "auto" may change')
    options = list(ladder(pipeline.min_bits))
    forward, backward = (options if name == AUTO else [name] for name in (pipeline.forward, pipeline.backward))
    length = max(len(forward), len(backward))
    pairs = [(forward[min(k, len(forward) - 1)], backward[min(k, len(backward) - 1)]) for k in range(length)]
    return ["/".join(dict.fromkeys(pair)) for pair in pairs], pairs


def _handling(device: Device, forward: str, backward: str) -> float:
    """Seconds that a boundary takes from a device's computing core for each value: one message out, another in."""
    if not device.shared:
        return 0.0
    coding = sum(costs[name] for costs in (device.encode, device.decode) for name in (forward, backward)) / 2
    return coding + (bits_of(forward) + bits_of(backward)) / 8 * device.byte


class _Needs:
    """Memory of a stage, by how many stages are behind it."""

    def __init__(self, job: config.Job, stages: int) -> None:
        kind, slack = job.pipeline.schedule, job.pipeline.transfer_slack
        self._optimizer = _OPTIMIZER_COPIES[job.train.optimizer.name]
        if job.train.optimizer.name == "sgd" and not job.train.optimizer.momentum:
            self._optimizer = 0
        many = 1 << 20 if kind == "1f1b-async" else micro_batches_of(job)
        # A stage with so many behind it is the first of a pipeline of one more; zero-bubble holds most in the longest.
        self.kept = np.array(
            [depth(kind, stages - 1 - behind, stages, many, slack) if kind == "zero-bubble"
             else depth(kind, 0, behind + 1, many, slack) for behind in range(stages)], float
        )  # fmt: skip
        weights = np.ones(stages)
        if kind == "1f1b-async":  # the optimizer's own, and a version for every update that happens while one is in flight
            versions = np.full(stages, self.kept.max()) if job.pipeline.vertical_sync else self.kept
            weights = 2 + np.ceil(versions / micro_batches_of(job))
        whole = 2 + self._optimizer
        self.copies = (weights + 1 + self._optimizer) / whole

    def state(self, layer: LayerOutline) -> float:
        """Bytes of a layer's weights, gradients and optimizer, one version. What is frozen has weights alone."""
        trained = layer.parameter_bytes - layer.frozen_bytes
        return (2 + self._optimizer) * trained + layer.frozen_bytes + layer.buffer_bytes


Layers = Sequence[Collection[int]]
"""Layers whose state each device has."""


def plan_for(survey: Survey, job: config.Job, held: Layers = ()) -> Outcome:
    """The plan that trains fastest. Raises UserError where none fits. ``held``: in mid-run; among devices that do as well in
    each other's place, those take layers that have most of them."""
    return plans_for(survey, job, held)[0]


def plans_for(survey: Survey, job: config.Job, held: Layers = ()) -> tuple[Outcome, Outcome]:
    """The plan that trains fastest, and even cuts, whether they fit or not. Raises UserError where no plan fits."""
    problem, loaded = (problem_of(survey, job, share)[0] for share in (1.0, LINK_SHARE))
    candidates: list[Solution] = []
    why = ""
    for one, ordered in itertools.product((loaded, problem), (True, False)):
        try:  # of many devices in any order a search may miss plans that there are
            candidates.append(spread(one, solve(one, ordered)))
        except NoPlan as error:
            why = str(error)
    even = outcome(survey, job, even_plan(survey, job))
    if problem.devices <= problem.layers:
        candidates.append(_even_solution(problem))
    possible: list[tuple[Outcome, Solution]] = []
    for candidate in candidates:
        reached = cost(problem, candidate)
        if reached.fits and reached.bottleneck < _NEVER:
            plan = _as_plan(candidate, job)
            possible.append((even if plan == even.plan else outcome(survey, job, plan), candidate))
    if not possible:
        have = ", ".join(device.host for device in survey.devices if device.data)
        if why:
            raise UserError(f"pipeline.cuts: {why}")
        if not have:
            raise UserError("data.name: first and last stage need the data, and no device that is there has it")
        raise UserError(
            f"data.name: first and last stage need the data, only {have} has it, and the model does not fit there"
        )
    longest = _ROOM * min(found.step for found, _ in possible)
    fast = [one for one in possible if one[0].step <= longest]
    best = fast[0]
    for other in fast[1:]:
        # The order that the user gave the hosts in may mean something; another one must be worth it.
        if other[0].expected < _WORTH * best[0].expected:
            best = other
    best = _spared(problem, best, survey, job)
    if held and (near := _nearest(problem, best[1], survey, job, held)) != best[1]:
        found = outcome(survey, job, _as_plan(near, job))
        if _ALIKE * found.expected <= best[0].expected:
            return found, even
    return best[0], even


def _spared(problem: Problem, best: tuple[Outcome, Solution], survey: Survey, job: config.Job) -> tuple[Outcome, Solution]:
    """The best plan, or one without devices far slower than the others that is as good but for what these could save at
    most: a few percent, while a third more than was measured would make the step a third longer."""
    speeds = np.array([1 / max(sum(d.forward) + sum(d.backward), 1e-12) for d in survey.devices])
    slow = sorted((n for n in best[1].devices if speeds[n] < _SLOW * speeds.mean()), key=lambda n: speeds[n])
    for count in sorted({len(slow), min(len(slow), 1)} - {0}, reverse=True):  # all of them, or the slowest
        left = [n for n in range(problem.devices) if n not in slow[:count]]
        found: list[tuple[Outcome, Solution]] = []
        for ordered in (True, False):
            with contextlib.suppress(NoPlan):
                others = problem.take(left)
                solution = spread(others, solve(others, ordered))
                solution = replace(solution, devices=tuple(left[n] for n in solution.devices))
                if cost(problem, solution).bottleneck < _NEVER:
                    found.append((outcome(survey, job, _as_plan(solution, job)), solution))
        without = min(found, key=lambda one: one[0].expected, default=best)
        if without is not best and without[0].expected <= _SPARED * best[0].expected:
            return without
    return best


def _nearest(problem: Problem, solution: Solution, survey: Survey, job: config.Job, held: Layers) -> Solution:
    """The same stages, with devices in each other's place wherever less must move then and a step takes hardly longer: all
    orders of a few devices, else exchange by exchange."""

    def moves(devices: Sequence[int]) -> tuple[float, float]:
        return moving(survey, _as_plan(replace(solution, devices=tuple(devices)), job), held)

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


def moving(survey: Survey, plan: Plan, held: Layers) -> tuple[float, float]:
    """Seconds in which layers' states get to the devices that do not have them: on the busiest link, and on all together."""
    each = []
    for stage in plan.stages:
        rank = stage.ranks[0]
        layers = [layer for layer in range(stage.start, stage.stop) if layer not in held[rank]]
        nbytes = sum(_STATES * survey.outline.layers[layer].parameter_bytes for layer in layers)
        each.append(nbytes / survey.nic(rank))
    return max(each), sum(each)


def settled(found: Outcome) -> Plan:
    """Its plan with the codecs that it has chosen wherever the job leaves them open."""
    codecs = []
    for boundary, codec in enumerate(found.plan.boundaries):
        chosen = {way: found.choices[boundary, way].name for way in "FB"}
        forward = chosen["F"] if codec.forward == AUTO else codec.forward
        codecs.append(Codec(forward=forward, backward=chosen["B"] if codec.backward == AUTO else codec.backward))
    return Plan(stages=found.plan.stages, boundaries=tuple(codecs))


def _even_solution(problem: Problem) -> Solution:
    """Even cuts with the codec that has fewest bits."""
    edges = (0, *even_cuts(problem.layers, problem.devices), problem.layers)
    strongest = int(np.argmin(problem.bits))
    return Solution(tuple(range(problem.devices)), edges, (strongest,) * (problem.devices - 1))


def _as_plan(solution: Solution, job: config.Job) -> Plan:
    """Codecs stay what the job says: which of an "auto" it is, is settled when stages have measured themselves."""
    codec = Codec(forward=str(job.pipeline.forward), backward=str(job.pipeline.backward))
    cuts = solution.edges[1:-1]
    return make_plan(solution.edges[-1], list(cuts), [codec] * len(cuts), list(solution.devices))


def even_plan(survey: Survey, job: config.Job) -> Plan:
    """All devices in their order, the same number of layers each."""
    layers, count = len(survey.outline.layers), min(len(survey.devices), len(survey.outline.layers))
    codec = Codec(forward=str(job.pipeline.forward), backward=str(job.pipeline.backward))
    return make_plan(layers, even_cuts(layers, count), [codec] * (count - 1))


def outcome(survey: Survey, job: config.Job, plan: Plan) -> Outcome:
    """What a plan should do."""
    forecast = forecast_of(survey, job, plan)
    fixed = {crossing: name for crossing, name in plan.codecs.items() if name != AUTO}
    choices, _ = choose(forecast, fixed, job.pipeline.min_bits)
    codecs = {crossing: choice.name for crossing, choice in choices.items()}
    step, busy = forecast.steady(codecs)
    loaded, _ = forecast.with_links(LINK_SHARE).steady(codecs)
    computes = [
        profile.forward + profile.backward + sum(forecast.handling(s, way, codecs) for way in "FB")
        for s, profile in enumerate(forecast.profiles)
    ]
    return Outcome(plan, step, loaded, busy, computes, choices, _memory(survey, job, plan))


def forecast_of(survey: Survey, job: config.Job, plan: Plan) -> Forecast:
    """The simulator on a plan's stages and boundaries."""
    kind: Kind = job.pipeline.schedule
    profiles = []
    for stage in plan.stages:
        device, mine = survey.devices[stage.ranks[0]], slice(stage.start, stage.stop)
        profiles.append(
            Profile(
                forward=sum(device.forward[mine]),
                backward=sum(device.backward[mine]),
                encode=device.encode,
                decode=device.decode,
                byte=device.byte,
                message=device.message,
                shared=device.shared,
                weights=sum(device.weights[mine]),
                update=sum(device.update[mine]),
            )
        )
    return Forecast(kind, micro_batches_of(job), job.pipeline.transfer_slack, profiles, _crossings(survey, plan))


class Replayed(NamedTuple):
    """Seconds of a step in the middle of a run."""

    measured: float
    simulated: float
    """With every action as long as it was."""
    with_means: float
    """With each stage's mean times."""


def replayed(survey: Survey, job: config.Job, plan: Plan, trace: Rows) -> Replayed:
    """What the simulator makes of a run, with the computing that its trace holds, on the links of the survey: whatever the
    devices' speeds were foreseen to be. Raises UserError where the trace holds fewer than three finished steps."""
    foreseen = forecast_of(survey, job, plan)
    run = rerun(trace, lambda boundary, way: foreseen.message((boundary, way), plan.codecs[boundary, way]))
    if run is None:
        raise UserError("the trace holds fewer than three finished steps")
    profiles = [
        Profile(
            forward=took["F"],
            backward=took["B"] + took.get("W", 0.0),
            encode=profile.encode,
            decode=profile.decode,
            weights=took.get("W", 0.0),
            update=took["U"],
        )
        for took, profile in zip(mean_times(trace), foreseen.profiles, strict=True)
    ]
    forecast = Forecast(
        job.pipeline.schedule, micro_batches_of(job), job.pipeline.transfer_slack, profiles, foreseen.crossings
    )
    return Replayed(run.took / run.steps, run.seconds / run.steps, forecast.steady(plan.codecs)[0])


def _crossings(survey: Survey, plan: Plan) -> dict[Direction, Crossing]:
    """Traffic of all boundaries. A device's own link is shared by what it sends ahead and back, in proportion."""
    ranks = [stage.ranks[0] for stage in plan.stages]
    starts = [stage.start for stage in plan.stages[1:]]
    sizes = {"F": list(map(survey.outline.crossing, starts)), "B": list(map(survey.outline.returning, starts))}
    weights = {way: [4 * values + other for values, other in both] for way, both in sizes.items()}
    found = {}
    for boundary, (a, b) in enumerate(itertools.pairwise(ranks)):
        for way, (source, target, beside) in {"F": (a, b, boundary - 1), "B": (b, a, boundary + 1)}.items():
            # The sender's other boundary carries traffic the other way round, and so does the receiver's.
            other_side = boundary + 1 if way == "F" else boundary - 1
            rate, weight = survey.rate[source][target], weights[way]
            for host, neighbour in ((source, beside), (target, other_side)):
                if 0 <= neighbour < len(weight):
                    share = weight[boundary] / max(1.0, weight[boundary] + weight[neighbour])
                    rate = min(rate, survey.nic(host) * share)
            found[boundary, way] = Crossing(*sizes[way][boundary], max(rate, 1.0), survey.latency[source][target])
    return found


def _memory(survey: Survey, job: config.Job, plan: Plan) -> list[float]:
    needs = _Needs(job, len(plan.stages))
    rows = []
    for s, stage in enumerate(plan.stages):
        layers = survey.outline.layers[stage.start : stage.stop]
        behind = len(plan.stages) - 1 - s
        state = sum(needs.state(layer) for layer in layers)
        held = sum(layer.held for layer in layers)
        rows.append(float(needs.copies[behind] * state + needs.kept[behind] * held))
    return rows


def codings_of(job: config.Job) -> dict[str, Coding]:
    """All codecs that a plan for this job may use, by name."""
    _, pairs = _codecs(job.pipeline)
    return {name: parse(name, False) for pair in pairs for name in pair} | {"none": Coding()}

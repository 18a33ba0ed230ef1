"""Chooses a codec for each boundary where the job says "auto": the mildest one that hides its transfer behind computing.

The simulator decides that, with measured compute times and link rates and the schedule's own action lists. A codec is mild
enough if a step takes at most ``TOLERANCE`` longer than with the fastest codecs. In an asynchronous schedule a step in the
middle of a run counts, since the pipeline fills once in many steps. Links are assumed to carry ``LINK_SHARE`` of their
measured rates, because a nearly full link delays computing as soon as anything wavers.

In the steady state a transfer shorter than a stage's computing is hidden, but each step of a synchronous schedule also
begins and ends with transfers that nothing hides; the simulator counts both. If the data plane has no core of its own, a
stage's time includes what its messages cost, so that coding may pay even on a fast link.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import msgspec

from accept_mpi.codecs.coding import Coding, parse
from accept_mpi.direction import Crossing, Direction
from accept_mpi.errors import UserError
from accept_mpi.job import Job, Pipeline
from accept_mpi.plan import Plan
from accept_mpi.planning.forecast import Forecast

AUTO, EXACT = "auto", "exact"
TOLERANCE = 0.02
"""Share of a step that milder codecs may cost."""
LINK_SHARE = 0.6
"""Share of their measured rates that links are assumed to carry."""
_MANY = 64  # with more crossings than this, all that are free get the same codec

# Codecs and their bits per value, from the mildest to the strongest. Entropy codes take many times the CPU time of others,
# and seconds to compile, so a job must ask for them. Those with a basis are for activations.
_LADDER = (("none", 32), ("bf16", 16), ("uniform:8", 8), ("uniform:6", 6), ("entropy:4.5+basis", 4.5), ("entropy:4.5", 4.5),
           ("uniform:4", 4), ("entropy:3.5+basis", 3.5), ("entropy:3.5", 3.5), ("uniform:3", 3),
           ("entropy:2.5+basis", 2.5), ("entropy:2.5", 2.5), ("uniform:2", 2), ("mbq:1", 1))  # fmt: skip
# The same for sums of gradients: fewer bits leave out so much that most of a sum would be what earlier ones left.
_SUMS = (("none", 32), ("bf16", 16), ("uniform:8", 8), ("uniform:4", 4))


class Choice(msgspec.Struct, frozen=True):
    """The codec of one boundary and direction, and the times that speak for it."""

    name: str
    seconds: float
    """Seconds per message, coding included, while the link also carries its other traffic."""
    uncoded: float
    """Seconds that the same message would take uncoded."""


def ladder(floor: int, entropy: bool = False) -> dict[str, Coding]:
    """The codecs to choose from, by name, from the mildest to the strongest with at least ``floor`` bits per value.
    ``entropy``: among them entropy codes."""
    found = {name: parse(name, False) for name, bits in _LADDER if bits >= floor}
    return {name: coding for name, coding in found.items() if entropy or coding.kind != "entropy"}


def ladder_of(pipeline: Pipeline) -> dict[str, Coding]:
    """The codecs from which "auto" chooses in a job."""
    return ladder(pipeline.min_bits, pipeline.entropy)


def way_of(name: str, way: Direction) -> str:
    """The codec of a ladder as it is for one direction: gradients have no basis."""
    return name if way is Direction.FORWARD else name.removesuffix("+basis")


def choose(forecast: Forecast, fixed: dict[Crossing, str], names: Sequence[str]) -> tuple[dict[Crossing, Choice], float]:
    """Codecs for all crossings, and the seconds that a step should take with them.

    ``fixed``: codecs that the job names; ``names``: those to choose from, from the mildest to the strongest. The forecast's
    profiles must have times for all of them.
    """
    if len(forecast.crossings) > _MANY:
        return _choose_alike(forecast, fixed, names)
    real, forecast = forecast, forecast.with_links(LINK_SHARE)
    free = [crossing for crossing in forecast.crossings if crossing not in fixed]
    every = {c: list(dict.fromkeys(way_of(name, c[1]) for name in names)) for c in free}
    chosen = quickest(forecast, fixed, names)
    best = forecast.step(chosen)
    for crossing in free:
        # On fast links the time of the core decides, and with it the bytes to move and the values to code.
        for name in every[crossing]:
            if (found := forecast.step(chosen | {crossing: name})) < best:
                best, chosen[crossing] = found, name
    limit = best * (1 + TOLERANCE)
    # Make codecs milder one step at a time, at one crossing after another, so that all of them share the slack.
    moved = True
    while moved:
        moved = False
        for crossing in free:
            index = every[crossing].index(chosen[crossing])
            for milder in reversed(every[crossing][:index]):
                if forecast.step(chosen | {crossing: milder}) <= limit:
                    chosen[crossing] = milder
                    moved = True
                    break
    return _choices(real, chosen), real.step(chosen)


def quickest(forecast: Forecast, fixed: Mapping[Crossing, str], names: Sequence[str]) -> dict[Crossing, str]:
    """Codecs for all crossings, by which a message takes least time if nothing else is sent; the rest as in ``choose``."""
    found = dict(fixed)
    for crossing in forecast.crossings:
        if crossing not in fixed:
            every = dict.fromkeys(way_of(name, crossing[1]) for name in names)
            found[crossing] = min(every, key=partial(forecast.message, crossing))
    return found


def _choose_alike(
    forecast: Forecast, fixed: dict[Crossing, str], names: Sequence[str]
) -> tuple[dict[Crossing, Choice], float]:
    """Choose one codec for all free crossings: the mildest that is within ``TOLERANCE`` of the best."""
    loaded = forecast.with_links(LINK_SHARE)
    each = {name: {c: fixed.get(c, way_of(name, c[1])) for c in forecast.crossings} for name in names}
    steps = {name: loaded.step(codecs) for name, codecs in each.items()}
    best = min(steps.values())
    chosen = each[next(name for name in names if steps[name] <= best * (1 + TOLERANCE))]
    return _choices(forecast, chosen), forecast.step(chosen)


def _choices(forecast: Forecast, chosen: dict[Crossing, str]) -> dict[Crossing, Choice]:
    """The chosen codecs with their times."""
    return {
        c: Choice(name, forecast.message(c, name, chosen), forecast.message(c, "none", chosen)) for c, name in chosen.items()
    }


def check_codecs(pipeline: Pipeline) -> None:
    """Raise UserError for a codec of a job that does not exist, or a list of them with cuts that are not given for good."""
    others = 'cuts = "auto" chooses' if pipeline.cuts == "auto" else "pipeline.adapt changes" if pipeline.adapt else ""
    for key, asked, gradients in (("forward", pipeline.forward, False), ("backward", pipeline.backward, True)):
        if others and not isinstance(asked, str):
            raise UserError(f"pipeline.{key}: a list has one codec per boundary, and {others} the boundaries")
        for name in [asked] if isinstance(asked, str) else asked:
            try:
                parse("none" if name == AUTO else name, gradients)
            except ValueError as error:
                raise UserError(f"pipeline.{key}: {error}") from error
    if pipeline.gradients != AUTO:
        gradient_codec(pipeline.gradients)


def sums_of(job: Job, plan: Plan | None = None) -> str:
    """How groups sum their gradients in a plan: "exact" or a codec. Where the job says "auto" and the plan nothing,
    "exact"."""
    name = (plan.gradients if plan else "") or job.pipeline.gradients
    return EXACT if name == AUTO else name


def gradient_codec(name: str) -> str:
    """Codec of gradients within a group that sums them as ``name`` says; "none" also for exact sums. Raises UserError for
    one that does not exist."""
    if name == EXACT:
        return "none"
    try:
        coding = parse(name, False)
    except ValueError as error:
        raise UserError(f'pipeline.gradients: {error}, "{EXACT}" or "{AUTO}"') from error
    if coding.basis:
        raise UserError(f'pipeline.gradients: codec "{name}": a basis is for activations')
    if coding.stochastic:  # all ranks must know what the others decode
        raise UserError(
            f'pipeline.gradients: "{name}" rounds at random, but what coding leaves out is carried over: no "+sr"'
        )
    return name


def possible_sums(job: Job) -> list[str]:
    """The ways to sum gradients among which a plan for this job may choose, from the mildest to the strongest."""
    if job.pipeline.gradients != AUTO:
        return [sums_of(job)]
    return [EXACT, *(name for name, bits in _SUMS if bits >= job.pipeline.min_bits)]


def codings_of(job: Job) -> dict[str, Coding]:
    """All codecs that a plan for this job may use, by name."""
    _, pairs = codec_pairs(job.pipeline)
    names = [*(name for pair in pairs for name in pair), *map(gradient_codec, possible_sums(job))]
    return {name: parse(name, False) for name in dict.fromkeys(names)} | {"none": Coding()}


def codec_pairs(pipeline: Pipeline) -> tuple[list[str], list[tuple[str, str]]]:
    """Options of the partitioner for each boundary: their names, and (forward, backward) codecs of each.

    Raises UserError if the job lists codecs by boundary.
    """
    if not isinstance(pipeline.forward, str) or not isinstance(pipeline.backward, str):
        raise UserError('pipeline.forward and backward: a list has one codec per boundary, which cuts = "auto" may change')
    options = list(ladder_of(pipeline))
    forward, backward = (
        [way_of(option, way) for option in options] if name == AUTO else [name]
        for way, name in zip(Direction, (pipeline.forward, pipeline.backward), strict=True)
    )
    length = max(len(forward), len(backward))
    pairs = [(forward[min(k, len(forward) - 1)], backward[min(k, len(backward) - 1)]) for k in range(length)]
    return ["/".join(dict.fromkeys(pair)) for pair in pairs], pairs


def codings(job: Job, plan: Plan) -> dict[str, Coding]:
    """All codecs that a run with this plan may use, by name."""
    names = {name for codec in plan.boundaries for name in (codec.forward, codec.backward)} - {AUTO}
    names |= {gradient_codec(sums_of(job, plan))}
    found = {name: parse(name, False) for name in sorted(names)}
    return found | ladder_of(job.pipeline) if is_open(plan) else found


def is_open(plan: Plan) -> bool:
    """True if the plan leaves a codec to be chosen."""
    return any(AUTO in (codec.forward, codec.backward) for codec in plan.boundaries)

"""Which codec each boundary uses where the job says "auto": the mildest that hides its transfer behind computing.

"Hides" is decided by the simulator, on measured compute times and link rates, over the schedule's own action lists: a
choice is as good as hidden where a step takes at most ``TOLERANCE`` longer than with the strongest codecs allowed
everywhere (an asynchronous schedule's in the middle of a run: it fills once in many steps), on links that carry
``LINK_SHARE`` of what they were measured to: a link that is nearly full delays what computing waits for as soon as anything
wavers. (A transfer that is shorter than a stage computes is hidden in the steady state, but a synchronous schedule's steps
also begin and end with transfers that nothing hides; the simulator counts both. Where the data plane has no core of its
own, a stage's time holds what its messages cost: a byte that need not be moved is worth coding even on a fast link.)
"""

import msgspec

from accept_mpi.codecs.coding import Coding, parse
from accept_mpi.errors import UserError
from accept_mpi.job import Job, Pipeline
from accept_mpi.plan import Plan
from accept_mpi.planning.forecast import Crossing, Forecast

AUTO = "auto"
TOLERANCE = 0.02
LINK_SHARE = 0.6
_MANY = 64  # crossings from which on all get the same codec

# From the mildest to the strongest, and the bits of each.
_LADDER = (("none", 32), ("bf16", 16), ("uniform:8", 8), ("uniform:6", 6), ("uniform:4", 4), ("uniform:3", 3),
           ("uniform:2", 2), ("mbq:1", 1))  # fmt: skip


class Choice(msgspec.Struct, frozen=True):
    """A codec for one boundary and direction, and why."""

    name: str
    seconds: float
    """A message takes this long, coding included, beside what else the link carries."""
    uncoded: float
    """It would take this long as it is, beside the same."""


def ladder(floor: int) -> dict[str, Coding]:
    """The codecs to choose from, from the mildest on; none with fewer than ``floor`` bits."""
    return {name: parse(name, False) for name, bits in _LADDER if bits >= floor}


def choose(forecast: Forecast, fixed: dict[Crossing, str], floor: int) -> tuple[dict[Crossing, Choice], float]:
    """Codecs for all crossings, and the seconds that a step should take with them.

    ``fixed``: those that the job names. Profiles must know them and the ladder's.
    """
    names = list(ladder(floor))
    if len(forecast.crossings) > _MANY:
        return _choose_alike(forecast, fixed, names)
    real, forecast = forecast, forecast.with_links(LINK_SHARE)
    free = [crossing for crossing in forecast.crossings if crossing not in fixed]
    fastest = {c: min(names, key=lambda name, c=c: forecast.message(c, name)) for c in free}  # type: ignore[misc]
    chosen = {**fixed, **fastest}
    best = forecast.step(chosen)
    for crossing in free:
        # Where links are fast, what counts is the time of the core: bytes to move, values to code.
        for name in names:
            if (found := forecast.step(chosen | {crossing: name})) < best:
                best, chosen[crossing] = found, name
    limit = best * (1 + TOLERANCE)
    # Milder and milder, everywhere in turn, so that all boundaries share what there is to give.
    moved = True
    while moved:
        moved = False
        for crossing in free:
            index = names.index(chosen[crossing])
            for milder in reversed(names[:index]):
                if forecast.step(chosen | {crossing: milder}) <= limit:
                    chosen[crossing] = milder
                    moved = True
                    break
    return _choices(real, chosen), real.step(chosen)


def _choose_alike(forecast: Forecast, fixed: dict[Crossing, str], names: list[str]) -> tuple[dict[Crossing, Choice], float]:
    """One codec for all that is free: the mildest that is as good as the best."""
    loaded = forecast.with_links(LINK_SHARE)
    steps = {name: loaded.step({c: fixed.get(c, name) for c in forecast.crossings}) for name in names}
    best = min(steps.values())
    name = next(name for name in names if steps[name] <= best * (1 + TOLERANCE))
    chosen = {c: fixed.get(c, name) for c in forecast.crossings}
    return _choices(forecast, chosen), forecast.step(chosen)


def _choices(forecast: Forecast, chosen: dict[Crossing, str]) -> dict[Crossing, Choice]:
    return {
        c: Choice(name, forecast.message(c, name, chosen), forecast.message(c, "none", chosen)) for c, name in chosen.items()
    }


def codings_of(job: Job) -> dict[str, Coding]:
    """All codecs that a plan for this job may use, by name."""
    _, pairs = codec_pairs(job.pipeline)
    return {name: parse(name, False) for pair in pairs for name in pair} | {"none": Coding()}


def codec_pairs(pipeline: Pipeline) -> tuple[list[str], list[tuple[str, str]]]:
    """What the partitioner chooses from for each boundary: names, and (forward, backward) of each."""
    if not isinstance(pipeline.forward, str) or not isinstance(pipeline.backward, str):
        raise UserError('pipeline.forward and backward: a list has one codec a boundary, which cuts = "auto" may change')
    options = list(ladder(pipeline.min_bits))
    forward, backward = (options if name == AUTO else [name] for name in (pipeline.forward, pipeline.backward))
    length = max(len(forward), len(backward))
    pairs = [(forward[min(k, len(forward) - 1)], backward[min(k, len(backward) - 1)]) for k in range(length)]
    return ["/".join(dict.fromkeys(pair)) for pair in pairs], pairs


def codings(job: Job, plan: Plan) -> dict[str, Coding]:
    """All codecs that this run may use, by name."""
    names = {name for codec in plan.boundaries for name in (codec.forward, codec.backward)} - {AUTO}
    found = {name: parse(name, False) for name in sorted(names)}
    return found | ladder(job.pipeline.min_bits) if is_open(plan) else found


def is_open(plan: Plan) -> bool:
    """Whether a codec is left to choose."""
    return any(AUTO in (codec.forward, codec.backward) for codec in plan.boundaries)

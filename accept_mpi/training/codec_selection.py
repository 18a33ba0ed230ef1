"""Chooses the codecs that are "auto" for given cuts: before the first step ranks measure themselves and their links, and
rank 0 decides.

If rank 0 has found the cuts itself, it has chosen the codecs with them (``planning.estimate.with_codecs``).
"""

import itertools
from collections.abc import Mapping, Sequence

import msgspec

from accept_mpi.codecs.coding import Coding
from accept_mpi.codecs.message import wire_bytes
from accept_mpi.codecs.tensors import BoundarySpecs, Specs
from accept_mpi.comm.links import neighbour_rates
from accept_mpi.comm.runtime import Runtime
from accept_mpi.data import Dataset
from accept_mpi.data.calendar import micro_batches_of
from accept_mpi.direction import Crossing, Direction
from accept_mpi.job import Job
from accept_mpi.pipeline.deal import Deal
from accept_mpi.pipeline.stage import Stage
from accept_mpi.plan import BoundaryCodecs, Plan, slots_in
from accept_mpi.planning.codec_choice import AUTO, Choice, choose, codings, is_open, ladder_of
from accept_mpi.planning.estimate import groups_of
from accept_mpi.planning.forecast import Forecast
from accept_mpi.planning.message_model import Traffic
from accept_mpi.planning.tables import aligned
from accept_mpi.profiling.cluster_profile import StageTimes
from accept_mpi.profiling.message_costs import message_costs
from accept_mpi.profiling.outline import crossing_sizes
from accept_mpi.profiling.stage_timer import time_stage


def select_codecs(
    runtime: Runtime,
    job: Job,
    plan: Plan,
    stage: Stage,
    size: int,
    signatures: tuple[BoundarySpecs, BoundarySpecs],
    train: Dataset | None,
) -> tuple[Plan, list[str]]:
    """The plan with a codec wherever it had "auto", and on rank 0 the reasons as lines of text.

    All ranks call this together. ``size``: samples per micro-batch; ``signatures``: specs of the boundaries before and
    after the stage.
    """
    if not is_open(plan):
        return plan, []
    messenger, seconds = runtime.messenger, runtime.startup_seconds
    place = plan.place(runtime.rank)
    behind, ahead = signatures

    def nbytes(signature: BoundarySpecs, direction: Direction) -> int:
        specs = signature.direction(direction).get(size)
        return wire_bytes(specs) if specs else 0

    forward, backward = Direction
    weights = (nbytes(ahead, forward), nbytes(behind, backward), nbytes(behind, forward), nbytes(ahead, backward))
    before, after = (place.before, place.after) if place.leads else (None, None)  # leaders measure for their groups
    rates = neighbour_rates(runtime.world, before, after, weights)
    mine, gradients = None, 0
    if place.leads:
        costs = message_costs(codings(job, plan) | {"none": Coding()}, rates.seconds_per_byte, rates.seconds_per_message)
        mine = time_stage(stage, size, behind, ahead, train, costs, runtime.cores)
        gradients = sum(p.numel() * p.element_size() for p in stage.trained)
    # What this rank receives: activations over the boundary behind, gradients over the one ahead.
    coming: list[Traffic | None] = [None, None]
    if before is not None:
        coming[forward] = _crossing(behind.forward[size], rates.before)
    if after is not None:
        coming[backward] = _crossing(ahead.backward[size], rates.after)
    of_stage = msgspec.to_builtins([mine, coming, gradients])
    told = messenger.allgather(of_stage, seconds, "each stage's compute time and link rates")

    names, lines = None, []
    if runtime.rank == 0:
        by_stage = [told[rank] for rank in plan.leaders]
        crossings = {
            (boundary, way): msgspec.convert(by_stage[way.ends(boundary)[1]][1][way], Traffic)
            for boundary in range(len(plan.boundaries))
            for way in Direction
        }
        profiles = [msgspec.convert(profiled, StageTimes) for profiled, _, _ in by_stage]
        forecast = forecast_from_leaders(job, plan, profiles, crossings, [gradients for _, _, gradients in by_stage])
        fixed = {crossing: name for crossing, name in plan.codecs.items() if name != AUTO}
        choices, step = choose(forecast, fixed, list(ladder_of(job.pipeline)))
        names = [[choices[boundary, way].name for way in Direction] for boundary in range(len(plan.boundaries))]
        lines = _reasons(profiles, crossings, choices, step)
    names = messenger.broadcast(names, seconds, "the codecs")
    boundaries = tuple(BoundaryCodecs(forward=forward, backward=backward) for forward, backward in names)
    return msgspec.structs.replace(plan, boundaries=boundaries), lines


def forecast_from_leaders(
    job: Job,
    plan: Plan,
    profiles: Sequence[StageTimes],
    crossings: Mapping[Crossing, Traffic],
    gradients: Sequence[int],
) -> Forecast:
    """Forecast for stages whose first ranks have measured them (``profiles``): others that hold the same stage are as fast
    as its paces say, and have links like theirs. ``gradients``: bytes of each stage's."""
    slots = plan.slots
    devices = []
    for s, rank, _ in slots:
        stage, paces, alone = plan.stages[s], Deal.of(plan.stages[s]).paces, profiles[s]
        longer = slots_in(stage.lanes_of(rank)) * paces[stage.ranks.index(rank)] / paces[0]
        devices.append(msgspec.structs.replace(alone, forward=longer * alone.forward, backward=longer * alone.backward))
    rates = {
        (d, e): max(((one.rate, one.latency) for (b, _), one in crossings.items() if s in (b, b + 1)), default=(1e12, 0.0))
        for (d, (s, rank, _)), (e, (t, other, _)) in itertools.permutations(enumerate(slots), 2)
        if s == t and rank != other
    }
    groups = groups_of(job, plan, gradients, rates)
    return Forecast(job.pipeline.schedule, micro_batches_of(job), plan.slack, devices, crossings, groups=groups)


def _crossing(specs: Specs, rate: float) -> Traffic:
    """Traffic of messages with these specs on a link of ``rate`` bytes/s."""
    return Traffic.of(crossing_sizes(specs), max(rate, 1.0))


def _reasons(
    profiles: list[StageTimes],
    crossings: dict[Crossing, Traffic],
    choices: dict[Crossing, Choice],
    step: float,
) -> list[str]:
    """Table of the measurements and the chosen codecs, as lines of text. Times are per micro-batch."""
    rows: list[list[str]] = [["stage", "forward", "backward", "activations ahead", "", "", "gradients back", "", ""]]
    for s, measured in enumerate(profiles):
        row = [str(s), f"{1e3 * measured.forward:.1f} ms", f"{1e3 * measured.backward:.1f} ms"]
        for way in Direction:
            if (s, way) in choices:
                choice, rate = choices[s, way], 8e-6 * crossings[s, way].rate
                took = f"{1e3 * choice.seconds:.1f} ms (none {1e3 * choice.uncoded:.1f} ms)"
                row += [choice.name, took, f"{rate:.0f} Mbit/s"]
        rows.append([*row, *[""] * (9 - len(row))])
    return [*aligned(rows), f"a step should take {1e3 * step:.0f} ms"]

"""Makes the plan that a job itself gives by its cuts, ranks and codecs."""

from collections.abc import Callable, Sequence

from accept_mpi.errors import UserError, counted
from accept_mpi.job import Job
from accept_mpi.models.shared import Shared, uncuttable
from accept_mpi.plan import BoundaryCodecs, Plan, even_cuts, make_plan, recomputing, with_lanes

_MOST_SHOWN = 8  # cuts that an error message lists


def plan_from_job(
    job: Job, layers: int, size: int, shared: Callable[[], Sequence[Shared]] = tuple, one_layer: str = ""
) -> Plan:
    """The plan for ``size`` ranks that a job's cuts, ranks and codecs ask for. ``shared`` returns what layers share; it is
    called only if there are cuts. ``one_layer``: why the model has no more, if that is known. Raises UserError if the plan
    does not fit the model or the ranks."""
    ranks = job.pipeline.ranks or list(range(size))
    every = [rank for held in ranks for rank in ([held] if isinstance(held, int) else held)]
    if wrong := [rank for rank in every if rank >= size or every.count(rank) > 1]:
        raise UserError(
            f"pipeline.ranks: rank {wrong[0]} of {ranks} comes twice or is not among the {size} ranks of this run"
        )
    if len(ranks) > layers:
        why = f", which cannot be divided ({one_layer})" if one_layer else ""
        ways = ', or have ranks share it (pipeline.cuts = "auto")' if layers == 1 else ""
        raise UserError(
            f"{len(ranks)} stages for a model of {counted(layers, 'layer')}{why}: each stage needs a layer; "
            f"start mpirun with -n {layers} at most{ways}"
        )
    speeds = [[one] if isinstance(one, float) else one for one in job.pipeline.speeds]
    sizes = [1 if isinstance(held, int) else len(held) for held in ranks]
    if speeds and [len(group) for group in speeds] != sizes:
        raise UserError(f"pipeline.speeds: {job.pipeline.speeds} does not have a speed for each rank of {ranks}")
    codecs = _codecs(job, len(ranks) - 1)
    cuts = job.pipeline.cuts
    if isinstance(cuts, str):  # "even", or "auto" where one rank has nothing to choose
        cuts = even_cuts(layers, len(ranks), uncuttable(shared(), layers, job.parts_ties) if len(ranks) > 1 else ())
        if len(cuts) < len(ranks) - 1:  # told below
            cuts = even_cuts(layers, len(ranks))
    elif len(cuts) != len(ranks) - 1:
        holders = f"{counted(len(ranks), 'group')} of ranks" if len(every) > len(ranks) else counted(len(ranks), "rank")
        there = f"there {'is' if len(ranks) == 1 else 'are'} {holders}"
        raise UserError(f"pipeline.cuts: {cuts} makes {counted(len(cuts) + 1, 'stage')}, but {there}")
    try:
        paces = [[1 / speed for speed in group] for group in speeds]
        plan = make_plan(layers, cuts, codecs, ranks, paces, job.pipeline.slack)
    except ValueError as error:
        raise UserError(f"pipeline.cuts: {error}") from error
    if cuts:
        _refuse_parting(list(cuts), layers, shared(), job.parts_ties)
    plan, lanes = as_asked(plan, job), job.pipeline.lanes
    return plan if lanes == "auto" or lanes == "off" else with_lanes(plan, dict.fromkeys(every, lanes))


def open_plan(job: Job, layers: int, cuts: Sequence[int], ranks: Sequence[int | Sequence[int]] | None = None) -> Plan:
    """The plan with these cuts and holders (``plan.make_plan``) that has what the job says for a planner's plans, "auto"
    codecs included."""
    codec = BoundaryCodecs(forward=str(job.pipeline.forward), backward=str(job.pipeline.backward))
    return as_asked(make_plan(layers, cuts, [codec] * len(cuts), ranks, slack=job.pipeline.slack), job)


def as_asked(plan: Plan, job: Job) -> Plan:
    """The plan with stages that compute forwards again if the job says so."""
    return recomputing(plan, range(len(plan.stages))) if job.pipeline.recompute == "on" else plan


def _refuse_parting(cuts: list[int], layers: int, shared: Sequence[Shared], ties: bool) -> None:
    """Raise UserError if layers that share trained state would be in different stages."""
    together = uncuttable(shared, layers, ties)
    if not (wrong := [cut for cut in cuts if cut in together]):
        return
    one = next(one for one in shared if wrong[0] in uncuttable([one], layers, ties))
    possible = [cut for cut in range(1, layers) if cut not in together]
    if one.tied and ties:
        why = f"of which only the first may be in another stage, so layer {wrong[0]} may not begin one"
    else:
        schedule = ' with pipeline.schedule = "1f1b-async"' if one.tied else ""
        why = f"so no cut may part them{schedule}, as {wrong[0]} does"
    if possible:
        which = "possible cuts" if one.tied and ties else "cuts that keep such layers together"
        ways = f"{which} are " + ", ".join(map(str, possible[:_MOST_SHOWN]))
        ways += ", ..." if len(possible) > _MOST_SHOWN else ""
        ways += f" (for {len(possible) + 1} ranks at most: pipeline.ranks)" if len(possible) < len(cuts) else ""
    else:
        ways = (
            "no cut keeps such layers together, so one rank must hold the model (pipeline.cuts = [], pipeline.ranks = [0])"
        )
    raise UserError(f'pipeline.cuts: {one.text}, {why}; {ways}, or "auto"')


def _codecs(job: Job, boundaries: int) -> list[BoundaryCodecs]:
    """The codecs of each boundary. Raises UserError if their number is wrong."""
    names = []
    for key, asked in (("forward", job.pipeline.forward), ("backward", job.pipeline.backward)):
        each = [asked] * boundaries if isinstance(asked, str) else asked
        if len(each) != boundaries:
            have = f"{counted(len(each), 'codec')} for {boundaries} boundar{'y' if boundaries == 1 else 'ies'}"
            raise UserError(f"pipeline.{key}: {have}; give one for all, or one each")
        names.append(each)
    return [BoundaryCodecs(forward=forward, backward=backward) for forward, backward in zip(*names, strict=True)]

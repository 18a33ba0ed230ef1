"""Regroups the surviving ranks after a loss, and plans which layers each of them takes."""

import time
from collections.abc import Sequence

import msgspec

from accept_mpi.comm.runtime import Runtime
from accept_mpi.errors import Agreed, TooFewDevices
from accept_mpi.failpoints import failpoint
from accept_mpi.job import Job
from accept_mpi.plan import Plan
from accept_mpi.planning.estimate import estimate, fits, least_seconds, with_codecs
from accept_mpi.planning.planner import Layers, plan_for
from accept_mpi.profiling.cluster_profile import ClusterProfile
from accept_mpi.recovery.replicas import Holdings, Replicas, newest

_STAYS = 1.2
"""After a group's loss the plan stays if a step takes at most this factor longer than with the best one: nothing moves."""


def regroup(runtime: Runtime) -> str:
    """Regroup the surviving ranks; all of them call this together. Returns a sentence that names the lost ones."""
    began = time.monotonic()
    who = {member: runtime.who(rank) for rank, member in enumerate(runtime.members)}
    gone = runtime.regroup()
    failpoint("regroup")
    lost = " and ".join(who[member] for member in gone) or "nobody but a connection"
    ranks = f"{runtime.size} rank{'s' if runtime.size > 1 else ''}"
    return f"lost {lost}; {ranks} regrouped in {1e3 * (time.monotonic() - began):.0f} ms"


class PlanInForce(msgspec.Struct, frozen=True):
    """A plan that ranks have built a deployment for."""

    number: int
    """Number of the deployment."""
    plan: Plan
    """The plan, with ranks numbered as when the job began."""


def newest_plan(
    runtime: Runtime, number: int, held: PlanInForce | None, replicas: Replicas
) -> tuple[int, PlanInForce | None, Layers]:
    """Agree on the newest plan that any rank has built a deployment for; all ranks call this together.

    Ranks may differ, since a loss while a deployment is built finds some with its plan and others with the one before.
    Returns the number of the next deployment, the plan (None if nobody has one), and the layers that each rank has a copy
    of, by rank.
    """
    mine = [number, msgspec.to_builtins(held), replicas.holdings()]
    told = runtime.messenger.allgather(mine, runtime.startup_seconds, "the last plan")
    plans = [msgspec.convert(one, PlanInForce) for _, one, _ in told if one is not None]
    last = max(plans, key=lambda one: one.number, default=None)
    copies = [msgspec.convert(holdings, Holdings, strict=False) for _, _, holdings in told]
    step = newest(copies, last.plan.stages[-1].stop) if last else None
    layers = [] if step is None else [set(holdings.get(step, ())) for holdings in copies]
    return 1 + max(number for number, _, _ in told), last, layers


def next_plan(runtime: Runtime, job: Job, plan: Plan, cluster: ClusterProfile | None, layers: Layers = ()) -> Plan:
    """The plan for the surviving ranks, as they are numbered now; all of them call this together.

    ``plan``: the one before, with ranks numbered as when the job began; ``cluster``: profile of the surviving devices;
    ``layers``: those that each rank has a copy of. Raises TooFewDevices if no plan fits.
    """
    members = runtime.members
    try:
        decided = runtime.agree(
            "the plan", lambda: plan_after_loss(job, plan, cluster, members, layers) if runtime.rank == 0 else None
        )
    except Agreed as mistake:
        raise TooFewDevices(str(mistake)) from mistake
    text = runtime.messenger.broadcast(decided.to_json() if decided else None, runtime.startup_seconds, "the plan")
    return Plan.from_json(text)


def plan_after_loss(
    job: Job, plan: Plan, cluster: ClusterProfile | None, members: Sequence[int], layers: Layers = ()
) -> Plan:
    """The plan for the surviving ranks ``members`` (as numbered when the job began), as they are numbered now.

    If groups have lost ranks but each keeps some, these share the micro-batches, and no layer moves, unless another plan is
    much faster. Otherwise the plan is made from the cluster profile; without one, a lost stage's layers go to a neighbour,
    and if all stages are lost, to the first rank that is left.
    Other arguments as for ``next_plan``. Raises UserError if no plan fits.
    """
    ranks = {member: rank for rank, member in enumerate(members)}
    lost = {rank for _, rank in plan.holders} - set(members)
    left = plan.without(lost)
    if cluster is None:
        if left is None:  # a rank that was idle takes their place
            leader = plan.stages[0].leader
            left, ranks = plan.without({rank for _, rank in plan.holders} - {leader}), {leader: 0}
            assert left is not None
        return left.renamed(ranks)
    dealt = None
    if left is not None and lost and len(left.stages) == len(plan.stages):
        dealt = estimate(cluster, job, left.renamed(ranks))
        if not fits(cluster, dealt):
            dealt = None
        elif dealt.expected <= _STAYS * least_seconds(cluster, job):
            return with_codecs(dealt)  # without a search: seconds count
    best = plan_for(cluster, job, layers)
    return with_codecs(dealt if dealt and dealt.expected <= _STAYS * best.expected else best)

"""A run on this rank, from its job to its end: one deployment after another, and what comes between two of them.

A deployment begins in three ways: the run's first plan, a plan after a loss, a better plan. Each is a ``Begin``, made by one
function and taken by ``_Run.deploy``.
"""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from accept_mpi.comm.runtime import Runtime
from accept_mpi.data.calendar import Calendar, Milestones
from accept_mpi.device.allocator import give_back_memory
from accept_mpi.errors import Agreed, GroupRefused, OutOfMemory
from accept_mpi.failpoints import failpoint
from accept_mpi.files.start_directory import from_start
from accept_mpi.job import Job
from accept_mpi.launch.ownership import Ownership
from accept_mpi.models import Chain
from accept_mpi.plan import Plan, held_alike
from accept_mpi.planning.adaptation import Adapter
from accept_mpi.planning.job_plan import plan_from_job
from accept_mpi.planning.memory import memory_on
from accept_mpi.planning.tables import weights_age
from accept_mpi.profiling.cluster_profile import ClusterProfile
from accept_mpi.recovery.checkpoint import Checkpoint
from accept_mpi.recovery.disk_replicas import DiskReplicas
from accept_mpi.recovery.manifest import Manifest
from accept_mpi.recovery.regroup import PlanInForce, newest_plan, next_plan, plan_after_loss, regroup
from accept_mpi.recovery.replicas import Replicas
from accept_mpi.training.alike import agree_on_code
from accept_mpi.training.auto_plan import AutoPlan, learn, micro_batches_alone, plan_by_measuring, with_best_lanes
from accept_mpi.training.deployment import Deployment, RankState
from accept_mpi.training.resuming import (
    calendar,
    check,
    course_of,
    lacks_evaluation,
    share_manifest,
    with_its_micro_batches,
)
from accept_mpi.training.run_log import RunLog
from accept_mpi.training.same_data import glimpses, go_on_with_data
from accept_mpi.training.source import Restoring, Source, newest_checkpoint
from accept_mpi.training.start import (
    Options,
    known_cluster,
    own,
    place_on_host,
    prepare,
    read_job,
    room_here,
    shared_origin,
    with_kept_micro_batches,
)

log = logging.getLogger(__name__)

_LESS = 0.7
"""Share of the memory that a stage needed but did not get, which the next start may plan for on that device."""


class Begin(NamedTuple):
    """Beginning of a deployment."""

    plan: Plan
    """The plan, with ranks as they are numbered now."""
    first: bool
    """True for the first deployment of this start, which may resume from a checkpoint."""


def train(runtime: Runtime, options: Options) -> None:
    """Train as the job file says; all ranks together.

    Where MPI survives the loss of a rank (ULFM), so does the run: the survivors go on from the newest snapshot. Raises
    UserError on all ranks alike for mistakes that the user can fix.
    """
    job = read_job(runtime, options.job, options.overrides)
    runtime.allow(job.pipeline.startup_timeout)
    with own(runtime, from_start(job.output.directory), options.supervised) as ownership:
        run = _Run(job, options, list(runtime.members), ownership)
        begin: Begin | None = None
        while True:
            try:
                begin = run.deploy(runtime, begin)
                if begin is None and runtime.all_done():
                    break
            except OutOfMemory:
                run.lacked_memory(runtime)
                raise
            except Exception as error:
                if not runtime.lost_one(error):
                    raise
                begin = None
            if begin is None:
                begin = run.recover(runtime)
        run.close(runtime)


class _Run:
    """This rank's part in a run."""

    def __init__(self, job: Job, options: Options, members: list[int], ownership: Ownership) -> None:
        """``members``: the ranks that begin the run, as numbered when the job began."""
        self.job, self.options, self.members, self._ownership = job, options, members, ownership
        self._state: RankState | None = None
        self._deployment: Deployment | None = None
        self._planned: AutoPlan | None = None
        self._cluster: ClusterProfile | None = None
        self._measured: list[int] = []
        """Ranks of the devices in the cluster profile, as numbered when the job began."""
        self._number = 0
        """Number of the deployment; the same on all ranks that build one together."""
        self._in_force: PlanInForce | None = None
        """The newest plan that this rank has built a deployment for."""
        self._lost = False
        self._origin: Manifest | None = None
        """The checkpoint with which the run has begun, on all ranks. After a loss, or in a later start, ``options.resume``
        may not be there for another rank 0, or its newest checkpoint be another one."""
        self._begun: Begin | None = None
        """Beginning of the newest deployment."""
        self._notes: list[str] = []
        """Events since the last deployment, for the log."""
        self._unevaluated = False
        """True if the evaluation is yet to be made that was due after the checkpoint with which the run has begun."""
        self._since = 0.0
        """Time (monotonic seconds) at which the ranks had regrouped, or a better plan was found."""
        self._records: RunLog | None = None
        """Log and observers, on rank 0."""

    # -- the three ways in which a deployment begins -------------------------------------------------------------------

    def _first(self, runtime: Runtime, state: RankState) -> Begin:
        """Make the run's first plan: the job's own, one from what an earlier start measured, or one by measuring now."""
        failpoint("plan")
        given = None
        if self.options.supervised and self.job.train.micro_batches == "auto":
            self._goes_on_with(with_kept_micro_batches(runtime, state.disk, self.job))
        if runtime.size == 1 and self.job.train.micro_batches == "auto":
            alone = self._given_plan(runtime, state.chain)
            settled, state.data = micro_batches_alone(runtime, self.job, state.chain, state.data, alone)
            self._goes_on_with(settled)
        job = self.job
        if job.pipeline.cuts != "auto" or runtime.size == 1:
            given = runtime.agree("the plan", lambda: self._given_plan(runtime, state.chain))
            if runtime.size == 1 and job.pipeline.cuts == "auto":
                given, state.data = with_best_lanes(runtime, job, state.chain, state.loss, state.data, given)
            if not job.pipeline.adapt or runtime.size == 1:
                return Begin(given, first=True)
        room = room_here(runtime, state.disk)
        if self.options.supervised and (known := known_cluster(runtime, state.disk, room)):
            self._share_cluster(runtime, known)
            state.outline = known.outline
            return Begin(next_plan(runtime, job, Plan(stages=(), boundaries=()), known), first=True)
        self._planned = plan_by_measuring(runtime, job, state.chain, state.loss, state.data, given, room)
        state.data, state.outline = self._planned.data, self._planned.outline
        self._goes_on_with(self._planned.job)
        self._share_cluster(runtime, self._planned.cluster)
        return Begin(self._planned.plan, first=True)

    def recover(self, runtime: Runtime) -> Begin | None:
        """Regroup the survivors of a loss, and agree on the next plan; another loss meanwhile restarts that. Returns None if
        no rank has built a deployment yet: the run then begins with its first plan."""
        while True:
            self._lost = True
            if self._deployment:
                self._deployment.abandon()
            try:
                self._notes.append(regroup(runtime))
                self._since = time.monotonic()
                replicas = self._state.replicas if self._state else Replicas()
                self._number, in_force, layers = newest_plan(runtime, self._number, self._in_force, replicas)
                if not in_force:
                    return None
                return Begin(next_plan(runtime, self.job, in_force.plan, self._of_now(runtime), layers), first=False)
            except Exception as error:
                if not runtime.lost_one(error):
                    raise

    def _is_over(self, runtime: Runtime) -> bool:
        """True if the run has ended before its last step, since it no longer gets better; on all ranks alike."""
        controller = self._records.controller if self._records else None
        mine = controller is not None and controller.over
        return bool(runtime.messenger.broadcast(mine, math.inf, "whether the run goes on"))  # as in ``Runtime.finish``

    def _better(self, runtime: Runtime) -> Begin:
        """Share the better plan that rank 0 has found, after the old one has ended for it."""
        adapter = self._records.adapter if self._records else None
        found = adapter.proposal if adapter else None
        mine = [found.plan.to_json(), found.text] if found else None
        plan, text = runtime.messenger.broadcast(mine, runtime.startup_seconds, "the new plan")
        self._share_cluster(runtime, found.cluster if found else None)
        new = Plan.from_json(plan)
        same = self._begun is not None and held_alike(new, self._begun.plan)
        what = "dealt micro-batches anew" if same else "moved layers"
        self._notes, self._since = [f"{what}: {text}"], time.monotonic()
        return Begin(new, first=False)

    # -- a deployment --------------------------------------------------------------------------------------------------

    def deploy(self, runtime: Runtime, begin: Begin | None) -> Begin | None:
        """Build a deployment, the first one if ``begin`` is None, and train with it. Returns the beginning of the next one;
        None at the end of the run."""
        state = self._state = self._state or prepare(runtime, self.job, self.options)
        checkpoint, manifest = self._newest_checkpoint(runtime)
        begin = self._begun = begin or self._first(runtime, state)
        deployment = self._start(runtime, state, begin)
        source = Source.newest(runtime, state, checkpoint, manifest)
        self._check(runtime, state, begin, source)
        batches = calendar(deployment.batches, manifest)
        course = self._course(runtime, batches, begin, source)
        changes: list[str] = []
        if manifest and begin.first:
            if manifest.run == self._ownership.run and manifest.step == course.last:
                if runtime.rank == 0:
                    print(f"step {course.last}  done: an earlier start has made the last checkpoint", flush=True)
                self._planned = None
                return None
            changes = self._changes(runtime, state.chain, manifest, batches, deployment.classes)
        restoring = Restoring(runtime, state, begin.plan, source, self.job.train.optimizer)
        try:
            deployment.build(course, batches, restoring)
        except GroupRefused as refused:
            if begin.first and self.job.pipeline.cuts != "auto":
                raise
            return self._without_groups(runtime, begin, refused)
        except Agreed as mistake:
            if restoring.fits or source.snapshot.on_disk or not self.options.supervised:
                raise
            log.warning("what hosts have kept of step %d is passed over: %s", source.step, mistake)
            state.replicas.clear()
            return begin
        self._in_force = PlanInForce(self._number, deployment.plan.renamed(dict(enumerate(runtime.members))))
        self._open_records(runtime, deployment, begin, source, restoring.took, changes)
        made = deployment.train()
        return None if made == course.last or self._is_over(runtime) else self._better(runtime)

    def _newest_checkpoint(self, runtime: Runtime) -> tuple[Checkpoint | None, Manifest | None]:
        """The newest checkpoint to go on from, on rank 0, and its manifest, or that of the one with which the run began."""
        if resume := self.options.resume:
            self._began_with(shared_origin(runtime, self._origin, self._disk))
        run = self._ownership.run if self._lost or self.options.supervised else None
        where = resume and from_start(resume), self._ownership.directory, run, self._origin
        checkpoint = runtime.agree(
            "the checkpoint", lambda: newest_checkpoint(runtime, *where) if runtime.rank == 0 else None
        )
        manifest = share_manifest(runtime, checkpoint) or self._origin
        if manifest:
            self._began_with(self._origin or (manifest if manifest.run != self._ownership.run else None))
            self._goes_on_with(with_its_micro_batches(self.job, manifest))
        return checkpoint, manifest

    def _start(self, runtime: Runtime, state: RankState, begin: Begin) -> Deployment:
        """A deployment in place of the previous one."""
        if self._deployment:
            self._deployment.close()
        self._deployment = Deployment.start(runtime, state, begin.plan)
        agree_on_code(runtime)  # again, since data may have been loaded only now
        if not begin.first and runtime.ranks_on_host > 1:
            give_back_memory()  # other ranks on this host may need the previous deployment's memory
        return self._deployment

    def _check(self, runtime: Runtime, state: RankState, begin: Begin, source: Source) -> None:
        """Raise Agreed if the run cannot go on from ``source``."""
        if self._origin and source.step < self._origin.step:
            raise Agreed(
                f"--resume: rank 0's host {runtime.hosts[0]['host']} does not have the checkpoint of step "
                f"{self._origin.step} that the run began with at {self.options.resume}, and there is no later snapshot"
            )
        if begin.first and source.step:
            go_on_with_data(runtime, state.inputs, source.manifest, self._disk, self.options.overrides)
        if self._disk:
            self._disk.keep_glimpses(msgspec.to_builtins(glimpses(state.inputs)))

    def _course(self, runtime: Runtime, batches: Calendar, begin: Begin, source: Source) -> Milestones:
        """The steps to make."""
        own = source.step > (self._origin.step if self._origin else 0)  # made by this run
        again = own and (self._lost or (begin.first and bool(self.options.supervised)))
        if source.manifest and begin.first and not own:
            self._unevaluated = lacks_evaluation(runtime, self._ownership.directory, source.manifest)
        return course_of(self.job, batches, source.step, again, self._unevaluated and not own)

    def _open_records(
        self,
        runtime: Runtime,
        deployment: Deployment,
        begin: Begin,
        source: Source,
        took: Mapping[str, float],
        changes: Sequence[str],
    ) -> None:
        """Connect a deployment with the log and the observers on rank 0. ``took``: as ``Restoring`` has it; ``changes``:
        what differs from the run that it goes on from."""
        if self._notes:
            times = {**took, "could begin": time.monotonic()}
            self._notes[-1] += "".join(f", {what} {1e3 * (at - self._since):.0f} ms later" for what, at in times.items())
        notes = [f"resumed from {source}", *changes] if deployment.course.first and begin.first else []
        runtime.agree(
            "the output directory",
            lambda: self._log(runtime, deployment, begin, source, notes) if runtime.rank == 0 else None,
        )
        self._notes = []
        deployment.connect(self._records.controller if self._records else None)
        if self._records:
            self._records.connect(deployment.barriers)

    def _without_groups(self, runtime: Runtime, begin: Begin, why: GroupRefused) -> Begin:
        """Plan again without groups, since what the layers do shows only now: of a plan that the job gave, and a loss has
        changed, only their leaders go on."""
        log.warning("%s; the plan is made again without groups", why)
        self._goes_on_with(
            msgspec.structs.replace(self.job, pipeline=msgspec.structs.replace(self.job.pipeline, groups=False))
        )
        if self.job.pipeline.cuts == "auto" or self.job.pipeline.adapt:
            plan = next_plan(runtime, self.job, Plan(stages=(), boundaries=()), self._of_now(runtime))
        else:
            plan = begin.plan.without({rank for _, rank in begin.plan.holders} - set(begin.plan.leaders)) or begin.plan
        if self._planned:
            lines = [f"{why}: planned again without groups", *weights_age(plan, self.job)] if self._planned.lines else []
            self._planned = self._planned._replace(plan=plan, lines=lines, step=None)
        return Begin(plan, begin.first)

    def _goes_on_with(self, job: Job) -> None:
        """Take the job with what has been decided of it; another start is to decide alike."""
        assert self._state is not None
        count = job.train.micro_batches
        if self._disk and isinstance(count, int) and count != self.job.train.micro_batches:
            self._disk.keep_micro_batches(count)
        self.job = self._state.job = job

    def _began_with(self, origin: Manifest | None) -> None:
        """Remember the checkpoint with which the run has begun, for another start, too."""
        if origin is not None and origin != self._origin:
            self._origin = origin
            if self._disk:
                self._disk.keep_origin(msgspec.to_builtins(origin))

    def _log(self, runtime: Runtime, deployment: Deployment, begin: Begin, source: Source, notes: list[str]) -> None:
        """Create the run's directory, log and observers on rank 0, or go on with those that exist."""
        if not self._records:
            self._records = RunLog(runtime, self.job, self.options.quiet, self._ownership)
        adapter = None
        cluster = self._of_now(runtime)
        if self.job.pipeline.adapt and cluster:
            adapter = Adapter(
                self.job, deployment.course.last, deployment.plan, cluster, lambda: deployment.barriers.ask_to_replan(),
                runtime.members,
            )  # fmt: skip
        number, origin = source.manifest.number if source.manifest else 0, source.run(self._ownership.run)
        run = None if begin.first else self._ownership.run
        self._records.begin(deployment, self._planned, number, origin, run, adapter, cluster)
        self._records.say(deployment, notes, self._notes)

    # -- ends ----------------------------------------------------------------------------------------------------------

    def lacked_memory(self, runtime: Runtime) -> None:
        """Under ``launch``, have the next start plan less memory on this device than the stage that did not fit needs."""
        cluster, deployment = self._of_now(runtime), self._deployment
        if self._disk and cluster and deployment and not deployment.place.idle:
            need = memory_on(runtime.rank, cluster, self.job, deployment.plan)
            self._disk.keep_room(place_on_host(runtime), _LESS * need)

    def close(self, runtime: Runtime) -> None:
        """Close the log, learn from it, and remove what was kept for another start."""
        if self._disk:
            self._disk.clear()
        if self._records and self._deployment:
            self._records.close(self._deployment.course)
        if self._planned and self._planned.step and self._deployment and self._begun and self._begun.first:
            learn(self.job, self._planned, self._deployment.plan, self._ownership.directory / "log.h5")
            share = self._planned.seconds / runtime.clock.now()
            print(f"planning    {self._planned.seconds:.1f} s, {100 * share:.0f} % of the run", flush=True)

    # ------------------------------------------------------------------------------------------------------------------

    @property
    def _disk(self) -> DiskReplicas | None:
        """Snapshots on this host's disk, under ``launch``."""
        return self._state.disk if self._state else None

    def _changes(
        self, runtime: Runtime, chain: Chain, manifest: Manifest, batches: Calendar, classes: Sequence[str]
    ) -> list[str]:
        """Lines on what differs from the run that made the checkpoint. Raises Agreed if it does not fit this job."""
        overrides = self.options.overrides
        return runtime.agree("the checkpoint", lambda: check(manifest, self.job, overrides, chain, batches, classes))

    def _given_plan(self, runtime: Runtime, chain: Chain) -> Plan:
        """The job's own plan, made for the ranks that began the run; the layers of lost ones go to the others."""
        plan = plan_from_job(self.job, len(chain), len(self.members), chain.shared, chain.one_layer)
        if runtime.members == self.members:
            return plan
        return plan_after_loss(self.job, plan.renamed(dict(enumerate(self.members))), None, runtime.members)

    def _share_cluster(self, runtime: Runtime, cluster: ClusterProfile | None) -> None:
        """Keep rank 0's cluster profile: on all ranks if losses are survived, since any of them may become rank 0."""
        self._cluster, self._measured = cluster, list(runtime.members)
        if runtime.survives:
            mine = msgspec.to_builtins(cluster)
            told = runtime.messenger.broadcast(mine, runtime.startup_seconds, "what all devices have measured")
            self._cluster = msgspec.convert(told, ClusterProfile)
        if self._disk and self._cluster:
            self._disk.keep_cluster(msgspec.to_builtins(self._cluster))

    def _of_now(self, runtime: Runtime) -> ClusterProfile | None:
        """The profile of the surviving devices, in the order of their present ranks; None if there is none."""
        return self._cluster.only([self._measured.index(member) for member in runtime.members]) if self._cluster else None

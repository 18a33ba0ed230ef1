"""From a job file to a running pipeline: what all ranks agree on, in order, and then the training loop."""

import contextlib
import logging
import math
import time
from pathlib import Path
from typing import Any

import msgspec

from accept_mpi.comm.runtime import Runtime
from accept_mpi.data.calendar import Milestones
from accept_mpi.device.allocator import give_back_memory, keep_memory
from accept_mpi.device.cpu import set_threads
from accept_mpi.errors import Agreed, OutOfMemory, UserError
from accept_mpi.failpoints import failpoint
from accept_mpi.job import Job
from accept_mpi.launch.ownership import Ownership
from accept_mpi.logs.observers import Observer
from accept_mpi.logs.progress import ProgressObserver
from accept_mpi.logs.writer import LogObserver
from accept_mpi.models import Chain
from accept_mpi.models import load as load_model
from accept_mpi.models.losses import find_loss
from accept_mpi.pipeline.stage import Stage
from accept_mpi.plan import Plan
from accept_mpi.planning.adaptation import Adapter
from accept_mpi.planning.job_plan import plan_from_job
from accept_mpi.planning.memory import memory_of
from accept_mpi.profiling.cluster_profile import ClusterProfile
from accept_mpi.recovery.checkpoint import Checkpoint, directory_of
from accept_mpi.recovery.checkpoint_writer import CheckpointWriter, new_manifest
from accept_mpi.recovery.disk_replicas import DiskReplicas
from accept_mpi.recovery.layer_state import fitting, load
from accept_mpi.recovery.manifest import Manifest, made_by
from accept_mpi.recovery.regroup import PlanInForce, newest_plan, next_plan, plan_after_loss, regroup
from accept_mpi.recovery.replicas import Replicas
from accept_mpi.recovery.restore import CheckpointStore, fetch, newest_snapshot
from accept_mpi.training.auto_plan import AutoPlan, learn, plan_by_measuring
from accept_mpi.training.controller import Controller
from accept_mpi.training.deployment import Deployment, RankState
from accept_mpi.training.resuming import calendar, check, course_of, share_manifest
from accept_mpi.training.run_log import begin_log, facts_of, prepare_directory, summary_line
from accept_mpi.training.start import Options, own, read_job

log = logging.getLogger(__name__)


_LESS = 0.7
"""Of the memory that a stage was to take, where there was not so much."""


def train(runtime: Runtime, options: Options) -> None:
    """Train as the job file says. Raises UserError on all ranks alike for what the user can mend.

    Where MPI survives the loss of a rank, so does the run: those who are left go on from the newest snapshot.
    """
    job = read_job(runtime, options.job, options.overrides)
    runtime.startup_seconds = job.pipeline.startup_timeout
    with own(runtime, Path(job.output.directory), options.supervised) as ownership:
        run = _Run(job, options, list(runtime.members), ownership)
        while True:
            try:
                done = run.term(runtime)
            except OutOfMemory:
                run.lacked_memory(runtime)
                raise
            except Exception as error:
                if not runtime.lost_one(error):
                    raise
            else:
                if not done:
                    continue
                if runtime.all_done():
                    break
            run.recover(runtime)
        run.close(runtime)


class _Run:
    """A run on this rank, term after term."""

    def __init__(self, job: Job, options: Options, members: list[int], ownership: Ownership) -> None:
        """``members``: who begins it, by their ranks when mpirun began."""
        self.job, self.options, self.members, self._ownership = job, options, members, ownership
        self._work: RankState | None = None
        self._planned: AutoPlan | None = None
        self._cluster: ClusterProfile | None = None
        self._measured: list[int] = []
        """Whose devices are in the survey, by their ranks when mpirun began."""
        self._number = 0
        """Of the term; the same on all ranks that build one together."""
        self._held: PlanInForce | None = None
        """The last term that this rank has built."""
        self._again: Plan | None = None
        """Where the first term has to begin once more."""
        self._next: Plan | None = None
        """After a loss or a proposal, in the ranks of now."""
        self._lost = False
        self._adapter: Adapter | None = None
        self._term: Deployment | None = None
        self._spill: DiskReplicas | None = None
        self._controller: Controller | None = None
        self._name = ownership.run
        """The same on all ranks and, under ``launch``, in all starts; nobody else's."""
        self._number_before = 0
        """Of the checkpoint that the run goes on from."""
        self._changes: list[str] = []
        """What is otherwise than when that was made."""
        self._told: list[str] = []
        """What happened since the last term, for the log."""
        self._found = 0.0
        """When those who are left had found together (monotonic)."""

    def term(self, runtime: Runtime) -> bool:
        """One term; whether the run is at its end then, or another plan is to go on."""
        work = self._work = self._work or self._prepare(runtime)
        stored = runtime.agree("the checkpoint", lambda: self._checkpoint(runtime) if runtime.rank == 0 else None)
        manifest = share_manifest(runtime, stored)
        plan = self._next or self._again or self._first_plan(runtime, work)
        if self._term:
            self._term.close()
        self._term = term = Deployment(runtime, work, plan)
        if self._next and runtime.ranks_on_host > 1:
            give_back_memory()  # the term's before, which other ranks here may need now
        begin = newest_snapshot(runtime, work.replicas, manifest.step if manifest else 0, len(work.chain))
        term.batches = calendar(term.batches, manifest)
        course = course_of(self.job, term.batches, begin.step)
        self._number_before = manifest.number if manifest else 0
        if manifest and not self._next:
            if manifest.run == self._name and manifest.step == course.last:
                if runtime.rank == 0:
                    print(f"step {course.last}  done: an earlier start has made the last checkpoint", flush=True)
                self._planned = None
                return True
            self._changes = runtime.agree(
                "the checkpoint",
                lambda: check(manifest, self.job, self.options.overrides, work.chain, term.batches.samples, course.last),
            )
        store = CheckpointStore(stored) if begin.on_disk and stored else work.replicas

        took: dict[str, float] = {}
        fits = not begin.step

        def restore(stage: Stage) -> None:
            nonlocal fits
            took["planned"] = time.monotonic()
            if begin.step:
                blobs = fetch(runtime.messenger, plan, begin, store, runtime.startup_seconds)
                runtime.agree("the checkpoint's weights", lambda: load(stage, blobs, self.job.train.optimizer))
                fits = True
            work.replicas.back_to(begin.step)
            took["had their layers' state"] = time.monotonic()

        try:
            term.build(course, restore)
        except Agreed as mistake:
            if fits or begin.on_disk or not self.options.supervised:
                raise
            log.warning("what hosts have kept of step %d is passed over: %s", begin.step, mistake)
            work.replicas.clear()
            self._again = plan
            return False
        if self._told:
            took["could begin"] = time.monotonic()
            self._told[-1] += "".join(f", {what} {1e3 * (at - self._found):.0f} ms later" for what, at in took.items())
        self._held = PlanInForce(self._number, term.plan.renamed(dict(enumerate(runtime.members))))
        controller = None
        where = str(stored.path) if stored and begin.on_disk else "the snapshot that hosts have kept"
        if runtime.rank == 0:
            controller = runtime.agree("the output directory", lambda: self._records(runtime, term, work, where))
        else:
            runtime.agree("the output directory", lambda: None)
        self._controller, self._told = controller, []
        term.start(controller)
        made = term.run()
        if made < course.last:
            self._take_proposal(runtime)
        return made == course.last

    def lacked_memory(self, runtime: Runtime) -> None:
        """Under ``launch`` the next start is to give this device less than what did not fit."""
        cluster = self._of_now(runtime)
        if self._spill and cluster and self._term and not self._term.place.idle:
            need = memory_of(cluster, self.job, self._term.plan)[self._term.place.stage]
            self._spill.keep_room(_place_on_host(runtime), _LESS * need)

    def recover(self, runtime: Runtime) -> None:
        """After a loss: find together and agree on what is next. Another loss meanwhile begins that anew."""
        while True:
            self._lost, self._again = True, None
            if self._term:
                self._term.abandon()
            try:
                self._told.append(regroup(runtime))
                self._found = time.monotonic()
                replicas = self._work.replicas if self._work else Replicas()
                self._number, held, layers = newest_plan(runtime, self._number, self._held, replicas)
                if held:
                    self._next = next_plan(runtime, self.job, held.plan, self._of_now(runtime), layers)
                return
            except Exception as error:
                if not runtime.lost_one(error):
                    raise

    def close(self, runtime: Runtime) -> None:
        """Close the log, and learn from it; what was kept for another start is not needed any more."""
        if self._work:
            self._work.stop.close()
        if self._spill:
            self._spill.clear()
        if self._controller and self._term:
            course, directory = self._term.course, Path(self.job.output.directory)
            summary = summary_line(self._controller.last_evaluation)
            self._controller.each("event", runtime.clock.now(), course.last, f"done: {summary}")
            self._controller.each("close")
            print(f"log         {directory / 'log.h5'}", flush=True)
            if course.newest_checkpoint is not None:
                print(f"checkpoint  {directory_of(directory, course.newest_checkpoint)}", flush=True)
        if self._planned and self._planned.step and self._term and not self._next:
            learn(self.job, self._planned, self._term.plan, Path(self.job.output.directory) / "log.h5")
            share = self._planned.seconds / runtime.clock.now()
            print(f"planning    {self._planned.seconds:.1f} s, {100 * share:.0f} % of the run", flush=True)

    # ------------------------------------------------------------------------------------------------------------------

    def _prepare(self, runtime: Runtime) -> RankState:
        """What needs no plan."""
        job = self.job
        versions = runtime.hosts[runtime.rank]["versions"]
        runtime.same("versions of accept_mpi and torch", f"{versions['accept_mpi']} and {versions['torch']}")
        keep_memory()
        self._threads = set_threads(job.train.threads, runtime.hosts[runtime.rank]["cores"], runtime.ranks_on_host)
        run = self.options.supervised
        chain = runtime.agree("the model", lambda: load_model(job.model.name, job.model.args, job.train.seed))
        runtime.same("layers of the model", chain.names)
        work = RankState(job, chain, runtime.agree("the loss", lambda: find_loss(job.train.loss)))
        if run:
            work.replicas.disk = self._spill = DiskReplicas(run, runtime.hosts[runtime.rank]["host"])
            if _place_on_host(runtime) == 0:
                for step, blobs in self._spill.read().items():
                    work.replicas.keep(step, fitting(blobs, chain.names))
        return work

    def _checkpoint(self, runtime: Runtime) -> Checkpoint | None:
        """Rank 0: the one to resume from; after a loss or another start the newest that this run has written."""
        memory = {facts["machine_id"]: facts["memory_bytes"] or math.inf for facts in runtime.hosts}
        most = sum(memory.values())
        if self._lost or self.options.supervised:
            for path in made_by(Path(self.job.output.directory), self._name):
                try:
                    return Checkpoint(path, most)
                except UserError as mistake:
                    log.warning("passed over: %s", mistake)
        return Checkpoint(self.options.resume, most) if self.options.resume else None

    def _first_plan(self, runtime: Runtime, work: RankState) -> Plan:
        job = self.job
        failpoint("plan")
        given = None
        if job.pipeline.cuts != "auto" or runtime.size == 1:
            given = runtime.agree("the plan", lambda: self._given_plan(runtime, work.chain))
            if not job.pipeline.adapt or runtime.size == 1:
                return given
        if known := self._cluster_of_last_start(runtime):
            self._share_cluster(runtime, known)
            work.outline = known.outline
            return next_plan(runtime, job, Plan(stages=(), boundaries=()), known)
        self._planned = plan_by_measuring(runtime, job, work.chain, work.loss, given, self._room(runtime))
        work.data, work.outline = self._planned.data, self._planned.outline
        self._share_cluster(runtime, self._planned.cluster)
        return self._planned.plan

    def _share_cluster(self, runtime: Runtime, cluster: ClusterProfile | None) -> None:
        """Rank 0's survey; where a loss is survived everyone's, since whoever becomes rank 0 must know."""
        self._cluster, self._measured = cluster, list(runtime.members)
        if runtime.survives:
            mine = msgspec.to_builtins(cluster)
            told = runtime.messenger.broadcast(mine, runtime.startup_seconds, "what all devices have measured")
            self._cluster = msgspec.convert(told, ClusterProfile)
        if self._spill and self._cluster:
            self._spill.keep_cluster(msgspec.to_builtins(self._cluster))

    def _cluster_of_last_start(self, runtime: Runtime) -> ClusterProfile | None:
        """Under ``launch``: what an earlier start measured of the very hosts that are here now, if any of them knows."""
        if not self.options.supervised:
            return None
        mine = [self._spill.cluster() if self._spill else None, self._room(runtime)]
        told = runtime.messenger.allgather(mine, runtime.startup_seconds, "what an earlier start has measured")
        wanted, rooms = [host["host"] for host in runtime.hosts], [room for _, room in told]
        for found in filter(None, (kept for kept, _ in told)):
            with contextlib.suppress(msgspec.ValidationError, IndexError):  # damaged
                cluster = msgspec.convert(found, ClusterProfile)
                there = [device.host for device in cluster.devices]
                if len(set(there)) == len(there) and set(wanted) <= set(there):
                    return cluster.only([there.index(host) for host in wanted]).within(rooms)
        return None

    def _room(self, runtime: Runtime) -> float:
        """Bytes that this rank may take at most: an earlier start of the run has run out of memory here."""
        return self._spill.room(_place_on_host(runtime)) if self._spill else math.inf

    def _of_now(self, runtime: Runtime) -> ClusterProfile | None:
        """What is known of the devices that are left, in their ranks of now."""
        return self._cluster.only([self._measured.index(member) for member in runtime.members]) if self._cluster else None

    def _take_proposal(self, runtime: Runtime) -> None:
        """The plan has ended for a better one, which rank 0 has found."""
        found = self._adapter.proposal if self._adapter else None
        mine = [found.plan.to_json(), found.text] if found else None
        plan, text = runtime.messenger.broadcast(mine, runtime.startup_seconds, "the new plan")
        self._share_cluster(runtime, found.cluster if found else None)
        self._next, self._told, self._found = Plan.from_json(plan), [f"moved layers: {text}"], time.monotonic()

    def _given_plan(self, runtime: Runtime, chain: Chain) -> Plan:
        """As the job says, for the ranks that it began with; those that are lost by now leave their layers to the others."""
        plan = plan_from_job(self.job, len(chain), len(self.members), chain.shared)
        if runtime.members == self.members:
            return plan
        return plan_after_loss(self.job, plan.renamed(dict(enumerate(self.members))), None, runtime.members)

    def _records(self, runtime: Runtime, term: Deployment, work: RankState, where: str) -> Controller:
        """Rank 0: output directory, log, checkpoint writer, progress; those that it has go on."""
        job, course, plan = self.job, term.course, term.plan
        directory = Path(job.output.directory)
        prepare_directory(directory)
        self._ownership.take()

        def manifest(step: int) -> Manifest:
            at = term.batches.position(step)
            return new_manifest(
                run=self._name,
                step=step,
                epoch=at.epoch,
                seen=at.seen,
                order=at.order,
                model=job.model.name,
                model_args=job.model.args,
                layers=work.chain.names,
                seed=job.train.seed,
                samples=term.batches.samples,
                job=job.to_json(),
            )

        edges = [(stage.start, stage.stop) for stage in plan.stages]
        if self._controller:
            self._controller.wait_for_disk(runtime.startup_seconds)
            self._controller.writer.close()
        writer = CheckpointWriter(directory, edges, manifest, job.output.keep, self._number_before)
        if self._controller:
            controller = self._controller
            controller.renew(writer)
        else:
            planned = self._planned
            facts = facts_of(
                runtime.hosts, plan, work.chain.names, term.parameters, threads=self._threads, first_step=course.first,
                last_step=course.last, compile_s=term.compile_seconds, plan_why=planned.lines if planned else [],
                forecast_step_s=planned.step if planned else None, codecs_why=term.codecs_why, run=self._name,
            )  # fmt: skip
            cluster = planned.cluster if planned else None
            mine = self._name if self._next else None
            self._log = records = LogObserver(begin_log(directory, job, plan, facts, course.first, cluster, mine))
            controller = Controller(self._observers(facts, course, records), writer)

            def before_end(text: str) -> None:
                records.event(runtime.clock.now(), runtime.lifeline.steps.get(0, 0), text)
                controller.each("close")

            runtime.before_end = before_end
        self._log.planned(runtime.clock.now(), course.first, plan.renamed(dict(enumerate(runtime.members))))
        now = self._of_now(runtime)
        if job.pipeline.adapt and now:
            self._adapter = self._adapter or Adapter(job, course.last)
            self._adapter.begin(plan, now, lambda: term.replication.ask_to_replan())
            controller.watch("adapter", self._adapter)
            controller.on_pulse = self._adapter.pulse
        if course.first and not self._next:
            for text in [f"resumed from {where}", *self._changes]:
                if self.options.quiet and text in self._changes:
                    print(text, flush=True)
                controller.each("event", runtime.clock.now(), course.first, text)
        for text in self._told:
            cuts = [stage.start for stage in plan.stages[1:]]
            after = f"{len(plan.stages)} stages go on from step {course.first}, cuts {cuts}"
            if self.options.quiet:
                print(f"{text}; {after}", flush=True)
            controller.each("event", runtime.clock.now(), course.first, f"{text}; {after}")
        return controller

    def _observers(self, facts: dict[str, Any], course: Milestones, records: LogObserver) -> dict[str, Observer]:
        observers: dict[str, Observer] = {"log": records}
        if not self.options.quiet:
            if facts["compile_s"] > 0.05:
                print(f"kernels ready after {facts['compile_s']:.1f} s", flush=True)
            for lines in (facts["plan_why"], facts["codecs_why"]):
                if lines:
                    print(*lines, sep="\n", flush=True)
            observers["progress"] = ProgressObserver(course.last, course.first)
        return observers


def _place_on_host(runtime: Runtime) -> int:
    """Which of its host's ranks this is."""
    mine = runtime.hosts[runtime.rank]["machine_id"]
    return [n for n, facts in enumerate(runtime.hosts) if facts["machine_id"] == mine].index(runtime.rank)

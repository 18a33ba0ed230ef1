"""The output directory, log and observers of a run, on rank 0."""

import contextlib
import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from accept_mpi.comm.runtime import Runtime
from accept_mpi.data.calendar import Milestones, micro_batches_of
from accept_mpi.errors import UserError, counted
from accept_mpi.files.start_directory import near
from accept_mpi.job import Job
from accept_mpi.launch.ownership import Ownership, unwritable
from accept_mpi.logs.format import Rows, rows_of
from accept_mpi.logs.observers import Evaluated, Observer
from accept_mpi.logs.progress import ProgressObserver
from accept_mpi.logs.reader import open_log
from accept_mpi.logs.writer import LogObserver, LogWriter
from accept_mpi.plan import Plan
from accept_mpi.planning.adaptation import Adapter
from accept_mpi.planning.comparison import PlanCheck
from accept_mpi.planning.tables import weights_age
from accept_mpi.profiling.cluster_profile import ClusterProfile
from accept_mpi.recovery.barriers import Barriers
from accept_mpi.recovery.checkpoint import directory_of
from accept_mpi.recovery.checkpoint_writer import CheckpointWriter, new_manifest
from accept_mpi.recovery.manifest import Manifest
from accept_mpi.training.auto_plan import AutoPlan
from accept_mpi.training.best import Best
from accept_mpi.training.controller import Controller
from accept_mpi.training.deployment import Deployment
from accept_mpi.training.lineage import Lineage, ancestors, lineage, shared
from accept_mpi.training.same_data import glimpses


class RunLog:
    """A run's directory on rank 0: its log, its checkpoints and its observers, from deployment to deployment."""

    def __init__(self, runtime: Runtime, job: Job, quiet: bool, ownership: Ownership) -> None:
        """``ownership`` is taken as soon as the directory exists."""
        self._runtime, self._job, self._quiet, self._ownership = runtime, job, quiet, ownership
        self.directory = ownership.directory
        self.controller: Controller | None = None
        self.adapter: Adapter | None = None
        """Adapter of the present deployment, if plans adapt."""
        self._log: LogObserver | None = None
        self.best: Best | None = None
        """The best checkpoint, if the run keeps one."""
        self._barriers: Barriers | None = None

    def begin(
        self,
        deployment: Deployment,
        planned: AutoPlan | None,
        number: int,
        origin: str,
        run: str | None,
        adapter: Adapter | None,
        cluster: ClusterProfile | None,
    ) -> None:
        """Begin a deployment. ``number``: that of the checkpoint that it goes on from; ``origin``: the run that made the
        state with which it begins; ``run``: after the first deployment, the run's name, by which its own log is recognized;
        ``cluster``: what is known of the devices. Raises UserError if the directory cannot be written."""
        job, plan, course, runtime = self._job, deployment.plan, deployment.course, self._runtime
        named = plan.renamed(dict(enumerate(runtime.members)))  # as in the log
        prepare_directory(self.directory)
        self._ownership.take()
        if self.controller:
            self.controller.wait_for_disk(runtime.startup_seconds)
            self.controller.writer.close()
        edges = [(stage.start, stage.stop) for stage in plan.stages]
        writer = CheckpointWriter(self.directory, edges, self._manifest_of(deployment), job.output.keep, number)
        if self.controller:
            self.controller.renew(writer)
            self.controller.watch("plan", Observer())  # of this plan nothing was foreseen
        else:
            before = ancestors(self.directory / "log.h5", origin, course.first)
            facts = facts_of(
                runtime.hosts, named, deployment.state.chain.names, deployment.parameters, threads=deployment.state.threads,
                first_step=course.first, last_step=course.last, compile_s=deployment.compile_seconds,
                plan_why=planned.lines if planned and planned.lines else weights_age(plan, job),
                forecast_step_s=planned.step if planned else None,
                codecs_why=deployment.codecs_why, run=self._ownership.run, ancestors=before,
                created_s=runtime.clock.now(),
            )  # fmt: skip
            self._log = LogObserver(begin_log(self.directory, job, named, facts, course.first, cluster, run))
            self.controller = Controller(self._observers(facts, course, self._log), writer)
            if planned and planned.cluster and planned.step:
                count = micro_batches_of(job)
                check = PlanCheck(plan, planned.cluster, planned.step, count, self._compare, runtime.members)
                self.controller.watch("plan", check)
            runtime.call_before_end(self._before_end)
            if job.output.keep_best:
                keep, patience = job.output.keep_best, job.train.patience
                own = self._ownership.run
                counts = course.evaluates_anyway
                self.best = Best(self.directory, own, keep, patience, before, self._enough, course.first, counts)
                self.controller.watch("best", self.best)
        assert self._log
        if self.best is not None:
            writer.best = self.best
        self._log.planned(runtime.clock.now(), course.first, named)
        self.adapter = adapter
        if adapter:
            self.controller.watch("adapter", adapter)

    def say(self, deployment: Deployment, resumed: Sequence[str], happened: Sequence[str]) -> None:
        """Write to the log and the terminal how a deployment begins. ``resumed``: what it resumes from; ``happened``: events
        before it."""
        assert self.controller
        plan, step = deployment.plan, deployment.course.first
        cuts = [stage.start for stage in plan.stages[1:]]
        go_on = f"{counted(len(plan.stages), 'stage')} {'go' if cuts else 'goes'} on"
        after = [f"{text}; {go_on} from step {step}, cuts {cuts}" for text in happened]
        for text in [*resumed, *after]:
            if self._quiet and text not in resumed[:1]:
                print(text, flush=True)
            self.controller.each("event", self._runtime.clock.now(), step, text)

    def close(self, course: Milestones) -> None:
        """End the log, and print where log and checkpoint are."""
        assert self.controller
        summary = summary_line(self.controller.last_evaluation)
        self.controller.each("event", self._runtime.clock.now(), course.last, f"done: {summary}")
        self.controller.each("close")
        print(f"log         {near(self.directory / 'log.h5')}", flush=True)
        if course.newest_checkpoint is not None:
            print(f"checkpoint  {near(directory_of(self.directory, course.newest_checkpoint))}", flush=True)
        if self.best is not None and self.best.at is not None:
            print(f"best        {near(directory_of(self.directory, self.best.at))}", flush=True)

    def connect(self, barriers: Barriers) -> None:
        """Take the barriers of a deployment that begins."""
        self._barriers = barriers
        if self.best is not None and self.best.over:  # the deployment before did not hear of it in time
            barriers.ask_to_replan(over=True)
        elif self.best is not None:  # what it resumes may have come to its end
            self.best.check()

    def _enough(self, text: str) -> None:
        """End the run with the next step that begins: it no longer gets better."""
        assert self.controller
        assert self._barriers
        self.controller.each("event", self._runtime.clock.now(), self.controller.newest_step, text)
        self._barriers.ask_to_replan(over=True)

    def _compare(self, step: int, text: str) -> None:
        """Write how the run compares with its plan to the log and, unless it is quiet, to the terminal."""
        assert self.controller
        self.controller.each("event", self._runtime.clock.now(), step, text)

    def _before_end(self, text: str) -> None:
        """Record the error that ends the run, and close the log."""
        assert self._log
        assert self.controller
        with contextlib.suppress(UserError):  # the error may be that the log cannot be written
            self._log.event(self._runtime.clock.now(), self._runtime.lifeline.steps.get(0, 0), text)
            self.controller.each("close")

    def _manifest_of(self, deployment: Deployment) -> Callable[[int], Manifest]:
        """A function that makes the manifest of a step's checkpoint, without its stages."""
        job, batches = self._job, deployment.batches

        def manifest(step: int) -> Manifest:
            at = batches.position(step)
            return new_manifest(
                run=self._ownership.run,
                step=step,
                epoch=at.epoch,
                seen=at.seen,
                order=at.order,
                model=job.model.name,
                model_args=job.model.args,
                layers=deployment.state.chain.names,
                own_names=deployment.state.chain.own_names,
                seed=job.train.seed,
                samples=batches.samples,
                classes=list(deployment.classes),
                glimpses=glimpses(deployment.state.inputs),
                job=job.to_json(),
            )

        return manifest

    def _observers(self, facts: dict[str, Any], course: Milestones, log: LogObserver) -> dict[str, Observer]:
        """Make the observers by name, and print what is known before the first step, unless the run is quiet."""
        observers: dict[str, Observer] = {}
        if not self._quiet:
            if facts["compile_s"] > 0.05:
                print(f"kernels ready after {facts['compile_s']:.1f} s", flush=True)
            for lines in (facts["plan_why"], facts["codecs_why"]):
                if lines:
                    print(*lines, sep="\n", flush=True)
            observers["progress"] = ProgressObserver(course.last, course.first)
        return observers | {"log": log}  # the last one, since a full disk ends its calls


def prepare_directory(directory: Path) -> None:
    """Make the output directory. Raises UserError if it, or its folder of checkpoints, cannot be written."""
    checkpoints = directory / "checkpoints"
    for folder in (directory, checkpoints) if os.path.lexists(checkpoints) else (directory,):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe = folder / ".writable"
            probe.unlink(missing_ok=True)
            os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600))
            probe.unlink(missing_ok=True)  # another run may be about to find that this directory is taken
        except OSError as error:
            raise unwritable(folder, error) from error


def begin_log(
    directory: Path,
    job: Job,
    plan: Plan,
    facts: dict[str, Any],
    resumed_step: int,
    cluster: ClusterProfile | None = None,
    run: str | None = None,
) -> LogWriter:
    """A new log in ``directory``, with the ``cluster`` profile from which the plan was made. Raises UserError.

    An existing log is kept under another name. A resumed run's log begins with the steps, evaluations and metrics up to
    ``resumed_step``, as far as the existing log has the same history (``training.lineage``). ``run``, after a loss: this
    run's name. An existing log that bears it is the run's own, whose writer was lost, so its trace, events and plans are
    continued, too, and it keeps what it says of how the run began: all its hosts, the first plan, and the ``cluster``.
    """
    path = directory / "log.h5"
    earlier: dict[str, Rows] = {}
    first = plan.to_json()
    kept: Path | None = None
    try:
        if path.exists():
            if resumed_step or run:
                with contextlib.suppress(UserError):  # an unreadable log is only renamed
                    earlier, own = _earlier(path, resumed_step, run, lineage(facts))
                    if own:
                        first, cluster = own.plan, own.cluster or cluster
                        facts = own.facts | {"created_s": facts["created_s"]}
            number = 1
            while (free := directory / f"log.{number}.h5").exists():
                number += 1
            kept = _also_named(path, free)

        def more(file: Any) -> None:
            if cluster is not None:
                cluster.write(file.create_group("survey"))

        try:
            return LogWriter(path, job.to_json(), first, facts, earlier, more)
        except UserError:
            if kept:  # another start, once there is room, is to find in it what it goes on from
                kept.rename(path)
                kept.unlink(missing_ok=True)  # if it is still another name of the same file
            raise
    except OSError as error:
        raise UserError(f"output.directory: cannot write {path}: {error.strerror or error}") from error


def _also_named(path: Path, free: Path) -> Path:
    """Give a log a second name, so that it has its own until the next one takes that, or, on a file system without such
    links, another name instead. Returns the name. Raises OSError."""
    try:
        os.link(path, free, follow_symlinks=False)
    except OSError:
        path.rename(free)
    return free


class _Own(NamedTuple):
    """What a run's own log says of how the run began."""

    plan: str
    facts: dict[str, Any]
    cluster: ClusterProfile | None


def _earlier(path: Path, step: int, run: str | None, mine: Lineage) -> tuple[dict[str, Rows], _Own | None]:
    """Rows of an old log: steps, evaluations and metrics up to ``step`` that belong to the history of the run at hand, whose
    lineage is ``mine``, and if the log is this ``run``'s own, its trace, events and plans, and how the run began. Raises
    UserError if it cannot be read."""
    with open_log(path) as old:
        facts = json.loads(old.attrs["facts"])
        step = min(step, shared(lineage(facts), mine))
        all_rows = {name: rows_of(old, name) for name in ("steps", "evals", "metrics")}
        earlier = {name: rows[rows["step"] <= step] for name, rows in all_rows.items()}
        if run and facts.get("run") == run:
            earlier |= {name: old[name][:] for name in ("trace", "events", "plans") if name in old}
            cluster = ClusterProfile.read(old["survey"]) if "survey" in old else None
            return earlier, _Own(old.attrs["plan"], facts, cluster)
    # Times count from the beginning of this run, so those of earlier rows become negative.
    timed = [earlier["steps"], earlier["evals"]]
    ends = [rows["end"].max() for rows in timed if len(rows)]
    for rows in timed:
        rows["end"] -= max(ends, default=0.0)
    return earlier, None


def summary_line(result: Evaluated | None) -> str:
    """The last evaluation as text, for the end of a run."""
    if result is None:
        return "no evaluation"
    accuracy = "" if math.isnan(result.accuracy) else f"test accuracy {100 * result.accuracy:.2f} %, "
    return f"{accuracy}test loss {result.loss:.4f}"


def facts_of(hosts: list[dict[str, Any]], plan: Plan, layers: list[str], parameters: int, **more: Any) -> dict[str, Any]:
    """Facts about a run for its log: hosts, versions, layers, and ``more``."""
    unlisted = ("machine_id", "versions")
    return {
        "versions": hosts[0]["versions"],
        "hosts": [
            {k: v for k, v in host.items() if k not in unlisted} | {"stage": plan.place(host["rank"]).stage}
            for host in hosts
        ],
        "layers": layers,
        "parameters": parameters,
        **more,
    }

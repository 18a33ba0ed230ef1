"""A deployment: a plan on its ranks, in force until the next plan. A run has one, and one more for each loss or new plan.

All ranks build it together: the stage with the state that it begins with, what crosses its boundaries, the data plane, and
the worker that walks the schedule.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from accept_mpi.codecs.basis import widths_of
from accept_mpi.codecs.coding import NONE, Coding, kernels_of, parse
from accept_mpi.comm.clock_check import ClockCheck
from accept_mpi.comm.data_plane import DataPlane
from accept_mpi.comm.machine_code import compile_together
from accept_mpi.comm.messages import EvaluationMade, Event, Leaving, Message, PlanOver, Speed, StepMade, TargetsDrawn
from accept_mpi.comm.runtime import Runtime
from accept_mpi.data import of_job as data_of
from accept_mpi.data.calendar import Calendar, Milestones, micro_batch_sizes, micro_batches_of
from accept_mpi.data.checksums import Checksum
from accept_mpi.data.feed import Drawn
from accept_mpi.device.cpu import computing_takes_all
from accept_mpi.device.speed_check import SpeedCheck
from accept_mpi.errors import Agreed, DeadlineError, GroupRefused
from accept_mpi.failpoints import failpoint
from accept_mpi.job import LOCAL_KEPT, Job, flows
from accept_mpi.launch.stop_signals import StopSignals
from accept_mpi.logs.recorder import Recorder
from accept_mpi.models import Chain
from accept_mpi.models.layers import Layers, build_stage, in_channels_last
from accept_mpi.models.losses import Loss
from accept_mpi.pipeline.deal import Deal, widths
from accept_mpi.pipeline.kept_bases import KeptBases
from accept_mpi.pipeline.kept_norms import KeptNorms
from accept_mpi.pipeline.schedule import max_in_flight
from accept_mpi.pipeline.settling import settle
from accept_mpi.pipeline.stage import Stage
from accept_mpi.plan import Lanes, Plan, StagePlan, with_lanes
from accept_mpi.planning.codec_choice import codings
from accept_mpi.profiling.outline import Outline
from accept_mpi.recovery.barriers import Barriers, LocalCopies
from accept_mpi.recovery.disk_replicas import DiskReplicas
from accept_mpi.recovery.layer_state import states
from accept_mpi.recovery.replicas import Replicas
from accept_mpi.recovery.replication import Replication, Route
from accept_mpi.training.basis_learning import BasisLearning
from accept_mpi.training.clipping import Clipping, known_to_all
from accept_mpi.training.codec_selection import select_codecs
from accept_mpi.training.controller import Controller, Follower
from accept_mpi.training.data_here import Data, Known, agree_on_data, turns
from accept_mpi.training.lanes import Computing, InTurn, LaneThreads, threads_of
from accept_mpi.training.reports import Reports
from accept_mpi.training.stage_channels import channels_to
from accept_mpi.training.summing import Summing
from accept_mpi.training.tried import Tried
from accept_mpi.training.worker import Services, Worker

_TOLD, _IN_FLIGHT = 4096, 8  # reports kept; more than can be in flight
_UNWRITTEN_SECONDS = 3.0  # of reports that a lost rank 0 may not have written to its log
_LOCAL_SHARE = 0.01
"""Share of the time that local copies may take."""
_LOCAL_SHARE_SYNC = 0.03
"""The same in synchronous schedules, where all stages but the first wait at the end of a step anyway."""


@dataclass
class RankState:
    """State of a rank that outlasts its deployments."""

    job: Job
    chain: Chain
    loss: Loss
    replicas: Replicas
    disk: DiskReplicas | None
    """Replicas on this host's disk, which outlive the process; only under ``launch``."""
    threads: int
    """Number of threads that this rank computes with."""
    data: Data = (None, None)
    """Training and test set, once this rank has needed them."""
    inputs: Known = field(default_factory=dict)  # of samples, on ranks that have held the first stage
    told: deque[StepMade | EvaluationMade] = field(default_factory=lambda: deque(maxlen=_TOLD))
    """The newest reports to rank 0, to be repeated in case they were in flight when a rank was lost, or rank 0 was."""
    outline: Outline | None = None
    """Outline of the model, if devices have been measured."""
    tried: Tried = field(default_factory=Tried)
    speed: SpeedCheck | None = None
    """Measures whether this device has become slower, if plans adapt."""
    stop: StopSignals = field(default_factory=StopSignals)


class Deployment:
    """One rank's part of a deployment. All ranks together call ``start``, ``build``, ``connect`` and ``train``."""

    batches: Calendar
    test_samples: int
    classes: tuple[str, ...]
    """Names of the data set's classes; empty if it has none."""

    def __init__(self, runtime: Runtime, state: RankState, plan: Plan, compile_seconds: float) -> None:
        self.runtime, self.state, self.plan, self.job = runtime, state, plan, state.job
        self.compile_seconds = compile_seconds
        """Seconds that the slowest rank took to compile kernels."""
        self.place = plan.place(runtime.rank)
        self.codecs_why: list[str] = []
        self._plane: DataPlane | None = None
        self._built: Stage | None = None

    @staticmethod
    def start(runtime: Runtime, state: RankState, plan: Plan) -> "Deployment":
        """Compile kernels, load the data if the stage needs it, and agree on its size; all ranks call this together."""
        idle = plan.place(runtime.rank).idle
        compiling = compile_together(runtime, [] if idle else kernels_of(codings(state.job, plan).values()))
        told = runtime.messenger.allgather(compiling, runtime.startup_seconds, "compiled kernels")
        new = Deployment(runtime, state, plan, max(told))
        runtime.describe_ranks(lambda rank: _holds(plan, rank))
        needed = state.data[0] is None and (new.place.first or new.place.last)
        for mine in turns(runtime, state.job, needed):
            state.data = runtime.agree("the data", partial(data_of, state.job) if mine else lambda: state.data)
        evaluates, first = state.job.train.evaluate_every > 0, plan.stages[0].ranks
        samples, new.test_samples, new.classes = agree_on_data(runtime, new._data, evaluates, first, state.inputs)
        train = state.job.train
        new.batches = Calendar(samples, train.batch_size, micro_batches_of(state.job), train.seed, train.drop_last)
        return new

    def build(self, course: Milestones, batches: Calendar, restore: Callable[[Stage], None]) -> None:
        """Build the stage, agree on what crosses its boundaries, and have ``restore`` load its state; all ranks call this
        together. ``course``: the steps to make; ``batches``: the samples of each step."""
        failpoint("build")
        runtime, job, self.course, self.batches = self.runtime, self.job, course, batches
        loss = self.state.loss if self.place.last else None
        self.stage = self._built = _make_stage(runtime, self.state, self.plan.layers_of(runtime.rank), loss)
        counts = runtime.messenger.allgather(self.stage.size, runtime.startup_seconds, "the number of parameters")
        self.parameters = sum(counts[rank] for rank in self.plan.leaders)
        sizes = _sizes(self.batches, self.test_samples if course.evaluate_every else 0)
        tried = runtime.messenger, self.stage, self.place, self.plan.stages, sizes, self._data
        self._signatures = self.state.tried.agree_on_shapes(*tried, job.pipeline.startup_timeout, self.state.outline)
        if self.plan.hybrid:
            try:
                runtime.agree("the groups", lambda: self.stage.join_group() if self.place.members > 1 else None)
            except Agreed as mistake:
                raise GroupRefused(str(mistake)) from mistake
        runtime.agree("what backwards do", lambda: None if self.place.idle else self._prepare_backwards())
        no_lanes = self._check_lanes() if self.plan.laned else ""
        self.plan, self.codecs_why = select_codecs(
            runtime, job, self.plan, self.stage, max(sizes[0]), self._signatures, self._data[0]
        )
        if runtime.size == 1 and self._lanes != 1 and job.pipeline.lanes == "auto":  # no table of the plan says so
            each = threads_of(self._lanes, self.state.threads)[0]
            self.codecs_why.append(
                f"{self._lanes} micro-batches at a time, each with {each} of {self.state.threads} threads"
            )
        self.codecs_why += [no_lanes] if no_lanes else []
        place, ahead = self.place, self._signatures[1]
        if self._coding_ahead.basis and not ahead.unclear:
            self.stage.bases = KeptBases(self.stage.names[-1], widths_of(ahead.forward.values()))
        if not place.idle:
            self.stage.norms = KeptNorms(self.stage.names, self._older)
        restore(self.stage)  # after the first forward, which may create buffers
        settle(self.stage)

    def _prepare_backwards(self) -> None:
        """Raises UserError if the stage's layers do not allow what backwards are to do."""
        self._summing.check_hooks(self.stage)
        if self.plan.stages[self.place.stage].recompute:
            self.stage.compute_again()

    def _check_lanes(self) -> str:
        """Have all ranks say whether their lanes can compute what their stages do. If not, no rank gets lanes; returns the
        reason. Raises Agreed if the job asks for them."""
        stage, lanes, found = self.stage, self._lanes, self.stage.found
        why = "" if lanes == 1 else found.in_turn or stage.undivided or ("" if lanes == "F+B" else found.one_forward)
        said = self.runtime.messenger.allgather(why, self.runtime.startup_seconds, "whether lanes can compute the stage")
        if whys := [f"stage {self.plan.place(rank).stage}: {why}" for rank, why in enumerate(said) if why]:
            if self.job.pipeline.lanes != "auto":
                raise Agreed(f"pipeline.lanes: {whys[0]}, so its micro-batches cannot be computed at a time")
            self.plan = with_lanes(self.plan, {})
            return f"no lanes, since in {whys[0]}"
        if lanes not in (1, "F+B") and stage.statistics is None:
            stage.join_group()
        return ""

    @property
    def _summing(self) -> Summing:
        """What this rank sums with others."""
        return Summing(self.plan, self.runtime.rank, self.job, self.state.chain.shared)

    @property
    def _coding_ahead(self) -> Coding:
        """The codec of the activations that this stage sends on."""
        sends = not (self.place.idle or self.place.last)
        return parse(self.plan.boundaries[self.place.stage].forward, False) if sends else NONE

    @property
    def _lanes(self) -> Lanes:
        """This rank's lanes."""
        return 1 if self.place.idle else self.plan.stages[self.place.stage].lanes_of(self.runtime.rank)

    def connect(self, controller: Controller | None) -> None:
        """Start the data plane and the channels to the neighbours. ``controller``: given on rank 0 only."""
        runtime, state = self.runtime, self.state
        self.recorder = Recorder(runtime.clock, runtime.rank, self.place.stage, runtime.members)
        self.role: Controller | Follower = controller or Follower()
        last = self.plan.stages[-1].leader
        self._drawn = Drawn(lambda step, sums: plane.post(last, TargetsDrawn(step, dict(sums))))
        plane = self._plane = DataPlane(
            runtime.circle.data, runtime.messenger, self.recorder, self._handle, computing_takes_all(runtime.cores)
        )
        self._clocks = ClockCheck(runtime.clock, runtime.rank, plane.post)
        ranks = self.plan.leaders
        copying = self.job.recovery.copies(runtime.size, runtime.survives)
        self.barriers = Barriers(self.job.recovery, ranks[0], copying, plane.post, self._local_copies())
        place = self.place
        groups = sum(len(stage.ranks) > 1 for stage in self.plan.stages)
        route = Route(None if place.idle else place.stage, ranks, runtime.size, place.member, place.members, groups)
        self.replication = Replication(
            state.replicas, route, copying, self.barriers, plane.post, lambda: plane.background.busy, self.course.first
        )
        self._tables = [self._table(stage) for stage in self.plan.stages]
        agreed, bases = self._signatures, self.stage.bases
        self._channels = channels_to(plane, self.job, self.plan, place, self._tables, self.batches.most, *agreed, bases.at)
        summing, count_of = self._summing, self.batches.count
        self._member = summing.connect(plane, self.stage, self._tables, count_of)
        flow = self._late if flows(self.job.pipeline.schedule) else 0
        self._learn = BasisLearning(plane, bases, self.plan, place, self._tables, count_of, flow)
        self._clipping = self._clips(plane, summing.late)
        leader = None if self.place.leads else self.plan.stages[-1].leader
        self._reports = Reports(self.batches, runtime.clock, leader, plane.post, state.told, state.loss.metrics)
        if state.speed is None and self.job.pipeline.adapt:
            state.speed = SpeedCheck()
        self._plane.start()
        if forgets := ", ".join(self.stage.found.forgets):
            text = f"forwards change {forgets}, which checkpoints cannot keep: what is resumed begins with other values"
            plane.post(0, Event(runtime.clock.now(), self.course.first, text))
        if place.leads and agreed[1].unclear and self._coding_ahead != NONE:
            text = f"boundary {place.stage}: activations go uncoded: none wants a gradient, which tells them from masks"
            plane.post(0, Event(runtime.clock.now(), self.course.first, text))
        self._tell_again()
        state.stop.connect(self.barriers.ask_to_stop)
        if not self.replication.on:
            state.replicas.clear()
        elif self.course.first and not self.place.idle:
            self.replication.restart(self.course.first, self.stage)

    def train(self) -> int:
        """Make all steps, and wait until everything that follows from them is on rank 0's disk.

        Returns the number of steps made so far: fewer than the course's if another plan is to make the others. This rank's
        state is then among its replicas.
        """
        assert self._plane is not None
        made, over = 0, False
        if not self.place.idle:
            computing = self._computing(self._plane)
            holders = [rank for _, rank in self.plan.holders]
            services = Services(
                self._channels, self._plane, self.recorder, self.barriers, self.replication, self._drawn,
                self.runtime.lifeline.begin_step, self._reports, self.state.speed, self._tables[self.place.stage],
                widths(self.plan.stages), self.plan.slack, self._member, computing, self._clipping, self._learn,
                self.state.chain.order,
                partial(self.barriers.tell_all, ranks=holders) if self.plan.hybrid else None,
            )  # fmt: skip
            worker = Worker(self.job, self.place, self.stage, self.batches, self._data, self.state.chain.names, services)
            try:
                made = worker.train(self.course, self._deliver, self.test_samples)
            finally:
                computing.close()
            worker.ship_trace()
            over = worker.over
            if made < self.course.last and not over:
                self.state.replicas.keep(made, states(self.stage))
        return self._end(self._plane, made, over)

    def _computing(self, plane: DataPlane) -> Computing:
        """How this rank computes its actions."""
        if self._lanes == 1:
            return InTurn(self.stage)
        slots = Deal.of(self.plan.stages[self.place.stage]).slots_of(len(self._tables[self.place.stage]))
        return LaneThreads(
            self.stage, self._lanes, self.state.threads, [slot.lane for slot in slots], plane.check, plane.fail
        )

    def abandon(self) -> None:
        """Drop everything after a loss, without waiting for other ranks."""
        self.state.stop.connect(None)
        if self._plane:
            self.runtime.leave_behind(self._plane.abandon())
        self.close()

    def close(self) -> None:
        """Free the stage's memory now. (A stored exception keeps its frames alive, and they reference the stage.)"""
        if self._built:
            self._built.close()

    # ------------------------------------------------------------------------------------------------------------------

    @property
    def _data(self) -> Data:
        """The data sets, if the stage needs inputs or targets."""
        return self.state.data if self.place.first or self.place.last else (None, None)

    def _deliver(self) -> None:
        self._clocks.ask()
        self.role.deliver()

    def _handle(self, message: Message) -> bool:
        control = message.control
        if isinstance(control, TargetsDrawn):
            self._drawn.hear(control.step, {k: Checksum(*one) for k, one in control.sums.items()})
            return True
        parts = self._clipping, self.barriers, self.replication, self._reports
        handled = any(part.handle(control) for part in parts if part)
        return handled or self._clocks.handle(message) or self.role.handle(message)

    def _tell_again(self) -> None:
        """Repeat the newest reports from before this deployment: they may not have reached rank 0, or it may be lost with
        what it had not written yet."""
        assert self._plane is not None
        told = [message for message in self.state.told if message.report.step <= self.course.first]
        recent = sum(message.report.end > told[-1].report.end - _UNWRITTEN_SECONDS for message in told)
        for message in told[-max(recent, _IN_FLIGHT) :]:
            self._plane.post(0, message)

    def _local_copies(self) -> LocalCopies | None:
        """How often ranks keep local copies; None if no group holds a stage."""
        if not self.plan.hybrid:
            return None
        if not flows(self.job.pipeline.schedule):
            return LocalCopies(1, _LOCAL_SHARE_SYNC)
        return LocalCopies(math.ceil((self._late + 1) / (LOCAL_KEPT - 1)), _LOCAL_SHARE)

    def _clips(self, plane: DataPlane, early: bool) -> Clipping | None:
        """This rank's part in the clipping of gradients, if the job asks for that. ``early``: as for ``Clipping``."""
        most, place, plan = self.job.train.clip_norm, self.place, self.plan
        kept = None if place.idle else self.stage.norms
        before = range(self.course.first - self._older, self.course.first)
        known = known_to_all(self.runtime.messenger, kept, before, self.runtime.startup_seconds)
        if most is None or kept is None:
            return None
        others = [rank for stage in plan.stages for rank in stage.ranks if rank not in plan.stages[place.stage].ranks]
        told, steps = others if place.leads else [], range(self.course.first, self.course.last)
        return Clipping(most, plane, place.stage, place.stages, told, self._older, steps, early, kept, known)

    @property
    def _older(self) -> int:
        """Steps by which the other stages' norms are older in clipping, where none waits for them."""
        clips = self.job.train.clip_norm is not None and self.job.pipeline.schedule == "1f1b-async"
        return self._late if clips else 0

    @property
    def _late(self) -> int:
        """In a pipeline that flows: most steps by which the first stage's updates are behind the last one's."""
        pipeline, wide = self.job.pipeline, widths(self.plan.stages)
        flying = max_in_flight(pipeline.schedule, 0, len(wide), 1 << 30, self.plan.slack, wide)
        return 1 + self.batches.spanned(flying)

    def _table(self, stage: StagePlan) -> list[int]:
        """The member of a stage's group that takes each micro-batch, for the longest step and the evaluation."""
        return Deal.of(stage).table(max(self.batches.most, -(-self.test_samples // self.batches.micro)))

    def _end(self, plane: DataPlane, made: int, over: bool) -> int:
        """Wait until everything is sent and the last checkpoint is on the disk; returns the number of steps made. An idle
        rank waits here for the others. ``over``: whether this rank's last step has ended the run before its time."""
        failpoint("end")
        seconds, role = self.job.pipeline.startup_timeout, self.role
        pulse = self.state.speed if self.place.idle else None

        def look() -> None:
            plane.check()
            if pulse and (factor := pulse.factor()) is not None:
                plane.post(0, Speed(factor))

        idle = [rank for rank in range(self.runtime.size) if self.plan.place(rank).idle]
        self._clocks.settle(seconds, look)
        plane.post(0, Leaving(made, over))
        if isinstance(role, Controller):
            role.wait_for_all(self.runtime.size, math.inf if 0 in idle else seconds, look)
            made = role.steps_made
            if role.over:
                self.course = replace(self.course, last=made)
            newest = self.course.newest_checkpoint if made == self.course.last else None
            if newest is not None and not role.writer.wait(newest, seconds):
                raise DeadlineError(f"waited {seconds:.0f} s for the last checkpoint to reach the disk")
            role.deliver()
            for rank in idle:
                plane.post(rank, PlanOver(made))
        elif self.runtime.rank in idle:
            made = role.wait(look)
        self.state.stop.connect(None)
        plane.stop(seconds)
        return made


def _holds(plan: Plan, rank: int) -> str:
    """Description of what a rank holds, for messages, such as "stage 2, layers 10..14"."""
    layers = plan.layers_of(rank)
    return f"stage {plan.place(rank).stage}, layers {layers[0]}..{layers[-1]}" if layers else "idle"


def _make_stage(runtime: Runtime, state: "RankState", mine: range, loss: Loss | None) -> Stage:
    """Build the stage of the layers ``mine``, in a memory format that is the same on all stages."""
    train = state.job.train

    def build() -> Layers:
        return build_stage(state.chain, mine.start, mine.stop, train.seed, state.loss.function)

    layers = runtime.agree("the layers", build)
    told = runtime.messenger.allgather(layers.likes_channels_last, runtime.startup_seconds, "the memory format")
    channels_last = in_channels_last(train.memory_format, told)
    return runtime.agree("the layers' state", lambda: Stage(layers, state.job, loss, channels_last, build))


def _sizes(batches: Calendar, test_samples: int) -> tuple[list[int], list[int]]:
    """All numbers of samples that a micro-batch of this run can have, in training and in evaluation."""
    return sorted(batches.every_size(), reverse=True), sorted(
        set(micro_batch_sizes(test_samples, batches.micro)), reverse=True
    )

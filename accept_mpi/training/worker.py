"""The training loop of a rank: it walks the schedule, and nothing else.

The way of one micro-batch: ``forward`` takes it from the data set or from the stage before, runs the stage, and sends the
outputs on; ``backward`` sends the gradients back the same way.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from accept_mpi.codecs.gradient_chunks import Gradients
from accept_mpi.codecs.message import Decoded
from accept_mpi.codecs.tensors import Tensors
from accept_mpi.comm.data_plane import DataPlane
from accept_mpi.comm.ends import Receiver
from accept_mpi.comm.messages import Speed, TraceRows
from accept_mpi.data import Dataset
from accept_mpi.data.calendar import Calendar, Milestones, in_order, segments
from accept_mpi.data.feed import Drawn, Feed
from accept_mpi.device.speed_check import EVERY_BESIDE_A_STAGE, SpeedCheck
from accept_mpi.errors import NonFiniteLoss
from accept_mpi.failpoints import failpoint
from accept_mpi.job import Job, flows
from accept_mpi.logs.recorder import Recorder, Subject
from accept_mpi.models.losses import Result
from accept_mpi.pipeline.deal import of_member
from accept_mpi.pipeline.micro_batch import Inputs, Outputs
from accept_mpi.pipeline.optimizer import learning_rate
from accept_mpi.pipeline.schedule import Action, forward_only, max_in_flight
from accept_mpi.pipeline.schedule import walk as schedule_walk
from accept_mpi.pipeline.stage import Stage
from accept_mpi.pipeline.suspects import Suspects
from accept_mpi.plan import Place
from accept_mpi.recovery.barriers import AHEAD, CHECKPOINT, EXTRA, LOCAL, OVER, REPLAN, SNAPSHOT, Barriers
from accept_mpi.recovery.replication import Replication
from accept_mpi.training.basis_learning import BasisLearning
from accept_mpi.training.checkpoint_sender import CheckpointSender
from accept_mpi.training.clipping import Clipping, positions
from accept_mpi.training.gradient_sums import GradientSums
from accept_mpi.training.lanes import Computing, InTurn
from accept_mpi.training.reports import Reports
from accept_mpi.training.stage_channels import StageChannels
from accept_mpi.tree import LONE

_COPIES = SNAPSHOT | EXTRA | LOCAL | CHECKPOINT
"""Flags of a step after which the state is copied."""
_TRACE_SECONDS = 1.0  # between two messages with trace rows


@dataclass(frozen=True)
class Services:
    """The parts of a deployment that a worker uses, apart from its stage."""

    channels: StageChannels
    plane: DataPlane
    recorder: Recorder
    barriers: Barriers
    replication: Replication
    drawn: Drawn
    begin_step: Callable[[int], None]
    """Gets the number of each step, counted from 1, as it begins."""
    reports: Reports
    speed: SpeedCheck | None
    """Speed check of this device, if plans adapt."""
    table: Sequence[int]
    """Member of this stage's group that takes each micro-batch."""
    widths: Sequence[int]
    """Each stage's (``pipeline.deal.widths``)."""
    slack: int
    """``Plan.slack``."""
    member: GradientSums | None
    """Sums of the gradients; None if this rank holds the stage alone, and computes one action after the other."""
    computing: Computing
    """How this rank computes its actions."""
    clipping: Clipping | None
    """If gradients are clipped."""
    learn: BasisLearning
    order: dict[str, int]
    """Positions of the model's parameters (``Chain.order``)."""
    tell_flags: Callable[[int], None] | None
    """If groups hold stages: tells all ranks how a step will end; on the first stage's leader does so, elsewhere nothing."""


class Worker:
    """One rank's part in a run: walks its stage's actions."""

    def __init__(
        self,
        job: Job,
        place: Place,
        stage: Stage,
        batches: Calendar,
        data: tuple[Dataset | None, Dataset | None],
        layer_names: list[str],
        services: Services,
    ) -> None:
        """``data``: training and test set, if this stage needs them."""
        self.job, self.stage, self.batches, self.place = job, stage, batches, place
        self.s, self.stages = place.stage, place.stages
        self._layer_names = layer_names
        self.links, self.plane, self.recorder = services.channels, services.plane, services.recorder
        self._barriers, self._replication = services.barriers, services.replication
        self._begin_step, self._reports, self._speed = services.begin_step, services.reports, services.speed
        self._table, self._widths, self._slack, self._learn = services.table, services.widths, services.slack, services.learn
        self._member, self._computing, self._clipping = services.member, services.computing, services.clipping
        self._positions = positions(services.order, self.s, stage.trained_names, stage.trained_first)
        self._tell_flags = services.tell_flags
        self._checkpoints = CheckpointSender(self.plane, self.recorder, self.s)
        self._flags: dict[int, int] = {}
        """Flags of steps that end with a barrier (``recovery.barriers``), by step."""
        self._said = -1
        """Newest step before which the leader of the first stage's group has told flags."""
        self._deadline = job.pipeline.startup_timeout
        self._final: int | None = None
        """Step with which the plan ends, once that is known; and if ``over``, the run."""
        self.over = False
        self._feed, self._suspects = Feed(batches, data, place, stage.shares, services.drawn, services.table), Suspects()
        self._scale = 1.0
        """Scale of the gradients of the present step (``Stage.scale``)."""
        self._results: dict[int, dict[int, Result]] = {}
        """Results on the last stage, by step and micro-batch."""
        self._waited, self._traced, self._since = 0.0, time.monotonic(), time.monotonic()

    def train(self, course: Milestones, deliver: Callable[[], None], test_samples: int) -> int:
        """Make the course's steps. ``deliver`` is called after each of them, for the observers on rank 0. Returns the number
        of steps made so far: fewer than the course's if another plan is to make the others, or the run ends early."""
        self._course = course
        if course.again:
            self._pause(course.first, test_samples)
        for segment in segments(course.first, course.last, course.pauses(flows(self.job.pipeline.schedule))):
            self.walk(segment, course.last, deliver)
            stop = segment.stop if self._final is None else self._final + 1
            self._pause(stop, test_samples)
            deliver()
            if self._final is not None:
                break
        self._feed.close(self._deadline, self.plane.check)
        self._reports.flush(self._deadline, self.plane.check)
        return course.last if self._final is None else stop

    def _pause(self, step: int, test_samples: int) -> None:
        """Evaluate, and keep a checkpoint, if that is due after ``step`` steps."""
        if self._course.evaluates(step):
            self.evaluate(step, test_samples)
        if self._course.checkpoints(step):
            self.checkpoint(step)

    def walk(self, segment: range, steps: int, deliver: Callable[[], None]) -> None:
        """Carry out the actions of one segment, from an empty pipeline to an empty one. ``steps``: the run's last step."""
        pipeline, slack = self.job.pipeline, self._slack
        samples: dict[int, tuple[Any, list[int]]] = {}  # indices and sizes of micro-batches, of the steps under way
        counts = [self.batches.count(step) for step in segment]
        plan = schedule_walk(
            pipeline.schedule, self.s, self.stages, counts, slack, pipeline.vertical_sync, self._widths,
            updates="usual" if self._clipping is None else "late" if self._clipping.early else "prompt",
        )  # fmt: skip
        bound = max_in_flight(pipeline.schedule, self.s, self.stages, sum(counts), slack, self._widths)
        if self._tell_flags and self.place.first and self.place.leads:
            plan = self._telling(plan, segment, steps)
        for kind, position, k, version, whole in plan:
            step = segment.start + position
            if self._final is not None and step > self._final:
                continue
            if step not in samples:
                self._begin(step, steps)
                if step - 1 in samples and self._flags.get(step - 1, 0) & _COPIES:
                    self.stage.hold()  # what the end of the last step is copied with, before a forward changes it
                samples[step] = self.batches.indices(step), self.batches.sizes(step)
            if kind != "U" and self._table[k] != self.place.member:  # who must know how the step ends before a later one
                continue
            indices, sizes = samples[step]
            if kind == "F":
                self.forward(step, k, indices, version, sizes, whole)
                assert len(self.stage.in_flight) <= bound, f"more than {bound} micro-batches in flight"
            elif kind == "B":
                self.backward(step, k, sizes[k])
            elif kind == "W":
                self.weight_gradient(step, k)
            else:
                self._computing.join()
                self.update(step, version, steps)
                if (flags := self._flags.pop(step, 0)) & (SNAPSHOT | EXTRA):
                    with self.recorder.span("snapshot", step + 1):
                        self._replication.begin(step + 1, self.stage, flags)
                elif flags & LOCAL:
                    with self.recorder.span("snapshot", step + 1):
                        self._replication.keep(step + 1, self.stage)
                if flags & CHECKPOINT and not self._course.checkpoints(step + 1):
                    self.checkpoint(step + 1)
                if flags & _COPIES:
                    self.stage.release()
                self._deadline = pipeline.timeout
                self._feed.end(step)
                del samples[step]
                self._beat()
                deliver()
                if step == self._final:
                    break
        self._computing.join()
        self.stage.drained()

    def _telling(self, plan: Iterator[Action], segment: range, steps: int) -> Iterator[Action]:
        """The group's actions on the first stage's leader, which says how a step ends, in time, before the group's first
        action in it: it may have none of its own until others' actions need to know."""
        for action in plan:
            step = segment.start + action.step
            if step > self._said and (self._final is None or step <= self._final):
                self._said = step
                if step + AHEAD + 1 < steps and self._tell_flags:
                    self._tell_flags(step + AHEAD)
            yield action

    def _begin(self, step: int, steps: int) -> None:
        """Begin a step, before this rank's first action in it: the first stage decides how it ends."""
        self._begin_step(step + 1)
        if self._tell_flags:  # groups hold stages
            if self._course.first + AHEAD <= step < steps - 1:
                self._flag(step, self._barriers.told(step, self._deadline, self.plane.check))
        elif self.place.first and step + 1 < steps:
            self._flag(step, self._barriers.flags(step))

    def _flag(self, step: int, flags: int) -> None:
        """Note how a step ends."""
        self._flags[step] = flags
        if flags & REPLAN:
            self._final = step
        if flags & OVER:
            self.over, self._course = True, replace(self._course, last=step + 1)

    def forward(self, step: int, k: int, samples: Any, version: int, sizes: list[int], whole: bool) -> None:
        """F of micro-batch ``k``: get its inputs, run the stage, send its outputs.

        ``samples`` and ``sizes``: indices and number of samples of each micro-batch of the step. Loading data counts as part
        of F, so that a host slow at that is given fewer layers; lanes are handed what this thread has loaded.
        """
        failpoint("forward")
        given, suspect = Inputs((), LONE), 0
        source, target = self.links.activations_in(k), self.links.activations_out(k)
        if source:
            message = self._receive(source, step, k)
            given, suspect = Inputs(message.tensors, message.tree), message.header.suspect
            if k == 0 and not self._tell_flags:
                self._flag(step, message.header.flags)
        flags = self._flags.get(step, 0)
        load = partial(self._feed.micro_batch, step, k, samples, self.stage.runner.drawing)
        # A data set may be bound to this thread, as a connection to SQLite is.
        loaded = None if isinstance(self._computing, InTurn) else load()

        def compute(stage: Stage) -> tuple[Outputs, int]:
            with self.recorder.span("F", step + 1, k):
                data, share = loaded or load()
                values = given if source else stage.from_data(data.inputs)
                out = stage.forward(step, k, values.tensors, version, data.targets, share, whole, values.tree, sizes[k])
                return out, suspect or (0 if out.sound else self._suspects.find(stage, step, k, values, data.targets))

        def after(computed: tuple[Outputs, int]) -> None:
            out, found = computed
            if self._member:
                self._member.after_forward(step, k, out)
            if target:
                target.send(step, k, sizes[k], out.outputs, flags=flags, suspect=found, tree=out.tree)
            if out.result:
                self._note(step, k, out.result, found)

        self._computing.do("F", step, k, compute, after)

    def _note(self, step: int, k: int, result: Result, suspect: int) -> None:
        """Note a micro-batch's result on the last stage. ``suspect``: as ``Suspects`` names them. Raises NonFiniteLoss."""
        self._results.setdefault(step, {})[k] = result
        if not math.isfinite(result.loss):
            names = [f'layer {n} "{name}"' for n, name in enumerate(self._layer_names)]
            source = ["the loss (if no target counts, have it give (sum, count))", "the data set", *names][suspect]
            where = f"step {step + 1}, micro-batch {k}; the first values that are not finite come out of {source}"
            raise NonFiniteLoss(f"the loss is {result.loss} in {where}")

    def backward(self, step: int, k: int, samples: int) -> None:
        """B of micro-batch ``k``: get its outputs' gradients, run the stage backward, send its inputs' gradients."""
        failpoint("backward")
        gradients: Tensors = ()
        source, target = self.links.gradients_in(k), self.links.gradients_out(k)
        if source:
            message = self._receive(source, step, k)
            gradients, self._scale = message.tensors, message.header.scale
        else:
            self._scale = self.stage.scale(step)
        scale = self._scale

        def compute(stage: Stage) -> tuple[Tensors, Gradients, bool]:
            with self.recorder.span("B", step + 1, k):
                tell = partial(self._member.in_backward, step, k, scale) if self._member else None
                result = stage.backward(step, k, gradients, tell=tell)
            whole = (step, k) not in stage.in_flight  # nothing is left to W
            return result, self._gradients(stage), whole

        def after(found: tuple[Tensors, Gradients, bool]) -> None:
            result, mine, whole = found
            if target:
                target.send(step, k, samples, result, scale=scale)
            if self._member:
                self._member.after_backward(step, k, mine, scale, whole)
                self._tell_norms(step, self._member)

        self._computing.do("B", step, k, compute, after)

    def weight_gradient(self, step: int, k: int) -> None:
        """W of micro-batch ``k``."""
        scale = self._scale

        def compute(stage: Stage) -> Gradients:
            with self.recorder.span("W", step + 1, k):
                stage.weight_gradient(step, k)
            return self._gradients(stage)

        def after(found: Gradients) -> None:
            if self._member:
                self._member.after_weight_gradient(step, k, found, scale)

        self._computing.do("W", step, k, compute, after)

    def _tell_norms(self, step: int, member: GradientSums) -> None:
        """If the other stages will wait for the norms of a step's gradients, and these are whole here, tell them."""
        if self._clipping and self._clipping.early and (gradients := member.whole(step)) is not None:
            self._clipping.tell(step, gradients, self._positions)

    def _gradients(self, stage: Stage) -> Gradients:
        """What an action has left in a stage, if gradients are summed apart."""
        return stage.exchange_gradients() if self._member else []

    def update(self, step: int, version: int, steps: int) -> None:
        """U: make the optimizer's step; the last stage reports loss and speed. ``steps``: the run's last step."""
        failpoint("update")
        lr = learning_rate(self.job.train.optimizer, self.job.lr, step, steps)
        if self._member:
            began = self.recorder.clock.now()
            self._member.wait(step, self._deadline)
            self._waited += self.recorder.clock.now() - began
            self.recorder.add("wait", began, Subject(step + 1))
        self._learn(step, self._deadline)
        with self.recorder.span("U", step + 1):
            clip = partial(self._clip, step) if self._clipping else None
            if self._member:
                self._member.update(lr, version, clip)
            else:
                self.stage.update(lr, version, self._scale, clip)
        if self.place.last:
            self._reports.add(step + 1, False, self._results.pop(step, {}))
            self._reports.made(step + 1, False, self.batches.count(step), lr)
        if time.monotonic() - self._traced > _TRACE_SECONDS:
            self.ship_trace()

    def _clip(self, step: int, gradients: Gradients) -> torch.Tensor:
        """Factor for a step's gradients."""
        assert self._clipping
        return self._clipping.factor(step, gradients, self._positions, self._deadline)

    def evaluate(self, step: int, test_samples: int) -> None:
        """Run the test set forward through all stages, after ``step`` steps; the last stage reports the result."""
        micro = list(in_order(test_samples, self.batches.micro))
        results = {}
        self._feed.begin_test(step)
        with self._computing.alone(), self.stage.evaluating():
            for _, _, k, *_ in of_member(forward_only(len(micro)), self._table, self.place.member):
                if result := self.forward_test(step, k, micro[k]):
                    results[k] = result
        self._feed.end_test(step)
        self.links.drain(self._deadline)
        if self.place.last:
            self._reports.add(step, True, results)
            self._reports.made(step, True, len(micro))

    def forward_test(self, step: int, k: int, samples: Any) -> Result | None:
        """E of micro-batch ``k`` of the test set, after ``step`` steps. Returns the result on the last stage, else None."""
        failpoint("evaluate")
        given, source, target = Inputs((), LONE), self.links.activations_in(k), self.links.activations_out(k)
        if source:
            message = source.receive(step - 1, k, self._deadline, self.recorder)
            given = Inputs(message.tensors, message.tree)
        with self.recorder.span("E", step, k):
            data = self._feed.test(k, samples)
            if self.place.first:
                given = self.stage.from_data(data.inputs)
            out = self.stage.evaluate(given.tensors, data.targets, given.tree, k, len(samples))
        if target:
            target.send(step - 1, k, len(samples), out.outputs, deadline=self._deadline, tree=out.tree)
        return out.result

    def checkpoint(self, step: int) -> None:
        """Copy the stage's state, and send it to rank 0 in the background; on the stage's leader."""
        failpoint("checkpoint")
        if self.place.leads:
            self._checkpoints.send(step, self.stage, self._deadline)

    def ship_trace(self) -> None:
        """Send the trace rows gathered so far to rank 0."""
        self._traced = time.monotonic()
        if len(self.recorder):
            self.plane.post(0, TraceRows(self.recorder.take().tobytes()))

    def _receive(self, link: Receiver, step: int, k: int) -> Decoded:
        """Receive a message, and add up the time of waiting for it."""
        began = time.monotonic()
        try:
            return link.receive(step, k, self._deadline, self.recorder)
        finally:
            self._waited += time.monotonic() - began

    def _beat(self) -> None:
        """On a device that mostly waits, report now and then how fast it would be with more to do."""
        span = time.monotonic() - self._since
        if self._speed and isinstance(self._computing, InTurn) and span > EVERY_BESIDE_A_STAGE:
            if self._waited > span / 2:
                self.plane.post(0, Speed(self._speed.beat()))
            self._waited, self._since = 0.0, time.monotonic()

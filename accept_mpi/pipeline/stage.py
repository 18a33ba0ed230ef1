"""One stage's computation: forward, backward, what is kept in between, and the optimizer."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from accept_mpi import tree
from accept_mpi.codecs.tensors import Tensors
from accept_mpi.device.compute import here
from accept_mpi.errors import UserError
from accept_mpi.job import Job, flows
from accept_mpi.models.common import Finder, Seen
from accept_mpi.models.divisors import Divisors
from accept_mpi.models.held import held
from accept_mpi.models.layers import Layers
from accept_mpi.models.losses import Loss, Result
from accept_mpi.models.memory import lay_out
from accept_mpi.models.modes import restore_modes
from accept_mpi.pipeline.averages import Averages
from accept_mpi.pipeline.correction import Correction
from accept_mpi.pipeline.deferred_weights import DeferredWeights
from accept_mpi.pipeline.findings import Findings
from accept_mpi.pipeline.graph_edges import Box, Seeded, Telling, apart, finite
from accept_mpi.pipeline.kept_bases import KeptBases
from accept_mpi.pipeline.kept_norms import KeptNorms
from accept_mpi.pipeline.layer_runner import LayerRunner
from accept_mpi.pipeline.micro_batch import InFlight, Inputs, Key, Outputs
from accept_mpi.pipeline.muon import matrices
from accept_mpi.pipeline.optimizer import make_optimizer, set_learning_rate, update
from accept_mpi.pipeline.parameters import Parameters
from accept_mpi.pipeline.recomputing import Recomputing
from accept_mpi.pipeline.remembered import Remembered
from accept_mpi.pipeline.running_statistics import RunningStatistics
from accept_mpi.pipeline.schedule import DELAY
from accept_mpi.pipeline.settled import Settled, check
from accept_mpi.pipeline.stage_state import Stateful
from accept_mpi.pipeline.turns import Turns, hooked
from accept_mpi.pipeline.weight_versions import LaneWeights, Weights
from accept_mpi.seeds import backward_seed, evaluation_seed, forward_seed, seed_all
from accept_mpi.tree import Tree
from accept_mpi.users_code import RAISED, blame, taken_apart

_EVALUATION = -1  # in place of a step
Clip = Callable[[list[torch.Tensor | None]], torch.Tensor]
"""Factor for a step's gradients, given those of a stage's trained parameters."""


class Stage(Stateful):
    """A contiguous run of layers, ready to train."""

    def __init__(
        self,
        layers: Layers,
        job: Job,
        loss: Loss | None,
        channels_last: bool,
        again: Callable[[], Layers] | None = None,
        found: Findings | None = None,
    ) -> None:
        """``loss`` is given on the last stage; ``channels_last`` must be the same on all stages. ``again`` builds the layers
        once more for a trial if they cannot be copied; ``found``: what is known of them already."""
        self.start, self.names, self.layers, self.common = layers.start, layers.names, layers.modules, layers.common
        self.job, self._seed, self.build_again = job, job.train.seed, again
        self.loss, self._compute = loss, here()
        for module in (*self.layers, loss and loss.function):
            self._compute.hold(module)
        self.channels_last = channels_last
        if channels_last:
            lay_out(self.layers, torch.channels_last)
        self.found = found or Findings()
        self.runner = LayerRunner(layers, job, self.found)
        own = self.own = Parameters(layers)
        self.parameters, schedule = own.every, job.pipeline.schedule
        buffers = [one for layer in self.layers for one in (*layer.buffers(), *(one for _, one in held(layer)))]
        delay = DELAY if schedule == "1f1b-delayed" else 0
        self._weights = Weights(self.parameters, flows(schedule), buffers, delay)
        trained = self._trained = [n for n, p in enumerate(self.parameters) if p.requires_grad]
        # Parameters that several layers share are AdamW's: another stage may not see that one of its uses is a table.
        of_muon = matrices(self.layers) if job.train.optimizer.name == "muon" else ()
        self.optimizer = make_optimizer(
            job.train.optimizer, job.lr, [self._weights.updated[n] for n in trained], [own.whole[n] for n in trained],
            job.train.groups, [id(own.every[n]) in of_muon and len(own.whole[n]) == 1 for n in trained],
        )  # fmt: skip
        self.trained_names = [own.whole[n][0] for n in trained]
        """Names of ``trained`` in the whole model."""
        self.trained_first = [own.first[n] for n in trained]
        """For each of ``trained``, False if an earlier stage has a copy of it, too."""
        self.trained_layers = [own.layers[n] for n in trained]
        """The first layer that has each of ``trained``."""
        self.averages = Averages(job.train.ema)
        self._correction = Correction(job.train.optimizer.correction == "extrapolate")
        self.again: Recomputing | None = None
        """If backwards compute their forwards again."""
        self.deferred = DeferredWeights(self.layers) if schedule == "zero-bubble" else None
        self._anchor = torch.zeros((), requires_grad=True, device=self._compute.device)
        self.in_flight: dict[Key, InFlight] = {}
        self.divisors = Divisors()
        self.statistics: RunningStatistics | None = None
        """BatchNorm's running statistics, if a group holds the stage."""
        self.remembered = Remembered([])
        """What forwards have modules remember."""
        self.bases, self.norms = KeptBases(), KeptNorms()
        self.settled: list[Settled] = []
        """What else forwards refer to, where several ranks or lanes compute: of this stage and of its lanes."""
        self._held: deque[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]] = deque()
        """State that is not trained, and what modules remembered, as it was when steps ended (``hold``)."""
        self.state_at_first = self.state_names()  # reports state that cannot be kept now, not at the first checkpoint

    @property
    def shares(self) -> Callable[[Sequence[Any], Sequence[int]], list[float]] | None:
        """``Loss.shares`` on the last stage, else None."""
        return self.loss.shares if self.loss is not None else None

    @property
    def last(self) -> int:
        """Index of the last layer."""
        return self.start + len(self.layers) - 1

    @property
    def where(self) -> str:
        """The layers, for the user."""
        return f"layers {self.start} to {self.last}" if self.last > self.start else f"layer {self.start}"

    def seen(self) -> Seen:
        """What layers have in common with those of other stages, and the variables of Python and of functions that forwards
        refer to."""
        layers = [*self.layers, self.loss and self.loss.function]
        finder = Finder()
        for index, layer in enumerate(layers, self.start):
            finder.show(index, layer)
        return Seen(layers, self.start, [*self.common, *finder.variables()])

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(p.numel() for p in self.parameters)

    def from_data(self, value: Any) -> Inputs:
        """A data set's inputs in the form that the first stage takes: images in the model's memory format."""
        tensors, of = taken_apart(-1, "", value)
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        laid_out = (v.contiguous(memory_format=layout) if v.dim() == 4 else v for v in tensors)
        return Inputs(tuple(laid_out), of)

    def close(self) -> None:
        """Release all tensors even if something still refers to this object, since another stage is to be built from it."""
        self.in_flight.clear()
        if self.deferred is not None:
            self.deferred.close()
        self.optimizer = self.deferred = None
        self.averages = Averages(0.0)
        self.layers, self.parameters, self._trained, self._weights = [], [], [], Weights([], False)
        nothing = Layers(self.start, [], [])
        self.own, self.runner, self.found = Parameters(nothing), LayerRunner(nothing, self.job, Findings()), Findings()
        self.build_again = self.again = self.statistics = None
        self.settled, self.remembered, self._held = [], Remembered([]), deque()

    # -- actions -------------------------------------------------------------------------------------------------------

    def forward(
        self,
        step: int,
        micro_batch: int,
        inputs: Tensors,
        version: int = 0,
        target: Any = None,
        share: float = 1.0,
        whole: bool = False,
        of: Tree | None = None,
        samples: int | None = None,
    ) -> Outputs:
        """F of one micro-batch. ``inputs``, from the wire or the data set, are the tensors of the tree ``of`` (by default a
        single tensor, or a tuple of several); ``version`` counts updates since the segment began. On the last stage
        ``target`` is required, ``samples`` is ``len(target)`` if None, and the micro-batch's loss has this ``share`` in the
        step's (``Loss.shares``). ``whole``: B is to leave nothing to W (zero-bubble)."""
        inputs, target = self._compute.take(inputs), self._compute.take_value(target)
        self._weights.begin(version)
        if self.deferred is not None:
            self.deferred.begin(not whole)
        again = self.again.kept(inputs, of) if self.again else None
        if self.settled:
            self.settled[0].largest.see(inputs, of)
        boxes, value, taken = self._computed(step, micro_batch, inputs, of)
        result, given = None, tree.LONE
        if self.loss is not None:
            with self.runner.precise():
                result, outputs = self._judge(step, value, target, share, samples)
            if result.count and not outputs[0].requires_grad and (self.trained or any(b.wants_gradient for b in boxes)):
                raise UserError(f'train.loss: "{self.loss.name}" gives a loss without a gradient: is something detached?')
        else:
            outputs, given = taken_apart(self.last, self.names[-1], value)
        if self.found.written:
            self.keep_apart()
        weights = self._weights.end(version)
        sound = finite(outputs)
        if self.again and again is not None:
            outputs, boxes = self.again.forget(outputs), []
        self.in_flight[step, micro_batch] = InFlight(boxes, outputs, weights, whole, again=again)
        return Outputs(() if result else self._compute.give(outputs), result, sound, given, next(iter(taken), None))

    def backward(
        self, step: int, micro_batch: int, gradients: Tensors, seed: int | None = None, tell: Telling | None = None
    ) -> Tensors:
        """B: gradients of the inputs that want one, for the previous stage. ``gradients`` is empty on the last stage.
        ``seed``: of random numbers, if not that of this micro-batch; ``tell``: told of ``progress`` if W has no part."""
        gradients = self._compute.take(gradients)
        flight = self.in_flight[step, micro_batch]
        self.runner.progress.tell = tell if self.deferred is None or flight.whole else None
        if self.again and flight.again is not None:
            with self._going_back(flight), self.again.untouched(self.statistics is None):
                flight.boxes, value, _ = self._computed(step, micro_batch, *flight.again)
                flight.outputs, _ = taken_apart(self.last, self.names[-1], value)
        wanting = [out for out in flight.outputs if out.requires_grad]
        if self.loss is not None:
            gradients = tuple(map(torch.ones_like, wanting))
        pairs = [(out, g) for out, g in zip(wanting, gradients, strict=True) if g is not None]
        self.bases.see(step, micro_batch, flight.outputs, pairs)
        if pairs:
            if self.runner.turns is None:  # else nothing draws
                after = self.last + 1  # the loss, or what is not of this stage
                seed_all(backward_seed(self._seed, step, micro_batch, after) if seed is None else seed)
            if self.deferred is not None:
                self.deferred.begin(not flight.whole, forward=False)  # which may compute forwards again
            with self._going_back(flight):
                Seeded.apply([g for _, g in pairs], *(out for out, _ in pairs)).backward()
        flight.outputs = []
        if self.deferred is not None and not flight.whole:
            flight.work = self.deferred.collect()
        else:
            del self.in_flight[step, micro_batch]
        found = [box.gradient for box in flight.boxes if box.wants_gradient]
        return self._compute.give(apart(found, self.parameters))

    def weight_gradient(self, step: int, micro_batch: int) -> None:
        """W: compute the weight gradients that B left."""
        flight = self.in_flight.pop((step, micro_batch))
        with self._going_back(flight):
            DeferredWeights.run(flight.work)
        self._compute.wait()

    def scale(self, step: int) -> float:
        """Factor for the step's gradients in ``update``, as far as the last stage knows it."""
        return self.divisors.scale(step)

    def update(self, lr: float, version: int, scale: float = 1.0, clip: Clip | None = None) -> None:
        """U: one optimizer step with ``scale`` times the gradients; afterwards weights are version ``version`` + 1 of the
        segment. ``clip`` gets the gradients of ``trained`` and returns a factor for all. Raises as ``check_settled``."""
        self.check_settled()
        if self.optimizer is not None:
            if scale != 1.0:
                for parameter in self.parameters:
                    if parameter.grad is not None:
                        parameter.grad.mul_(scale)
            if clip is not None:
                gradients = [parameter.grad for parameter in self.trained]
                factor = clip(gradients)
                for gradient in gradients:
                    if gradient is not None:
                        gradient.mul_(factor)
            self._weights.before_update()
            set_learning_rate(self.optimizer, lr, self.job.lr)
            with self._correction.around(self._updated):
                update(self.optimizer)
            self.averages.add(self._updated)
        elif clip is not None:
            clip([])
        self._weights.publish(version + 1)
        self._compute.wait()

    def check_settled(self, deep: bool = False) -> None:
        """As ``settled.check``."""
        check(self.settled, self.where, self.statistics is not None, deep)

    def drained(self) -> None:
        """End a segment: nothing is in flight, and versions count from 0 again."""
        assert not self.in_flight, f"micro-batches {sorted(self.in_flight)} are still in flight"
        self._weights.restart()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within the context: the newest weights or their moving average, no dropout, BatchNorm's running statistics.
        Modules get their modes back on exit."""
        self.check_settled(deep=True)
        late = self.remembered.late()
        self._weights.newest()
        trained = self.trained
        shown = self.averages.show(self._updated, trained)
        turns, self.runner.turns = self.runner.turns, None  # nothing else computes now
        modes = [(module, module.training) for layer in self.layers for module in layer.modules()]
        for layer in self.layers:
            layer.eval()
        try:
            yield
        finally:
            restore_modes(modes)  # a user's own ``train`` takes out of the weights what ``eval`` has put in
            self.averages.hide(trained, shown)
            for one in self.settled:
                one.look()
            self.remembered.pass_over(self.remembered.late().difference(late))
            self.runner.turns = turns
            if turns is not None:
                turns.forget()

    @torch.no_grad()
    def evaluate(
        self, inputs: Tensors, target: Any, of: Tree | None = None, micro_batch: int = 0, samples: int | None = None
    ) -> Outputs:
        """E, within ``evaluating``: outputs for the next stage, or the result on the last."""
        inputs, target = self._compute.take(inputs), self._compute.take_value(target)
        there = [x if x is None else x.detach() for x in inputs]  # which want no gradient, as in one process
        with self.runner.precise():
            value = self.runner.run(there, of, partial(evaluation_seed, self._seed, micro_batch))
        if self.loss is None:
            outputs, given = taken_apart(self.last, self.names[-1], value)
            return Outputs(self._compute.give(outputs), None, tree=given)
        with self.runner.precise():
            return Outputs((), self._judge(_EVALUATION, value, target, 1.0, samples)[0])

    def compute_again(self) -> None:
        """Have backwards compute forwards again, but not the last stage's. Raises UserError if that were not the same."""
        if self.found.alone or self.found.written or self.deferred is not None:
            why = self.found.alone or "a forward writes into its parameters or buffers, or weight gradients are put off"
            raise UserError(f"pipeline.recompute: {self.where} cannot compute forwards again: {why}")
        self.again = Recomputing(self.layers) if self.loss is None else None

    # -- in a group ----------------------------------------------------------------------------------------------------

    def join_group(self) -> None:
        """From now on a group holds the stage: leave BatchNorm's running statistics to ``statistics``. Raises UserError if
        a group cannot hold it."""
        changes = any(name.startswith("parameter ") for name in self.found.written)
        writes = "a layer writes into its own parameters in its forward" if changes else ""
        hooks = "a parameter has hooks" if hooked(self.parameters) else ""  # which may count, or remember
        if why := self.undivided or writes or hooks or self.found.unreplayed:
            raise UserError(f"{self.where} cannot be held by several ranks: {why}")
        self.statistics = RunningStatistics(self.names, self.layers, self.found.norms_take, self.found.norms_apart)

    @property
    def undivided(self) -> str:
        """Reason why neither several ranks nor several lanes can hold the stage; empty: they can."""
        return self._compute.alone or self.found.alone

    @property
    def trained(self) -> list[nn.Parameter]:
        """The parameters that the optimizer has: those that wanted gradients at first, whatever forwards freeze."""
        return [self.parameters[n] for n in self._trained]

    @property
    def _updated(self) -> list[nn.Parameter]:
        """The same as the optimizer has them."""
        return [self._weights.updated[n] for n in self._trained]

    def exchange_gradients(self, gradients: Sequence[torch.Tensor | None] = ()) -> list[torch.Tensor | None]:
        """Take the gradients out of ``trained``, and put others in, by default none."""
        trained = self.trained
        found = [parameter.grad for parameter in trained]
        for parameter, gradient in zip(trained, gradients or [None] * len(found), strict=True):
            parameter.grad = gradient
        return found

    # -- in several threads --------------------------------------------------------------------------------------------

    def take_turns(self) -> Turns:
        """From now on two threads compute, one F and the other B. Raises UserError if they cannot."""
        if self.found.in_turn:
            raise UserError(f"pipeline.lanes: {self.where}: {self.found.in_turn}")
        self.runner.turns = self.runner.turns or Turns()
        return self.runner.turns

    # ------------------------------------------------------------------------------------------------------------------

    def _computed(
        self, step: int, micro_batch: int, inputs: Tensors, of: Tree | None
    ) -> tuple[list[Box], Any, list[torch.Tensor]]:
        """Forward of a micro-batch: the boxes of its inputs, the last layer's value, and what BatchNorm saw."""
        boxes = [Box(x) for x in inputs]
        opened = [box.open(self._anchor) for box in boxes]
        untouched_statistics: AbstractContextManager[list[torch.Tensor]] = nullcontext([])
        with self.runner.precise(), self.statistics.taken() if self.statistics else untouched_statistics as taken:
            back = partial(backward_seed, self._seed, step, micro_batch) if self.found.draws_back else None
            value = self.runner.run(opened, of, partial(forward_seed, self._seed, step, micro_batch), back)
        return boxes, value, taken

    @contextmanager
    def _going_back(self, flight: InFlight) -> Iterator[None]:
        """Within the context: the weights are those of the micro-batch's F, and an exception is the user's."""
        # With lanes of its own weights, or none; otherwise another thread may compute F with them.
        beside = self.runner.turns is not None and not isinstance(self._weights, LaneWeights)
        newest = None if beside else self._weights.meet(flight.weights)
        try:
            yield
        except RAISED as error:
            blame(error, f"the backward of {self.where}")
        finally:
            if newest is not None:
                self._weights.leave(newest, flight.weights)
        if beside:
            self._weights.check_wanting(flight.weights, self.where)

    def _judge(
        self, step: int, value: Any, target: Any, share: float, samples: int | None
    ) -> tuple[Result, list[torch.Tensor]]:
        """Result that the loss gives for the last layer's output, and the tensors at which backward begins."""
        assert self.loss is not None
        before, samples = self.runner.drawn(), len(target) if samples is None else samples
        if self.loss.on_trial:  # the same targets come again, and a loss may write into them
            target = tree.replace(target, torch.clone)
        judged = self.loss(value, target, samples, self.runner.setting_up)
        self.runner.note_draws(self.last + 1, before)
        if judged.summed:
            share = self.divisors.share(step, judged.count, samples, share)
        result = Result(judged.total, judged.count, *self.loss.hits(value, target), samples)
        if step == _EVALUATION:
            result.metrics = self.loss.measured(value, target, result, self.runner.setting_up)
        return result, [judged.value * share]

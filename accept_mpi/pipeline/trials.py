"""What a stage does with its layers apart from training them: the first forward of all, and the search for the layer that
makes values which are not finite. Both happen to copies: what a forward does to modules must happen in training alone.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Self, cast

import torch
from torch import nn

from accept_mpi import tree
from accept_mpi.codecs.tensors import Tensors, TensorSpec
from accept_mpi.errors import UserError, UsersBug
from accept_mpi.job import Job
from accept_mpi.models.attributes import Attributes
from accept_mpi.models.copies import copied, why_not_copied
from accept_mpi.models.fine_tuning import Uses, check_called
from accept_mpi.models.graph import parameters_behind
from accept_mpi.models.layers import Layers
from accept_mpi.models.losses import Divisors
from accept_mpi.models.untouched import untouched
from accept_mpi.pipeline.deferred_weights import DeferredWeights
from accept_mpi.pipeline.further_forwards import FurtherForwards, Given, is_nan
from accept_mpi.pipeline.graph_edges import Differentiating, cast_twice, finite
from accept_mpi.pipeline.grown import Change, made_alike, others, same_values, undo
from accept_mpi.pipeline.micro_batch import Inputs
from accept_mpi.pipeline.optimizer import make_optimizer, update
from accept_mpi.pipeline.remembered import LOSS, AtFirst, Remembered
from accept_mpi.pipeline.running_statistics import batch_norms, lies_apart
from accept_mpi.pipeline.settled import Changing, Settled
from accept_mpi.pipeline.shareable import Watch
from accept_mpi.pipeline.state import check_state
from accept_mpi.pipeline.turns import calls_of_shared, hooked, why_in_turn
from accept_mpi.pipeline.weight_versions import Writes, may_be_written
from accept_mpi.seeds import forward_seed, kept, seed_all, state
from accept_mpi.tree import Tree

_NO_STEP = -1  # in place of a step


class Trials(FurtherForwards):
    """The part of a ``Stage`` that tries its layers. ``Stage.__init__`` sets the fields."""

    _job: Job
    _seed: int
    _again: Callable[[], Layers] | None
    _channels_last: bool
    _deferred: DeferredWeights | None
    _divisors: Divisors
    _setting_up: bool
    _strange: Sequence[nn.Parameter] = ()
    """Parameters that a forward uses though no layer here has them, found by ``probe``."""
    _partial: bool = False
    """True if a forward differentiates by what the stage is given, but would not get all of the derivative."""
    _kept: set[str]
    close: Callable[[], None]
    drawing: Callable[[], AbstractContextManager[None]]
    _seed_layer: Callable[[int, int], None]
    _precise: Callable[[], AbstractContextManager[object]]
    _through: Callable[..., Any]

    def _know_nothing(self) -> None:
        """Begin with what holds before ``probe`` has found out more."""
        self._made: set[str] = set()
        """Names of buffers that the first forward creates."""
        self._written: set[str] = set()
        """What a forward writes to, by its name in ``may_be_written``."""
        self.alone = ""
        """Reason why a group cannot hold the stage, found by ``probe``; empty: its layers do not mind."""
        self.in_turn = ""
        """Reason why several threads cannot compute its micro-batches at a time, found by ``probe``; empty: they can."""
        self.one_forward = ""
        """Reason why several threads cannot compute forwards at a time, found by ``probe``; empty: they can."""
        self.forgets: list[str] = []
        """What forwards change and read, found by ``probe``, and no checkpoint can keep."""
        self.unreplayed = ""
        """Reason why BatchNorm's running statistics cannot be replayed, found by ``probe``; empty: they can."""
        self._calls: Counter[str] = Counter()
        """Calls of BatchNorm layers, by name, in the first forward of a trial."""
        self.norms_apart: set[str] = set()
        """Names of BatchNorm layers whose inputs are contiguous in no memory format, found by ``probe``."""
        self.norms_take: dict[str, torch.dtype] = {}
        """Types of the inputs of BatchNorm layers, by name, found by ``probe``."""
        self._drawing: set[int] = set()
        """Layers whose forwards draw random numbers, by index, found by ``probe``; one past the last stands for the loss."""
        self._draws_back = False
        """True if backwards draw random numbers, found by ``probe``."""
        self._passed_by: set[str] = set()
        """Parameters that a forward uses without calling modules with adapters, found by ``probe``."""
        self._remembered = Remembered([])
        """What forwards have modules remember, found by ``probe``."""
        self._changing: Changing = set()
        """What first forwards change, found by ``probe``."""
        self._settled: list[Settled] = []
        """Where several ranks or lanes compute: what else forwards refer to; of this stage and of its lanes."""
        self.sparse: dict[int, torch.Tensor] = {}
        """Sparse gradients, by the parameter's place among ``parameters``, found by ``probe``."""

    @property
    def _last(self) -> int:
        return self.start + len(self.layers) - 1

    @contextmanager
    def trial(self, learns: bool = True) -> Iterator[Self]:
        """Within the context: a stage of the same layers to try things on. It shares nothing with this one: whatever a
        forward does to modules (buffers created, replaced or resized, attributes, counters) happens to copies. ``learns``:
        this one takes over what the other finds out, as is due before the first step."""
        gradients = [parameter.grad for parameter in self.parameters]
        with kept(), untouched(self.layers, self._loss and self._loss.function):
            try:
                modules = copied(self.layers)
            except Exception as error:  # some modules cannot be copied
                if self._again is None:
                    raise
                self.in_turn = self.in_turn or why_not_copied(self.names, self.layers, error)
                modules = self._again().modules
            layers, make = Layers(self.start, self.names, modules, common=tuple(self._common)), cast(Any, type(self))
            stage = make(layers, self._job, self._loss and self._loss.apart(), self._channels_last)
            stage._setting_up = True
            if stage._deferred is not None:
                stage._deferred.looking = True
            try:
                yield stage
            finally:
                for parameter, gradient in zip(self.parameters, gradients, strict=True):
                    parameter.grad = gradient  # copies of functions refer to the same parameters
                if learns:
                    self._learn(stage)
                stage.close()

    def probe(
        self,
        inputs: Tensors,
        target: Any,
        gradients_of: Callable[[Tensors, Tree], Tensors],
        of: Tree | None = None,
        samples: int | None = None,
    ) -> tuple[TensorSpec, ...]:
        """Run one forward and backward on a ``trial`` stage, to find the shapes of what crosses boundaries.

        ``gradients_of`` is called with the outputs and their tree, and returns gradients in the layout that training will
        send. Returns the specs of the inputs' gradients.
        """
        if not self._setting_up:
            with self.trial() as trial:
                return trial.probe(inputs, target, gradients_of, of, samples)
        named = self._modules
        there = may_be_written(self.parameters, self.layers)
        norms = batch_norms(self.names, self.layers).items()
        notes = [norm.register_forward_pre_hook(partial(self._note, name)) for name, norm in norms]
        writes = self.writes()
        watch, attributes = Watch([name for name, _ in named], [one for _, one in named]), Attributes(named)
        unused = tuple(None if x is None else x.detach().clone() for x in inputs)  # a forward may write to them
        uses = Uses() if self._job.train.lora else None
        seen = self._seen()
        self._calls.clear()
        with calls_of_shared() as shared, uses or nullcontext(), Differentiating() as differentiating:
            try:
                out = self.forward(0, 0, inputs, target=target, of=of, samples=samples)
            except UsersBug as error:
                raise self._with_hint(error) from None
        if uses:
            self._passed_by |= {name for name, parameter in self.own.every_name() if uses.passed_by(parameter)}
        self._written |= writes.found()
        self._partial = differentiating.found
        mine = {id(parameter) for layer in self.layers for parameter in layer.parameters()}
        self._strange = [one for one in parameters_behind(self.in_flight[0, 0].outputs) if id(one) not in mine]
        for note in notes:
            note.remove()
        nan = is_nan(out)
        watch.after_forward(self._divisors)
        # Any thread that ends a forward drops the casts that torch keeps for all threads.
        if cast_twice(self.in_flight[0, 0].outputs):
            self.one_forward = "a forward uses a parameter twice in lower precision"
        if self._deferred is not None:
            self._deferred.look(self.in_flight[0, 0].outputs)
        gradients = gradients_of(out.outputs, out.tree)
        seed_all(0)
        seeded = state()
        with calls_of_shared() as shared_back:
            result = self.backward(0, 0, gradients, seed=0)
        self._draws_back = state() != seeded
        self.in_turn = self.in_turn or why_in_turn(
            bool(shared or shared_back),
            self._draws_back,
            self.start + len(self.layers) in self._drawing,
            bool(self._written),
        )
        if self._deferred is not None:
            self.weight_gradient(0, 0)
        self.alone = self.alone or watch.after_backward()
        self.find_sparse()
        given = Given(unused, of, target, samples)
        remembered, variables = self._look_again(given, gradients, there, attributes, seen, nan)
        self.unreplayed = self.unreplayed or ("" if self.alone else self._why_unreplayed(given))
        names = {*self._remembered.names, *remembered, *watch.ever_changed - self._check_state()}
        self._remembered = Remembered(named, names)
        self.forgets = list(dict.fromkeys([*self.forgets, *self._remembered.lost(), *variables]))
        for parameter in self.parameters:
            parameter.grad = None
        return tuple(TensorSpec.of(g) for g in result)

    def writes(self) -> Writes:
        """Finds out what the next forward writes to, apart from BatchNorm's averages."""
        norms = batch_norms(self.names, self.layers).values()
        averages = {id(buffer) for norm in norms for buffer in norm.buffers(recurse=False)}
        there = may_be_written(self.parameters, self.layers)
        return Writes({name: tensor for name, tensor in there.items() if id(tensor) not in averages})

    def keep_apart(self, written: set[str]) -> None:
        """Have each micro-batch keep its own values of what forwards write to."""
        self._written |= written
        self._watch_written()

    def find_sparse(self) -> None:
        """Note which gradients that are there are sparse."""
        here = {n: p.grad for n, p in enumerate(self.parameters) if p.grad is not None}
        self.sparse |= {n: gradient for n, gradient in here.items() if gradient.layout is not torch.strided}

    def check_sparse(self) -> None:
        """Raise UserError if the job's optimizer, or clipping, does not take the sparse gradients that there are."""
        train = self._job.train
        for n, gradient in self.sparse.items():
            name, alike = self.own.whole[n], nn.Parameter(self.parameters[n].detach().clone())
            alike.grad = gradient.clone()
            try:
                if train.clip_norm is not None:
                    torch.linalg.vector_norm(gradient)
                optimizer = make_optimizer(train.optimizer, self._job.lr, [alike], [name], train.groups)
                assert optimizer is not None
                update(optimizer)
            except RuntimeError as error:  # which torch raises for kinds of tensors that a function does not take
                raise UserError(
                    f'{name[0]} has a sparse gradient (sparse=True), which train.optimizer.name = "{train.optimizer.name}" '
                    'with these settings, or train.clip_norm, does not take; "sgd" without weight decay does'
                ) from error

    def _with_hint(self, error: UsersBug) -> UsersBug:
        """The error of a layer that may miss what a layer of another stage has left for it."""
        for one in self._common:
            if str(one.places[0][1].steps[-1]) in str(error):
                hint = f"{one.what}: what a forward leaves there does not reach another stage (pipeline.cuts)"
                return type(error)(f"{error}\n{hint}")
        return error

    def try_metrics(self, inputs: Tensors, target: Any, of: Tree | None, samples: int) -> None:
        """Evaluate a micro-batch on a ``trial`` stage, so that a metric that cannot be taken of what the model gives is told
        before the first step. What a layer raises meanwhile is told where it is evaluated: inputs are those of training.
        Raises UserError, UsersBug."""
        if self._loss is None or not self._loss.metrics or not self._job.train.evaluate_every:
            return
        with self.evaluating():
            try:
                with self._without_metrics():
                    self.evaluate(inputs, target, of, samples=samples)
            except Exception:
                return
            self.evaluate(inputs, target, of, samples=samples)

    def _note(self, name: str, norm: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        """Note that a norm is called, and the type and layout of what it takes; a hook on it."""
        self._calls[name] += 1
        if given:
            self.norms_take[name] = given[0].dtype
            if lies_apart(given[0]):
                self.norms_apart.add(name)

    def _check_state(self) -> set[str]:
        """Names of all state. Raises UserError if some of it cannot be kept."""
        layers = zip(self.names, self.layers, strict=True)
        return {f"{name}.{key}" for name, layer in layers for key in check_state(name, layer)}

    def _learn(self, trial: "Trials") -> None:
        """Take over what ``trial`` has found: buffers that are created, tensors that are written to, modules that never
        defer. Raises UserError if ``vertical_sync`` does not allow it, or an adapter would not be called."""
        mine = {id(parameter) for parameter in self.parameters}
        if strange := [tuple(one.shape) for one in trial._strange if id(one) not in mine]:
            raise UserError(
                f"layers {self.start} to {self._last} use a parameter of shape {strange[0]} that is "
                "none of theirs, and would not train it: make the module that has it a part of the layer, too, or freeze it"
            )
        if trial._parted:
            raise UserError(f"{trial._parted}, so they must be in one stage")
        if trial._partial:
            raise UserError(
                f"layers {self.start} to {self._last} differentiate (torch.autograd.grad) by what an "
                "earlier stage gives, of which they are given more that may depend on it: no cut may part such layers"
            )
        self._made |= trial._check_state() - self._kept
        self._written |= trial._written
        self.forgets = self.forgets or trial.forgets
        self._changing |= trial._changing
        self._begin_loss(trial._remembered.names | self._remembered.names)
        self.alone, self.in_turn = self.alone or trial.alone, self.in_turn or trial.in_turn
        self.unreplayed = self.unreplayed or trial.unreplayed
        self.one_forward = self.one_forward or trial.one_forward or trial.unreplayed
        if hooked(self.parameters):  # which a trial's copies have not
            self.in_turn = self.in_turn or "a parameter has hooks"
        self.norms_take |= trial.norms_take
        self.norms_apart |= trial.norms_apart
        self._drawing |= trial._drawing
        self._draws_back |= trial._draws_back
        self.sparse |= trial.sparse
        self.check_sparse()
        if self._job.train.lora:
            check_called(self._job.train.lora, map(self.own.in_model.__getitem__, trial._passed_by))
        if self._written and self._job.pipeline.vertical_sync:
            raise UserError(
                "pipeline.vertical_sync: a layer writes into its own parameters or buffers in its forward, which would be "
                "those of an older version; leave vertical_sync out"
            )
        if self._job.pipeline.schedule == "1f1b-delayed" and any(name.startswith("parameter ") for name in self._written):
            raise UserError(
                "pipeline.schedule: a layer writes into its own parameters in its forward, which 1f1b-delayed "
                "would lose: they are not the newest; take another schedule"
            )
        self._watch_written()
        if self._deferred is not None and trial._deferred is not None:
            self._deferred.learn(trial._deferred)

    def _begin_loss(self, names: set[str]) -> None:
        """Know ``names`` of what forwards have modules remember, and have the loss remember what it did before the first
        step: it has been trained with since, if this is another plan or a run that goes on after a loss of a rank."""
        loss = self._loss
        if loss is not None and loss.put_back is None:
            loss.put_back = AtFirst(self._modules[len(self.layers) :]).put_back
        if loss is not None and loss.put_back is not None:
            loss.put_back()
        self._remembered = Remembered(self._modules, names, self._remembered, self._changing)
        if loss is None or not names:
            return
        now = {key: one for key, one in self._remembered.state().items() if key.startswith(f"{LOSS}/")}
        loss.beginning = now | (loss.beginning or {})
        self._remembered.put(loss.beginning)

    def _search(self, step: int, micro_batch: int, inputs: Tensors, of: Tree | None, target: Any) -> int:
        """What makes outputs not finite, as in ``Outputs.suspect``; a layer is found by running a copy of the stage layer by
        layer."""
        sound = finite([x for x in inputs if x is not None])
        if (self.start == 0 and not sound) or not finite(tree.leaves(target)):
            return 1
        if self._searches == 0 or not sound:
            return 0
        self._searches -= 1  # a model may intend its infinities (masks), so do not search forever
        with self.drawing(), torch.no_grad(), self.trial(learns=False) as trial:
            value = tree.unflatten(of or tree.packed(len(inputs)), inputs)
            for index, layer in enumerate(trial.layers, self.start):
                self._seed_layer(index, forward_seed(self._seed, step, micro_batch, index))
                value = layer(value)
                if not finite(tree.leaves(value)):
                    return index + 2
        return 0  # then it is the loss

    def _make_again(self, changes: Sequence[Change], given: Sequence[Inputs]) -> bool:
        """True if forwards of other values leave the same in modules that are as they were before ``changes``, and give then
        what they gave before. ``given``: what may have led to these."""
        moved = [other for one in given if (other := others(one))]
        if not moved or len(moved) < len(given):
            return False
        try:
            with self.drawing(), torch.no_grad(), self.trial(learns=False) as trial:
                parts = zip(trial.names, trial.layers, strict=True)
                modules = {path: one for name, layer in parts for path, one in layer.named_modules(prefix=name)}
                before = []
                for one in moved:  # each from what there was
                    undo(changes, modules)
                    before.append(trial._values(one))
                undo(changes, modules)
                for one in moved:
                    trial._values(one)
                return made_alike(changes, modules) and all(map(same_values, before, map(trial._values, moved)))
        except Exception:  # also if it is the loss that has changed, or layers cannot be copied
            return False

    def _values(self, given: Inputs) -> Any:
        """What a forward of no step gives, with the same random numbers each time. It may write to copies of the inputs."""
        inputs = [x if x is None else x.clone() for x in given.tensors]
        with self._precise():
            return self._through(inputs, given.tree, partial(forward_seed, self._seed, _NO_STEP, 0))

"""What happens to copies of a stage's layers, since what a forward does to modules must happen in training alone: above all
the first forward and backward, in which a stage learns how its layers behave (``Findings``)."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from accept_mpi.codecs.tensors import Tensors, TensorSpec
from accept_mpi.device.compute import here
from accept_mpi.errors import UserError, UsersBug
from accept_mpi.models.attributes import Attributes
from accept_mpi.models.common import HOOKS, Seen
from accept_mpi.models.copies import copied, why_not_copied
from accept_mpi.models.fine_tuning import Uses, check_called
from accept_mpi.models.graph import parameters_behind
from accept_mpi.models.held import held
from accept_mpi.models.layers import Layers
from accept_mpi.models.untouched import untouched
from accept_mpi.pipeline.common_memory import HELD, CommonMemory, versions
from accept_mpi.pipeline.findings import Findings
from accept_mpi.pipeline.further_forwards import FurtherForwards, Given, is_nan, without_metrics, writes_of
from accept_mpi.pipeline.graph_edges import Differentiating, cast_twice
from accept_mpi.pipeline.micro_batch import Outputs
from accept_mpi.pipeline.remembered import LOSS, AtFirst, Remembered
from accept_mpi.pipeline.running_statistics import batch_norms, input_of, lies_apart
from accept_mpi.pipeline.shareable import Watch
from accept_mpi.pipeline.sparse_gradients import check_sparse, find_sparse
from accept_mpi.pipeline.stage import Stage
from accept_mpi.pipeline.turns import calls_of_shared, hooked, why_in_turn
from accept_mpi.pipeline.weight_versions import Writes
from accept_mpi.seeds import kept, seed_all, state
from accept_mpi.tree import Tree


@contextmanager
def copy_of(stage: Stage) -> Iterator[Stage]:
    """Within the context: a stage of the same layers to try things on. It shares nothing with this one: whatever a forward
    does to modules (buffers created, replaced or resized, attributes, counters) happens to copies."""
    with kept(), untouched(stage.layers, stage.loss and stage.loss.function):
        try:
            modules = copied(stage.layers)
        except Exception as error:  # some modules cannot be copied
            if stage.build_again is None:
                raise
            stage.found.in_turn = stage.found.in_turn or why_not_copied(stage.names, stage.layers, error)
            modules = stage.build_again().modules
        layers = Layers(stage.start, stage.names, modules, common=tuple(stage.common))
        copy = Stage(layers, stage.job, stage.loss and stage.loss.apart(), stage.channels_last)
        copy.runner.setting_up = True
        if copy.deferred is not None:
            copy.deferred.looking = True
        try:
            yield copy
        finally:
            copy.close()


@contextmanager
def trial_of(stage: Stage) -> Iterator["Trial"]:
    """Within the context: a trial. The stage learns at the end what that has found out. Raises as ``Trial.teach``."""
    gradients = [parameter.grad for parameter in stage.parameters]
    with copy_of(stage) as copy:
        trial = Trial(copy)
        try:
            yield trial
        finally:
            for parameter, gradient in zip(stage.parameters, gradients, strict=True):
                parameter.grad = gradient  # copies of functions refer to the same parameters
            trial.teach(stage)


class _Before(NamedTuple):
    """What there is before a first forward, to compare with what there is after it."""

    there: dict[str, torch.Tensor]
    """``may_be_written``."""
    writes: Writes
    watch: Watch
    attributes: Attributes
    hooks: dict[str, list[int]]
    seen: Seen

    @classmethod
    def of(cls, stage: Stage) -> "_Before":
        named = stage.modules
        watch = Watch([name for name, _ in named], [one for _, one in named])
        return cls(stage.may_be_written(), writes_of(stage), watch, Attributes(named), _hooks_of(stage), stage.seen())


class Trial:
    """First forwards and backwards, of a copy of a stage."""

    def __init__(self, stage: Stage) -> None:
        """``stage``: the copy."""
        self.stage, self.found = stage, stage.found
        self._calls: Counter[str] = Counter()
        """Calls of BatchNorm layers, by name, in the first forward."""

    def probe(
        self,
        inputs: Tensors,
        target: Any,
        gradients_of: Callable[[Tensors, Tree], Tensors],
        of: Tree | None = None,
        samples: int | None = None,
    ) -> tuple[TensorSpec, ...]:
        """Run a forward and a backward, to find the shapes of what crosses boundaries, and further ones.

        ``gradients_of`` is called with the outputs and their tree, and returns gradients in the layout that training will
        send. Returns the specs of the inputs' gradients.
        """
        stage, found = self.stage, self.found
        given = Given(tuple(None if x is None else x.detach().clone() for x in inputs), of, target, samples)
        before = _Before.of(stage)
        inputs = here().take(inputs)  # which a forward may write to
        counts, memory = versions(inputs), CommonMemory()
        with calls_of_shared() as shared:
            out = self._first_forward(given._replace(inputs=inputs))
        handed = stage.in_flight[0, 0].outputs if stage.loss is None else []
        memory.look(inputs, counts, handed, dict(_tensors_of(stage)))
        found.written |= before.writes.found()
        before.watch.after_forward(stage.divisors)
        hooks = [where for where, there in _hooks_of(stage).items() if there != before.hooks[where]]
        if hooks:
            found.anew |= before.attributes.numbers(before.attributes.changed(), bool).keys()
        nan = is_nan(out)
        gradients = gradients_of(out.outputs, out.tree)
        with calls_of_shared() as shared_back:
            result = self._first_backward(gradients)
        found.alone = found.alone or before.watch.after_backward()
        loss_draws = stage.last + 1 in found.drawing
        found.in_turn = found.in_turn or why_in_turn(
            bool(shared or shared_back), found.draws_back, loss_draws, bool(found.written)
        )
        find_sparse(stage)
        further = FurtherForwards(stage, given, gradients, self._calls)
        remembered, variables = further.look(before.there, before.attributes, before.seen, nan)
        found.in_turn = found.in_turn or why_in_turn(False, False, False, bool(found.written))
        found.unreplayed = found.unreplayed or ("" if found.alone else further.why_unreplayed())
        found.remembered |= {*remembered, *before.watch.ever_changed - stage.state_names()} - found.anew
        memory.keep_only(found.remembered)
        found.memory.add(memory)
        lost = Remembered(stage.modules, found.remembered).lost()
        hooks = [] if found.anew else hooks
        found.forgets = list(dict.fromkeys([*found.forgets, *lost, *variables, *hooks]))
        for parameter in stage.parameters:
            parameter.grad = None
        return tuple(TensorSpec.of(g) for g in result)

    def _first_forward(self, given: Given) -> Outputs:
        """Run a forward, and take note of how it uses parameters, and of what BatchNorm layers take."""
        stage, found = self.stage, self.found
        norms = batch_norms(stage.names, stage.layers).items()
        self._calls.clear()
        notes = [norm.register_forward_pre_hook(partial(self._note, name), with_kwargs=True) for name, norm in norms]
        uses = Uses() if stage.job.train.lora else None
        with uses or nullcontext(), Differentiating() as differentiating:
            try:
                out = stage.forward(0, 0, given.inputs, target=given.target, of=given.of, samples=given.samples)
            except UsersBug as error:
                raise self._with_hint(error) from None
        for note in notes:
            note.remove()
        outputs = stage.in_flight[0, 0].outputs
        if uses:
            found.passed_by |= {name for name, parameter in stage.own.every_name() if uses.passed_by(parameter)}
        found.partial = differentiating.found
        mine = {id(parameter) for layer in stage.layers for parameter in layer.parameters()}
        found.strange = [one for one in parameters_behind(outputs) if id(one) not in mine]
        # Any thread that ends a forward drops the casts that torch keeps for all threads.
        if cast_twice(outputs):
            found.one_forward = "a forward uses a parameter twice in lower precision"
        if stage.deferred is not None:
            stage.deferred.look(outputs)
        return out

    def _first_backward(self, gradients: Tensors) -> Tensors:
        """Run the backward, and take note if it draws random numbers."""
        seed_all(0)
        seeded = state()
        result = self.stage.backward(0, 0, gradients, seed=0)
        self.found.draws_back = state() != seeded
        if self.stage.deferred is not None:
            self.stage.weight_gradient(0, 0)
        return result

    def try_metrics(self, inputs: Tensors, target: Any, of: Tree | None, samples: int) -> None:
        """Evaluate a micro-batch, so that a metric that cannot be taken of what the model gives is told before the first
        step. What a layer raises meanwhile is told where it is evaluated: inputs are those of training. Raises UserError,
        UsersBug."""
        stage, loss = self.stage, self.stage.loss
        if loss is None or not loss.metrics or not stage.job.train.evaluate_every:
            return
        with stage.evaluating():
            try:
                with without_metrics(loss):
                    stage.evaluate(inputs, target, of, samples=samples)
            except Exception:
                return
            stage.evaluate(inputs, target, of, samples=samples)

    def teach(self, stage: Stage) -> None:
        """Have the stage of which this has a copy take over what was found. Raises UserError if that does not go with the
        job."""
        found = self.found
        mine = {id(parameter) for parameter in stage.parameters}
        if strange := [tuple(one.shape) for one in found.strange if id(one) not in mine]:
            raise UserError(
                f"{stage.where}: a forward uses a parameter of shape {strange[0]} that belongs to none of its layers, and "
                "would not train it: make the module that has it a part of the layer, too, or freeze it"
            )
        if found.parted:
            raise UserError(f"{found.parted}, so they must be in one stage")
        if found.partial:
            raise UserError(
                f"{stage.where}: a forward differentiates (torch.autograd.grad) by what an earlier stage gives, of which it "
                "is given more that may depend on it: no cut may part such layers"
            )
        found.made = self.stage.state_names() - stage.state_at_first
        learn(stage, found, never_deferred(self.stage))

    def _with_hint(self, error: UsersBug) -> UsersBug:
        """The error of a layer that may miss what a layer of another stage has left for it."""
        for one in self.stage.common:
            if str(one.places[0][1].steps[-1]) in str(error):
                hint = f"{one.what}: what a forward leaves there does not reach another stage (pipeline.cuts)"
                return type(error)(f"{error}\n{hint}")
        return error

    def _note(self, name: str, norm: nn.Module, given: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Note that a norm is called, and the type and layout of what it takes; a hook on it."""
        self._calls[name] += 1
        if given or named:
            x = input_of(given, named)
            self.found.norms_take[name] = x.dtype
            if lies_apart(x):
                self.found.norms_apart.add(name)


def never_deferred(stage: Stage) -> frozenset[int]:
    """Numbers of a stage's modules that never defer (``DeferredWeights.never``); none where nothing defers."""
    return stage.deferred.never if stage.deferred else frozenset()


def learn(stage: Stage, found: Findings, never: frozenset[int]) -> None:
    """Have a stage take over what trials of the same layers have found; ``never``: as of ``DeferredWeights``. Raises
    UserError if that does not go with the job."""
    stage.found.take(found)
    _begin_loss(stage)
    if hooked(stage.parameters):  # which a trial's copies have not
        stage.found.in_turn = stage.found.in_turn or "a parameter has hooks"
    check_sparse(stage)
    job = stage.job
    if job.train.lora:
        check_called(job.train.lora, map(stage.own.in_model.__getitem__, found.passed_by))
    if stage.found.written and job.pipeline.vertical_sync:
        raise UserError(
            "pipeline.vertical_sync: a layer writes into its own parameters or buffers in its forward, which would be "
            "those of an older version; leave vertical_sync out"
        )
    if job.pipeline.schedule == "1f1b-delayed" and any(name.startswith("parameter ") for name in stage.found.written):
        raise UserError(
            "pipeline.schedule: a layer writes into its own parameters in its forward, which 1f1b-delayed "
            "would lose: they are not the newest; take another schedule"
        )
    stage.keep_apart()
    if stage.deferred is not None:
        stage.deferred.learn(never)


def _hooks_of(stage: Stage) -> dict[str, list[int]]:
    """Numbers of the hooks that modules have, by where these are."""
    modules = [named for name, one in stage.modules for named in one.named_modules(prefix=name)]
    return {f"hooks of {path}": [n for name in HOOKS for n in vars(one)[name]] for path, one in modules}


def _tensors_of(stage: Stage) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what layers have: parameters, buffers and tensors in attributes, by name."""
    for name, layer in zip(stage.names, stage.layers, strict=True):
        for key, one in (*layer.named_parameters(), *layer.named_buffers()):
            yield f"{name}.{key}", one
        yield from ((f"{name}.{key}{HELD}", one) for key, one in held(layer))


def _begin_loss(stage: Stage) -> None:
    """Have the stage know what forwards have modules remember, and the loss remember what it did before the first step: it
    has been trained with since, if this is another plan or a run that goes on after a loss of a rank."""
    loss, named = stage.loss, stage.modules
    if loss is not None and loss.put_back is None:
        loss.put_back = AtFirst(named[len(stage.layers) :], copies=True).put_back
    if loss is not None and loss.put_back is not None:
        loss.put_back()
    stage.remembered = Remembered(named, stage.found.remembered, stage.remembered, stage.found.changing, stage.found.anew)
    if loss is None or not stage.found.remembered:
        return
    now = {key: one for key, one in stage.remembered.state().items() if key.startswith(f"{LOSS}/")}
    loss.beginning = now | (loss.beginning or {})
    stage.remembered.put(loss.beginning)

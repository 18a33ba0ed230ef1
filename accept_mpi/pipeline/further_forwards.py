"""Further forwards of a trial, which find out what a forward leaves for the next one: in BatchNorm's running statistics, in
attributes, in what layers have in common, in variables of Python."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from accept_mpi.codecs.tensors import Tensors
from accept_mpi.errors import UserError
from accept_mpi.models.attributes import Attributes
from accept_mpi.models.common import Common, Finder, Seen
from accept_mpi.models.losses import Loss
from accept_mpi.models.shared import same_bits
from accept_mpi.pipeline.grown import Change
from accept_mpi.pipeline.micro_batch import InFlight, Inputs, Key, Outputs
from accept_mpi.pipeline.recomputing import Recomputing
from accept_mpi.pipeline.remembered import THE_LOSS
from accept_mpi.pipeline.running_statistics import RunningStatistics, batch_norms
from accept_mpi.pipeline.settled import Changing, Settled, place_of
from accept_mpi.pipeline.stage_state import Stateful
from accept_mpi.tree import Tree


class Given(NamedTuple):
    """What a forward takes."""

    inputs: Tensors
    of: Tree | None
    target: Any
    samples: int | None

    @property
    def boxes(self) -> Tensors:
        """The inputs, for a forward that may write to them."""
        return tuple(None if x is None else x.clone() for x in self.inputs)


class FurtherForwards(Stateful):
    """The part of a ``Stage`` that looks for what forwards leave. ``Stage.__init__`` sets the fields."""

    start: int
    alone: str
    in_turn: str
    norms_take: dict[str, torch.dtype]
    _calls: Counter[str]
    norms_apart: set[str]
    _loss: Loss | None
    _searches: int
    _common: Sequence[Common]
    _parted: str = ""
    """What a forward changes though layers of other stages have it, too, found by ``probe``."""
    in_flight: dict[Key, InFlight]
    again: Recomputing | None
    evaluate: Callable[..., Outputs]
    evaluating: Callable[[], AbstractContextManager[None]]
    forward: Callable[..., Outputs]
    backward: Callable[..., Tensors]
    weight_gradient: Callable[[int, int], None]
    _written: set[str]
    _changing: Changing
    _settled: list[Settled]
    _make_again: Callable[[Sequence[Change], Sequence[Inputs]], bool]
    _returned: Tensors = ()
    """Gradients of the inputs that the last further backward gave."""

    @property
    def _modules(self) -> list[tuple[str, nn.Module]]:
        """The layers, and a loss that is a module, with their names."""
        found = [*zip(self.names, self.layers, strict=True)]
        if self._loss is not None and isinstance(self._loss.function, nn.Module):
            found.append((THE_LOSS, self._loss.function))
        return found

    @contextmanager
    def _without_metrics(self) -> Iterator[None]:
        """Evaluate no metrics within the context."""
        loss = self._loss
        measured = loss.metrics if loss else []
        if loss:
            loss.metrics = []
        try:
            yield
        finally:
            if loss:
                loss.metrics = measured

    def _seen(self) -> Seen:
        """What layers have in common with those of other stages, and the variables of Python and of functions that forwards
        refer to."""
        layers = [*self.layers, self._loss and self._loss.function]
        finder = Finder()
        for index, layer in enumerate(layers, self.start):
            finder.show(index, layer)
        return Seen(layers, self.start, [*self._common, *finder.variables()])

    def settle(self) -> list[Settled]:
        """Before the first step, where other ranks or lanes compute, too, or backwards compute forwards again: what forwards
        refer to must stay as it is from now on, but for what trials have seen change."""
        if self.statistics is not None or self.again:
            self._settled.append(Settled(self._modules, self._seen, self._changing, self._make_again))
        return self._settled

    def note_sizes(self, inputs: Tensors, of: Tree | None) -> None:
        """A forward begins, of which caches may grow."""
        if self._settled:
            self._settled[0].largest.see(inputs, of)

    def check_settled(self, deep: bool = False) -> None:
        """Raise UserError if forwards have changed what must stay as it is. ``deep`` as in ``Settled.changed``."""
        for one in self._settled:
            if name := one.changed(deep):
                shared = (
                    "ranks and lanes that share micro-batches do so each for themselves; have one rank take them all, "
                    "without lanes (pipeline.ranks, pipeline.groups, pipeline.lanes)"
                )
                again = 'backwards that compute forwards again meet what later ones left; set pipeline.recompute = "off"'
                raise UserError(
                    f"a forward of layers {self.start} to {self.start + len(self.names) - 1} has changed {name}, which the "
                    f"first ones did not: {again if self.statistics is None else shared}"
                )

    def settle_again(self, late: Collection[str]) -> None:
        """After an evaluation: what it has changed may be so, and need not be kept. It does not decide what is trained.
        ``late``: what was so before."""
        for one in self._settled:
            one.look()
        self._remembered.pass_over(self._remembered.late().difference(late))

    def _look_again(
        self,
        given: Given,
        gradients: Tensors,
        there: Mapping[str, torch.Tensor],
        attributes: Attributes,
        seen: Seen,
        nan: bool,
    ) -> tuple[list[str], list[str]]:
        """After the first forward and backward: find out by further ones what one leaves for the next. Then one rank must
        compute the micro-batches, one after the other. ``gradients``: those of the first backward; ``there``:
        ``may_be_written``; ``attributes``, ``seen``: as they were before the first forward; ``nan``: NaN came out of it.

        Returns the names of attributes that are changed and read, and of variables of Python that are changed.
        """
        changed, outside = attributes.changed(), seen.changed(grown=True)
        self._changing.update(attributes.changed(grown=True), map(place_of, outside))
        again: list[str] = []
        variables: list[str] = []
        counts = False
        now = attributes.again() if changed else attributes
        if changed or outside:
            seen = seen.again()
            failed = self._once_more(given, gradients)
            variables = self._judge_outside([one for one in seen.changed() if one in outside])
            again = [name for name in changed if failed or name in now.changed()]
            counts = failed or not set(again).isdisjoint(now.changed(but_floating=True))
        if nan:
            return (again if counts else []), variables
        read = self._reads_statistics(given, there)
        if again and not counts:
            counts = bool(read) or self._reads(given, lambda: now.with_nan(again, numbers=False), gradients)
        found = again if counts else self._set_again(given, now, [name for name in changed if name not in again])
        why = read or (f'a forward changes "{found[0]}", and reads it' if found else "")
        self.alone, self.in_turn = self.alone or why, self.in_turn or why
        return found, variables

    def _once_more(self, given: Given, gradients: Tensors) -> bool:
        """Another forward and backward, which may not begin with the same state. True if it fails."""
        self._searches = 0
        try:
            self.forward(0, 0, given.boxes, target=given.target, of=given.of, samples=given.samples)
            self._returned = self.backward(0, 0, gradients, seed=0)
            if (0, 0) in self.in_flight:
                self.weight_gradient(0, 0)
        except Exception:
            return True
        finally:
            self.in_flight.clear()
        return False

    def _judge_outside(self, changed: Sequence[Common]) -> list[str]:
        """Take note of what layers have in common and each forward changes. Returns the names of variables among it."""
        self._parted = self._parted or next((one.text for one in changed if one in self._common), "")
        owners = dict(enumerate([*self.names, "the loss"], self.start))
        names = [
            place.text if place.python else f"{owners[index]}.{place.text}"
            for index, place in (one.places[0] for one in changed)
            if place.python or place.called
        ]
        if names:
            why = f"a forward changes {names[0]}"
            self.alone, self.in_turn = self.alone or why, self.in_turn or why
        return names

    def _reads_statistics(self, given: Given, there: Mapping[str, torch.Tensor]) -> str:
        """Reason why forwards must be computed in turn, if they read BatchNorm's running statistics in training."""
        norms = batch_norms(self.names, self.layers).items()
        moving = {
            id(average): name
            for name, norm in norms
            for average in (norm.running_mean, norm.running_var)
            if norm.training and average is not None
        }
        kept = [(name, tensor, tensor.detach().clone()) for name, tensor in there.items() if id(tensor) in moving]
        if not kept:
            return ""
        for _, tensor, _ in kept:
            tensor.data.fill_(math.nan)
        read = self._gives_nan(given)
        for _, tensor, values in kept:
            tensor.data.copy_(values)
        if not read:
            return ""
        self._written |= {name for name, _, _ in kept}
        return f'a forward reads running statistics of "{next(iter(moving.values()))}", which each one changes'

    def _why_unreplayed(self, given: Given) -> str:
        """Reason why BatchNorm's running statistics after a forward cannot be replayed from what it saw; empty: they can, as
        those of torch's own layers that are called once."""
        norms = batch_norms(self.names, self.layers).items()
        moving = {name: norm for name, norm in norms if norm.training and norm.running_mean is not None}
        for name, norm in norms:
            if (
                norm.training
                and norm.track_running_stats
                and (norm.running_mean is None) != (norm.num_batches_tracked is None)
            ):
                return f'layer "{name}" has no {"running_mean" if norm.running_mean is None else "num_batches_tracked"}'
        odd = [
            name
            for name, norm in moving.items()
            if self._calls[name] != 1 or not _is_torchs(norm) or name in self.norms_apart
        ]
        if not odd:
            return ""
        why = f'layer "{odd[0]}" computes its running statistics in a way of its own'
        buffers = [buffer for norm in moving.values() for buffer in norm.buffers(recurse=False)]
        before = [buffer.detach().clone() for buffer in buffers]
        statistics = RunningStatistics(self.names, self.layers, self.norms_take, self.norms_apart)
        try:
            self.forward(0, 0, given.boxes, target=given.target, of=given.of, samples=given.samples)
            self.in_flight.clear()
            after = _put(buffers, before)
            self.statistics = statistics
            out = self.forward(0, 0, given.boxes, target=given.target, of=given.of, samples=given.samples)
            assert out.statistics is not None
            statistics.replay([out.statistics])
            return "" if all(map(same_bits, after, _put(buffers, before))) else why
        except UserError as error:
            return str(error)
        except Exception:
            return why
        finally:
            self.statistics = None
            self.in_flight.clear()
            _put(buffers, before)

    def _set_again(self, given: Given, now: Attributes, names: Sequence[str]) -> list[str]:
        """Attributes that are numbers, and that each forward sets and another reads: the same inputs may give the same
        number, which a cache, made where there is none yet, is not set to again."""
        numbers = now.numbers(names)
        if not numbers:
            return []
        made_once = numbers
        for other in (math.nan, -math.inf, math.inf):  # a largest so far is set again then, or a smallest
            now.put(dict.fromkeys(made_once, other))
            self._gives_nan(given)
            left = now.numbers([*made_once])
            made_once = {name: numbers[name] for name, value in left.items() if value == other or value != value}
        now.put(made_once)
        set_again = [name for name in numbers if name not in made_once]
        if not set_again or not self._reads(given, lambda: now.with_nan(set_again, numbers=True)):
            return []
        if len(set_again) > 1:  # what is told of is the first
            set_again.sort(key=lambda one: not self._reads(given, partial(self._only_nan, now, numbers, one)))
        return set_again

    @staticmethod
    def _only_nan(now: Attributes, numbers: dict[str, float], name: str) -> None:
        """Have one of some attributes hold NaN, and the others numbers."""
        now.put(numbers)
        now.with_nan([name], numbers=True)

    def _reads(self, given: Given, spoil: Callable[[], None], gradients: Tensors | None = None) -> bool:
        """True if the NaN that ``spoil`` puts into attributes comes out of a forward, in training or in an evaluation, or of
        a backward, if ``gradients`` are given, that gives none otherwise."""
        without = gradients is not None and not self._goes_back_to_nan(given, gradients)
        spoil()
        if self._gives_nan(given):
            return True
        if without and gradients is not None:
            spoil()
            if self._goes_back_to_nan(given, gradients):
                return True
        if self._gives_nan(given, evaluates=True):  # it cannot be evaluated at all
            return False
        spoil()
        return self._gives_nan(given, evaluates=True)

    def _goes_back_to_nan(self, given: Given, gradients: Tensors) -> bool:
        """Run a forward and its backward; True if NaN comes out of the backward, or if it fails."""
        for parameter in self.parameters:
            parameter.grad = None
        if self._once_more(given, gradients):
            return True
        every = (*self._returned, *(parameter.grad for parameter in self.parameters))
        return any(one is not None and one.layout is torch.strided and bool(one.isnan().any()) for one in every)

    def _gives_nan(self, given: Given, evaluates: bool = False) -> bool:
        """Run a forward, in training or in an evaluation; True if NaN comes out, or if it fails."""
        self._searches = 0
        try:
            if evaluates:
                with self.evaluating(), self._without_metrics():
                    out = self.evaluate(given.boxes, given.target, given.of, samples=given.samples)
            else:
                out = self.forward(0, 0, given.boxes, target=given.target, of=given.of, samples=given.samples)
        except Exception:
            return True
        finally:
            self.in_flight.clear()
        return is_nan(out)


def _is_torchs(norm: nn.Module) -> bool:
    """True if torch's own code computes a BatchNorm layer, and nothing else."""
    return type(norm).forward.__module__.startswith("torch.") and "forward" not in vars(norm) and not norm._forward_hooks


def _put(buffers: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Put values into buffers. Returns copies of what they had."""
    had = [buffer.detach().clone() for buffer in buffers]
    for buffer, value in zip(buffers, values, strict=True):
        buffer.data.copy_(value)
    return had


def is_nan(out: Outputs) -> bool:
    """True if NaN is among what a stage gives."""
    return math.isnan(out.result.loss) if out.result else any(x is not None and bool(x.isnan().any()) for x in out.outputs)

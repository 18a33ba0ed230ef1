"""Further forwards of a trial, which find out what a forward leaves for the next one: in BatchNorm's running statistics, in
attributes, in what layers have in common, in variables of Python."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from accept_mpi.codecs.tensors import Tensors
from accept_mpi.errors import UserError
from accept_mpi.models.attributes import Attributes
from accept_mpi.models.common import Common, Seen
from accept_mpi.models.losses import Loss
from accept_mpi.models.memory import same_bits
from accept_mpi.pipeline.grown import same_values
from accept_mpi.pipeline.micro_batch import Outputs
from accept_mpi.pipeline.running_statistics import RunningStatistics, batch_norms
from accept_mpi.pipeline.settled import place_of
from accept_mpi.pipeline.stage import Stage
from accept_mpi.pipeline.weight_versions import Writes
from accept_mpi.tree import Tree

_MORE = 7  # than a whole number is; not so much that a table of as many could take all memory


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


class FurtherForwards:
    """Further forwards of a copy of a stage. What they find goes into its ``Findings``, or is returned."""

    def __init__(self, stage: Stage, given: Given, gradients: Tensors, calls: Counter[str]) -> None:
        """``given``: what all of them take; ``gradients``: of the first backward; ``calls`` of BatchNorm layers, by name, in
        the first forward."""
        self._stage, self._found, self._given, self._gradients = stage, stage.found, given, gradients
        self._calls = calls
        self._returned: Tensors = ()
        """Gradients of the inputs that the last further backward gave."""

    def look(
        self, there: Mapping[str, torch.Tensor], attributes: Attributes, seen: Seen, nan: bool
    ) -> tuple[list[str], list[str]]:
        """After the first forward and backward: find out by further ones what one leaves for the next. Then one rank must
        compute the micro-batches, one after the other. ``there``: ``may_be_written``; ``attributes``, ``seen``: as they were
        before the first forward; ``nan``: NaN came out of it.

        Returns the names of attributes that are changed and read, and of variables of Python that are changed.
        """
        changed, grown, outside = attributes.changed(), attributes.changed(grown=True), seen.changed(grown=True)
        self._found.changing.update(grown, map(place_of, outside))
        again: list[str] = []
        variables: list[str] = []
        counts = False
        now = attributes.again() if grown else attributes
        if grown or outside:
            seen, writes = seen.again(), writes_of(self._stage)
            failed = self._once_more()
            self._found.written |= writes.found()  # to what the first forward has made, too
            variables = self._judge_outside([one for one in seen.changed() if one in outside])
            # What was not there may be a cache; or a counter, which is another one each time.
            again = [name for name in grown if (failed and name in changed) or name in now.changed()]
            counts = failed or not set(again).isdisjoint(now.changed(but_floating=True))
        if nan:
            return (again if counts else []), variables
        read = self._reads_statistics(there)
        if again and not counts:
            counts = bool(read) or self._reads(partial(now.fill, again, False), backwards=True)
        once = [name for name in changed if name not in again]
        found = again if counts else self._set_again(now, once) or self._extremes(now, once)
        why = read or (f'a forward changes "{found[0]}", and reads it' if found else "")
        self._found.compute_in_turn(why)
        return found, variables

    def _once_more(self) -> bool:
        """Another forward and backward, which may not begin with the same state. True if it fails."""
        stage = self._stage
        try:
            self._forward()
            self._returned = stage.backward(0, 0, self._gradients, seed=0)
            if (0, 0) in stage.in_flight:
                stage.weight_gradient(0, 0)
        except Exception:
            return True
        finally:
            stage.in_flight.clear()
        return False

    def _forward(self) -> Outputs:
        given = self._given
        return self._stage.forward(0, 0, given.boxes, target=given.target, of=given.of, samples=given.samples)

    def _judge_outside(self, changed: Sequence[Common]) -> list[str]:
        """Take note of what layers have in common and each forward changes. Returns the names of variables among it."""
        self._found.parted = self._found.parted or next((one.text for one in changed if one in self._stage.common), "")
        owners = dict(enumerate([*self._stage.names, "the loss"], self._stage.start))
        names = [
            place.text if place.python else f"{owners[index]}.{place.text}"
            for index, place in (one.places[0] for one in changed)
            if place.python or place.called
        ]
        if names:
            why = f"a forward changes {names[0]}"
            self._found.compute_in_turn(why)
        return names

    def _reads_statistics(self, there: Mapping[str, torch.Tensor]) -> str:
        """Reason why forwards must be computed in turn, if they read BatchNorm's running statistics in training."""
        norms = batch_norms(self._stage.names, self._stage.layers).items()
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
        read = self._gives_nan()
        for _, tensor, values in kept:
            tensor.data.copy_(values)
        if not read:
            return ""
        self._found.written |= {name for name, _, _ in kept}
        return f'a forward reads running statistics of "{next(iter(moving.values()))}", which each one changes'

    def why_unreplayed(self) -> str:
        """Reason why BatchNorm's running statistics after a forward cannot be replayed from what it saw; empty: they can, as
        those of torch's own layers that are called once."""
        stage = self._stage
        norms = batch_norms(stage.names, stage.layers).items()
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
            if self._calls[name] != 1 or not _is_torchs(norm) or name in self._found.norms_apart
        ]
        if not odd:
            return ""
        why = f'layer "{odd[0]}" computes its running statistics in a way of its own'
        buffers = [buffer for norm in moving.values() for buffer in norm.buffers(recurse=False)]
        before = [buffer.detach().clone() for buffer in buffers]
        statistics = RunningStatistics(stage.names, stage.layers, self._found.norms_take, self._found.norms_apart)
        try:
            self._forward()
            stage.in_flight.clear()
            after = _put(buffers, before)
            stage.statistics = statistics
            out = self._forward()
            assert out.statistics is not None
            statistics.replay([out.statistics])
            return "" if all(map(same_bits, after, _put(buffers, before))) else why
        except UserError as error:
            return str(error)
        except Exception:
            return why
        finally:
            stage.statistics = None
            stage.in_flight.clear()
            _put(buffers, before)

    def _set_again(self, now: Attributes, names: Sequence[str]) -> list[str]:
        """Attributes that are numbers, and that each forward sets and another reads: the same inputs may give the same
        number, which a cache, made where there is none yet, is not set to again."""
        numbers = now.numbers(names, float)
        if not numbers:
            return []
        made_once = numbers
        for other in (math.nan, -math.inf, math.inf):  # a largest so far is set again then, or a smallest
            now.put(dict.fromkeys(made_once, other))
            self._gives_nan()
            left = now.numbers([*made_once], float)
            made_once = {name: numbers[name] for name, value in left.items() if value == other or value != value}
        now.put(made_once)
        set_again = [name for name in numbers if name not in made_once]
        if not set_again or not self._reads(partial(now.fill, set_again, True)):
            return []
        if len(set_again) > 1:  # what is told of is the first
            set_again.sort(key=lambda one: not self._reads(partial(self._fill_only, now, numbers, one)))
        return set_again

    def _extremes(self, now: Attributes, names: Sequence[str]) -> list[str]:
        """Attributes that are whole numbers, the largest or smallest so far, and decide what a forward gives. The length of
        a table that is made anew when it is too short decides nothing."""
        numbers = now.numbers(names, int)
        found = []
        for name, value in numbers.items():
            moved, gave = False, []
            for other in (value, -1, value + _MORE):
                now.put({**numbers, name: other})
                gave.append(self._values())
                moved = moved or now.numbers([name], int).get(name) != other
            if moved and not (same_values(gave[0], gave[1]) and same_values(gave[0], gave[2])):
                found.append(name)
        now.put(numbers)
        return found

    @staticmethod
    def _fill_only(now: Attributes, numbers: dict[str, float], name: str, filling: float) -> None:
        """Have one of some attributes hold ``filling``, and the others numbers."""
        now.put(numbers)
        now.fill([name], True, filling)

    def _reads(self, fill: Callable[[float], None], backwards: bool = False) -> bool:
        """True if what a forward gives, in training or in an evaluation, depends on what ``fill`` puts into attributes; or
        if the NaN that it puts there comes out of a backward that gives none otherwise, if that is to be tried."""
        evaluates = not self._gives_nan(evaluates=True)  # or it cannot be evaluated at all
        without = backwards and not self._goes_back_to_nan()
        if self._depends_on(fill):
            return True
        if without:
            fill(math.nan)
            if self._goes_back_to_nan():
                return True
        return evaluates and self._depends_on(fill, evaluates=True)

    def _depends_on(self, fill: Callable[[float], None], evaluates: bool = False) -> bool:
        """True if a forward gives NaN, or fails, where ``fill`` puts that, or other values for infinities: what is only
        compared with NaN gives none."""
        written = [one for name, one in self._stage.may_be_written().items() if name in self._found.written]
        before = [one.detach().clone() for one in written]

        def gives(filling: float) -> list[torch.Tensor]:
            fill(filling)
            found = self._values(evaluates)
            _put(written, before)
            return found

        with_nan = gives(math.nan)
        if not with_nan or any(bool(value.isnan().any()) for value in with_nan):
            return True
        most = gives(math.inf)
        if same_values(with_nan, most) and same_values(gives(-math.inf), most):
            return False
        return same_values(gives(math.inf), most)  # else it depends on something else that forwards change

    def _goes_back_to_nan(self) -> bool:
        """Run a forward and its backward; True if NaN comes out of the backward, or if it fails."""
        for parameter in self._stage.parameters:
            parameter.grad = None
        if self._once_more():
            return True
        every = (*self._returned, *(parameter.grad for parameter in self._stage.parameters))
        return any(one is not None and one.layout is torch.strided and bool(one.isnan().any()) for one in every)

    def _gives_nan(self, evaluates: bool = False) -> bool:
        """Run a forward, in training or in an evaluation; True if NaN comes out, or if it fails."""
        out = self._out(evaluates)
        return out is None or is_nan(out)

    def _values(self, evaluates: bool = False) -> list[torch.Tensor]:
        """What a forward gives, in training or in an evaluation; nothing if it fails."""
        if (out := self._out(evaluates)) is None:
            return []
        loss = [torch.tensor(out.result.loss)] if out.result else []
        return [*loss, *(x.detach() for x in out.outputs if x is not None)]

    def _out(self, evaluates: bool) -> Outputs | None:
        """Run a forward, in training or in an evaluation; None if it fails."""
        stage, given = self._stage, self._given
        try:
            if not evaluates:
                return self._forward()
            with stage.evaluating(), without_metrics(stage.loss):
                return stage.evaluate(given.boxes, given.target, given.of, samples=given.samples)
        except Exception:
            return None
        finally:
            stage.in_flight.clear()


def writes_of(stage: Stage) -> Writes:
    """Finds out what the next forward writes to, apart from BatchNorm's averages."""
    norms = batch_norms(stage.names, stage.layers).values()
    averages = {id(buffer) for norm in norms for buffer in norm.buffers(recurse=False)}
    return Writes({name: tensor for name, tensor in stage.may_be_written().items() if id(tensor) not in averages})


@contextmanager
def without_metrics(loss: Loss | None) -> Iterator[None]:
    """Have a loss evaluate no metrics within the context."""
    measured = loss.metrics if loss else []
    if loss:
        loss.metrics = []
    try:
        yield
    finally:
        if loss:
            loss.metrics = measured


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

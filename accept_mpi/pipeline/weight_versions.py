"""Versions of the values of a stage's parameters.

Parameters stay the same objects for the whole of a run, so that hooks on them, parametrizations and all other references
keep working; what changes is the memory behind them. In the asynchronous schedule each update makes a new version in its own
memory, while each micro-batch in flight keeps the one that its forward used (PipeDream's weight stashing): before its
backward the parameters show that version again, so that everything computed then (recomputed activations, hooks) uses it,
too. The newest version is the optimizer's own memory, so that what a layer writes into its parameters in a forward is not
lost. In the delayed schedule the version before the newest belongs to the state, too: the next step computes with it.

A layer that writes into its own parameters in every forward (a norm that it keeps, say) gets separate memory for each
micro-batch, in every schedule: the forwards of later micro-batches must not change what the backward of an earlier one uses.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import nn

from accept_mpi.errors import UserError
from accept_mpi.models.held import OWN, inside
from accept_mpi.models.memory import checksum, common_memory, copies, memory_of, same_bits
from accept_mpi.models.parts import part_at
from accept_mpi.pipeline.kept_values import KeptValues

PREVIOUS = "previous"
"""Name, beside the optimizer's state, of the weights before the last update."""


class Memory(NamedTuple):
    """Memory behind a tensor."""

    tensor: torch.Tensor
    data: torch.Tensor
    writes: int
    """Torch's count of them."""


class Kept(NamedTuple):
    """Weights that a micro-batch keeps from its F to its B."""

    values: list[torch.Tensor] | None
    """Values of all parameters; None if there are no versions."""
    own: list[Memory]
    """That of each tensor that forwards write to."""
    wanting: list[bool]
    """Which parameters wanted gradients when F ended. It may have frozen some, and later ones others."""


class Met(NamedTuple):
    """What ``Weights.meet`` has put aside."""

    own: list[Memory]
    wanting: list[bool]


class Weights:
    """Values of some parameters: several versions if ``versions``, else only one. The parameters show the newest values,
    except from ``begin`` to ``end`` and from ``meet`` to ``leave``."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        versions: bool,
        buffers: Sequence[torch.Tensor] = (),
        delay: int = 0,
    ) -> None:
        """``buffers``: the same layers', and what else they hold; those that share memory with parameters are treated like
        parameters. ``delay``: number of versions before the newest that forwards of later steps use."""
        self._delay = delay
        self.parameters: list[torch.Tensor] = list(parameters)
        self.updated = list(parameters)
        """Parameters that the optimizer updates."""
        self._versions: dict[int, list[torch.Tensor]] | None = None
        self._wanted = 0
        """The newest version that a forward has asked for."""
        self._shown: list[torch.Tensor] | None = None
        if versions:
            every = list({id(one): one for one in (*parameters, *buffers)}.values())
            groups = [places for places in common_memory(every) if any(every[place].requires_grad for place in places)]
            common = {place for places in groups for place in places}
            taken = [place for place in range(len(every)) if place < len(parameters) or place in common]
            self.parameters = [every[place] for place in taken]
            self._copied = [place in common or every[place].requires_grad for place in taken]
            # Separate objects, since an update in place must not count as a write to tensors that graphs in flight keep.
            self._own = [nn.Parameter(p.data, requires_grad=p.requires_grad) for p in self.parameters]
            self.updated = self._own[: len(parameters)]
            self._shown = [p.data for p in self.parameters]
            self.start(self._shown, self._shown)
        self.written: list[torch.Tensor] = []
        """Parameters, buffers and other tensors that forwards write to."""
        self._begun: list[torch.Tensor] = []
        """The same, as the forward began with them, which may replace them."""

    def begin(self, version: int) -> None:
        """Before F: show the values of this version."""
        if (values := self.at(version)) is not None:
            self._show(values)
        self._begun = self.written
        for tensor, own in zip(self.written, copies([tensor.data for tensor in self.written]), strict=True):
            tensor.data = own

    def end(self, version: int) -> Kept:
        """After F: show the newest values. Returns what the micro-batch keeps for its B."""
        own = self._memory(self._begun)
        if self._versions is None:
            return Kept(None, own, self.wanting)
        values = self._versions[version]
        if self.written:  # what was written belongs to this version
            values = self._versions[version] = self._shown = [p.data for p in self.parameters]
        self.newest()
        return Kept(values, own, self.wanting)

    def at(self, version: int) -> list[torch.Tensor] | None:
        """Values of a version, for F in any thread; None if there are no versions. Older ones live on only in micro-batches
        in flight."""
        if self._versions is None:
            return None
        self._wanted = max(self._wanted, version)
        return self._versions[version]

    @property
    def wanting(self) -> list[bool]:
        """Which parameters want gradients."""
        return [parameter.requires_grad for parameter in self.parameters]

    def meet(self, kept: Kept) -> Met:
        """Before B: show the values that F used, and what it left to train. Returns what ``leave`` needs."""
        if kept.values is not None:
            self._show(kept.values)
        newest = Met(self._memory([one.tensor for one in kept.own]), self.wanting)
        self._want(kept.wanting, newest.wanting)
        for tensor, data, count in kept.own:
            tensor.data = data
            _set_version(tensor, count)
        return newest

    def leave(self, newest: Met, kept: Kept) -> None:
        """After B: show the newest values."""
        self._want(newest.wanting, kept.wanting)
        for tensor, data, count in newest.own:
            tensor.data = data
            _set_version(tensor, max(count, tensor._version))
        self.newest()

    def check_wanting(self, kept: Kept, layers: str) -> None:
        """After a B beside Fs: raise UserError if one has changed what is trained, since autograd may have seen either."""
        if kept.wanting != self.wanting:
            raise UserError(
                f"a forward of {layers} has changed which parameters are trained while a backward went on beside it: leave "
                'pipeline.lanes = "F+B" out'
            )

    def _want(self, wanting: list[bool], before: list[bool]) -> None:
        """Have parameters want gradients as they did at some time, where that differs from ``before``."""
        if wanting != before:
            for parameter, wants, wanted in zip(self.parameters, wanting, before, strict=True):
                if wants is not wanted:
                    parameter.requires_grad_(wants)

    def _memory(self, others: Sequence[torch.Tensor]) -> list[Memory]:
        every = {id(tensor): tensor for tensor in (*self.written, *others)}.values()
        return [Memory(tensor, tensor.data, tensor._version) for tensor in every]

    def newest(self) -> None:
        """Show the newest values; what is written to them stays."""
        if self._versions is not None:
            self._show(self._versions[max(self._versions)])

    def before_update(self) -> None:
        """Before U: give the parameters that the optimizer updates the gradients and new memory."""
        if self._versions is None:
            return
        self.newest()
        # Only here, since lanes begin forwards in any order: those to come want this version or newer ones.
        self._forget(max(self._versions) + 1 - self._delay if self._delay else self._wanted)
        copied = iter(copies([p.data for p, copied in zip(self.parameters, self._copied, strict=True) if copied]))
        for parameter, own, is_copied in zip(self.parameters, self._own, self._copied, strict=True):
            own.data = next(copied) if is_copied else parameter.data
            own.grad, parameter.grad = parameter.grad, None

    def publish(self, version: int) -> None:
        """After U: make the optimizer's values this version, and show it."""
        if self._versions is not None:
            self._versions[version] = [own.data for own in self._own]
            self._show(self._versions[version])

    def restart(self) -> None:
        """Make the newest values version 0. Nothing may be in flight."""
        if self._versions is not None:
            self.newest()
            assert self._shown is not None
            self.start(*self.last_two())

    def adopt(self) -> None:
        """Make values that were loaded into the parameters the newest version and the optimizer's. Nothing may be in
        flight."""
        if self._versions is not None:
            values = [p.data for p in self.parameters]
            for own, data in zip(self._own, values, strict=True):
                own.data = data
            self.start(values, values)
            self._shown = values

    @property
    def previous(self) -> "Previous":
        """The values before the last update, where forwards to come use them."""
        return Previous(self)

    def last_two(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The version before the newest, or the newest if there is no other; and the newest."""
        assert self._versions is not None
        newest = max(self._versions)
        return self._versions.get(newest - self._delay, self._versions[newest]), self._versions[newest]

    def start(self, before: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        """Make ``values`` version 0, and ``before`` the one that it follows."""
        self._wanted = 0
        self._versions = {-self._delay: before, 0: values}

    def _forget(self, version: int) -> None:
        """Forget versions older than this one, which live on in micro-batches in flight."""
        assert self._versions is not None
        for old in [v for v in tuple(self._versions) if v < version]:
            self._versions.pop(old, None)

    def _show(self, values: list[torch.Tensor]) -> None:
        if values is not self._shown:
            for parameter, data in zip(self.parameters, values, strict=True):
                parameter.data = data
            self._shown = values


class Previous(KeptValues):
    """The values of some weights before the last update, where they are others and forwards to come use them. Loaded ones
    come after ``Weights.adopt``."""

    name = PREVIOUS

    def __init__(self, weights: Weights) -> None:
        super().__init__(bool(weights._delay))
        self._weights = weights
        self._places: dict[torch.Tensor, int] = {own: place for place, own in enumerate(weights.updated)}

    def put(self, parameter: torch.Tensor, value: torch.Tensor) -> None:
        before, newest = self._weights.last_two()
        self._weights.start([value if place == self._places[parameter] else old for place, old in enumerate(before)], newest)

    def of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        if not self.on:
            return {}
        value, newest = (values[self._places[parameter]] for values in self._weights.last_two())
        return {} if value.data_ptr() == newest.data_ptr() else {self.name: value}


class LaneWeights(Weights):
    """The values of a stage's parameters, shown on copies of its layers with which another thread computes."""

    def __init__(self, source: Weights, parameters: Sequence[nn.Parameter]) -> None:
        """``parameters``: the copies, in the order of the stage's."""
        super().__init__(parameters, False)
        self._source = source
        self._values: list[torch.Tensor] = []
        self._see([p.data for p in source.parameters])

    def begin(self, version: int) -> None:
        self._see(self._source.at(version) or self._values)

    def end(self, version: int) -> Kept:
        return Kept(self._values, [], [])

    def meet(self, kept: Kept) -> Met:
        self._see(kept.values or self._values)
        return Met([], [])

    def leave(self, newest: Met, kept: Kept) -> None:
        """Nothing to do: each F shows the version that it needs."""

    def restart(self) -> None:
        """Nothing to do, as for ``leave``."""

    def _see(self, values: list[torch.Tensor]) -> None:
        if values is not self._values:
            for parameter, data in zip(self.parameters, values, strict=False):  # the stage's buffers come after them
                parameter.data = data
            self._values = values


def may_be_written(parameters: Sequence[torch.Tensor], modules: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """All that forwards might write to, under names that stay theirs when a forward makes more of it: parameters, buffers
    that a graph may refer to (to whole numbers, too, by which it divides), and such tensors in attributes. ``modules``: the
    layers, and a loss that is a module."""
    found = {f"parameter {place}": parameter for place, parameter in enumerate(parameters)}
    seen = {id(parameter) for parameter in parameters}
    for place, whole in enumerate(modules):
        for path, module in whole.named_modules():
            attributes = ((key, value) for key, value in list(vars(module).items()) if key not in OWN)
            for key, value in (*module._buffers.items(), *attributes):
                for number, one in enumerate(inside(value), 1):
                    if id(one) not in seen and _may_be_in_graph(one):
                        seen.add(id(one))
                        found[f"layer {place} {path}.{key} {number}"] = one
    return found


def named(names: Iterable[str], parameters: Sequence[torch.Tensor], modules: Sequence[nn.Module]) -> list[torch.Tensor]:
    """What has these names of ``may_be_written`` now, as far as it is there."""
    found: dict[int, torch.Tensor] = {}
    for name in names:
        kind, place, *rest = name.split(" ", 2)
        if kind == "parameter":
            there = [parameters[int(place)]]
        else:
            whole, number = rest[0].rsplit(" ", 1)
            path, _, key = whole.rpartition(".")
            value: Any = None
            with suppress(AttributeError):  # a forward may take a module away
                module = part_at(modules[int(place)], path)
                value = module._buffers[key] if key in module._buffers else vars(module).get(key)
            there = [*inside(value)][int(number) - 1 : int(number)]
        found |= {id(one): one for one in there if kind == "parameter" or _may_be_in_graph(one)}
    return [*found.values()]


def _may_be_in_graph(value: torch.Tensor) -> bool:
    strided = value.layout is torch.strided  # others have no single memory that could be kept apart
    return strided and value.is_leaf and not value.requires_grad and not value.is_inference()


class Writes:
    """Finds out which tensors a forward writes to. It must be created before the forward."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Remember the state of the tensors (``may_be_written``) before the forward."""
        self._tensors = tensors
        self._counts = {name: tensor._version for name, tensor in tensors.items()}
        self._values = {name: (_values(tensor), tensor.data_ptr()) for name, tensor in tensors.items()}

    def found(self) -> set[str]:
        """Names of tensors that have been written to since, whether or not torch has counted it."""
        return {name for name, tensor in self._tensors.items() if self._is_written(name, tensor)}

    def _is_written(self, name: str, tensor: torch.Tensor) -> bool:
        before, at = self._values[name]
        if tensor._version != self._counts[name] or tensor.data_ptr() != at:
            return True
        if isinstance(before, int):
            return checksum(memory_of(tensor)) != before
        return not same_bits(tensor.data, before)


def _values(tensor: torch.Tensor) -> int | torch.Tensor:
    """The values behind a tensor, to compare: a checksum of its memory, or a copy where that cannot be read here."""
    found = checksum(memory_of(tensor))
    return tensor.data.clone() if found is None else found


def _set_version(tensor: torch.Tensor, count: int) -> None:
    """Set torch's count of writes to a tensor. Autograd refuses memory that was written to after a forward kept it, which
    does not apply to this memory."""
    if tensor._version != count:
        torch._C._autograd._unsafe_set_version_counter((tensor,), (count,))

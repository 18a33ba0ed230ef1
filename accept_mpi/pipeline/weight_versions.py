"""Which values a stage's parameters have at the moment.

Parameters stay the same objects for the whole of a run, so that hooks on them, parametrizations and whoever else knows them
go on working; what changes is the memory behind them. In the asynchronous schedule each update makes a new version in
memory of its own, while each micro-batch in flight keeps the one that its forward met (PipeDream's weight stashing): before
its backward the parameters show that one again, so that whatever computes then (recomputed activations, hooks) meets it,
too. The newest version is the optimizer's own memory, so that what a layer writes into its parameters in a forward is not
lost.

A layer that writes into its own parameters in every forward (a norm that it keeps, say) gets memory of its own for each
micro-batch, in every schedule: the forwards of later micro-batches must not change what the backward of an earlier one
meets.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from accept_mpi.models.shared import common_memory, copies


class Kept(NamedTuple):
    """What a micro-batch keeps of weights from its F to its B."""

    values: list[torch.Tensor] | None
    """Of all parameters; None where there are no versions."""
    own: list[tuple[torch.Tensor, int]]
    """Of what forwards write to: memory, and how often it had been written to."""


class Weights:
    """The values of some parameters: by version, where ``versions``; else there is one of each. They show the newest, but
    for the time from ``begin`` to ``end`` and from ``meet`` to ``leave``."""

    def __init__(self, parameters: Sequence[nn.Parameter], versions: bool, buffers: Sequence[torch.Tensor] = ()) -> None:
        """``buffers``: of the same layers; what lies on the memory of parameters goes with them."""
        self.parameters: list[torch.Tensor] = list(parameters)
        self.updated = list(parameters)
        """What the optimizer updates."""
        self._versions: dict[int, list[torch.Tensor]] | None = None
        self._shown: list[torch.Tensor] | None = None
        if versions:
            every = [*parameters, *{id(buffer): buffer for buffer in buffers}.values()]
            groups = [places for places in common_memory(every) if any(every[place].requires_grad for place in places)]
            common = {place for places in groups for place in places}
            taken = [place for place in range(len(every)) if place < len(parameters) or place in common]
            self.parameters = [every[place] for place in taken]
            self._copied = [place in common or every[place].requires_grad for place in taken]
            # Of their own, since an update in place must not count as written to what graphs in flight have kept.
            self._own = [nn.Parameter(p.data, requires_grad=p.requires_grad) for p in self.parameters]
            self.updated = self._own[: len(parameters)]
            self._shown = [p.data for p in self.parameters]
            self._versions = {0: self._shown}
        self.written: list[torch.Tensor] = []
        """Parameters and buffers that forwards write to."""

    def begin(self, version: int) -> None:
        """F: parameters have the values of this version. Older ones live on only with micro-batches in flight."""
        if self._versions is not None:
            for old in [v for v in self._versions if v < version]:
                del self._versions[old]
            self._show(self._versions[version])
        for tensor, own in zip(self.written, copies([tensor.data for tensor in self.written]), strict=True):
            tensor.data = own

    def end(self, version: int) -> Kept:
        """F is done."""
        own = [(tensor.data, tensor._version) for tensor in self.written]
        if self._versions is None:
            return Kept(None, own)
        values = self._versions[version]
        if self.written:  # they have become this version's newest
            values = self._versions[version] = self._shown = [p.data for p in self.parameters]
        self.newest()
        return Kept(values, own)

    def meet(self, kept: Kept) -> list[tuple[torch.Tensor, int]]:
        """B: parameters have the values that F met. Returns what ``leave`` wants."""
        if kept.values is not None:
            self._show(kept.values)
        newest = [(tensor.data, tensor._version) for tensor in self.written]
        for tensor, (data, count) in zip(self.written, kept.own, strict=True):
            tensor.data = data
            _set_version(tensor, count)
        return newest

    def leave(self, newest: list[tuple[torch.Tensor, int]]) -> None:
        """B is done."""
        for tensor, (data, count) in zip(self.written, newest, strict=True):
            tensor.data = data
            _set_version(tensor, max(count, tensor._version))
        self.newest()

    def newest(self) -> None:
        """Parameters have the newest values, and what is written to them stays."""
        if self._versions is not None:
            self._show(self._versions[max(self._versions)])

    def before_update(self) -> None:
        """Gradients go to what the optimizer updates, in new memory."""
        if self._versions is None:
            return
        self.newest()
        copied = iter(copies([p.data for p, copied in zip(self.parameters, self._copied, strict=True) if copied]))
        for parameter, own, is_copied in zip(self.parameters, self._own, self._copied, strict=True):
            own.data = next(copied) if is_copied else parameter.data
            own.grad, parameter.grad = parameter.grad, None

    def publish(self, version: int) -> None:
        """The optimizer's values are a version now."""
        if self._versions is not None:
            self._versions[version] = [own.data for own in self._own]
            self._show(self._versions[version])

    def restart(self) -> None:
        """Nothing is in flight: the newest values are version 0."""
        if self._versions is not None:
            self.newest()
            assert self._shown is not None
            self._versions = {0: self._shown}

    def adopt(self) -> None:
        """Parameters were given other values from outside, nothing is in flight: these are the newest, and the
        optimizer's."""
        if self._versions is not None:
            values = [p.data for p in self.parameters]
            for own, data in zip(self._own, values, strict=True):
                own.data = data
            self._versions, self._shown = {max(self._versions): values}, values

    def _show(self, values: list[torch.Tensor]) -> None:
        if values is not self._shown:
            for parameter, data in zip(self.parameters, values, strict=True):
                parameter.data = data
            self._shown = values


def may_be_written(layers: Sequence[nn.Module]) -> list[torch.Tensor]:
    """Buffers, and tensors that are attributes of modules, that may be part of a graph."""
    modules = [module for layer in layers for module in layer.modules()]
    attributes = [value for module in modules for value in vars(module).values() if type(value) is torch.Tensor]
    every = (*(buffer for layer in layers for buffer in layer.buffers()), *attributes)
    return list({id(b): b for b in every if b.is_floating_point() and b.is_leaf and not b.requires_grad}.values())


class Writes:
    """Finds out which tensors a forward writes to."""

    def __init__(self, parameters: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> None:
        """Before it."""
        self._parameters, self._buffers = parameters, buffers
        self._before = [(tensor.data.clone(), tensor._version, tensor.data_ptr()) for tensor in parameters]
        self._counts = [buffer._version for buffer in buffers]

    def found(self) -> set[tuple[int, int]]:
        """After it: places among parameters, as (0, place), and among buffers, as (1, place), of what torch saw a write to;
        parameters are looked at, too."""
        written = set()
        for place, (tensor, (data, count, at)) in enumerate(zip(self._parameters, self._before, strict=True)):
            if tensor._version != count or tensor.data_ptr() != at or not torch.equal(tensor.data, data):
                written.add((0, place))
        counts = enumerate(zip(self._buffers, self._counts, strict=True))
        return written | {(1, place) for place, (buffer, count) in counts if buffer._version != count}


def _set_version(tensor: torch.Tensor, count: int) -> None:
    """Autograd refuses what was written to after a forward kept it: this memory was not."""
    if tensor._version != count:
        torch._C._autograd._unsafe_set_version_counter((tensor,), (count,))

"""Layers cut from a record: modules that hold a part of the model under its own names, and compute a part of the record."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from accept_mpi.errors import UserError
from accept_mpi.models.parts import part_at
from accept_mpi.models.recording.autocasting import Opened
from accept_mpi.models.recording.key import keyed
from accept_mpi.models.recording.structure import as_it_is, fixed_in, mapped, parts_of, tensors_in
from accept_mpi.models.recording.tape import DEVICE, ComputingDevice, Node, State, Value

_PLACES = (Value, State, ComputingDevice)


@dataclass(frozen=True, eq=False)
class Step:
    """A node that a layer computes, and the values that nothing needs afterwards."""

    node: Node
    places: bool
    """True if the arguments have places to fill."""
    lists: bool
    """True if they have lists or dicts that a module may change."""
    frees: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Program:
    """What a layer computes for inputs of one shape, in one mode."""

    takes: tuple[int, ...]
    """Slots of the tensors that it is given."""
    steps: tuple[Step, ...]
    gives: tuple[int, ...]
    """Slots of the tensors that it passes on; empty on the last layer."""
    output: Any
    """Structure of the result, on the last layer."""


def program(nodes: Sequence[Node], takes: Sequence[int], gives: Sequence[int], output: Any) -> Program:
    """The program of these nodes. ``gives``: slots that it passes on, or on the last layer those in ``output``."""
    left = set(gives)
    steps: list[Step] = []
    for node in reversed(nodes):
        unused = tuple({slot for slot in (*node.takes, *node.gives) if slot not in left})
        left.update(node.takes)
        places = bool(parts_of((node.args, node.kwargs), _PLACES))
        lists = node.function is None and bool(parts_of((*node.args, *node.kwargs.values()), (list, dict)))
        steps.append(Step(node, places, lists, unused))
    return Program(tuple(takes), tuple(reversed(steps)), () if output is not None else tuple(gives), output)


class RecordedLayer(nn.Module):
    """A part of a recorded model. Its parameters and buffers have the names that they have in the model.

    The first layer takes what the data set gives. A layer passes on a tuple of the inputs' shapes (as a key), and of the
    tensors that later layers need.
    """

    def __init__(
        self, index: int, programs: Callable[[bytes, bool], Sequence[Program]], changing: frozenset[str] = frozenset()
    ) -> None:
        """``programs(key, training)`` are those of all layers; ``changing``: names of what the model's forward writes to."""
        super().__init__()
        self.__dict__["_changing"] = changing
        self.__dict__["_recorded_index"] = index
        self.__dict__["_recorded_programs"] = _Uncopied(programs)

    def forward(self, value: Any) -> Any:
        index = self.__dict__["_recorded_index"]
        key, given = keyed(value) if index == 0 else (value[0], value[1:])
        run = self.__dict__["_recorded_programs"](key, self.training)[index]
        slots = dict(zip(run.takes, given, strict=True))
        device = next((one.device for one in given), torch.device("cpu"))

        def filled(place: Any) -> Any:
            if type(place) is Value:
                return slots[place.slot]
            return device if place is DEVICE else self._state(place.name)

        enabled = torch.is_grad_enabled()
        with Opened() as opened:
            for step in run.steps:
                node = step.node
                opened.have(node.autocast)
                args, kwargs = node.args, node.kwargs
                if step.places:
                    args, kwargs = mapped(args, filled, _PLACES), mapped(kwargs, filled, _PLACES)
                if step.lists:
                    args, kwargs = as_it_is((args, kwargs))
                call = self._part(node.module) if node.function is None else node.function
                # In training gradients may be off around a forward that is computed again; in evaluation they are.
                same = node.grad == enabled or (self.training and not enabled)
                with nullcontext() if same else torch.set_grad_enabled(node.grad):
                    result = call(*args, **kwargs)
                tensors = tensors_in(result)
                if node.fixed is not None and (now := fixed_in(result)) != node.fixed:
                    raise UserError(_changes(node.module, node.fixed, now))
                slots.update(zip(node.gives, tensors, strict=True))
                for slot in step.frees:
                    slots.pop(slot, None)
        if run.output is not None:
            return mapped(run.output, filled, _PLACES)
        return (key, *(slots[slot] for slot in run.gives))

    def _part(self, path: str) -> nn.Module:
        """The model's module of this name."""
        found: nn.Module = self._found(path, path, lambda: part_at(self, path))
        if type(found) is nn.Module:  # it holds those of the module's tensors that are used directly
            raise UserError(_elsewhere(path, path))
        return found

    def _state(self, name: str) -> torch.Tensor:
        path, _, last = name.rpartition(".")
        return self._found(name, path, lambda: getattr(part_at(self, path), last))

    def _found(self, name: str, module: str, find: Callable[[], Any]) -> Any:
        try:
            return find()
        except AttributeError as error:
            raise UserError(_elsewhere(name, module)) from error


def _elsewhere(name: str, module: str) -> str:
    """A sentence on a module, or something of its, that forward uses for some shapes only."""
    around = module.rpartition(".")[0]
    remedy = f'; model.blocks = ["{around}"] keeps in one layer what chooses between them' if around else ""
    return (
        f"model.name: for inputs of this shape forward uses {name}, which it does not use there for those of the usual "
        f"shape, so that another layer has it{remedy}"
    )


def _changes(block: str, before: Sequence[Any], now: Sequence[Any]) -> str:
    """A sentence on a block that gives something else (``fixed_in``) for other values."""
    which = next(n for n, (one, other) in enumerate(zip(before, now, strict=True)) if one != other)
    kind = ("shapes", "dtypes", "constants beside its tensors")[which]
    old, new = (
        ", ".join(" x ".join(map(str, part)) if isinstance(part, tuple) else str(part) for part in some[which])
        for some in (before, now)
    )
    return (
        f"model.blocks: {block} gives other {kind} for other values ({old}, now {new}), so what follows cannot be recorded"
    )


class _Uncopied:
    """A function that copies of a layer share."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Uncopied":
        return self


def put_module(layer: nn.Module, path: str, module: nn.Module) -> None:
    """Put a module into a layer under its dotted name in the model."""
    *parents, last = path.split(".")
    holder = _holder(layer, parents)
    there = holder._modules.get(last)
    if there is not None and there is not module:
        raise UserError(f"model.name: {path} is used both as a whole and in parts, which cannot be cut into layers")
    holder._modules[last] = module


def put_tensor(layer: nn.Module, path: str, model: nn.Module) -> None:
    """Put one of the model's tensors into a layer under its dotted name."""
    *parents, last = path.split(".")
    source = part_at(model, ".".join(parents))
    holder = _holder(layer, parents)
    if holder is source:
        return  # a part of a module that is there
    if last in source._parameters:
        holder._parameters[last] = source._parameters[last]
    elif last in source._buffers:
        holder._buffers[last] = source._buffers[last]
        if last in source._non_persistent_buffers_set:
            holder._non_persistent_buffers_set.add(last)
    else:
        holder.__dict__[last] = source.__dict__[last]


def _holder(layer: nn.Module, parents: Sequence[str]) -> nn.Module:
    holder = layer
    for name in parents:
        if name not in holder._modules:
            holder._modules[name] = nn.Module()
        found = holder._modules[name]
        assert found is not None
        holder = found
    return holder

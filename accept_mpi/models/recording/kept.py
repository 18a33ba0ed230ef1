"""Attributes that a forward sets: what it shows (a map of attention, its last loss), hands on within itself (the mean that
it takes off and adds again), or makes once and keeps (a mask, a table of positions).

Layers do not set them, so what an earlier forward has left must not matter. That is tried out: the forward is recorded as it
is at first, and as it is later, when the attributes hold what forwards leave. Both records must be the same, and leave the
same. Of what is left, constants have their values; of anything else there is ``UNSET`` instead, with which nothing can be
computed.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from accept_mpi.models.parts import part_at
from accept_mpi.models.recording.constants import Constants
from accept_mpi.models.recording.own_hooks import Hooks
from accept_mpi.models.recording.refusals import Unrecordable
from accept_mpi.models.recording.structure import is_plain, mapped
from accept_mpi.models.recording.tape import Node, State, Tape, Value

SETS = (
    "model.name: forward sets {} of the model for later forwards, which training in a pipeline would not do: pass it on as "
    "a value, or write into a buffer in place"
)


class Sets(Unrecordable):
    """A forward sets attributes of the model."""

    def __init__(self, names: Mapping[str, bool], text: str) -> None:
        """``names``: of the attributes, and whether they are given other values (``is_set_anew``)."""
        super().__init__(text)
        self.names = names


class _Unset:
    def __bool__(self) -> bool:
        raise TypeError("what an earlier forward has left is not there")


UNSET, MISSING, AS_BEFORE = _Unset(), object(), object()
"""A value that is not there, an attribute that is not there, and one that a forward has not set."""
Values = dict[str, Any]
"""Of attributes, by their dotted names."""


def plain_attributes(model: nn.Module) -> Values:
    """What is in the modules' own attributes."""
    modules = model.named_modules()
    return {f"{path}.{key}" if path else key: value for path, module in modules for key, value in vars(module).items()}


def get(model: nn.Module, name: str) -> Any:
    """Value of an attribute, or ``MISSING``."""
    path, _, key = name.rpartition(".")
    return vars(part_at(model, path)).get(key, MISSING)


def put(model: nn.Module, values: Mapping[str, Any]) -> None:
    """Set attributes; ``MISSING`` takes one away."""
    for name, value in values.items():
        path, _, key = name.rpartition(".")
        if value is MISSING:
            vars(part_at(model, path)).pop(key, None)
        else:
            vars(part_at(model, path))[key] = value


def is_set_anew(before: Any, after: Any) -> bool:
    """True if an attribute has another value, not the same one changed; both tensors, constants or structures of them."""
    return before is not after and (before is MISSING or is_plain(before)) and is_plain(after)


def later(first: Values, *others: Values) -> Values:
    """What attributes hold after a forward that leaves ``first``, or, where it does not set them, after ``others``."""
    return {name: next((one[name] for one in (first, *others) if one[name] is not AS_BEFORE), UNSET) for name in first}


def leaves_another(first: Values, again: Values) -> str:
    """Name of an attribute to which a forward gives another value than the ``first`` one; "" if there is none."""
    return next((name for name in first if again[name] is not AS_BEFORE and not _same(first[name], again[name])), "")


class Record:
    """A tape, its constants, and what the forward has left in attributes and tables of hooks."""

    def __init__(self, tape: Tape, constants: Constants, left: Values, hooks: Hooks) -> None:
        self.tape, self._constants, self.left, self.hooks = tape, constants, left, hooks
        slots = constants.slots  # not those that something is written to later
        self._nodes = [node for node in tape.nodes if not node.constant or not slots.issuperset(node.gives)]

    def same(self, other: "Record") -> bool:
        """True if two records compute the same."""
        slots = dict(zip(self.tape.inputs, other.tape.inputs, strict=True))

        def alike(one: Any, two: Any) -> bool:
            return _same(one, two, lambda a, b: slots.get(a.slot) == b.slot)

        if len(self._nodes) != len(other._nodes):
            return False
        for node, its in zip(self._nodes, other._nodes, strict=True):
            if _facts(node) != _facts(its) or len(node.gives) != len(its.gives):
                return False
            if not alike(self._filled((node.args, node.kwargs)), other._filled((its.args, its.kwargs))):
                return False
            slots.update(zip(node.gives, its.gives, strict=True))
        return alike(self._filled(self.tape.output), other._filled(other.tape.output))

    def _filled(self, value: Any) -> Any:
        """Places with constants' values in them."""
        constants = self._constants
        return mapped(value, lambda one: constants.value(one.slot) if one.slot in constants.slots else one, (Value,))


def _facts(node: Node) -> Any:
    return node.function, node.module, node.states, node.draws, node.grad, node.autocast, len(node.writes), node.fixed


def _same(one: Any, other: Any, slots: Callable[[Value, Value], bool] | None = None) -> bool:
    """True if two structures of tensors, constants and places are the same."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one is other or (
            one.dtype == other.dtype and not one.is_meta and not other.is_meta and torch.equal(one, other)
        )
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(one, Value) and slots is not None:
        return slots(one, other)
    if isinstance(one, State):
        return bool(one == other)
    if isinstance(one, slice):
        return _same((one.start, one.stop, one.step), (other.start, other.stop, other.step), slots)
    if isinstance(one, dict):
        return list(one) == list(other) and _same(list(one.values()), list(other.values()), slots)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(_same(a, b, slots) for a, b in zip(one, other, strict=True))
    return one is other or bool(one == other) or (one != one and other != other)

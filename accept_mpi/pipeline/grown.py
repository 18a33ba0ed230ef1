"""Caches that grow late: a table of positions that is made anew, longer, when a longer text comes than any before.

Each rank or lane that shares a stage may keep one of its own. What it gives does not depend on who has made it, nor when, as
long as shorter tables are the beginnings of longer ones, and values have no part in it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from accept_mpi.codecs.tensors import Tensors
from accept_mpi.models.memory import same_bits
from accept_mpi.pipeline.micro_batch import Inputs
from accept_mpi.tree import Tree, leaves, packed


class Largest:
    """The micro-batches of this step and the last that were larger in a dimension than all before them."""

    def __init__(self) -> None:
        self._most: dict[tuple[int, int], int] = {}
        """The most so far, by input and dimension."""
        self._now: list[Inputs] = []
        self._before: list[Inputs] = []
        self._newest: Inputs | None = None

    @property
    def given(self) -> list[Inputs]:
        """What their forwards were given, and that of the newest micro-batch."""
        return [*self._before, *self._now, *([self._newest] if self._newest else [])]

    def next_step(self) -> None:
        """Forget those of the last step."""
        self._before, self._now = self._now, []

    def see(self, inputs: Tensors, of: Tree | None) -> None:
        """A forward is given ``inputs``."""
        sizes = {(n, d): size for n, x in enumerate(inputs) if x is not None for d, size in enumerate(x.shape)}
        there = tuple(None if x is None else x.detach() for x in inputs)
        self._newest = Inputs(there, of or packed(len(there)))
        if any(size > self._most.get(key, -1) for key, size in sizes.items()):
            self._most |= {key: max(size, self._most.get(key, -1)) for key, size in sizes.items()}
            self._now.append(self._newest)


class Change(NamedTuple):
    """An attribute, or a buffer, that has another value now."""

    path: str
    """Name of the module."""
    key: str
    before: Any
    """``MISSING`` if there was none."""
    now: Any

    def undo(self, module: nn.Module) -> None:
        """Have a copy of the module have what it had before."""
        table = module._buffers if self.key in module._buffers else vars(module)
        if self.before is MISSING:
            del table[self.key]
        else:
            table[self.key] = self.before

    def made(self, module: nn.Module) -> Any:
        """What a copy of the module has now."""
        return module._buffers[self.key] if self.key in module._buffers else vars(module).get(self.key, MISSING)


MISSING = object()
"""In place of a value: there is no such attribute."""


def may_be_cache(changes: Sequence[Change]) -> bool:
    """True if these may be tables that have become longer, and how long they are."""
    tables = [one for one in changes if isinstance(one.now, torch.Tensor)]
    lengths = {size for one in tables for size in one.now.shape}
    numbers = [one for one in changes if not isinstance(one.now, torch.Tensor)]
    return (
        bool(tables)
        and all(one.before is not one.now for one in tables)
        and all(_has_grown(one.before, one.now) for one in tables)
        and all(type(one.now) is int and one.now in lengths and _was_less(one) for one in numbers)
    )


def undo(changes: Sequence[Change], modules: Mapping[str, nn.Module]) -> None:
    """Have copies of the modules, by their names, have what they had before the changes."""
    for one in changes:
        one.undo(modules[one.path])


def made_alike(changes: Sequence[Change], modules: Mapping[str, nn.Module]) -> bool:
    """True if copies of the modules have made the same tables, as far as both reach."""
    pairs = [(one.now, one.made(modules[one.path])) for one in changes if isinstance(one.now, torch.Tensor)]
    return all(isinstance(made, torch.Tensor) and (_begins(now, made) or _begins(made, now)) for now, made in pairs)


def same_values(one: Any, other: Any) -> bool:
    """True if what two forwards gave has the same tensors."""
    some, more = leaves(one), leaves(other)
    return 0 < len(some) == len(more) and all(map(same_bits, some, more))


def others(given: Inputs) -> Inputs | None:
    """Other values of the same shapes and kinds, which a model can take; None if these are all alike."""
    found = tuple(None if x is None else _moved(x) for x in given.tensors)
    same = all(x is None or y is None or same_bits(x, y) for x, y in zip(given.tensors, found, strict=True))
    return None if same else Inputs(found, given.tree)


def _moved(x: torch.Tensor) -> torch.Tensor:
    for dim in range(x.dim()):
        x = x.roll(1, dim)
    return 0.75 * x if x.is_floating_point() else x


def _was_less(change: Change) -> bool:
    return change.before is None or (type(change.before) is int and change.before < change.now)


def _has_grown(before: Any, now: torch.Tensor) -> bool:
    if isinstance(now, nn.Parameter) or now.requires_grad or now.layout is not torch.strided:
        return False
    return before is None or before is MISSING or (isinstance(before, torch.Tensor) and _begins(before, now))


def _begins(short: torch.Tensor, long: torch.Tensor) -> bool:
    """True if a tensor is the beginning of another one, in all dimensions."""
    if short.dim() != long.dim() or short.dtype != long.dtype or short.layout is not torch.strided:
        return False
    if any(a > b for a, b in zip(short.shape, long.shape, strict=True)):
        return False
    return same_bits(short.detach(), long.detach()[tuple(slice(size) for size in short.shape)])

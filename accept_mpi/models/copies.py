"""Copies of modules whose functions refer to the copies.

``copy.deepcopy`` leaves functions as they are. A hook, or a function in an attribute, that finds its module in a variable of
the function around it (``lambda *given: self.count()``) would go on with the original: a trial would change what training
begins with, and not see it, and a lane would leave gradients where nobody takes them.
"""

import copy
import functools
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from accept_mpi.errors import one_line
from accept_mpi.models.common import parts_of
from accept_mpi.models.held import MOST_INSIDE, filled

_T = TypeVar("_T")
_LEAVES = (type(None), bool, int, float, complex, str, bytes, torch.Tensor, type, types.ModuleType)


def copied(values: Sequence[_T], memo: dict[int, Any] | None = None) -> list[_T]:
    """Deep copies of modules, or of functions. Modules that functions refer to are copied, too, but for parameters of those
    around the given ones; other variables of functions are theirs and the originals'. ``memo``: copies that there are, by
    the originals' ids."""
    memo = {} if memo is None else memo
    there = {id(one) for one in memo.values()}
    found = copy.deepcopy(list(values), memo)
    _Functions(memo, there).rebind()
    return found


def why_not_copied(names: Sequence[str], modules: Sequence[nn.Module], error: Exception) -> str:
    """Half a sentence on why modules cannot be copied. ``error``: what ``copied`` raised."""
    for name, module in zip(names, modules, strict=True):
        for path, part in module.named_modules(prefix=name):
            for key, value in vars(part).items():
                if isinstance(value, torch.Tensor) and not value.is_leaf:
                    return (
                        f'layer "{name}" has a tensor that is computed from others, "{path}.{key}" (as '
                        "torch.nn.utils.prune leaves it), and cannot be copied"
                    )
    return f"layers cannot be copied: {one_line(str(error), 200)}"


class _Functions:
    """Functions of copies, which refer to copies where the originals refer to what is copied."""

    def __init__(self, memo: dict[int, Any], there: set[int]) -> None:
        """``memo``: as ``copy.deepcopy`` leaves it; ``there``: ids of the copies in it that are not to be touched."""
        self._memo = memo
        self._done = {*there, id(memo.get(id(memo)))}  # a list of originals
        self._made: dict[int, types.FunctionType] = {}
        self._cells: dict[int, types.CellType] = {}

    def rebind(self) -> None:
        """Put functions that refer to copies into all copies, those included that this makes."""
        while fresh := [one for one in self._memo.values() if id(one) not in self._done]:
            self._done |= {id(one) for one in fresh}
            for one in fresh:
                if type(one) in (dict, OrderedDict):
                    self._put(one, list(one.items()))
                elif type(one) in (list, deque):
                    self._put(one, list(enumerate(one)))
                elif not isinstance(one, _LEAVES) and hasattr(one, "__dict__"):
                    self._put(vars(one), list(vars(one).items()))

    def _put(self, table: Any, items: Sequence[tuple[Any, Any]]) -> None:
        for key, value in items:
            if (new := self._rebound(value)) is not value:
                table[key] = new

    def _rebound(self, value: Any) -> Any:
        """A function or a weak reference that is in a copy, or what cannot change with such a one in it."""
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if type(value) is tuple:
            new = tuple(map(self._rebound, value))
            return new if any(one is not other for one, other in zip(new, value, strict=True)) else value
        if type(value) is functools.partial:
            given = value.func, value.args, tuple(value.keywords.items())
            if (new := self._rebound(given)) is not given:
                return functools.partial(new[0], *new[1], **dict(new[2]))
        if type(value) is weakref.ref and (one := self._memo.get(id(value()))) is not None:
            return weakref.ref(one)
        return value

    def _function(self, old: types.FunctionType) -> types.FunctionType:
        if id(old) in self._made:
            return self._made[id(old)]
        if not self._refers(old):
            self._made[id(old)] = old
            return old
        cells = [self._cell(cell) for cell in old.__closure__ or ()]
        new = types.FunctionType(old.__code__, old.__globals__, old.__name__, closure=tuple(new for _, new in cells))
        self._made[id(old)] = new  # before it is filled, since it may refer to itself
        for name in ("__module__", "__qualname__", "__doc__"):  # annotations may name what does not exist
            setattr(new, name, getattr(old, name))
        vars(new).update(vars(old))
        new.__defaults__ = self._copy(old.__defaults__)
        new.__kwdefaults__ = self._copy(old.__kwdefaults__)
        for before, cell in cells:
            if cell is not before:
                cell.cell_contents = self._copy(before.cell_contents)
        return new

    def _cell(self, cell: types.CellType) -> tuple[types.CellType, types.CellType]:
        """A variable, and what stands for it in copies: itself, unless it refers to what is copied."""
        if id(cell) not in self._cells:
            self._cells[id(cell)] = types.CellType() if filled(cell) and self._refers(cell.cell_contents) else cell
        return cell, self._cells[id(cell)]

    def _copy(self, value: Any) -> Any:
        """What stands for the value of a variable in copies."""
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if not self._refers(value):
            return value
        if isinstance(value, nn.Module):  # what is around the modules: nobody trains it here
            for parameter in value.parameters():
                self._memo.setdefault(id(parameter), parameter)
        return self._rebound(copy.deepcopy(value, self._memo))

    def _refers(self, value: Any) -> bool:
        """True if a module, or something else that is copied, can be reached from a value."""
        seen: set[int] = set()
        left = [value]
        while left and len(seen) < MOST_INSIDE:
            one = left.pop()
            if id(one) in self._memo or isinstance(one, nn.Module):
                return True
            if type(one) is weakref.ref and id(one()) in self._memo:
                return True
            if isinstance(one, _LEAVES) or id(one) in seen:
                continue
            seen.add(id(one))
            if isinstance(one, types.FunctionType):
                left += [one.__defaults__, one.__kwdefaults__]
            if isinstance(one, RemovableHandle):  # of a hook, which may take itself away
                left.append(one.hooks_dict_ref())
            left += [part for _, part in parts_of(one)]
        return False

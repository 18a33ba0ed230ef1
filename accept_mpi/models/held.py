"""Tensors that a module holds otherwise than as parameters and buffers: as attributes, in collections, in functions."""

import functools
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

OWN = frozenset(vars(nn.Module()))
"""Names of the attributes that are torch's own."""
MOST_INSIDE = 10_000
"""Parts of an attribute that are looked at."""


def held(layer: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that a layer's modules hold so, each with the name of its attribute. A module that is no part of the
    layer, but is in a collection or a function of it, holds its parameters and buffers for it."""
    for path, module in layer.named_modules():
        for name, value in list(vars(module).items()):
            if name not in OWN:
                whole = f"{path}.{name}" if path else name
                yield from ((whole, tensor) for tensor in _inside(value, set()))


def filled(cell: types.CellType) -> bool:
    """True if a variable of a function has a value."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def inside(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in an attribute, also in objects, in an order that stays theirs as more are added."""
    return _inside(value, set(), objects=True)


def _inside(value: Any, seen: set[int], objects: bool = False) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
        return
    if id(value) in seen or len(seen) > MOST_INSIDE:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):
        yield from (*value.parameters(), *value.buffers())
    elif isinstance(value, dict):
        for one in list(value.values()):
            yield from _inside(one, seen, objects)
    elif isinstance(value, list | tuple | set | frozenset | deque):
        for one in list(value):
            yield from _inside(one, seen, objects)
    elif isinstance(value, functools.partial):
        yield from _inside((value.func, value.args, value.keywords), seen, objects)
    elif isinstance(value, types.FunctionType):
        for cell in filter(filled, value.__closure__ or ()):
            yield from _inside(cell.cell_contents, seen, objects)
        yield from _inside((value.__defaults__, value.__kwdefaults__), seen, objects)
    elif objects and hasattr(value, "__dict__") and not isinstance(value, type | types.ModuleType | types.MethodType):
        yield from _inside(vars(value), seen, objects)

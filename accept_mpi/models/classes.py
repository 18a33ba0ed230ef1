"""Modules of another class, changed in place: they stay the same objects, with their hooks, modes and names."""

import types

from torch import nn

_MADE: dict[tuple[type, type], type] = {}


def put_before(module: nn.Module, first: type, prefix: str = "") -> None:
    """Have the methods of ``first`` count before those of a module's own class. ``prefix``: of the new class's name."""
    key = first, type(module)
    if key not in _MADE:
        made = types.new_class(prefix + key[1].__name__, key)
        made.__module__ = key[1].__module__
        _MADE[key] = made
    module.__class__ = _MADE[key]

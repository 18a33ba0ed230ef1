"""Modules of another class, changed in place: they stay the same objects, with their hooks, modes and names."""

import types
from typing import Any

from torch import nn

_MADE: dict[tuple[type, type, tuple[tuple[str, Any], ...]], type] = {}


def put_before(module: nn.Module, first: type, prefix: str = "", **attributes: Any) -> None:
    """Have the methods of ``first`` count before those of a module's own class. ``prefix``: of the new class's name;
    ``attributes``: the class's, since copies of compiled modules lose their own."""
    kind = type(module)
    key = first, kind, tuple(sorted(attributes.items()))
    if key not in _MADE:
        own = {"__module__": kind.__module__, **attributes}
        _MADE[key] = types.new_class(prefix + kind.__name__, (first, kind), exec_body=lambda body: body.update(own))
    module.__class__ = _MADE[key]

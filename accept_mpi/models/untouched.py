"""Restores what a trial changes although it works on copies of modules: state in functions, classes and Python modules.

Hooks, functions that are a module's attributes, and a class's or Python module's own names are not copied with a layer. The
counters, lists and caches in them are restored after the trial.
"""

import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from accept_mpi.models.common import HOOKS, KNOWN, functions_of, is_of, kept_by, referred
from accept_mpi.models.held import filled

_CONSTANT = (type(None), bool, int, float, complex, str, bytes, torch.Tensor)
_DEEP = 4

_Undo = Callable[[], None]


@contextmanager
def untouched(layers: Sequence[nn.Module], *others: Any) -> Iterator[None]:
    """On exit, restore the state in the functions and classes of layers, and of ``others`` (a loss)."""
    undo: list[_Undo] = []
    seen: set[int] = set()
    every = (*(module for layer in layers for module in layer.modules()), *others)
    for kind in dict.fromkeys(kind for one in every for kind in type(one).__mro__):
        if not is_of(KNOWN, kind.__module__):
            _remember_class(kind, seen, undo)
    for one in every:
        values = [one, *getattr(one, "__dict__", {}).values()]
        hooks = [hook for name in HOOKS for hook in getattr(one, name, {}).values()]
        for value in (*values, *hooks):
            _remember_function(value, seen, undo, 0)
    try:
        yield
    finally:
        for back in undo:
            back()


def _remember_class(kind: type, seen: set[int], undo: list[_Undo]) -> None:
    _remember_owner(kind, kind.__module__, seen, undo)
    _remember_module(kind.__module__, seen, undo)
    for _, function in functions_of(kind):
        _remember_function(function, seen, undo, 0)


def _remember_module(name: str | None, seen: set[int], undo: list[_Undo]) -> None:
    if (module := sys.modules.get(name or "")) is not None:
        _remember_owner(module, name or "", seen, undo)


def _remember_owner(owner: Any, module: str, seen: set[int], undo: list[_Undo]) -> None:
    """Remember what a class or a Python module has. ``module``: the name of the module."""
    if id(owner) not in seen and not is_of(KNOWN, module):
        seen.add(id(owner))
        _remember_names(owner, seen, undo)


def _remember_names(owner: Any, seen: set[int], undo: list[_Undo]) -> None:
    for name, value in list(vars(owner).items()):
        if name.startswith("__"):
            continue
        if (info := getattr(value, "cache_info", None)) is not None and callable(value) and not isinstance(value, type):
            undo.append(_emptied(value, info().currsize))
        elif isinstance(value, _CONSTANT) or type(value) in (list, set) or isinstance(value, dict):
            undo.append(_named(owner, name, value, _copied(value)))
        elif id(value) not in seen and _is_object(value):  # which layers may have in common
            seen.add(id(value))
            _remember_names(value, seen, undo)


def _is_object(value: Any) -> bool:
    """True for an instance of a user's class that is no module."""
    others = (type, nn.Module, types.ModuleType, types.FunctionType, types.MethodType)
    return hasattr(value, "__dict__") and not isinstance(value, others) and not is_of(KNOWN, type(value).__module__)


def _remember_function(function: Any, seen: set[int], undo: list[_Undo], depth: int) -> None:
    """Remember what a function, or one that it refers to, keeps between two calls."""
    if not isinstance(function, types.FunctionType) or depth > _DEEP or id(function) in seen:
        return
    if is_of(KNOWN, function.__module__ or ""):
        return
    seen.add(id(function))
    _remember_module(function.__module__, seen, undo)
    _remember_names(function, seen, undo)
    for _, value in kept_by(function):
        if type(value) in (list, set) or isinstance(value, dict):
            undo.append(_named(types.SimpleNamespace(value=value), "value", value, _copied(value)))
    for cell in filter(filled, function.__closure__ or ()):
        value = cell.cell_contents
        if isinstance(value, _CONSTANT) or type(value) in (list, set) or isinstance(value, dict):
            undo.append(_named(cell, "cell_contents", value, _copied(value)))
        elif _is_object(value) and id(value) not in seen:
            seen.add(id(value))
            _remember_names(value, seen, undo)
        else:
            _remember_function(value, seen, undo, depth + 1)
    for _, _, value in referred(function):
        if isinstance(value, types.ModuleType | type):
            _remember_owner(value, value.__name__ if isinstance(value, types.ModuleType) else value.__module__, seen, undo)
        else:
            _remember_function(value, seen, undo, depth + 1)


def _named(owner: Any, name: str, value: Any, before: Any) -> _Undo:
    def back() -> None:
        if getattr(owner, name, None) is not value:
            setattr(owner, name, value)
        if isinstance(value, list) and not _same(value, before):
            value[:] = before
        elif isinstance(value, dict | set) and not _same(_items(value), _items(before)):
            value.clear()
            value.update(before)

    return back


def _emptied(cached: Any, size: int) -> _Undo:
    """Undo for a function behind ``functools.lru_cache``: empty the cache if its size has changed."""
    return lambda: cached.cache_clear() if cached.cache_info().currsize != size else None


def _same(values: Any, others: Any) -> bool:
    return len(values) == len(others) and all(one is other for one, other in zip(values, others, strict=True))


def _items(value: Any) -> list[Any]:
    return [part for pair in dict.items(value) for part in pair] if isinstance(value, dict) else list(value)


def _copied(value: Any) -> Any:
    """Shallow copy of a collection; any other value itself. What a dictionary's own class makes of its values when it is
    asked for one (transformers' table of activations makes new modules) does not matter."""
    if isinstance(value, dict):
        return dict(dict.items(value))
    return value.copy() if type(value) in (list, set) else value

"""Finds out what a forward changes among the attributes of modules."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from accept_mpi.models.held import MOST_INSIDE, OWN

_KEPT = (bool, int, float, str, type(None))
_NO_STATE = OWN | {"forward"}  # and a method that something else has put there


class Attributes:
    """The attributes of some modules and of all their parts, as they were when this object was made."""

    def __init__(self, named: Sequence[tuple[str, nn.Module]]) -> None:
        """``named``: the modules and their names, "" for none."""
        self._named = named
        self._before, self._inside = self._values(), self._containers()

    def again(self) -> "Attributes":
        """The same modules' attributes, as they are now."""
        return Attributes(self._named)

    def changed(self) -> list[str]:
        """Dotted names of what has changed since: numbers and texts, also those in containers and objects, and tensors in
        whose place there are others now. New keys of dictionaries do not count, since a forward may remember what it has
        computed."""
        inside = [key for key, (value, digest) in self._inside.items() if _digest(value, set()) != digest]
        return [".".join(filter(None, key)) for key in (*inside, *self._replaced())]

    def tensors(self, names: Sequence[str]) -> list[tuple[dict[str, Any], str]]:
        """Where those of the named attributes are that are floating-point tensors now: a table of a module, and its key."""
        return [
            (table, name)
            for path, module in self._modules()
            for table in (module.__dict__, module._buffers)
            for name, value in table.items()
            if f"{path}.{name}" in names and isinstance(value, torch.Tensor) and value.is_floating_point()
        ]

    def _replaced(self) -> Iterator[tuple[str, str]]:
        for key, value in self._values().items():
            old = self._before.get(key, self._before)
            if old is not value and not (type(old) is type(value) and isinstance(value, _KEPT) and old == value):
                path, _, name = key
                yield path, name

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        for prefix, module in self._named:
            yield from module.named_modules(prefix=prefix)

    def _values(self) -> dict[tuple[str, str, str], Any]:
        found: dict[tuple[str, str, str], Any] = {}
        for path, module in self._modules():
            for kind, table in (("", module.__dict__), ("p", module._parameters), ("b", module._buffers)):
                for name, value in table.items():
                    if isinstance(value, torch.Tensor) or (kind == "" and isinstance(value, _KEPT)):
                        found[path, kind, name] = value
        return found

    def _containers(self) -> dict[tuple[str, str], tuple[Any, Any]]:
        """The containers and objects that modules have as attributes, and what is in them."""
        return {
            (path, name): (value, _digest(value, set()))
            for path, module in self._modules()
            for name, value in module.__dict__.items()
            if name not in _NO_STATE and not isinstance(value, (torch.Tensor, nn.Module, *_KEPT))
        }


def _digest(value: Any, seen: set[int]) -> Any:
    """Something that differs if numbers, texts or lengths have changed in a container or an object, however deep. New keys
    of dictionaries do not count: a forward may remember what it has computed."""
    if isinstance(value, _KEPT):
        return type(value), value
    if id(value) in seen or len(seen) > MOST_INSIDE or isinstance(value, (torch.Tensor, nn.Module, type)):
        return None
    seen.add(id(value))
    if isinstance(value, list | tuple | deque):
        return [_digest(one, seen) for one in value]
    if isinstance(value, set | frozenset):
        return len(value)
    inside = value if isinstance(value, dict) else getattr(value, "__dict__", {})
    return _Known({key: _digest(one, seen) for key, one in list(inside.items())})


class _Known:
    """Equal to another one if the keys that both have mean the same."""

    def __init__(self, parts: dict[Any, Any]) -> None:
        self._parts = parts

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Known):
            return False
        both = self._parts.keys() & other._parts.keys()
        return all(self._parts[key] == other._parts[key] for key in both)

    __hash__ = None  # type: ignore[assignment]

"""Arguments and results of recorded calls: nested tuples, lists, dicts and slices with tensors in them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def parts_of(value: Any, kinds: tuple[type, ...]) -> list[Any]:
    """The parts of a structure that are of these ``kinds``, in order, as often as they occur."""
    return [value] if isinstance(value, kinds) else [one for part in _parts(value) for one in parts_of(part, kinds)]


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of a structure, in order, as often as they occur."""
    return parts_of(value, (torch.Tensor,))


def constants_in(value: Any) -> list[Any]:
    """The parts of a structure that are no tensors and no structures."""
    parts = _parts(value)
    if parts or isinstance(value, dict | tuple | list | torch.Tensor):
        return [one for part in parts for one in constants_in(part)]
    return [value]


def fixed_in(value: Any) -> tuple[Any, ...]:
    """What must be the same whenever a block is called: shapes and dtypes of its result's tensors, and its constants."""
    tensors = tensors_in(value)
    shapes, dtypes = [tuple(one.shape) for one in tensors], [one.dtype for one in tensors]
    return shapes, dtypes, [one for one in constants_in(value) if is_plain(one)]


def mapped(value: Any, change: Callable[[Any], Any], kinds: tuple[type, ...]) -> Any:
    """The structure with ``change`` applied to all its parts of these ``kinds``; itself if it has none."""
    if isinstance(value, kinds):
        return change(value)
    before = _parts(value)
    after = [mapped(part, change, kinds) for part in before]
    return value if all(new is old for new, old in zip(after, before, strict=True)) else _of(value, after)


def as_it_is(value: Any) -> Any:
    """The structure with lists, dicts and arrays of its own, which nobody changes later."""
    if isinstance(value, np.ndarray):
        return value.copy()
    before = _parts(value)
    after = [as_it_is(part) for part in before]
    own = type(value) in (list, dict) or any(new is not old for new, old in zip(after, before, strict=True))
    return _of(value, after) if own else value


def _of(value: Any, after: list[Any]) -> Any:
    """A structure like ``value``, of other parts."""
    if isinstance(value, slice):
        return slice(*after)
    if isinstance(value, dict):
        if type(value) is dict:
            return dict(zip(value, after, strict=True))
        return type(value)(**dict(zip(value, after, strict=True)))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*after)
    return type(value)(after) if type(value) in (tuple, list, torch.Size) else tuple(after)


def is_plain(value: Any) -> bool:
    """True if a value consists of tensors, constants and the structures that ``tensors_in`` looks into."""
    if isinstance(value, torch.Tensor | torch.dtype | torch.device | torch.layout | torch.memory_format):
        return True
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | type(...)):
        return True
    if isinstance(value, tuple | list | dict | slice):
        return all(map(is_plain, _parts(value)))
    return False


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, tuple | list):
        return list(value)
    if isinstance(value, slice):
        return [value.start, value.stop, value.step]
    return []

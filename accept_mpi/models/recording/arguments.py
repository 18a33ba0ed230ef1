"""How what a data set gives becomes the arguments of a model's forward."""

import inspect
import re
import sys
from typing import Any

from torch import nn

from accept_mpi import tree
from accept_mpi.errors import UserError


def arguments_of(model: nn.Module, value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of the model's forward: a dict's values by keyword, those of a tuple or list by position; or all as one, if
    forward takes one only, or if it is of a class of its own (a named tuple, an ordered dict) and forward takes that. Raises
    UserError if it takes neither."""
    alone: tuple[tuple[Any, ...], dict[str, Any]] = (value,), {}
    parts = alone
    if isinstance(value, dict):
        parts = (), dict(value)
    elif isinstance(value, tuple | list):
        parts = tuple(value), {}
    plain = type(value) in (dict, tuple, list)
    if not (wrong := _unfit(model, *(parts if plain else alone))):
        return parts if plain else alone
    if not plain and not _unfit(model, *parts):
        return parts
    if plain and len(_signature(model).parameters) == 1 and not _unfit(model, *alone):
        return alone
    raise UserError(
        f"model.name: forward does not take what the data set gives ({wrong}): what is in a dict becomes its keyword "
        f"arguments, what is in a tuple its arguments, and this is {tree.describe(value)}"
    )


def hint(model: nn.Module, value: Any, args: tuple[Any, ...], error: str) -> str:
    """End of a sentence for a forward that has got a dict as its only argument, and fails with an ``error`` that says so;
    empty otherwise."""
    if type(value) is not dict or not args or args[0] is not value or not re.search(r"\bdict\b", error):
        return ""
    name = next(iter(_signature(model).parameters))
    return f'; its only argument, "{name}", is given all of {tree.describe(value)}, since nothing there has that name'


def _signature(model: nn.Module) -> inspect.Signature:
    """The forward's parameters. Annotations may name what there is for type checkers only: from Python 3.14 on they are
    looked up when they are asked for."""
    if sys.version_info >= (3, 14):
        from annotationlib import Format

        return inspect.signature(model.forward, annotation_format=Format.STRING)
    return inspect.signature(model.forward)


def _unfit(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Why the model's forward cannot be called so; "" if it can, or if hooks might change the arguments."""
    try:
        _signature(model).bind(*args, **kwargs)
    except TypeError as error:
        return "" if model._forward_pre_hooks else str(error)
    except ValueError:  # it has no signature
        return ""
    return ""

"""The part of a model's result that the loss gets."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from accept_mpi.errors import UserError, counted
from accept_mpi.models.losses import OWN
from accept_mpi.models.recording.structure import is_plain, tensors_in

_TARGETS = (
    "; a model that computes its loss from targets gets them where samples are dicts, by the name of its forward's argument "
    "(as labels or targets)"
)


def select(result: Any, wanted: str) -> Any:
    """The part of a result that the job asks for: a key, an attribute or a position; "loss" is also a lone tensor, or the
    only number among a tuple's parts; "": the result itself if it is a tensor or a tuple, list or dict of tensors, named or
    ordered ones included; of what a library's class holds, its "logits", else its first floating-point tensor.

    Raises UserError if there is none.
    """
    if wanted == OWN and isinstance(result, torch.Tensor):
        return result
    if wanted:
        found = _part(result, wanted)
        if wanted == OWN and found is None and isinstance(result, tuple | list):
            numbers = [one for one in result if isinstance(one, torch.Tensor) and one.is_floating_point() and not one.dim()]
            found = numbers[0] if len(numbers) == 1 else None
        if not tensors_in(found) or not is_plain(found):
            hint = _TARGETS if wanted == OWN else ""
            raise UserError(f'model.output: the model gives no tensors under "{wanted}", but {_show(result)}{hint}')
        return found
    if (isinstance(result, torch.Tensor | tuple) or type(result) in (list, dict, OrderedDict)) and is_plain(result):
        return result
    logits = _part(result, "logits")
    if isinstance(logits, torch.Tensor):
        return logits
    first = next((one for one in tensors_in(result) if one.is_floating_point()), None)
    if first is not None:
        return first
    raise UserError(f"model.output: the model gives {_show(result)}; say which part of it the loss gets")


def _part(result: Any, name: str) -> Any:
    if isinstance(result, Mapping):
        return result.get(name)
    if isinstance(result, tuple | list) and name.lstrip("-").isdigit():
        return result[int(name)] if -len(result) <= int(name) < len(result) else None
    return getattr(result, name, None)


def _show(result: Any) -> str:
    if isinstance(result, Mapping):
        return ", ".join(f'"{key}"' for key in result)
    return counted(len(result), "value") if isinstance(result, tuple | list) else f"a {type(result).__name__}"

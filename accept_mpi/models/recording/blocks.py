"""Blocks (``[model] blocks``): modules that are recorded as wholes, so that what they compute may depend on values.

Such a call cannot run on the meta device. A copy of the block runs on the CPU instead, with made-up values; of what it gives
only shapes, layouts and the need for gradients are kept.
"""

import copy
from collections.abc import Callable
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from accept_mpi.models.attributes import Attributes
from accept_mpi.models.fine_tuning import check_patterns
from accept_mpi.models.recording.structure import mapped
from accept_mpi.seeds import seeded

_CONTAINERS = nn.Sequential, nn.ModuleList, nn.ModuleDict
_SCALE = 0.02


def blocks_of(model: nn.Module, patterns: tuple[str, ...]) -> set[int]:
    """Ids of the modules that ``patterns`` name; of a list or sequence of modules its parts. Raises UserError for a pattern
    that names none."""
    named = {path: module for path, module in model.named_modules(remove_duplicate=False) if path}
    check_patterns("model.blocks", patterns, list(named))
    found = [module for path, module in named.items() if any(fnmatchcase(path, pattern) for pattern in patterns)]
    return {id(part) for module in found for part in (module.children() if isinstance(module, _CONTAINERS) else [module])}


def try_out(block: nn.Module, call: Callable[..., Any], changed: set[str], *args: Any, **kwargs: Any) -> Any:
    """What a block on the meta device gives for arguments there. ``call`` calls a module; ``changed`` gets the names of
    attributes that the block changes.

    Raises ValueError if the block writes to its arguments.
    """
    try:
        return _tried(block, call, changed, 0, args, kwargs)
    except Exception as error:
        with suppress(Exception):
            return _tried(block, call, changed, 1, args, kwargs)  # lengths, say
        raise error


def _tried(block: nn.Module, call: Callable[..., Any], changed: set[str], whole: int, args: Any, kwargs: Any) -> Any:
    """What a block gives if whole numbers among its arguments are all this one."""
    given: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}  # an argument, its values, torch's count of writes

    def values_of(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in given:
            values = made_up(tensor, whole)
            given[id(tensor)] = tensor, values, values._version
        return given[id(tensor)][1]

    def shape_of(result: torch.Tensor) -> torch.Tensor:
        for tensor, values, _ in given.values():
            if result is values:
                return tensor
            if result.untyped_storage()._cdata == values.untyped_storage()._cdata:
                return tensor.as_strided(result.shape, result.stride(), result.storage_offset())
        found = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device="meta")
        return found.requires_grad_(result.requires_grad)

    with seeded(0), torch.device("cpu"):  # all ranks come to the same
        args, kwargs = mapped((args, kwargs), values_of, (torch.Tensor,))
        own = _filled(block)
        attributes = Attributes([("", own)])
        result = call(own, *args, **kwargs)
        changed.update(attributes.changed())
    if any(values._version != writes for _, values, writes in given.values()):
        raise ValueError("a block writes to its arguments, which cannot be recorded")
    return mapped(result, shape_of, (torch.Tensor,))


def _filled(block: nn.Module) -> nn.Module:
    """A copy of a block with values."""
    new: dict[int, torch.Tensor] = {}
    for part in block.modules():
        for table in (part._parameters, part._buffers, part.__dict__):
            for tensor in (value for value in table.values() if isinstance(value, torch.Tensor)):
                value = made_up(tensor).detach()
                is_parameter = isinstance(tensor, nn.Parameter)
                new[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if is_parameter else value
    return copy.deepcopy(block, new)


def made_up(tensor: torch.Tensor, whole: int = 0) -> torch.Tensor:
    """A tensor on the CPU like one without values: small numbers, whole ones that are all the same, or True."""
    found = torch.empty_like(tensor, device="cpu", requires_grad=False)
    if found.is_floating_point() or found.is_complex():
        found.copy_(torch.arange(float(found.numel())).sin().mul(_SCALE).view(found.shape))
    else:
        found.fill_(whole or found.dtype == torch.bool)
    return found.requires_grad_().view_as(found) if tensor.requires_grad else found

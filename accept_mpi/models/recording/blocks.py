"""Blocks (``[model] blocks``): modules that are recorded as wholes, so that what they compute may depend on values.

Such a call cannot run on the meta device. A copy of the block runs on the CPU instead, with made-up values; of what it gives
only shapes, layouts and the need for gradients are kept.
"""

import copy
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from accept_mpi.models.fine_tuning import check_patterns
from accept_mpi.models.recording.structure import mapped, tensors_in

_CONTAINERS = nn.Sequential, nn.ModuleList, nn.ModuleDict
_SCALE = 0.02


def blocks_of(model: nn.Module, patterns: tuple[str, ...]) -> set[int]:
    """Ids of the modules that ``patterns`` name; of a list or sequence of modules its parts. Raises UserError for a pattern
    that names none."""
    named = {path: module for path, module in model.named_modules(remove_duplicate=False) if path}
    check_patterns("model.blocks", patterns, list(named))
    found = [module for path, module in named.items() if any(fnmatchcase(path, pattern) for pattern in patterns)]
    return {id(part) for module in found for part in (module.children() if isinstance(module, _CONTAINERS) else [module])}


def try_out(block: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a block on the meta device gives for arguments there. ``call`` calls a module.

    Raises ValueError if the block writes to its arguments.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)  # all ranks come to the same
        given: dict[int, torch.Tensor] = {}
        origin: dict[int, torch.Tensor] = {}

        def made_up(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in given:
                given[id(tensor)] = value = _values(tensor)
                origin[value.untyped_storage()._cdata] = tensor
            return given[id(tensor)]

        real = mapped((args, kwargs), made_up, (torch.Tensor,))
        versions = {key: value._version for key, value in given.items()}
        result = call(_filled(block), *real[0], **real[1])
        if any(value._version != versions[key] for key, value in given.items()):
            raise ValueError("a block writes to its arguments, which cannot be recorded")
    passed_on = {id(value): key for key, value in given.items()}
    known = {id(tensor): tensor for tensor in tensors_in((args, kwargs))}

    def shape_of(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in passed_on:
            return known[passed_on[id(tensor)]]
        if (base := origin.get(tensor.untyped_storage()._cdata)) is not None:
            return base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        found = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return found.requires_grad_(tensor.requires_grad)

    return mapped(result, shape_of, (torch.Tensor,))


def _filled(block: nn.Module) -> nn.Module:
    """A copy of a block with values."""
    new: dict[int, torch.Tensor] = {}
    for part in block.modules():
        for table in (part._parameters, part._buffers, part.__dict__):
            for tensor in (value for value in table.values() if isinstance(value, torch.Tensor)):
                value = _values(tensor).detach()
                kept = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
                new[id(tensor)] = kept
    return copy.deepcopy(block, dict(new))


def _values(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the CPU like one without values: small numbers, zeros or True."""
    found = torch.empty_like(tensor, device="cpu", requires_grad=False)
    if found.is_floating_point() or found.is_complex():
        found.copy_(torch.arange(float(found.numel())).sin().mul(_SCALE).view(found.shape))
    else:
        found.fill_(found.dtype == torch.bool)
    return found.requires_grad_().view_as(found) if tensor.requires_grad else found

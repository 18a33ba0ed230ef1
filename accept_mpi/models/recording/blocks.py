"""Blocks (``[model] blocks``): modules that are recorded as wholes, so that what they compute may depend on values.

Such a call cannot run on the meta device. A copy of the block runs on the CPU instead, with made-up values for what it is
given and for what it trains; of what it gives only shapes, layouts and the need for gradients are kept, and which of its
arguments' memory that may be. It runs with several values, since that must not depend on them.
"""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from accept_mpi.models.attributes import Attributes
from accept_mpi.models.copies import copied
from accept_mpi.models.fine_tuning import check_patterns
from accept_mpi.models.recording.counting import Counting, place_of
from accept_mpi.models.recording.refusals import Varies
from accept_mpi.models.recording.structure import fixed_in, mapped
from accept_mpi.models.untouched import untouched
from accept_mpi.seeds import seeded

_CONTAINERS = nn.Sequential, nn.ModuleList, nn.ModuleDict
_SCALES = 0.02, -1.0, 3.0
"""Factors of made-up values, by variant."""


def blocks_of(model: nn.Module, patterns: tuple[str, ...]) -> set[int]:
    """Ids of the modules that ``patterns`` name; of a list or sequence of modules its parts. Raises UserError for a pattern
    that names none."""
    named = {path: module for path, module in model.named_modules(remove_duplicate=False) if path}
    check_patterns("model.blocks", patterns, list(named))
    found = [module for path, module in named.items() if any(fnmatchcase(path, pattern) for pattern in patterns)]
    return {id(part) for module in found for part in (module.children() if isinstance(module, _CONTAINERS) else [module])}


class Trials:
    """Calls of a block that is on the meta device, with made-up values."""

    def __init__(
        self, block: nn.Module, call: Callable[..., Any], known: Mapping[int, torch.Tensor], changed: set[str],
        written: list[torch.Tensor],
    ) -> None:  # fmt: skip
        """``call`` calls a module; ``known``: values of some of the block's own tensors, by their ids; ``changed`` gets the
        names of attributes that the block changes, ``written`` its own tensors that it writes to."""
        self._block, self._call, self._known, self._changed, self._written = block, call, known, changed, written

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the block gives for arguments on the meta device.

        Raises Varies, ValueError if the block writes to its arguments, and what it raises itself for all values.
        """
        failed: Exception | None = None
        found: list[tuple[Any, int]] = []
        for variant in range(len(_SCALES)):
            try:
                found.append(self._tried(variant, args, kwargs))
            except Exception as error:  # no lengths of 0, or no class 2, say
                failed = failed or error
        if not found:
            assert failed is not None
            raise failed
        if any(fixed_in(one) != fixed_in(found[0][0]) for one, _ in found[1:]):
            raise Varies(type(self._block).__name__)
        return max(found, key=lambda one: one[1])[0]

    def _tried(self, variant: int, args: Any, kwargs: Any) -> tuple[Any, int]:
        """What the block gives for a variant of made-up arguments, and how many of these tensors are in the memory of
        arguments."""
        given: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}  # an argument, its values, torch's count of writes
        shared = 0

        def values_of(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in given:
                values = made_up(tensor, variant)
                given[id(tensor)] = tensor, values, values._version
            return given[id(tensor)][1]

        def shape_of(result: torch.Tensor) -> torch.Tensor:
            nonlocal shared
            for tensor, values, _ in given.values():
                if result.untyped_storage()._cdata == values.untyped_storage()._cdata:
                    shared += 1
                    if result is values:  # for these values; for others it may be another
                        return tensor.view_as(tensor)
                    return tensor.as_strided(result.shape, result.stride(), result.storage_offset())
            found = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device="meta")
            made: torch.Tensor = _Result.apply(found.requires_grad_()) if result.requires_grad else found
            return made

        with seeded(0), torch.device("cpu"):  # all ranks come to the same
            args, kwargs = mapped((args, kwargs), values_of, (torch.Tensor,))
            own, tensors = self._filled()
            attributes = Attributes([("", own)])
            with Counting() as counting, untouched([own]):  # what it counts outside, it counts in training
                result = self._call(own, *args, **kwargs)
            self._changed.update(attributes.changed())
        if any(values._version != writes for _, values, writes in given.values()):
            raise ValueError("a block writes to its arguments, which cannot be recorded")
        self._written += [tensor for tensor, values in tensors if place_of(values) in counting.written]
        return mapped(result, shape_of, (torch.Tensor,)), shared

    def _filled(self) -> tuple[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]]:
        """A copy of the block with values; and the block's tensors with those that stand for them."""
        new: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for part in self._block.modules():
            for table in (part._parameters, part._buffers, part.__dict__):
                for tensor in (value for value in table.values() if isinstance(value, torch.Tensor)):
                    known = self._known.get(id(tensor))
                    value = made_up(tensor).detach() if known is None else known.clone()
                    is_parameter = isinstance(tensor, nn.Parameter)
                    new[id(tensor)] = tensor, nn.Parameter(value, tensor.requires_grad) if is_parameter else value
        return copied([self._block], {which: value for which, (_, value) in new.items()})[0], list(new.values())


class _Result(torch.autograd.Function):
    """Gives a tensor that is no leaf, and may be written to, as what a block computes may."""

    @staticmethod
    def forward(ctx: Any, like: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)


def made_up(tensor: torch.Tensor, variant: int = 0) -> torch.Tensor:
    """A tensor on the CPU like one without values: whole numbers are all the number of the variant, others are small at
    first and then larger, truth values are all True at first and then False or both."""
    found = torch.empty_like(tensor, device="cpu", requires_grad=False)
    count = torch.arange(found.numel()).view(found.shape)
    if found.dtype == torch.bool:
        found.copy_(count % 2 == 0 if variant == 2 else torch.tensor(variant == 0))
    elif found.is_floating_point() or found.is_complex():
        found.copy_(count.float().sin().mul(_SCALES[variant]))
    else:
        found.fill_(variant)
    return found.requires_grad_().view_as(found) if tensor.requires_grad else found

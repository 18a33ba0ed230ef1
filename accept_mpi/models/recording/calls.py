"""What nodes of a tape call, apart from the model's own modules and torch's functions."""

import types
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from accept_mpi.errors import UserError
from accept_mpi.models.common import parts_of as reached_from
from accept_mpi.models.recording.structure import as_it_is, parts_of, tensors_in

EFFECTS = ("register_hook", "retain_grad", "register_post_accumulate_grad_hook")
"""Functions that have an effect apart from their result."""
READS = (
    "item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__complex__", "is_nonzero", "numpy", "equal",
    "__contains__", "allclose", "__array__",
)  # fmt: skip
"""Functions that ask for a tensor's values."""
_NO_CODE = (lambda: None).__code__


@dataclass(frozen=True)
class Apply:
    """Call of a ``torch.autograd.Function``."""

    function: Any

    def __call__(self, *args: Any) -> Any:
        return self.function.apply(*args)


@dataclass(frozen=True)
class Made:
    """Call of a module that the forward itself makes, without state."""

    module: nn.Module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Made) and type(self.module) is type(other.module)

    def __hash__(self) -> int:
        return hash(type(self.module))


@dataclass(frozen=True)
class OfArrays:
    """Call of a function with arrays of NumPy, whose memory tensors may share: each call is given its own."""

    function: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = as_it_is((args, kwargs))
        return self.function(*args, **kwargs)


def of_arrays(function: Any, args: Any, kwargs: Any) -> Any:
    """What a node calls in place of a function that is given these arguments."""
    return OfArrays(function) if parts_of((args, kwargs), (np.ndarray,)) else function


@dataclass(frozen=True)
class Strided:
    """Call of ``as_strided``, which reads a tensor's memory: that is to be laid out as where the model comes from. Images
    are in channels_last format here, and what has crossed a boundary is contiguous."""

    function: Any
    stride: tuple[int, ...]
    offset: int
    copies: bool
    """False if something is written there later."""

    def __call__(self, tensor: torch.Tensor, size: Any, stride: Any, storage_offset: int | None = None) -> Any:
        if tensor.stride() == self.stride or not tensor.numel():
            moved = 0 if storage_offset is None else tensor.storage_offset() - self.offset
        elif self.copies:
            moved = -self.offset
            tensor = torch.empty_strided(tensor.shape, self.stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
        else:
            raise UserError(
                "model.name: forward writes into what as_strided gives, of a tensor that lies otherwise in memory here; "
                'set train.memory_format = "contiguous", or cut elsewhere'
            )
        return self.function(tensor, size, stride, None if storage_offset is None else storage_offset + moved)


def refers_to_tensors(given: Any, deep: int = 4) -> bool:
    """True if a function among these arguments, such as a hook, refers to a tensor without values, perhaps through others
    (``deep``: at most so many)."""
    inside: list[Any] = []
    for one in parts_of(given, (types.FunctionType, types.MethodType, partial)):
        inside += [part for _, part in reached_from(one)]
        names = getattr(getattr(one, "__func__", one), "__code__", _NO_CODE).co_names
        tables = [(vars(part), part._parameters, part._buffers) for part in inside if isinstance(part, nn.Module)]
        inside += [table.get(name) for of_module in tables for table in of_module for name in names]
    further = bool(inside) and deep > 0 and refers_to_tensors(inside, deep - 1)
    return further or any(tensor.is_meta for tensor in tensors_in(inside))


def on_devices(function: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """A call that says where tensors are to be by a name ("cpu"), with a device in its place."""
    name = getattr(function, "__name__", "")
    if name == "cpu" and function is torch.Tensor.cpu:
        function, args = torch.Tensor.to, (args[0], torch.device("cpu"), *args[1:])
    elif name == "to" and len(args) > 1 and isinstance(args[1], str):
        args = (args[0], torch.device(args[1]), *args[2:])
    if isinstance(kwargs.get("device"), str):
        kwargs = kwargs | {"device": torch.device(kwargs["device"])}
    return function, args, kwargs


def averages(name: str, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The running averages that ``batch_norm`` writes to: it alone of torch's functions does not count that as a version."""
    if name != "batch_norm":
        return []
    given = dict(zip(("input", "running_mean", "running_var", "weight", "bias", "training"), args, strict=False)) | kwargs
    both = (given.get("running_mean"), given.get("running_var"))
    return [one for one in both if isinstance(one, torch.Tensor)] if given.get("training") else []


@dataclass(frozen=True)
class Viewed:
    """Call of a function that gives a view of a tensor, also of one whose memory is laid out otherwise than where the model
    comes from: images are in channels_last format here. Nothing may be written to the result."""

    function: Any

    def __call__(self, tensor: torch.Tensor, *args: Any, **how: Any) -> Any:
        try:
            return self.function(tensor, *args, **how)
        except RuntimeError:
            return self.function(tensor.contiguous(), *args, **how)

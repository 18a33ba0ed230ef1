"""Keys of what a data set gives: structure, shapes and dtypes, for which a record holds."""

import functools
from typing import Any

import msgspec
import torch

from accept_mpi import tree


def keyed(value: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Key and tensors of what a data set gives. Raises ``tree.NotATree``."""
    tensors, of = tree.flatten(value)
    shapes = [[list(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.requires_grad] for tensor in tensors]
    return msgspec.msgpack.encode([of, shapes]), tensors


def value_of(key: bytes) -> tuple[Any, list[torch.Tensor]]:
    """A value with this key on the meta device, and its tensors."""
    of, shapes = _decoded(key)
    tensors = [
        torch.empty(shape, dtype=getattr(torch, dtype), device="meta", requires_grad=grad) for shape, dtype, grad in shapes
    ]
    return tree.unflatten(of, tensors), tensors


@functools.lru_cache(maxsize=64)
def _decoded(key: bytes) -> Any:
    return msgspec.msgpack.decode(key)

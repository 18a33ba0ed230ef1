"""A layer's ``state_dict()`` as tensors, so that checkpoints and snapshots can hold it; and back.

State that is not a tensor (the result of ``get_extra_state``, for example) becomes bytes in a uint8 tensor of the same name:
a tree (``tree``) with its tensors in safetensors' format, never pickle.
"""

from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import nn

from accept_mpi import tree
from accept_mpi.device.compute import here
from accept_mpi.errors import UserError
from accept_mpi.models.parts import part_at
from accept_mpi.users_code import RAISED, blame

_MAGIC = b"accept-mpi state\n"
_TREE = "tree"


def state_of(name: str, layer: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of a layer's state, contiguous, by the layer's own names. Raises UserError if some of it cannot be kept."""
    return {key: _kept(name, key, value) for key, value in _state_dict(name, layer).items()}


def check_state(name: str, layer: nn.Module) -> set[str]:
    """Names of a layer's state. Raises UserError if some of it cannot be kept."""
    state = _state_dict(name, layer)
    for key, value in state.items():
        if not _is_plain(value):
            _packed(name, key, value)
    return set(state)


def load_layer(name: str, layer: nn.Module, state: Mapping[str, torch.Tensor], made: Collection[str] = ()) -> None:
    """Load a layer's state. ``made``: names of buffers that its first forward creates.

    Raises UserError if the state belongs to another layer.
    """
    _make_room(layer, state, made)
    given = {key: unpacked(value) for key, value in state.items()}
    try:
        layer.load_state_dict(given, strict=True)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise UserError(f'the checkpoint does not fit layer "{name}" of this model: {reason}') from error
    except RAISED as error:
        blame(error, f'load_state_dict() of layer "{name}"')


def is_packed(value: torch.Tensor) -> bool:
    """True if ``value`` holds state that was not a tensor."""
    return value.dtype == torch.uint8 and value.dim() == 1 and bytes(value[: len(_MAGIC)].tolist()) == _MAGIC


def packed(value: Any) -> torch.Tensor:
    """State that is no tensor, as bytes in a uint8 tensor. Raises NotATree if it cannot be kept."""
    tensors, of = tree.flatten(value)
    if strange := [tensor.dtype for tensor in tensors if not _has_files(tensor.dtype)]:
        raise tree.NotATree(f"a tensor of {str(strange[0]).removeprefix('torch.')}, which no file can hold")
    named = {str(n): here().copied(tensor) for n, tensor in enumerate(tensors)}
    try:
        data = safetensors.torch.save({_TREE: bytes_as_tensor(of), **named})
    except SafetensorError as error:
        raise tree.NotATree(str(error)) from error
    tree.unflatten(of, tensors, classes=False)
    return bytes_as_tensor(_MAGIC + data)


def unpacked(value: torch.Tensor) -> Any:
    """State as ``state_dict()`` gave it. Raises UserError if it is damaged."""
    if not is_packed(value):
        return value
    data = value[len(_MAGIC) :].numpy().tobytes()
    try:
        tensors = safetensors.torch.load(data)
        of = tensors.pop(_TREE).numpy().tobytes()
        return tree.unflatten(of, [tensors[str(n)] for n in range(len(tensors))], classes=False)
    except (SafetensorError, KeyError, tree.NotATree) as error:
        raise UserError(f"the checkpoint holds state that cannot be read: {' '.join(str(error).split())}") from error


def _state_dict(name: str, layer: nn.Module) -> Mapping[str, Any]:
    try:
        state: Mapping[str, Any] = layer.state_dict()
    except RAISED as error:
        blame(error, f'state_dict() of layer "{name}"')
    return state


def _is_plain(value: Any) -> bool:
    plain = isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_quantized
    return plain and _has_files(value.dtype)


@cache
def _has_files(dtype: torch.dtype) -> bool:
    """True if a file can hold values of this type."""
    try:
        return bool(safetensors.torch.load(safetensors.torch.save({"": torch.empty(0, dtype=dtype)})))
    except Exception:  # of torch or of safetensors, of several kinds
        return False


def _kept(name: str, key: str, value: Any) -> torch.Tensor:
    if not _is_plain(value):
        return _packed(name, key, value)
    return here().copied(value)


def _packed(name: str, key: str, value: Any) -> torch.Tensor:
    try:
        return packed(value)
    except tree.NotATree as error:
        raise UserError(
            f'layer "{name}" cannot be kept in a checkpoint: "{key}" of its state_dict() is or holds {error}; '
            "tensors, numbers, text, None, and tuples, lists and dicts of them can be kept"
        ) from error


def bytes_as_tensor(data: bytes) -> torch.Tensor:
    """Bytes as a tensor of uint8."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _make_room(layer: nn.Module, state: Mapping[str, torch.Tensor], made: Collection[str]) -> None:
    """Give a layer the buffers that its forwards had created, replaced or resized when its state was kept."""
    for key, value in state.items():
        path, _, name = key.rpartition(".")
        try:
            module = part_at(layer, path)
        except AttributeError:
            continue
        if name in module._buffers:
            there = module._buffers[name]
            if there is None or there.shape != value.shape or there.dtype != value.dtype:
                module._buffers[name] = torch.empty_like(value)
        elif key in made and not hasattr(module, name):
            module.register_buffer(name, torch.empty_like(value))

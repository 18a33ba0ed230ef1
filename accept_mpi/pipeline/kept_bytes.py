"""Bytes in a stage's state, by the step that they are of: "<what>/<last layer's name>.@<step>", each a tensor of uint8."""

from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec
import torch

from accept_mpi.errors import ProtocolError, UserError, shown
from accept_mpi.pipeline.state import bytes_as_tensor

_T = TypeVar("_T")


def prefix(what: str, layer: str) -> str:
    """Beginning of their names. ``layer``: the stage's last one."""
    return f"{what}/{layer}.@"


def as_tensors(begin: str, found: Mapping[int, bytes]) -> dict[str, torch.Tensor]:
    """As named tensors. ``begin``: their ``prefix``."""
    return {f"{begin}{step}": bytes_as_tensor(data) for step, data in found.items()}


def read_from(state: Mapping[str, torch.Tensor], begin: str, read: Callable[[bytes], _T]) -> dict[int, _T]:
    """What ``read`` makes of each that ``state`` has under this ``prefix``, by step. Raises UserError for a damaged one."""
    found = {}
    for key in [key for key in state if key.startswith(begin)]:
        try:
            found[int(key.removeprefix(begin))] = read(state[key].view(torch.uint8).numpy().tobytes())
        except (ProtocolError, msgspec.DecodeError, ValueError, RuntimeError) as error:
            raise UserError(f'"{shown(key)}" of the checkpoint is damaged: {error}') from error
    return found

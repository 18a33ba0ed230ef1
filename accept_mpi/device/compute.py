"""The device on which this process computes its stage: the CPU, or a GPU. Nothing else asks which one it is.

What crosses a boundary, data sets, snapshots and checkpoints are in the host's memory; a stage's weights, activations and
gradients are where it computes. ``take`` and ``give`` carry tensors over; on a CPU they do nothing.

GPUs are written, not measured: no machine with one was at hand.
"""

import os
import time
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from accept_mpi import tree
from accept_mpi.device.cpu import cpu_name
from accept_mpi.device.memory import available_memory
from accept_mpi.errors import UserError
from accept_mpi.seeds import GENERATORS

Tensors = tuple[torch.Tensor | None, ...]


class Compute:
    """A CPU."""

    alone = ""
    """Reason why a stage can be neither shared by several ranks nor computed in lanes here; empty: it can."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)

    @property
    def name(self) -> str:
        """Name that the processor gives itself."""
        return cpu_name()

    def generators(self) -> list[torch.Generator]:
        """Torch's global random numbers: the host's, and the device's."""
        return [torch.default_generator]

    def hold(self, module: Any) -> None:
        """Move a module's state to the device. Parameters stay the same objects."""

    def take(self, tensors: Tensors) -> Tensors:
        """Tensors from the host, on the device."""
        return tensors

    def take_value(self, value: Any) -> Any:
        """A value of a data set, such as targets, with its tensors on the device."""
        return value

    def give(self, tensors: Sequence[torch.Tensor | None]) -> Tensors:
        """Tensors from the device, on the host, once they are computed. Like the originals, they want a gradient or not."""
        return tuple(tensors)

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy on the host."""
        return tensor.detach().contiguous().clone()

    def seconds(self) -> float:
        """A clock that counts while this thread computes: its CPU seconds."""
        return time.thread_time()

    def room(self) -> float:
        """Bytes that this process can still take for a stage; infinite if that is unknown."""
        return available_memory()


class Gpu(Compute):
    """A GPU that torch sees. Copies wait until they are made: what is given goes to the network at once."""

    alone = "it is computed on a GPU"

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.device)

    def generators(self) -> list[torch.Generator]:
        torch.cuda.init()
        return [torch.default_generator, torch.cuda.default_generators[self.device.index]]

    def hold(self, module: Any) -> None:
        if isinstance(module, nn.Module):
            module.to(self.device)

    def take(self, tensors: Tensors) -> Tensors:
        return tuple(None if one is None else self._taken(one) for one in tensors)

    def take_value(self, value: Any) -> Any:
        return tree.replace(value, self._taken)

    def give(self, tensors: Sequence[torch.Tensor | None]) -> Tensors:
        given = []
        for one in tensors:
            if one is not None:
                like = one.detach() if 0 not in one.stride() else one.detach().contiguous()
                host = torch.empty_like(like, device="cpu", pin_memory=True)
                one = host.copy_(like, non_blocking=True).requires_grad_(one.requires_grad)
            given.append(one)
        torch.cuda.current_stream(self.device).synchronize()
        return tuple(given)

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().contiguous().to("cpu", copy=True)

    def seconds(self) -> float:
        torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def room(self) -> float:
        return float(torch.cuda.mem_get_info(self.device)[0])

    def _taken(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(self.device, non_blocking=True).requires_grad_(tensor.requires_grad)


_here = Compute()


def gpus() -> list[str]:
    """Names of the GPUs that torch sees."""
    return [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]


def here() -> Compute:
    """This process's device."""
    return _here


def select(asked: str | dict[str, str], host: str, place: int) -> None:
    """Choose this process's device: "cpu", "cuda", "cuda:1", or "auto", a GPU if torch sees one; or a table of these by
    patterns of hosts' names. $ACCEPT_MPI_DEVICE wins. ``place``: this rank's number among those of its host, by which
    several share its GPUs.

    Raises UserError if there is no such device.
    """
    global _here
    if said := os.environ.get("ACCEPT_MPI_DEVICE"):
        asked = said
    elif isinstance(asked, dict):
        asked = next((device for pattern, device in asked.items() if fnmatchcase(host, pattern)), "cpu")
    count = torch.cuda.device_count() if asked != "cpu" else 0
    kind, _, number = asked.partition(":")
    index = int(number) if number.isdigit() else place % max(count, 1)
    if asked == "cpu" or (asked == "auto" and not count):
        _here = Compute()
    elif kind in ("auto", "cuda") and number.isdigit() == bool(number) and index < count:
        _here = Gpu(f"cuda:{index}")
    else:
        there = f"{count} GPU{'s' if count > 1 else ''}" if count else "no GPU"
        raise UserError(f'train.device: {host} has no "{asked}": torch sees {there} there')
    GENERATORS[:] = _here.generators()

"""The device on which this process computes its stage: the CPU, or a GPU. Nothing else asks which one it is.

What crosses a boundary, data sets, snapshots and checkpoints are in the host's memory; a stage's weights, activations and
gradients are where it computes. ``take`` and ``give`` carry tensors over; on a CPU they do nothing.
"""

import os
import re
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import torch
from torch import nn

from accept_mpi import tree
from accept_mpi.device.allocator import take_memory
from accept_mpi.device.cpu import cpu_name
from accept_mpi.device.memory import available_memory
from accept_mpi.errors import UserError
from accept_mpi.job import DEVICES
from accept_mpi.seeds import GENERATORS

DEVICE = "ACCEPT_MPI_DEVICE"
"""Environment variable with a rank's device."""
Tensors = tuple[torch.Tensor | None, ...]


class Given(tuple[torch.Tensor | None, ...]):
    """Tensors on the host that may still be on their way from a device."""

    ready: Callable[[], bool]
    """True once they have arrived. Any thread may ask."""

    def __new__(cls, tensors: Iterable[torch.Tensor | None], ready: Callable[[], bool]) -> "Given":
        given = super().__new__(cls, tensors)
        given.ready = ready
        return given


class _Fetched(tuple[torch.Tensor | None, ...]):
    """Tensors on a GPU that may still be on their way there."""

    copied: torch.cuda.Event


class Compute:
    """A CPU."""

    alone = ""
    """Reason why a stage can be neither shared by several ranks nor computed in lanes here; empty: it can."""
    backward_in_thread = True
    """True if a backward runs in the thread that asks for it; autograd has a thread of its own for each GPU."""

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

    def empty(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory on the host for what is to be fetched."""
        return torch.empty_strided(shape, stride, dtype=dtype)

    def fetch(self, tensors: Tensors) -> Tensors:
        """Begin to copy tensors from the host (``empty``) to the device, for ``take``; on any thread. They must not change
        afterwards."""
        return tensors

    def take(self, tensors: Tensors) -> Tensors:
        """Tensors from the host, on the device."""
        return tensors

    def take_value(self, value: Any) -> Any:
        """A value of a data set, such as targets, with its tensors on the device."""
        return value

    def give(self, tensors: Sequence[torch.Tensor | None]) -> Tensors:
        """Tensors from the device, on the host; ``Given`` if they are still on their way when this returns. Like the
        originals, they want a gradient or not."""
        return tuple(tensors)

    def on_host(self, tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Tensors from the device, on the host, when this returns."""
        return list(tensors)

    def wait(self) -> None:
        """Wait until what this thread has begun is computed."""

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy on the host."""
        return tensor.detach().contiguous().clone()

    def seconds(self) -> float:
        """A clock that counts while this thread computes: its CPU seconds."""
        return time.thread_time()

    def room(self) -> float:
        """Bytes that this process can still take for a stage; infinite if that is unknown."""
        return available_memory()

    @property
    def memory(self) -> str:
        """Name of the memory that ``room`` is of; empty: the host's, which all of its ranks share."""
        return ""

    def reserve(self, nbytes: int) -> None:
        """Take memory that a stage will need from the system now: taking it would count as the stage's time."""
        take_memory(nbytes)


class Gpu(Compute):
    """A GPU that torch sees.

    Actions are waited for, so that their times are known and no more than one is in the GPU's queue; copies are not. They
    have a stream of their own for each direction, beside computing.
    """

    alone = "it is computed on a GPU"
    backward_in_thread = False

    def __init__(self, device: str) -> None:
        super().__init__(device)
        # Single precision is what the job says, and what stages on CPUs compute with; torch would multiply in TF32.
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.deterministic = True  # steps that are made again after a loss are to be the same

    @cached_property
    def _to_host(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)

    @cached_property
    def _from_host(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.device)

    def generators(self) -> list[torch.Generator]:
        torch.cuda.init()
        return [torch.default_generator, torch.cuda.default_generators[self.device.index]]

    @cached_property
    def _moved(self) -> dict[int, tuple[weakref.ref[torch.Tensor], weakref.ref[torch.Tensor]]]:
        """Buffers on the host that have been moved, and what they are here, by the ids of the former."""
        return {}

    def hold(self, module: Any) -> None:
        if isinstance(module, nn.Module):
            for part in module.modules():
                for key, buffer in part._buffers.items():
                    if buffer is not None and buffer.device != self.device:
                        part._buffers[key] = self._one_here(buffer)
            module.to(self.device)

    def _one_here(self, buffer: torch.Tensor) -> torch.Tensor:
        """A buffer on the device; the same one for all modules that share it, since parts of a record do: one of them may
        write to it, and another read."""
        old, new = self._moved.get(id(buffer), (None, None))
        here = new() if new is not None and old is not None and old() is buffer else None
        if here is None:
            here = buffer.to(self.device)
            for gone in [one for one, (was, _) in self._moved.items() if was() is None]:
                del self._moved[gone]
            self._moved[id(buffer)] = weakref.ref(buffer), weakref.ref(here)
        return here

    def empty(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(shape, stride, dtype=dtype, pin_memory=True)

    def fetch(self, tensors: Tensors) -> Tensors:
        with torch.cuda.device(self.device), torch.cuda.stream(self._from_host):
            fetched = _Fetched(None if one is None else self._taken(one) for one in tensors)
            fetched.copied = torch.cuda.Event()
            fetched.copied.record()
        return fetched

    def take(self, tensors: Tensors) -> Tensors:
        if isinstance(tensors, _Fetched):
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(tensors.copied)
            for one in tensors:
                if one is not None:
                    one.record_stream(stream)  # its memory belongs to the stream of the copies
            return tuple(tensors)
        while isinstance(tensors, Given) and not tensors.ready():
            time.sleep(0)
        return tuple(None if one is None else self._taken(one) for one in tensors)

    def take_value(self, value: Any) -> Any:
        return tree.replace(value, self._taken)

    def give(self, tensors: Sequence[torch.Tensor | None]) -> Tensors:
        computed = torch.cuda.current_stream(self.device)
        self._to_host.wait_stream(computed)
        with torch.cuda.stream(self._to_host):
            given = [None if one is None else self._given(one) for one in tensors]
            copied = torch.cuda.Event()
            copied.record()
        computed.synchronize()
        return Given(given, copied.query)

    def on_host(self, tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        return [None if one is None else one.detach().cpu() for one in tensors]

    def wait(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().contiguous().to("cpu", copy=True)

    def seconds(self) -> float:
        torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def room(self) -> float:
        free, _ = torch.cuda.mem_get_info(self.device)
        kept = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return float(free + kept)

    @property
    def memory(self) -> str:
        return str(self.device)

    def reserve(self, nbytes: int) -> None:
        """Nothing: torch keeps what it has taken, and the first rounds of a measurement do not count."""

    def _taken(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(self.device, non_blocking=True).requires_grad_(tensor.requires_grad)

    def _given(self, one: torch.Tensor) -> torch.Tensor:
        like = one.detach() if 0 not in one.stride() else one.detach().contiguous()
        like.record_stream(self._to_host)
        host = torch.empty_like(like, device="cpu", pin_memory=True)
        return host.copy_(like, non_blocking=True).requires_grad_(one.requires_grad)


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
    if said := os.environ.get(DEVICE):
        if not re.fullmatch(DEVICES, said):
            raise UserError(f'{DEVICE} = "{said}": expected "cpu", "auto", "cuda" or "cuda:1"')
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

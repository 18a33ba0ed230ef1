"""What the operations below a recorded call do: how much they compute, whether they draw, and where they write."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from accept_mpi.models.recording.autocasting import cast
from accept_mpi.models.recording.structure import tensors_in


class Counting(TorchDispatchMode):
    """Counts floating-point operations, and sees whether any operation draws random numbers, and where it writes. Autocast
    has its effect on the meta device, too (``autocasting.cast``)."""

    def __init__(self) -> None:
        super().__init__()
        self.total, self.drew = 0.0, False
        self.lower: torch.dtype | None = None
        """As ``autocasting.lower`` of the function that is called."""
        self.written: set[int] = set()
        """Memories, as ``place_of`` names them. A tensor's version does not count what is written to its ``data``."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():  # what is recorded is above autograd
            if self.lower is not None:
                args, kwargs = cast(func._overloadpacket.__name__, args, kwargs, self.lower)
            found = func(*args, **kwargs)
        self.drew = self.drew or torch.Tag.nondeterministic_seeded in func.tags
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[place] if place < len(args) else kwargs.get(argument.name)
                self.written |= {place_of(tensor) for tensor in tensors_in(given)}
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.total += count(*args, **kwargs, out_val=found)
        return found


def place_of(tensor: torch.Tensor) -> int:
    """Identity of the memory behind a tensor."""
    return int(tensor.untyped_storage()._cdata)

"""Tensors and the memory in which their values lie: which of them have it in common, and copies that keep that."""

import ctypes
from collections.abc import Sequence

import torch
from torch import nn
from xxhash import xxh3_64_intdigest

from accept_mpi.errors import UserError


def memory_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Storage of a tensor's values; None if it has several (a sparse tensor) or none."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte, and last + 1, of its storage that a tensor uses."""
    size = tensor.element_size()
    begin = int(tensor.storage_offset()) * size
    reach = sum(int(n - 1) * int(stride) for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (reach + 1) * size if tensor.numel() else begin


def same_bits(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two tensors of a shape and dtype have the same values, where NaN is equal to itself."""
    if tensor.shape != other.shape or tensor.layout is not torch.strided:
        return tensor.shape == other.shape
    equal = tensor == other
    return bool((equal | ((tensor != tensor) & (other != other))).all())


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two tensors have memory in common."""
    memory, (begin, end), (begin_2, end_2) = memory_of(one), extent(one), extent(other)
    same = memory is not None and (of := memory_of(other)) is not None and memory._cdata == of._cdata
    return same and begin < end_2 and begin_2 < end


def common_memory(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Groups of positions of tensors that lie in one storage, unless they are all the same tensor."""
    places: dict[int, list[int]] = {}
    for place, tensor in enumerate(tensors):
        if (storage := memory_of(tensor)) is not None:
            places.setdefault(storage._cdata, []).append(place)
    return [one for one in places.values() if len({id(tensors[place]) for place in one}) > 1]


def copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of tensors in the same layout. Tensors that share a storage get copies that share one."""
    found: list[torch.Tensor | None] = [None] * len(tensors)
    for places in common_memory(tensors):
        memory = tensors[places[0]].untyped_storage().clone()
        for place in places:
            old = tensors[place]
            found[place] = torch.empty(0, dtype=old.dtype).set_(memory, old.storage_offset(), old.shape, old.stride())
    return [tensor.detach().clone() if new is None else new for new, tensor in zip(found, tensors, strict=True)]


def images_in(layer: nn.Module, memory_format: torch.memory_format) -> None:
    """Convert a layer's parameters and buffers of four dimensions to a memory format. ``nn.Module.to`` would ask it of those
    of five dimensions, too, such as a 3-D convolution's kernels, which cannot have it."""

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(memory_format=memory_format) if tensor.dim() == 4 else tensor

    layer._apply(convert)


def lay_out(layers: Sequence[nn.Module], memory_format: torch.memory_format) -> None:
    """Convert layers' parameters and buffers to a memory format, keeping shared memory shared. Raises UserError if that is
    impossible."""

    def places() -> list[tuple[str, torch.Tensor]]:
        return [
            (f"{prefix}.{name}" if prefix else name, tensor)
            for layer in layers
            for prefix, module in layer.named_modules()
            for name, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None
        ]

    before = [tensor.detach() for _, tensor in places()]
    for layer in layers:
        images_in(layer, memory_format)
    after = places()
    for together in common_memory(before):
        first, *others = together
        for place in others:
            (name, tensor), (of, like) = after[place], after[first]
            moved = any(after[n][1].data_ptr() != before[n].data_ptr() for n in (place, first))
            if tensor is like or not moved:
                continue
            if before[place].shape != before[first].shape or before[place].data_ptr() != before[first].data_ptr():
                raise UserError(
                    f"model: {of} and {name} lie on one memory, which cannot be in channels_last then: "
                    f'train.memory_format = "contiguous"'
                )
            tensor.data = like.data


def checksum(storage: torch.UntypedStorage | None) -> int | None:
    """Checksum of a storage's values; None if they cannot be read here."""
    if storage is None or storage.device.type != "cpu":
        return None
    size = storage.nbytes()
    # Not by way of an array: torch would refuse to resize the storage from then on, and a forward may do that.
    return xxh3_64_intdigest((ctypes.c_char * size).from_address(storage.data_ptr()) if size else b"")

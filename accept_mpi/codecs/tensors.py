"""Tensors without their values: shape, strides and dtype, and what crosses a boundary."""

import math
from collections.abc import Callable
from functools import lru_cache

import msgspec
import numpy as np
import torch

from accept_mpi.codecs.coding import NONE, Bytes, Coding
from accept_mpi.device.compute import here
from accept_mpi.direction import Direction
from accept_mpi.tree import Tree

_MOST_GAPS = 8  # memory from a tensor's first value to its last, in values of its own, up to which its gaps are kept


class TensorSpec(msgspec.Struct, frozen=True):
    """A tensor without its values. ``dtype`` is torch's name ("float32"), or "absent" for a gradient that is None.

    Strides are preserved exactly, since kernels choose their order of summation by them: gaps, too, such as those of a part
    of a larger tensor (``chunk``, the gradients of what ``cat`` joins), though not sent. A dimension of stride 0 (an
    expanded gradient) is sent once and expanded again by the receiver. Only a tensor that is less than an eighth of its
    memory, or overlaps itself, arrives contiguous.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    grad: bool = False
    """True if a gradient is sent back for the tensor."""

    @staticmethod
    def of(tensor: torch.Tensor | None) -> "TensorSpec":
        """Spec of a tensor; None gives the spec of an absent one."""
        if tensor is None:
            return TensorSpec((0,), (1,), "absent")
        stride = tensor.stride()
        if not _is_kept(_sent_shape(tensor.shape, stride), stride):
            stride = torch.empty_like(tensor, device="meta", memory_format=torch.contiguous_format).stride()
        grad = tensor.requires_grad
        return TensorSpec(tuple(tensor.shape), tuple(stride), str(tensor.dtype).removeprefix("torch."), grad)

    @property
    def sent_shape(self) -> tuple[int, ...]:
        """Shape of the values that are sent: dimensions of stride 0 are reduced to 1."""
        return _sent_shape(self.shape, self.stride)

    @property
    def sent_stride(self) -> tuple[int, ...]:
        """Strides of the values that are sent: dense, in the order of those of the tensor."""
        return _closed(self.sent_shape, self.stride)

    @property
    def numel(self) -> int:
        """Number of values sent."""
        return math.prod(self.sent_shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the values sent, uncoded."""
        return 0 if self.dtype == "absent" else self.numel * self.torch_dtype.itemsize

    @property
    def memory(self) -> int:
        """Bytes that it takes where it arrives, gaps included."""
        return 0 if self.dtype == "absent" else _extent(self.sent_shape, self.stride) * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def zeros(self) -> torch.Tensor | None:
        """A tensor of this spec, all zeros."""
        if self.dtype == "absent":
            return None
        dense = torch.empty_strided(self.sent_shape, self.stride, dtype=self.torch_dtype).zero_()
        return dense.expand(self.shape).requires_grad_(self.grad)

    def made_up(self, values: bytes = b"") -> torch.Tensor | None:
        """A tensor of this spec for a trial: of these ``values`` (``trial_values``), if there are any, else of numbers
        between 0 and 1, which more functions take than zeros; of zeros if it is of whole numbers."""
        found = self.zeros()
        if found is None or not self.numel or not (values or found.is_floating_point()):
            return found
        made = torch.frombuffer(bytearray(values), dtype=self.torch_dtype) if values else _spread(self.numel)
        with torch.no_grad():
            torch.as_strided(found, self.sent_shape, self.stride).copy_(made.view(self.sent_shape))
        return found

    def fits(self, tensor: torch.Tensor | None, training: bool = True) -> bool:
        """True if this is the spec of ``tensor``. Outside ``training``, it may want a gradient or not."""
        if tensor is None or self.dtype == "absent":
            return tensor is None and self.dtype == "absent"
        if (
            tensor.shape != self.shape
            or tensor.dtype != self.torch_dtype
            or (training and tensor.requires_grad != self.grad)
        ):
            return False
        return tensor.stride() == self.stride or _same_layout(self.shape, TensorSpec.of(tensor).stride, self.stride)

    def flatten(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        """Values of a tensor that ``fits``, in memory order: a 1-D view, or a copy if the tensor is not dense."""
        if self.dtype == "absent":
            return None
        assert tensor is not None, "ask ``fits`` first"
        tensor, dense = tensor.detach().resolve_conj().resolve_neg(), self.sent_stride
        if tensor.stride() == dense and 0 not in dense:
            return tensor.as_strided((tensor.numel(),), (1,))
        for dim, (full, sent) in enumerate(zip(self.shape, self.sent_shape, strict=True)):
            if sent < full:
                tensor = tensor.narrow(dim, 0, 1)
        if not _same_layout(self.sent_shape, tensor.stride(), dense):
            tensor = torch.empty_strided(self.sent_shape, dense, dtype=tensor.dtype).copy_(tensor)
        return tensor.as_strided((tensor.numel(),), (1,))

    def unflatten(
        self,
        data: Bytes,
        coding: Coding = NONE,
        in_place: bool = False,
        turn: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor | None:
        """New tensor of this spec, from its values' bytes as ``coding`` wrote them; with ``in_place`` in their memory, if
        they are not coded. ``turn``: makes values (1-D float32) of what was coded."""
        if self.dtype == "absent":
            return None
        stride = self.sent_stride
        if in_place and coding.kind == "none" and self.numel and stride == self.stride:
            return torch.from_numpy(data).view(self.torch_dtype).as_strided(self.shape, stride).requires_grad_(self.grad)
        dense = here().empty(self.sent_shape, stride, self.torch_dtype)
        flat = dense.as_strided((dense.numel(),), (1,))
        if coding.kind == "none":
            if dense.numel():
                np.copyto(flat.view(torch.uint8).numpy(), data)
        elif dense.dtype == torch.float32 and turn is None:
            coding.decode(data, flat.numpy())
        else:
            values = torch.empty(dense.numel(), dtype=torch.float32)
            coding.decode(data, values.numpy())
            values = turn(values) if turn else values
            if dense.dtype.itemsize < values.itemsize:  # what is decoded may lie beyond the narrower type
                most = torch.finfo(dense.dtype)
                values.clamp_(most.min, most.max)
            flat.copy_(values)
        if not _same_layout(self.sent_shape, stride, self.stride):
            dense = torch.empty_strided(self.sent_shape, self.stride, dtype=dense.dtype).copy_(dense)
        return dense.expand(self.shape).requires_grad_(self.grad)


Specs = tuple[TensorSpec, ...]
Tensors = tuple[torch.Tensor | None, ...]


class BoundarySpecs(msgspec.Struct, frozen=True):
    """Specs of the tensors that cross one boundary, by the number of samples in the micro-batch."""

    forward: dict[int, Specs]
    backward: dict[int, Specs]
    trees: dict[int, Tree] = {}
    """Trees of the activations. Gradients need none: there is one for each input that wants one."""
    whole: dict[int, tuple[bytes, ...]] = {}
    """What stages that were tried one after the other have told of activations' values (``trial_values``)."""

    def made_up(self, size: int) -> Tensors:
        """Activations for a trial."""
        specs = self.forward[size]
        values = self.whole.get(size) or (b"",) * len(specs)
        return tuple(spec.made_up(value) for spec, value in zip(specs, values, strict=True))

    def direction(self, direction: Direction) -> dict[int, Specs]:
        """Specs of the tensors that cross in this direction, by number of samples."""
        return self.backward if direction is Direction.BACKWARD else self.forward

    @property
    def unclear(self) -> bool:
        """True if no activation of several wants a gradient in training, since what makes them is frozen: nothing tells
        masks and positions from others then, so no codec may change any."""
        usual = next(iter(self.forward.values()), ())
        floats = [spec for spec in usual if spec.dtype != "absent" and spec.torch_dtype.is_floating_point]
        return len(floats) > 1 and not any(spec.grad for spec in floats)


def trial_values(tensor: torch.Tensor | None, true: bool = False) -> bytes:
    """Values of a tensor, without what is repeated in it, for a trial of the stage that takes it. Empty, so that
    they are made up, if they are floating-point values and not ``true``: a layer may not take just any whole numbers."""
    if tensor is None or ((tensor.is_floating_point() or tensor.is_complex()) and not true):
        return b""
    with torch.no_grad():
        sent = torch.as_strided(tensor, _sent_shape(tensor.shape, tensor.stride()), tensor.stride())
        return sent.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _spread(count: int) -> torch.Tensor:
    """Numbers between 0 and 1, no two of them alike."""
    return torch.arange(1, count + 1, dtype=torch.float64).mul_(0.6180339887498949).frac_()


def _sent_shape(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(1 if st == 0 and sh > 1 else sh for sh, st in zip(shape, stride, strict=True))


def _extent(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Number of values from the first element to the last, gaps included."""
    return 1 + sum(st * (sh - 1) for sh, st in zip(shape, stride, strict=True)) if math.prod(shape) else 0


@lru_cache(maxsize=1024)
def _is_kept(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """True if a tensor arrives with the same strides: its elements do not overlap, and fill an eighth of its memory."""
    extent = 1
    for st, sh in sorted((st, sh) for sh, st in zip(shape, stride, strict=True) if sh != 1):
        if st < extent:
            return False
        extent += st * (sh - 1)
    return _extent(shape, stride) <= _MOST_GAPS * math.prod(shape)


@lru_cache(maxsize=1024)
def _closed(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """These strides without gaps between elements."""
    found, extent = list(stride), 1
    for _, n in sorted((st, n) for n, st in enumerate(stride) if shape[n] != 1):
        found[n] = extent
        extent *= shape[n]
    return tuple(found)


def codable(specs: Specs) -> list[bool]:
    """For each tensor of a message, False if no codec may change its values: beside tensors that want a gradient, one that
    wants none is a mask, a position or the like, in which a rounded zero may outweigh all else."""
    some = any(spec.grad for spec in specs)
    return [spec.grad or not some for spec in specs]


def as_in_training(specs: Specs, usual: Specs) -> Specs:
    """The specs of tensors in an evaluation, where none wants a gradient, with the marks of those in training (``usual``):
    what is ``codable`` is the same."""
    if len(specs) != len(usual):
        return specs
    pairs = zip(specs, usual, strict=True)
    return tuple(msgspec.structs.replace(one, grad=known.grad and one.dtype == known.dtype) for one, known in pairs)


def _same_layout(shape: tuple[int, ...], a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return all(x == y for sh, x, y in zip(shape, a, b, strict=True) if sh > 1)

"""Tensors <-> bytes on the wire: the header, and what a boundary agrees on once per plan.

A message is one boundary's tensors of one micro-batch in one direction: a 64-byte header, then each tensor's bytes in
memory order, each padded to 64. Shapes, dtypes and strides are not in it; both ends have agreed on them beforehand
(``Signature``), for each number of samples that a micro-batch can have.
"""

import struct
import zlib
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from accept_mpi.errors import ProtocolError
from accept_mpi.kernels import checksum

Bytes = npt.NDArray[np.uint8]

MAGIC = 0x4D504941  # "AIPM"
VERSION = 1
ALIGN = 64
CODECS = ("none",)

_HEADER = struct.Struct("<IBBHIHHQIIQQdQ")
HEADER_BYTES = _HEADER.size
assert HEADER_BYTES == ALIGN


class Header(msgspec.Struct, frozen=True):
    """What a message says of itself, in the order of its fields on the wire (little-endian, 64 bytes)."""

    direction: int
    codec: int
    term: int
    boundary: int
    flags: int
    """Activations: ``Forward.suspect``."""
    step: int
    micro_batch: int
    samples: int
    length: int
    """Payload bytes after the header."""
    raw: int
    """Bytes before coding."""
    sent: float
    """When it was given to MPI, in seconds on rank 0's clock."""

    def pack_into(self, buffer: Bytes, payload_checksum: int) -> None:
        fields = (MAGIC, VERSION, *msgspec.structs.astuple(self))
        _HEADER.pack_into(buffer.data, 0, *fields, 0)
        guard = payload_checksum ^ zlib.crc32(buffer[:56].tobytes())
        _HEADER.pack_into(buffer.data, 0, *fields, guard)

    @staticmethod
    def unpack(buffer: Bytes) -> "Header":
        """Read and check the header of a received message, its payload's checksum included.

        Raises ProtocolError with a sentence.
        """
        if buffer.size < HEADER_BYTES:
            raise ProtocolError(f"a message of {buffer.size} bytes is shorter than its header of {HEADER_BYTES}")
        magic, version, *fields, guard = _HEADER.unpack_from(buffer.data, 0)
        if magic != MAGIC:
            raise ProtocolError(f"a message begins with {magic:#010x} instead of {MAGIC:#010x}")
        if version != VERSION:
            raise ProtocolError(f"a message has format version {version}; this rank speaks {VERSION}")
        header = Header(*fields)
        if header.length != buffer.size - HEADER_BYTES:
            raise ProtocolError(
                f"a message announces {header.length} bytes after its header and has {buffer.size - HEADER_BYTES}"
            )
        if guard != checksum(buffer[HEADER_BYTES:]) ^ zlib.crc32(buffer[:56].tobytes()):
            raise ProtocolError(f"a message has a wrong checksum ({header})")
        return header


class TensorSpec(msgspec.Struct, frozen=True):
    """A tensor but for its values. ``dtype`` is torch's name ("float32"), or "absent" for a gradient that is None.

    Strides cross the wire exactly, since kernels choose their order of summation by them: a dimension of stride 0 (an
    expanded gradient) is sent once and expanded again on the other side.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    grad: bool = False
    """Whether a gradient comes back for it."""

    @staticmethod
    def of(tensor: torch.Tensor | None) -> "TensorSpec":
        if tensor is None:
            return TensorSpec((0,), (1,), "absent")
        stride = tensor.stride()
        if not _is_dense(_sent_shape(tensor.shape, stride), stride):
            stride = tensor.contiguous().stride()
        grad = tensor.requires_grad
        return TensorSpec(tuple(tensor.shape), tuple(stride), str(tensor.dtype).removeprefix("torch."), grad)

    @property
    def sent_shape(self) -> tuple[int, ...]:
        """The shape of what is sent: dimensions of stride 0 reduced to 1."""
        return _sent_shape(self.shape, self.stride)

    @property
    def nbytes(self) -> int:
        if self.dtype == "absent":
            return 0
        return int(np.prod(self.sent_shape, dtype=np.int64)) * self.torch_dtype.itemsize

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

    def flatten(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        """The values to send, in memory order: a 1-D view, or a copy where ``tensor`` is laid out otherwise."""
        if self.dtype == "absent":
            if tensor is not None:
                raise ProtocolError("a gradient is there that the first micro-batch did not have")
            return None
        if tensor is None:
            tensor = self.zeros()
            assert tensor is not None
        tensor = tensor.detach()
        if tuple(tensor.shape) != self.shape or tensor.dtype != self.torch_dtype:
            raise ProtocolError(
                f"a tensor of shape {tuple(tensor.shape)} and {tensor.dtype} where {self.shape} and {self.dtype} was agreed"
            )
        for dim, (full, sent) in enumerate(zip(self.shape, self.sent_shape, strict=True)):
            if sent < full:
                tensor = tensor.narrow(dim, 0, 1)
        if not _same_layout(self.sent_shape, tensor.stride(), self.stride):
            tensor = torch.empty_strided(self.sent_shape, self.stride, dtype=tensor.dtype).copy_(tensor)
        return tensor.as_strided((tensor.numel(),), (1,))

    def unflatten(self, data: Bytes) -> torch.Tensor | None:
        """A fresh tensor of this spec from the bytes of its values."""
        if self.dtype == "absent":
            return None
        dense = torch.empty_strided(self.sent_shape, self.stride, dtype=self.torch_dtype)
        if dense.numel():
            np.copyto(dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy(), data)
        return dense.expand(self.shape).requires_grad_(self.grad)


Specs = tuple[TensorSpec, ...]
Tensors = tuple[torch.Tensor | None, ...]


class Signature(msgspec.Struct, frozen=True):
    """What crosses one boundary, by the number of samples of the micro-batch."""

    forward: dict[int, Specs]
    backward: dict[int, Specs]

    def direction(self, direction: int) -> dict[int, Specs]:
        return self.backward if direction else self.forward


def _sent_shape(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(1 if st == 0 and sh > 1 else sh for sh, st in zip(shape, stride, strict=True))


def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether the elements fill one block of memory, in whatever order of dimensions."""
    expected = 1
    for st, sh in sorted((st, sh) for sh, st in zip(shape, stride, strict=True) if sh != 1):
        if st != expected:
            return False
        expected *= sh
    return True


def _same_layout(shape: tuple[int, ...], a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return all(x == y for sh, x, y in zip(shape, a, b, strict=True) if sh > 1)


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def wire_bytes(specs: Specs) -> int:
    """Size of a message, header included."""
    return HEADER_BYTES + sum(_padded(spec.nbytes) for spec in specs)


def aligned(nbytes: int) -> Bytes:
    """An uninitialized byte buffer that begins at a multiple of 64."""
    block = np.empty(nbytes + ALIGN, np.uint8)
    offset = -block.ctypes.data % ALIGN
    return block[offset : offset + nbytes]


def encode(specs: Specs, flat: Tensors, buffer: Bytes, **fields: Any) -> int:
    """Write a message of ``flat`` tensors (from ``TensorSpec.flatten``) into ``buffer``; returns its length in bytes.

    ``fields`` are the header's direction, boundary, step, micro_batch, samples, flags, term and sent.
    """
    at = HEADER_BYTES
    for spec, tensor in zip(specs, flat, strict=True):
        if tensor is not None and tensor.numel():
            np.copyto(buffer[at : at + spec.nbytes], tensor.view(torch.uint8).numpy())
        buffer[at + spec.nbytes : at + _padded(spec.nbytes)] = 0
        at += _padded(spec.nbytes)
    raw = sum(spec.nbytes for spec in specs)
    header = Header(codec=0, length=at - HEADER_BYTES, raw=raw, **fields)
    header.pack_into(buffer, checksum(buffer[HEADER_BYTES:at]))
    return at


def decode(by_samples: dict[int, Specs], message: Bytes) -> tuple[Header, Tensors]:
    """Header and tensors of a received message. Raises ProtocolError with a sentence where it cannot be right."""
    header = Header.unpack(message)
    specs = by_samples.get(header.samples)
    if specs is None:
        raise ProtocolError(f"a message holds {header.samples} samples; agreed were {sorted(by_samples)}")
    if header.codec >= len(CODECS):
        raise ProtocolError(f"a message has codec number {header.codec}, which is unknown here")
    if message.size != wire_bytes(specs):
        raise ProtocolError(
            f"a message has {message.size} bytes where its {header.samples} samples make {wire_bytes(specs)}"
        )
    tensors = []
    at = HEADER_BYTES
    for spec in specs:
        tensors.append(spec.unflatten(message[at : at + spec.nbytes]))
        at += _padded(spec.nbytes)
    return header, tuple(tensors)

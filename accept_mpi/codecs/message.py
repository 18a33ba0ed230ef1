"""Tensors as bytes on the wire and back: a message's header, layout, encoding and decoding.

A message carries one boundary's tensors of one micro-batch in one direction: a 64-byte header, then each tensor's bytes in
memory order, each padded to a multiple of 64. Both ends agree beforehand, once per plan and for each number of samples that
a micro-batch can have, on shapes, dtypes, strides and the tree that the tensors belong to (``BoundarySpecs``). Only a
micro-batch that differs has them in its message, as a description between header and tensors.
"""

import struct
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from xxhash import xxh3_64_intdigest

from accept_mpi.codecs.basis import NO_BASES, Bases, Basis, packed, unpacked, width_of
from accept_mpi.codecs.coding import KINDS, NONE, Bytes, Coding
from accept_mpi.codecs.tensors import Specs, Tensors, TensorSpec, codable
from accept_mpi.errors import ProtocolError
from accept_mpi.seeds import mix
from accept_mpi.tree import LONE, Tree

MAGIC = 0x4D41  # "AM"
VERSION = 9
ALIGN = 64

_HEADER = struct.Struct("<HBBHHIQIIIQddQ")
_BACKWARD = 0x80  # direction, in the byte that it shares with the codec's number
HEADER_BYTES = _HEADER.size
assert HEADER_BYTES == ALIGN
_GUARDED = HEADER_BYTES - 8  # bytes before the checksum


class Header(msgspec.Struct, frozen=True):
    """A message's header: 64 bytes, little-endian, its fields in the order in which they lie on the wire. Direction and
    codec share a byte."""

    direction: int
    codec: int
    boundary: int
    flags: int
    """Activations: how the step ends (``recovery.barriers``)."""
    described: int
    """Bytes of the description; 0: all is as agreed."""
    step: int
    suspect: int
    """Activations: ``Outputs.suspect``."""
    micro_batch: int
    samples: int
    length: int
    """Payload bytes after the header."""
    scale: float
    """Gradients: what the last stage multiplies the step's gradients with (``Stage.update``), once it knows."""
    sent: float
    """When it was given to MPI, in seconds on rank 0's clock."""

    def pack_into(self, head: Bytes, payload: Bytes) -> None:
        """Write it, in front of a payload that is there already."""
        direction, codec, *others = msgspec.structs.astuple(self)
        fields = (MAGIC, VERSION, direction * _BACKWARD | codec, *others)
        _HEADER.pack_into(head.data, 0, *fields, 0)
        _HEADER.pack_into(head.data, 0, *fields, _checksum(head, payload))

    @staticmethod
    def unpack(buffer: Bytes) -> "Header":
        """Read and check the header of a received message, its payload's checksum included.

        Raises ProtocolError with a sentence.
        """
        if buffer.size < HEADER_BYTES:
            raise ProtocolError(f"a message of {buffer.size} bytes is shorter than its header of {HEADER_BYTES}")
        magic, version, kind, *others, guard = _HEADER.unpack_from(buffer.data, 0)
        if magic != MAGIC:
            raise ProtocolError(f"a message begins with {magic:#06x} instead of {MAGIC:#06x}")
        if version != VERSION:
            raise ProtocolError(f"a message has format version {version}; this rank speaks {VERSION}")
        header = Header(*divmod(kind, _BACKWARD), *others)
        if header.length != buffer.size - HEADER_BYTES and not _announces(header, buffer):
            raise ProtocolError(
                f"a message announces {header.length} bytes after its header and has {buffer.size - HEADER_BYTES}"
            )
        if guard != _checksum(buffer[:HEADER_BYTES], buffer[HEADER_BYTES:]):
            raise ProtocolError(f"a message has a wrong checksum ({header})")
        return header

    def announce(self) -> Bytes:
        """The header alone, to announce a message too large for the buffer that waits for it; the message follows."""
        message = aligned(HEADER_BYTES)
        self.pack_into(message, message[HEADER_BYTES:])
        return message


class Label(NamedTuple):
    """Part of a header that the sender knows: where the message belongs, and what travels with it. Fields as in
    ``Header``."""

    direction: int
    boundary: int
    step: int
    micro_batch: int
    samples: int
    flags: int = 0
    suspect: int = 0
    scale: float = 1.0


def _announces(header: Header, buffer: Bytes) -> bool:
    return buffer.size == HEADER_BYTES and header.length > 0


def announced(message: Bytes) -> int:
    """Bytes of the whole message that a received one announces; 0 if it is to be decoded itself, which checks it. Raises
    ProtocolError."""
    if message.size != HEADER_BYTES:
        return 0
    header = Header.unpack(message)
    return HEADER_BYTES + header.length if _announces(header, message) else 0


def _checksum(head: Bytes, payload: Bytes) -> int:
    """XXH3, 64 bits, of the header's other fields and the payload."""
    return xxh3_64_intdigest(payload.data, seed=xxh3_64_intdigest(head.data[:_GUARDED]))


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


class _Part(NamedTuple):
    """Bytes start to end of a message in which a tensor lies."""

    start: int
    end: int
    padded: int
    """Start of the next tensor."""
    coded: bool


class _Layout(NamedTuple):
    """Layout of a message. It is computed before the first message: when one arrives, caches are full of what is being
    computed, and each line of Python is slow."""

    parts: tuple[_Part, ...]
    wire: int
    """Bytes of the message, header included."""
    raw: int
    """Bytes of the tensors, uncoded."""


@lru_cache(maxsize=4096)
def _layout(specs: Specs, coding: Coding) -> _Layout:
    parts, at = [], HEADER_BYTES
    for spec, may_be in zip(specs, codable(specs), strict=True):
        coded = may_be and _is_coded(spec, coding)
        end = at + (coding.nbytes(spec.numel) if coded else spec.nbytes)
        parts.append(_Part(at, end, at + _padded(end - at), coded))
        at = parts[-1].padded
    return _Layout(tuple(parts), at, sum(spec.nbytes for spec in specs))


def raw_bytes(specs: Specs) -> int:
    """Bytes of these tensors, uncoded."""
    return _layout(specs, NONE).raw


def wire_bytes(specs: Specs, coding: Coding = NONE) -> int:
    """Bytes of a message with these tensors, header included."""
    return _layout(specs, coding).wire


def buffer_bytes(specs: Specs, coding: Coding, description: bytes = b"") -> int:
    """Bytes that a message may take, whether it is coded or, if values are not finite, not."""
    return max(wire_bytes(specs), wire_bytes(specs, coding)) + _padded(len(description))


def aligned(nbytes: int) -> Bytes:
    """An uninitialized byte buffer that begins at a multiple of 64."""
    block = np.empty(nbytes + ALIGN, np.uint8)
    offset = -block.ctypes.data % ALIGN
    return block[offset : offset + nbytes]


def describe(specs: Specs, tree: Tree, bases: Bases | None = None) -> bytes:
    """Description that precedes the tensors in a message that is not as agreed, or from which on other ``bases`` are in use
    (or none): its length without these (u32), the format of the tensors, and the bases."""
    found = msgspec.msgpack.encode((tree, specs))
    return struct.pack("<I", len(found)) + found + (b"" if bases is None else packed(bases))


@lru_cache(maxsize=1024)
def _described(description: bytes) -> tuple[Tree, Specs]:
    try:
        return msgspec.msgpack.decode(description, type=tuple[Tree, Specs])
    except msgspec.DecodeError as error:
        raise ProtocolError(f"a message's description cannot be read: {error}") from error


def encode(
    label: Label,
    specs: Specs,
    flat: Tensors,
    buffer: Bytes,
    coding: Coding = NONE,
    key: int = 0,
    *,
    now: Callable[[], float],
    description: bytes = b"",
    bases: Bases = NO_BASES,
) -> Header:
    """Write a message of ``flat`` tensors (from ``TensorSpec.flatten``) into ``buffer``, and return its header.

    ``key`` determines stochastic rounding; ``now`` is called for the header's ``sent`` when everything is coded;
    ``description`` comes from ``describe`` if the message is not as agreed; ``bases`` are those in use. A message with
    values that cannot be coded (not finite) goes uncoded, and its header says so.
    """
    layout, offset = _layout(specs, coding), _padded(len(description))
    for number, (tensor, part) in enumerate(zip(flat, layout.parts, strict=True)):
        into = buffer[offset + part.start : offset + part.end]
        if part.coded:
            assert tensor is not None
            if bases and (basis := _basis_of(bases, number, specs[number])):
                tensor = basis.turned(tensor.float())
            if not _coded_into(tensor, into, coding, mix(key, number)):
                return encode(label, specs, flat, buffer, NONE, key, now=now, description=description)
        elif tensor is not None and tensor.numel():
            np.copyto(into, _bytes(tensor))
        if part.end < part.padded:
            buffer[offset + part.end : offset + part.padded] = 0
    if description:
        buffer[HEADER_BYTES : HEADER_BYTES + offset] = 0
        buffer[HEADER_BYTES : HEADER_BYTES + len(description)] = np.frombuffer(description, np.uint8)
    wire = layout.wire + offset
    header = Header(
        codec=coding.number, described=len(description), length=wire - HEADER_BYTES, sent=now(), **label._asdict()
    )
    header.pack_into(buffer[:HEADER_BYTES], buffer[HEADER_BYTES:wire])
    return header


def encode_in_place(label: Label, flat: Tensors, head: Bytes, *, now: Callable[[], float]) -> tuple[Header, Bytes] | None:
    """Write the header of a message of one tensor, uncoded and as agreed, into ``head``. Its payload, which is returned, is
    the tensor's memory. None if it would have to be padded."""
    values = flat[0] if len(flat) == 1 else None
    if values is None or not values.numel() or values.nbytes % ALIGN:
        return None
    payload = _bytes(values)
    header = Header(codec=NONE.number, described=0, length=payload.size, sent=now(), **label._asdict())
    header.pack_into(head[:HEADER_BYTES], payload)
    return header, payload


def _bytes(values: torch.Tensor) -> Bytes:
    """The memory of a contiguous tensor."""
    found: Bytes = values.view(torch.uint8).numpy()
    return found


class Decoded(NamedTuple):
    """A message as received."""

    header: Header
    tensors: Tensors
    tree: Tree
    raw: int
    """Bytes of the tensors, uncoded."""


def decode(
    by_samples: dict[int, Specs], message: Bytes, agreed: Coding = NONE, trees: Mapping[int, Tree] = MappingProxyType({}),
    in_place: bool = False, bases: dict[int, Basis] | None = None,
) -> Decoded:  # fmt: skip
    """Decode a received message. With ``in_place``, tensors that came uncoded share its memory. ``bases``: those in use,
    which change to those that it brings. Raises ProtocolError with a sentence if it is invalid."""
    header = Header.unpack(message)
    offset, tree = _padded(header.described), trees.get(header.samples, LONE)
    if header.described:
        if header.described > header.length:
            raise ProtocolError(f"a message of {header.length} bytes has a description of {header.described}")
        description = message[HEADER_BYTES : HEADER_BYTES + header.described].tobytes()
        length = 4 + int.from_bytes(description[:4], "little")
        tree, specs = _described(description[4:length])
        if bases is not None and description[length:]:
            new = unpacked(description[length:])
            bases.clear()
            bases |= new
    elif header.samples in by_samples:
        specs = by_samples[header.samples]
    else:
        raise ProtocolError(f"a message holds {header.samples} samples; agreed were {sorted(by_samples)}")
    if header.codec not in (agreed.number, NONE.number):
        name = KINDS[header.codec] if header.codec < len(KINDS) else f"number {header.codec}"
        raise ProtocolError(f"a message has codec {name} where {agreed.kind} was agreed")
    coding = agreed if header.codec else NONE
    layout = _layout(specs, coding)
    if message.size != layout.wire + offset:
        raise ProtocolError(
            f"a message has {message.size} bytes where its {header.samples} samples make {layout.wire + offset}"
        )
    tensors = []
    for n, (spec, part) in enumerate(zip(specs, layout.parts, strict=True)):
        values = message[offset + part.start : offset + part.end]
        basis = _basis_of(bases, n, spec) if bases and part.coded else None
        turn = basis.returned if basis else None
        tensors.append(spec.unflatten(values, coding if part.coded else NONE, in_place, turn))
    return Decoded(header, tuple(tensors), tree, layout.raw)


def _basis_of(bases: Bases, n: int, spec: TensorSpec) -> Basis | None:
    """The basis in which the rows of a message's tensor ``n`` are coded."""
    basis = bases.get(n)
    return basis if basis is not None and width_of(spec) == len(basis.mean) else None


def as_decoded(values: torch.Tensor, coding: Coding) -> torch.Tensor | None:
    """What the receiver of a message will decode these values to, a contiguous tensor, if ``coding`` rounds to nearest; None
    if they will go uncoded."""
    spec = TensorSpec.of(values)
    if not _is_coded(spec, coding):
        return None
    into = aligned(coding.nbytes(spec.numel))
    return spec.unflatten(into, coding) if _coded_into(values.view(-1), into, coding, 0) else None


def _coded_into(tensor: torch.Tensor, into: Bytes, coding: Coding, key: int) -> bool:
    """Code a tensor's values; False if they cannot be coded, since some are not finite in single precision."""
    values = tensor.float()
    fits = tensor.dtype != torch.float64 or bool(values.isfinite().all())
    return fits and coding.encode(values.numpy(), into, key)


def _is_coded(spec: TensorSpec, coding: Coding) -> bool:
    """True if ``coding`` applies to a tensor: not to token ids or masks, and not where it would not make values shorter."""
    if coding.kind == "none" or spec.dtype == "absent" or not spec.torch_dtype.is_floating_point or spec.numel == 0:
        return False
    return coding.nbytes(spec.numel) < spec.nbytes

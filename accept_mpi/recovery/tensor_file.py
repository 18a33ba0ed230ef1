"""Safetensors files: checks the header of one before anything in it is trusted, and writes one without copies.

8 bytes   length of the header, little-endian
header    JSON: {name: {"dtype": "F32", "shape": [3, 3], "data_offsets": [begin, end]}, "__metadata__": {...}}
data      the tensors' bytes, one after another
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import BinaryIO

import msgspec
import torch

from accept_mpi.errors import shown

_MOST_HEADER = 8 << 20
_MOST_DIMENSIONS = 64
_ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
_NAMES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.uint16: "U16", torch.int16: "I16", torch.float16: "F16", torch.bfloat16: "BF16", torch.uint32: "U32",
    torch.int32: "I32", torch.float32: "F32", torch.uint64: "U64", torch.int64: "I64", torch.float64: "F64",
    torch.complex64: "C64",
}  # fmt: skip
_ALIGNED = 8  # bytes: the tensors begin at a multiple


class Entry(msgspec.Struct, frozen=True):
    """One tensor's entry in the header."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def read_header(file: BinaryIO, size: int) -> dict[str, Entry]:
    """Tensors by name in an open file of ``size`` bytes. Raises ValueError unless they fill the file, in order."""
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > size - 8:
        raise ValueError("cut short, or no safetensors file")
    if length > _MOST_HEADER:
        raise ValueError(f"its header has {length} bytes, more than the {_MOST_HEADER} that it may have")
    try:
        raw = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(value, type=Entry) for name, value in raw.items()}
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"its header cannot be read: {error}") from error
    end = 0
    for key, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        name = shown(key)
        if entry.dtype not in _ITEM_BYTES:
            raise ValueError(f'"{name}" has values of a kind that is not known here')
        if len(entry.shape) > _MOST_DIMENSIONS or any(not 0 <= extent < 1 << 53 for extent in entry.shape):
            raise ValueError(f'"{name}" has a shape that cannot be')
        begin, after = entry.data_offsets
        if begin != end or after - begin != math.prod(entry.shape) * _ITEM_BYTES[entry.dtype]:
            raise ValueError(f'the bytes of "{name}" are not where they should be')
        end = after
    if end != size - 8 - length:
        raise ValueError(f"it has {size - 8 - length} bytes of tensors, not the {end} that its header tells of")
    return entries


def written(
    tensors: Mapping[str, torch.Tensor], size: int, about: Mapping[str, str] | None = None
) -> tuple[int, Iterator[memoryview]]:
    """Size of a file with these contiguous tensors and the header's texts ``about``, and the file in pieces of at most
    ``size`` bytes. Large pieces share the tensors' memory: safetensors' own ``save`` makes three more copies of all of them,
    and puts the texts in another order each time. Raises ValueError for a dtype that such a file cannot have."""
    total, parts = _parts(tensors, about)
    return total, _pieces(parts, size)


def whole(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """The file that ``written`` gives in pieces, as one."""
    return b"".join(_parts(tensors, None)[1])


def _parts(tensors: Mapping[str, torch.Tensor], about: Mapping[str, str] | None) -> tuple[int, list[memoryview]]:
    """Size of a file, and its parts, which share the tensors' memory."""
    entries: dict[str, Entry] = {}
    end = 0
    # Larger values first, as ``save`` has them, so that all of them lie at multiples of their size.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in _NAMES:
            raise ValueError(f'"{name}" has values of a kind ({tensor.dtype}) that a file cannot have')
        begin, end = end, end + tensor.nbytes
        entries[name] = Entry(_NAMES[tensor.dtype], list(tensor.shape), (begin, end))
    header = msgspec.json.encode({"__metadata__": about} | entries if about else entries)
    header += b" " * (-len(header) % _ALIGNED)
    parts = [memoryview(len(header).to_bytes(8, "little") + header), *(_bytes_of(tensors[name]) for name in order)]
    return 8 + len(header) + end, parts


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """A contiguous tensor's memory."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def _pieces(parts: Iterable[memoryview], size: int) -> Iterator[memoryview]:
    """Yield the same bytes in pieces of at most ``size``: whole ones as they are, rests joined."""
    rest = bytearray()
    for part in parts:
        while part:
            if not rest and len(part) >= size:
                yield part[:size]
                part = part[size:]
                continue
            taken = size - len(rest)
            rest += part[:taken]
            part = part[taken:]
            if len(rest) == size:
                yield memoryview(rest)
                rest = bytearray()
    if rest:
        yield memoryview(rest)

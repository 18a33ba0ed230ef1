"""Checks the header of a safetensors file before anything in the file is trusted.

8 bytes   length of the header, little-endian
header    JSON: {name: {"dtype": "F32", "shape": [3, 3], "data_offsets": [begin, end]}, "__metadata__": {...}}
data      the tensors' bytes, one after another
"""

import math
from typing import BinaryIO

import msgspec

from accept_mpi.errors import shown

_MOST_HEADER = 8 << 20
_MOST_DIMENSIONS = 64
_ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


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

"""Reading HDF5 files that another person or machine may have written.

HDF5 lets a file refer to others (external links, data sets whose bytes are in other files, virtual data sets), and lets a
few bytes stand for any number of them. Neither is accepted here: everything that is read is in the file itself and no larger
than it.
"""

import errno
import io
import json
import os
import re
import struct
from typing import Any

import h5py
import numpy as np

from accept_mpi.errors import one_line
from accept_mpi.files.regular import open_regular
from accept_mpi.files.values import every_value

_SPARE = 4 << 20  # bytes: the last rows of a growing file may not have reached the disk yet
_PACKED = 4  # bytes held per byte on disk, at most: some file systems compress
_MOST_TEXT = 16 << 20
_DEEPEST = 64
_MOST_LINKS = 8  # that lead to one another
_NUMBERS = "biuf"
_SUPERBLOCK, _FLAGS_AT, _END_AT = 48, 11, 28  # bytes of a superblock, and offsets of two of its fields
_FOLLOWED = 0b101  # flags of a file that is open for writing and that readers may follow
_WORD = 0xFFFFFFFF


class Damaged(ValueError):
    """A file is not laid out as it should be. The message says which part of it."""


def reason(error: Exception) -> str:
    """The system's reason for an error of h5py, which tells it among much else, and not always as an OSError."""
    number = re.search(r"\berrno = (\d+)", str(error))
    return os.strerror(int(number[1])) if number else getattr(error, "strerror", None) or one_line(str(error), 300)


def open_file(path: str | os.PathLike[str]) -> h5py.File:
    """Open an HDF5 file for reading. Raises OSError, with a reason in words, if it is not one or cannot be read."""
    with open_regular(path):
        pass
    return _opened(path, locking=False)


def is_followed(path: str | os.PathLike[str]) -> bool:
    """True if a file is marked as being written while readers may follow (HDF5's SWMR). The mark stays if the writer is
    killed."""
    with open_regular(path) as file:
        return _flags(file.read(_SUPERBLOCK)) & _FOLLOWED == _FOLLOWED


def open_followed(path: str | os.PathLike[str]) -> h5py.File:
    """Open a file that is being written, so that new data become visible. Raises OSError. On a damaged file HDF5 retries
    without end, so ``open_still`` comes first."""
    return _opened(path, libver="latest", swmr=True, locking=False)


def open_still(path: str | os.PathLike[str]) -> h5py.File:
    """Open a file that is being written as it is at this moment, as if it had no writer. Raises OSError."""
    with open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > _taken(file.fileno()):
            raise OSError(errno.EINVAL, f"most of its {size} bytes are not there", os.fspath(path))
    return _opened(_Still(path, "rb"))


def _opened(file: Any, **how: Any) -> h5py.File:
    try:
        return h5py.File(file, "r", **how)
    except OSError:
        raise
    except Exception as error:  # HDF5 reports damage by many types of exceptions
        raise OSError(0, " ".join(str(error).split())) from error


class _Still(io.FileIO):
    """A file read as if its superblock (HDF5's format specification, version 3) did not say that it has a writer."""

    def readinto(self, buffer: Any) -> int:
        at, view = self.tell(), memoryview(buffer).cast("B")
        count = 0
        while count < len(view) and (more := super().readinto(view[count:])):
            count += more
        view[count:] = bytes(len(view) - count)
        if at < _SUPERBLOCK:
            head = self._head()[at : at + len(view)]
            view[: len(head)] = head
            self.seek(at + count)
        return len(view)

    def _head(self) -> bytes:
        """Superblock without its flags, and with the file's actual size as its end."""
        end = self.seek(0, os.SEEK_END)
        self.seek(0)
        head = bytearray(super().read(_SUPERBLOCK).ljust(_SUPERBLOCK, b"\0"))
        head[_FLAGS_AT] = 0
        struct.pack_into("<Q", head, _END_AT, end)
        struct.pack_into("<I", head, _SUPERBLOCK - 4, _lookup3(head[:-4]))
        return bytes(head)


def _flags(superblock: bytes) -> int:
    """Flags of a file's superblock; 0 if it has none of version 3."""
    known = superblock.startswith(b"\x89HDF\r\n\x1a\n\x03\x08\x08") and len(superblock) == _SUPERBLOCK
    return superblock[_FLAGS_AT] if known else 0


def _lookup3(data: bytes | bytearray) -> int:
    """HDF5's checksum of metadata: lookup3 (Jenkins 2006)."""

    def turned(x: int, by: int) -> int:
        return x << by & _WORD | x >> 32 - by

    a = b = c = 0xDEADBEEF + len(data) & _WORD
    for begin in range(0, len(data), 12):
        words = struct.unpack("<3I", data[begin : begin + 12].ljust(12, b"\0"))
        a, b, c = (x + word & _WORD for x, word in zip((a, b, c), words, strict=True))
        if begin + 12 < len(data):
            for by in (4, 6, 8, 16, 19, 4):
                a = (a - c & _WORD) ^ turned(c, by)
                a, b, c = b, c + b & _WORD, a
    for by in (14, 11, 25, 16, 4, 14, 24):
        c = (c ^ b) - turned(b, by) & _WORD
        a, b, c = b, c, a
    return b


def group_in(parent: Any, name: str) -> h5py.Group:
    """Group ``name`` of ``parent``, which must be in this very file. Raises Damaged."""
    found = _own(parent, name)
    if not isinstance(found, h5py.Group):
        raise Damaged(f'"{name}" is not a group')
    return found


def dataset_in(
    parent: Any, name: str, kinds: str = _NUMBERS, shape: tuple[int | None, ...] | None = None, dtype: Any = None
) -> h5py.Dataset:
    """Data set ``name`` of ``parent``, which must be in this very file and no larger than it. Raises Damaged.

    ``kinds``: NumPy's letters of the allowed types, unless ``dtype`` gives the exact one. ``shape``: None stands for any
    length.
    """
    found = _own(parent, name)
    if not isinstance(found, h5py.Dataset):
        raise Damaged(f'"{name}" is not a data set')
    held_here(found, name)
    wanted = found.dtype == dtype if dtype is not None else found.dtype.kind in kinds
    if not wanted:
        raise Damaged(f'"{name}" holds {found.dtype}' + (f", not {dtype}" if dtype is not None else ""))
    if found.shape is None:
        raise Damaged(f'"{name}" is empty')
    if shape is not None and not (
        len(found.shape) == len(shape) and all(want in (None, has) for want, has in zip(shape, found.shape, strict=True))
    ):
        raise Damaged(f'"{name}" has the shape {found.shape}')
    if found.id.get_create_plist().get_nfilters():
        raise Damaged(f'"{name}" is compressed')
    if (nbytes := found.size * found.dtype.itemsize) > _most_bytes(parent.file):
        raise Damaged(f'"{name}" would have {nbytes} bytes, more than the file')
    return found


def within(group: Any, path: str, links: int = _MOST_LINKS) -> Any:
    """What a path in a group stands for, also through links within the file; None if there is nothing, or it is in another
    file, which is not opened."""
    found = group.file if path.startswith("/") else group
    for name in filter(None, path.split("/")):
        if not isinstance(found, h5py.Group) or not found.id.links.exists(name.encode()):
            return None
        link = found.get(name, getlink=True)
        if isinstance(link, h5py.SoftLink):
            found = within(found, link.path, links - 1) if links else None
        else:
            found = found[name] if isinstance(link, h5py.HardLink) else None
    return found


def held_here(dataset: h5py.Dataset, name: str) -> None:
    """Raise Damaged if a data set's values are in other files."""
    how = dataset.id.get_create_plist()
    if how.get_layout() == h5py.h5d.VIRTUAL:
        raise Damaged(f'"{name}" is virtual, put together from other data sets')
    if how.get_external_count() or how.get_layout() not in (h5py.h5d.COMPACT, h5py.h5d.CONTIGUOUS, h5py.h5d.CHUNKED):
        raise Damaged(f'"{name}" lies in another file')


def values_in(parent: Any, name: str, **how: Any) -> np.ndarray:
    """All values of a data set that ``dataset_in`` accepts. Raises Damaged."""
    dataset = dataset_in(parent, name, **how)
    try:
        return np.asarray(dataset[()])
    except (OSError, RuntimeError) as error:
        raise Damaged(f'"{name}" cannot be read: {error}') from error


def text_in(thing: Any, name: str) -> str:
    """Attribute ``name`` as a text. Raises Damaged if it is missing or not a single text."""
    if name not in thing.attrs:
        raise Damaged(f'there is no attribute "{name}"')
    found = thing.attrs.get_id(name)
    value = thing.attrs[name] if found.shape == () and h5py.check_string_dtype(found.dtype) else None
    if isinstance(value, bytes):
        value = value.decode("utf-8", "surrogateescape")
    if not isinstance(value, str) or value != value.encode(errors="replace").decode():
        raise Damaged(f'the attribute "{name}" is not a text')
    if len(value) > _MOST_TEXT:
        raise Damaged(f'the attribute "{name}" is longer than {_MOST_TEXT} characters')
    return value


def number_in(thing: Any, name: str) -> float:
    """Attribute ``name`` as a number. Raises Damaged if it is missing or not a single number."""
    if name not in thing.attrs:
        raise Damaged(f'there is no attribute "{name}"')
    found = thing.attrs.get_id(name)
    if found.shape != () or found.dtype.kind not in "iuf":
        raise Damaged(f'the attribute "{name}" is not a number')
    value: float = thing.attrs[name].item()
    return value


def json_in(text: str, what: str) -> Any:
    """Value of a JSON text that is not nested too deeply. Raises Damaged, a sentence that begins with ``what``."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{what} is not JSON: {error}") from error
    try:
        for _ in every_value(value, _DEEPEST):
            pass
    except ValueError as error:
        raise Damaged(f"{what} {error}") from error
    return value


def _own(parent: Any, name: str) -> Any:
    """Object that a name in a group stands for. Raises Damaged if there is none or the name is a link to elsewhere."""
    if not parent.id.links.exists(name.encode()):  # "in" would follow links
        raise Damaged(f'there is no "{name}"')
    if not isinstance(parent.get(name, getlink=True), h5py.HardLink):
        raise Damaged(f'"{name}" is a link to elsewhere')
    try:
        return parent[name]
    except (KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise Damaged(f'"{name}" cannot be opened: {error}') from error


def _most_bytes(file: h5py.File) -> int:
    """Most bytes that a file's data sets may hold: what it takes on disk, since holes in a file cost nothing."""
    if file.driver == "sec2":
        return _taken(file.id.get_vfd_handle())
    return _SPARE + int(file.id.get_filesize())  # ``open_still`` refuses files with holes


def _taken(handle: int) -> int:
    """Bytes that a file may hold, judged by the space that it takes on disk."""
    about = os.fstat(handle)
    return _SPARE + min(about.st_size, _PACKED * 512 * getattr(about, "st_blocks", about.st_size))

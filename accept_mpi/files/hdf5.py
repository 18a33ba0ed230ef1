"""Reading HDF5 files that another person or machine may have written.

HDF5 lets a file name others: external links, data sets whose bytes lie elsewhere, virtual ones. It also lets a few bytes
stand for as many as one likes. None of that is followed here: what is read lies in the file itself, and is no larger.
"""

import errno
import io
import json
import os
import struct
from typing import Any

import h5py
import numpy as np

from accept_mpi.files.regular import open_regular
from accept_mpi.files.values import every_value

_SPARE = 4 << 20  # bytes: a growing file's last rows may not have reached the disk
_PACKED = 4  # a file system that compresses says that a file takes less than it holds
_MOST_TEXT = 16 << 20
_DEEPEST = 64
_NUMBERS = "biuf"
_SUPERBLOCK, _FLAGS_AT, _END_AT = 48, 11, 28  # bytes of a superblock, and where in it what is
_FOLLOWED = 0b101  # open for writing, and readers may follow
_WORD = 0xFFFFFFFF


class Damaged(ValueError):
    """A file is not laid out as it should be. The message says what of it."""


def open_file(path: str | os.PathLike[str]) -> h5py.File:
    """An HDF5 file, open for reading. Raises OSError, with a reason in words, where it is none or cannot be read."""
    with open_regular(path):
        pass
    return _opened(path, locking=False)


def is_followed(path: str | os.PathLike[str]) -> bool:
    """Whether a file says that a writer has it whom readers may follow (HDF5's SWMR): now, or until it was killed."""
    with open_regular(path) as file:
        return _flags(file.read(_SUPERBLOCK)) & _FOLLOWED == _FOLLOWED


def open_followed(path: str | os.PathLike[str]) -> h5py.File:
    """Such a file, such that what comes is seen. Raises OSError. Where HDF5 finds damage in it, it tries again without end:
    so ``open_still`` comes first."""
    return _opened(path, libver="latest", swmr=True, locking=False)


def open_still(path: str | os.PathLike[str]) -> h5py.File:
    """Such a file as it is now, as if nobody wrote it. Raises OSError."""
    with open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > _taken(file.fileno()):
            raise OSError(errno.EINVAL, f"most of its {size} bytes are not there", os.fspath(path))
    return _opened(_Still(path, "rb"))


def _opened(file: Any, **how: Any) -> h5py.File:
    try:
        return h5py.File(file, "r", **how)
    except OSError:
        raise
    except Exception as error:  # HDF5 says what it finds in many ways
        raise OSError(0, " ".join(str(error).split())) from error


class _Still(io.FileIO):
    """A file whose superblock (HDF5's format specification, version 3) does not say that it has a writer."""

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
        """The superblock without its flags; the file ends where it does."""
        end = self.seek(0, os.SEEK_END)
        self.seek(0)
        head = bytearray(super().read(_SUPERBLOCK).ljust(_SUPERBLOCK, b"\0"))
        head[_FLAGS_AT] = 0
        struct.pack_into("<Q", head, _END_AT, end)
        struct.pack_into("<I", head, _SUPERBLOCK - 4, _lookup3(head[:-4]))
        return bytes(head)


def _flags(superblock: bytes) -> int:
    """Of a file's superblock; 0 where it has none."""
    known = superblock.startswith(b"\x89HDF\r\n\x1a\n\x03\x08\x08") and len(superblock) == _SUPERBLOCK
    return superblock[_FLAGS_AT] if known else 0


def _lookup3(data: bytes | bytearray) -> int:
    """HDF5's checksum of metadata (Jenkins 2006)."""

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
    """A group of this very file. Raises Damaged."""
    found = _own(parent, name)
    if not isinstance(found, h5py.Group):
        raise Damaged(f'"{name}" is not a group')
    return found


def dataset_in(
    parent: Any, name: str, kinds: str = _NUMBERS, shape: tuple[int | None, ...] | None = None, dtype: Any = None
) -> h5py.Dataset:
    """A data set of this very file, its size known to be within the file's. Raises Damaged.

    ``kinds``: NumPy's letters of what it may hold, unless ``dtype`` says exactly. ``shape``: None stands for any length.
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


def held_here(dataset: h5py.Dataset, name: str) -> None:
    """Raises Damaged where a data set's values lie in other files."""
    how = dataset.id.get_create_plist()
    if how.get_external_count() or how.get_layout() not in (h5py.h5d.COMPACT, h5py.h5d.CONTIGUOUS, h5py.h5d.CHUNKED):
        raise Damaged(f'"{name}" lies in another file')


def values_in(parent: Any, name: str, **how: Any) -> np.ndarray:
    """All that ``dataset_in`` finds. Raises Damaged."""
    dataset = dataset_in(parent, name, **how)
    try:
        return np.asarray(dataset[()])
    except (OSError, RuntimeError) as error:
        raise Damaged(f'"{name}" cannot be read: {error}') from error


def text_in(thing: Any, name: str) -> str:
    """An attribute that is one text. Raises Damaged."""
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
    """An attribute that is one number. Raises Damaged."""
    if name not in thing.attrs:
        raise Damaged(f'there is no attribute "{name}"')
    found = thing.attrs.get_id(name)
    if found.shape != () or found.dtype.kind not in "iuf":
        raise Damaged(f'the attribute "{name}" is not a number')
    value: float = thing.attrs[name].item()
    return value


def json_in(text: str, what: str) -> Any:
    """JSON that is not nested too deeply. Raises Damaged."""
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
    """What a name in a group stands for, if it is there and no link to elsewhere."""
    if not parent.id.links.exists(name.encode()):  # "in" would follow links
        raise Damaged(f'there is no "{name}"')
    if not isinstance(parent.get(name, getlink=True), h5py.HardLink):
        raise Damaged(f'"{name}" is a link to elsewhere')
    try:
        return parent[name]
    except (KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise Damaged(f'"{name}" cannot be opened: {error}') from error


def _most_bytes(file: h5py.File) -> int:
    """What the data sets of a file may hold: what it takes on the disk, since holes in it are free."""
    if file.driver == "sec2":
        return _taken(file.id.get_vfd_handle())
    return _SPARE + int(file.id.get_filesize())  # without holes: ``open_still``


def _taken(handle: int) -> int:
    """Bytes that a file may hold, by what it takes on the disk."""
    about = os.fstat(handle)
    return _SPARE + min(about.st_size, _PACKED * 512 * getattr(about, "st_blocks", about.st_size))

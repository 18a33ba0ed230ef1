"""Reading files that another person or machine may have written: regular files only, no more of them than was asked for.

A device or a pipe under a name that is only to be read would be waited for, or read, without end.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_PART = 1 << 20


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """A regular file, open for reading. Raises OSError, with a reason in words, where there is none."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))  # a pipe is not waited for
    except ValueError as error:  # a NUL in the name
        raise OSError(errno.EINVAL, str(error), os.fspath(path)) from error
    try:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            kind = "a directory" if stat.S_ISDIR(os.fstat(number).st_mode) else "a device or a pipe"
            raise OSError(errno.EINVAL, f"it is {kind}, not a file", os.fspath(path))
        return open(number, "rb")
    except BaseException:
        os.close(number)
        raise


def read_regular(path: str | os.PathLike[str], most: int) -> bytes:
    """All of a regular file of at most ``most`` bytes. Raises OSError, with a reason in words."""
    with open_regular(path) as file:
        parts, left = [], most + 1
        while left and (part := file.read(min(left, _PART))):
            parts.append(part)
            left -= len(part)
    if not left:
        raise OSError(errno.EFBIG, f"it is larger than the {most} bytes that such a file may have", os.fspath(path))
    return b"".join(parts)


def is_regular(path: Path) -> bool:
    """Whether there is a regular file; False for a name that no file can have."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (OSError, ValueError):
        return False


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Another name, beside ``path``, for a file that takes its place once it is whole. Raises OSError, with a reason in
    words, where something else than a file has that name: a device is not to be replaced."""
    try:
        there = os.stat(path)
    except FileNotFoundError:
        pass
    except ValueError as error:
        raise OSError(errno.EINVAL, str(error), os.fspath(path)) from error
    else:
        if not stat.S_ISREG(there.st_mode):
            raise OSError(errno.EINVAL, "something else than a file has this name", os.fspath(path))
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)

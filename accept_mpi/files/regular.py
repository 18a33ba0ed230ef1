"""Files that another person or machine may have written: only regular ones, inside their folder, of a size that is known
before anything is read. A link may lead anywhere, a device never ends, a pipe may never begin."""

import contextlib
import errno
import grp
import os
import pwd
import stat
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO


def open_regular(path: str | os.PathLike[str], most: int | None = None, links: bool = True) -> BinaryIO:
    """Open a regular file for reading. Raises OSError, with a reason in words, if there is none, if it has more than
    ``most`` bytes, or if it is a link and ``links`` is False."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # do not wait for a pipe's writer
    try:
        number = os.open(path, flags if links else flags | os.O_NOFOLLOW)
    except ValueError as error:  # a NUL in the name
        raise OSError(errno.EINVAL, str(error), os.fspath(path)) from error
    except OSError as error:
        if error.errno == errno.ELOOP and not links:
            raise OSError(error.errno, "a symbolic link, not a file", os.fspath(path)) from error
        raise
    try:
        about = os.fstat(number)
        if not stat.S_ISREG(about.st_mode):
            kind = "a directory" if stat.S_ISDIR(about.st_mode) else "a device or a pipe"
            raise OSError(errno.EINVAL, f"it is {kind}, not a file", os.fspath(path))
        if most is not None and about.st_size > most:
            raise OSError(
                errno.EFBIG, f"it has {about.st_size} bytes, more than the {most} that it may have", os.fspath(path)
            )
        return open(number, "rb")
    except BaseException:
        os.close(number)
        raise


def read_regular(path: str | os.PathLike[str], most: int, links: bool = True) -> bytes:
    """Content of a regular file of at most ``most`` bytes. Raises OSError, with a reason in words."""
    with open_regular(path, most, links) as file:
        return file.read(most)


def is_regular(path: Path) -> bool:
    """True if ``path`` is a regular file; False also for a name that no file can have."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (OSError, ValueError):
        return False


def is_plain_name(name: str) -> bool:
    """True if ``name`` stands for an entry of a folder and cannot lead elsewhere."""
    return 0 < len(name) <= 255 and name.isprintable() and not {"/", "\\"} & set(name) and name not in (".", "..")


def is_private(path: Path) -> bool:
    """True if a file or folder belongs to this user and nobody else may write to it; False for a link. Raises OSError."""
    about = os.lstat(path)
    return not stat.S_ISLNK(about.st_mode) and about.st_uid == os.geteuid() and not about.st_mode & 0o022


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Within the context: a temporary name next to ``path`` for a file that takes its place once it is whole. Raises
    OSError, with a reason in words, if ``path`` is anything but a file: a device must not be replaced."""
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


def foreign(folder: Path) -> str:
    """Reason why the content of a folder may not be the user's own; empty if nobody else can have put it there.

    Cached machine code is run as it is. So the folder and everything in it must belong to the user, others must not be able
    to write there, and nobody else may be able to replace the folder. A group of which only the user is a member does not
    count as others.
    """
    folder = folder.resolve()
    for path in (folder, *(found for found in sorted(folder.rglob("*")))):
        about = path.lstat()
        if about.st_uid != os.getuid():
            return f"{path} is another user's"
        if stat.S_ISLNK(about.st_mode) or _others_write(about):
            return f"others can write {path} (mode {stat.S_IMODE(about.st_mode):04o})"
    for path in folder.parents:
        about = path.stat()
        if about.st_uid not in (os.getuid(), 0):
            return f"{path} is another user's"
        if _others_write(about) and not about.st_mode & stat.S_ISVTX:
            return f"others can write {path} (mode {stat.S_IMODE(about.st_mode):04o})"
    return ""


def _others_write(about: os.stat_result) -> bool:
    if about.st_mode & stat.S_IWOTH:
        return True
    return bool(about.st_mode & stat.S_IWGRP) and not _own_group(about.st_gid)


@lru_cache
def _own_group(number: int) -> bool:
    """True if a group seems to contain only this user: it has the user's name and no other members."""
    try:
        me, group = pwd.getpwuid(os.getuid()), grp.getgrgid(number)
    except KeyError:
        return False
    return number == me.pw_gid and group.gr_name == me.pw_name and set(group.gr_mem) <= {me.pw_name}

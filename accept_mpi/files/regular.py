"""Files that another person or machine may have written: regular ones only, inside their folder, of a size that is known
before anything of them is read. A link may lead anywhere, a device never ends, a pipe never begins."""

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
    """A regular file, open for reading. Raises OSError, with a reason in words, where there is none, where it has more than
    ``most`` bytes, or where it is a link and ``links`` are not to be followed."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe is not waited for
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
    """All of a regular file of at most ``most`` bytes. Raises OSError, with a reason in words."""
    with open_regular(path, most, links) as file:
        return file.read(most)


def is_regular(path: Path) -> bool:
    """Whether there is a regular file; False for a name that no file can have."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (OSError, ValueError):
        return False


def is_plain_name(name: str) -> bool:
    """Whether it names something in a folder, and nothing elsewhere."""
    return 0 < len(name) <= 255 and name.isprintable() and not {"/", "\\"} & set(name) and name not in (".", "..")


def is_private(path: Path) -> bool:
    """Whether a file or folder is this user's own, and nobody else may write to it; a link is not. Raises OSError."""
    about = os.lstat(path)
    return not stat.S_ISLNK(about.st_mode) and about.st_uid == os.geteuid() and not about.st_mode & 0o022


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


def foreign(folder: Path) -> str:
    """Why what lies in a folder may not be the user's own; empty where nobody else can have put it there.

    Machine code is run as it is found. So the folder and what is in it belong to the user, others cannot write there, and
    nobody else can put another folder in its place. A group that is the user's own is nobody else.
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
    """Whether a group has only this user in it, as far as one can see: named as the user is, without other members."""
    try:
        me, group = pwd.getpwuid(os.getuid()), grp.getgrgid(number)
    except KeyError:
        return False
    return number == me.pw_gid and group.gr_name == me.pw_name and set(group.gr_mem) <= {me.pw_name}

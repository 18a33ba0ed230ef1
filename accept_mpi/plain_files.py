"""Files that another machine or person may have written are plain ones, inside their folder, of a size that is known before
anything of them is read: a link may lead anywhere, a device never ends, a pipe never begins."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def is_plain_name(name: str) -> bool:
    """Whether it names something in a folder, and nothing elsewhere."""
    return 0 < len(name) <= 255 and name.isprintable() and not {"/", "\\"} & set(name) and name not in (".", "..")


def shown(text: str) -> str:
    """A text of unknown origin as a part of one line."""
    safe = text if text.isprintable() else ascii(text)[1:-1]
    return safe if len(safe) <= 80 else f"{safe[:77]}..."


def open_plain(path: Path, most: int | None = None) -> BinaryIO:
    """A regular file to read. Raises OSError: also where it is a link or anything else, or has more than ``most`` bytes."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:  # a NUL in it
        raise OSError(errno.EINVAL, str(error), str(path)) from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(error.errno, "a symbolic link, not a file", str(path)) from error
        raise
    try:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if most is not None and about.st_size > most:
            raise OSError(errno.EFBIG, f"has {about.st_size} bytes, more than the {most} that it may have", str(path))
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_plain(path: Path, most: int) -> bytes:
    """All of a regular file of at most ``most`` bytes. Raises OSError."""
    with open_plain(path, most) as file:
        return file.read(most)


def is_private(path: Path) -> bool:
    """Whether a file or folder is this user's own, and nobody else may write to it; a link is not. Raises OSError."""
    about = os.lstat(path)
    return not stat.S_ISLNK(about.st_mode) and about.st_uid == os.geteuid() and not about.st_mode & 0o022

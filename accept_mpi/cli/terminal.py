"""Output that cannot be written: its reader is gone (a closed terminal, the other end of a pipe), or its disk is full."""

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator

from accept_mpi.errors import UserError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class _Raw(io.FileIO):
    """A file that drops what it cannot write, or, ``telling``, what its disk has no room for is still an error."""

    telling = False

    def write(self, data: "io.ReadableBuffer") -> int | None:  # type: ignore[override, name-defined]
        try:
            return super().write(data)
        except OSError as error:
            if self.telling and error.errno in _FULL:
                raise
            return memoryview(data).nbytes


def outlive_terminal(full: bool = True) -> None:
    """Make writes to standard output and error succeed even if nobody reads them any more, or, if ``full``, their disk is
    full."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__") or not isinstance(stream, io.TextIOWrapper):
            continue  # replaced by someone else, such as pytest
        stream.flush()
        raw = _Raw(stream.fileno(), "w", closefd=False)
        raw.telling = not full
        steady = io.BufferedWriter(raw)
        # Standard error is line-buffered, as Python's own is.
        lines = stream.line_buffering or name == "stderr"
        setattr(sys, name, io.TextIOWrapper(steady, stream.encoding, stream.errors, line_buffering=lines))


@contextlib.contextmanager
def printing() -> Iterator[None]:
    """Turn what a full disk does to output in the ``with`` block into a UserError. A closed pipe stays what it is."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno not in _FULL:
            raise
        raise UserError(f"cannot write the output: {error.strerror}") from error


def last_words(text: str) -> None:
    """Write a command's last line to standard error. What neither stream can write is dropped, so that nothing fails when
    the process ends."""
    with contextlib.suppress(OSError):
        print(text, end="", file=sys.stderr, flush=True)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

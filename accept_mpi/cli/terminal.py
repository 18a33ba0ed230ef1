"""Output that survives the loss of its reader: a closed terminal, or the other end of a pipe."""

import errno
import io
import sys

_GONE = (errno.EIO, errno.EPIPE, errno.ENXIO, errno.ENODEV)


class _Raw(io.FileIO):
    """A file that drops what it cannot write because nobody reads it any more."""

    def write(self, data: "io.ReadableBuffer") -> int | None:  # type: ignore[override, name-defined]
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _GONE:
                raise
            return memoryview(data).nbytes


def outlive_terminal() -> None:
    """Make writes to standard output and error succeed even if nobody reads them any more."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__") or not isinstance(stream, io.TextIOWrapper):
            continue  # replaced by someone else, such as pytest
        stream.flush()
        steady = io.BufferedWriter(_Raw(stream.fileno(), "w", closefd=False))
        # Standard error is line-buffered, as Python's own is.
        lines = stream.line_buffering or name == "stderr"
        setattr(sys, name, io.TextIOWrapper(steady, stream.encoding, stream.errors, line_buffering=lines))

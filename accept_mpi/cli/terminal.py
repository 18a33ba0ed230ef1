"""Output whose reader may go away: a terminal that is closed, a pipe's other end."""

import errno
import io
import sys

_GONE = (errno.EIO, errno.EPIPE, errno.ENXIO, errno.ENODEV)


class _Raw(io.FileIO):
    """What nobody reads any more is dropped."""

    def write(self, data: "io.ReadableBuffer") -> int | None:  # type: ignore[override, name-defined]
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _GONE:
                raise
            return memoryview(data).nbytes


def outlive_terminal() -> None:
    """From now on standard output and error never fail because nobody is there to read them."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__") or not isinstance(stream, io.TextIOWrapper):
            continue  # somebody else's, as under pytest
        stream.flush()
        steady = io.BufferedWriter(_Raw(stream.fileno(), "w", closefd=False))
        # Errors are written at once, as Python does it.
        lines = stream.line_buffering or name == "stderr"
        setattr(sys, name, io.TextIOWrapper(steady, stream.encoding, stream.errors, line_buffering=lines))

"""The HDF5 log of a run: facts, per-step results and the trace. Written by rank 0, readable while it grows.

Layout, version 1 (attribute ``version`` of the root; ``format`` is "accept-mpi log"):

====================  ====================================================================================
``/`` attributes      ``job`` (JSON text), ``plan`` (JSON), ``facts`` (JSON: versions, hosts, clock offsets,
                      ...), ``created`` (ISO 8601, UTC)
``/steps``            one row an optimizer step: STEPS of ``log_layout``
``/evals``            one row an evaluation on the test set: EVALS
``/trace``            one row an action or transfer: TRACE. Times are seconds on rank 0's clock since the
                      run began
``/events``           what happened besides (checkpoints, warnings, the end): EVENTS
``/plans``            who held which layers from when on: PLANS (``plan`` is the first one)
``/survey``           what devices and links were measured to do before "auto" cuts (``survey``), if they were
====================  ====================================================================================

The file appears under its name only when its layout is complete, and is in HDF5's single-writer multiple-readers mode from
then on: it opens at any moment, also after ``kill -9`` (with ``open_log``, or ``h5py.File(path, swmr=True)``).
"""

import contextlib
import json
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from accept_mpi.errors import UserError
from accept_mpi.files.hdf5 import is_followed, number_in, open_file, open_followed, open_still, text_in
from accept_mpi.files.regular import is_regular
from accept_mpi.logs.format import BACKWARD, EVALS, EVENTS, FORWARD, KINDS, PLANS, STEPS, TABLES, TRACE, check_log

__all__ = [
    "BACKWARD", "EVALS", "EVENTS", "FORMAT", "FORWARD", "KINDS", "PLANS", "STEPS", "TRACE", "VERSION", "LogWriter", "Rows",
    "open_log", "read_facts",
]  # fmt: skip

FORMAT = "accept-mpi log"
VERSION = 1
_LOOKS, _BETWEEN_LOOKS = 5, 0.1  # seconds

Rows = npt.NDArray[Any]
_TEXT_BYTES = EVENTS["text"].itemsize


class LogWriter:
    """Writes one log. Rows are buffered and appended at most once a second, so that a step costs no disk wait."""

    def __init__(
        self,
        path: Path,
        job: str,
        plan: str,
        facts: dict[str, Any],
        earlier: dict[str, Rows] | None = None,
        more: Callable[[h5py.File], None] = lambda file: None,
    ):
        """Create the log at ``path``; ``earlier`` holds rows to begin with, by table (a resumed run's history); ``more``
        writes what else there is.

        Raises OSError where the directory cannot be written.
        """
        self.path = path
        self._pending: dict[str, list[Rows]] = {name: [] for name in TABLES}
        self._last_flush = time.monotonic()
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        file = h5py.File(temporary, "w", libver="latest")
        try:
            file.attrs.update(
                format=FORMAT,
                version=VERSION,
                job=job,
                plan=plan,
                facts=json.dumps(facts),
                created=datetime.now(UTC).isoformat(timespec="seconds"),
            )
            for name, dtype in TABLES.items():
                rows = (earlier or {}).get(name, np.empty(0, dtype))
                chunk = max(64, (32 << 10) // dtype.itemsize)
                file.create_dataset(name, data=rows, dtype=dtype, maxshape=(None,), chunks=(chunk,))
            more(file)
            file.swmr_mode = True
            os.replace(temporary, path)
        except BaseException:
            file.close()
            temporary.unlink(missing_ok=True)
            raise
        self._file = file

    def append(self, table: str, rows: Rows) -> None:
        """Add rows (of the table's dtype) to ``table``; they reach the disk with the next flush."""
        if len(rows):
            self._pending[table].append(np.atleast_1d(rows))
        if time.monotonic() - self._last_flush > 1.0:
            self.flush()

    def event(self, seconds: float, step: int, text: str) -> None:
        """Note what happened at ``seconds`` of the run."""
        self.append("events", np.array([(seconds, step, text.encode(errors="backslashreplace")[:_TEXT_BYTES])], EVENTS))

    def flush(self) -> None:
        """Write all buffered rows out."""
        self._last_flush = time.monotonic()
        for name, parts in self._pending.items():
            if not parts:
                continue
            rows = np.concatenate(parts)
            parts.clear()
            dataset = self._file[name]
            dataset.resize((len(dataset) + len(rows),))
            dataset[-len(rows) :] = rows
            dataset.flush()

    def close(self) -> None:
        """Write out and close; closing twice is harmless."""
        if self._file:
            with contextlib.suppress(OSError):
                self.flush()
            self._file.close()


def open_log(path: str | os.PathLike[str]) -> h5py.File:
    """Open a log for reading: finished, growing, or left behind by a killed run. What is in it is as ``log_layout`` says.

    Raises UserError with one sentence where there is none, or the file is not a log of a version known here.
    """
    if not is_regular(Path(path)):
        raise UserError(f"{path}: there is no such log file")
    try:
        if not is_followed(path):
            return _checked(path, open_file)
        for left in reversed(range(_LOOKS)):
            try:
                _checked(path, open_still).close()
                break
            except UserError:
                if not left:
                    raise
                time.sleep(_BETWEEN_LOOKS)  # its writer may have been in the middle of something
        return open_followed(path)
    except OSError as error:
        raise UserError(f"{path}: not a readable HDF5 file ({error.strerror or error})") from error


def _checked(path: str | os.PathLike[str], opened: Callable[[str | os.PathLike[str]], h5py.File]) -> h5py.File:
    """A log, open, that has been looked through. Raises UserError, and OSError where it is no HDF5 file."""
    file = opened(path)
    try:
        if "format" not in file.attrs or text_in(file, "format") != FORMAT:
            raise UserError(f"{path}: an HDF5 file, but not a log of accept-mpi")
        if (found := number_in(file, "version")) != VERSION:
            raise UserError(f"{path}: log layout version {found}; this program reads version {VERSION}")
        check_log(file)
    except UserError:
        file.close()
        raise
    except Exception as error:  # HDF5 says in many ways what it finds damaged
        file.close()
        raise UserError(f"{path}: a damaged log: {error}") from error
    return file


def read_facts(file: h5py.File) -> dict[str, Any]:
    """The run's facts, with ``job`` and ``plan`` decoded beside them."""
    facts: dict[str, Any] = json.loads(file.attrs["facts"])
    return facts | {"job": json.loads(file.attrs["job"]), "plan": json.loads(file.attrs["plan"])}

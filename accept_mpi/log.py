"""The HDF5 log of a run: facts, per-step results and the trace. Written by rank 0, readable while it grows.

Layout, version 1 (attribute ``version`` of the root; ``format`` is "accept-mpi log"):

====================  ====================================================================================
``/`` attributes      ``job`` (JSON text), ``plan`` (JSON), ``facts`` (JSON: versions, hosts, clock offsets,
                      ...), ``created`` (ISO 8601, UTC)
``/steps``            one row an optimizer step: STEPS below
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

FORMAT = "accept-mpi log"
VERSION = 1

#: Kinds of trace row, in the order of their number in the column ``kind``. F, B, W, U: forward, backward (of inputs, where
#: W is apart), weight gradient, update. E: forward of evaluation. On the data plane: encode, send (given to MPI here to
#: arrived there; both on rank 0's clock), decode (arrived to tensor). Pauses: wait (for a message), checkpoint, snapshot
#: (both: a copy is made, to be sent in the background).
KINDS = ("F", "B", "W", "U", "E", "encode", "send", "decode", "wait", "checkpoint", "snapshot")
FORWARD, BACKWARD = 0, 1

TRACE = np.dtype(
    [
        ("start", "f8"),  # seconds
        ("end", "f8"),
        ("rank", "i4"),
        ("stage", "i4"),
        ("kind", "u1"),  # index into KINDS
        ("boundary", "i2"),  # between stage `boundary` and the next; -1 for actions
        ("direction", "i1"),  # FORWARD or BACKWARD; -1 for actions
        ("step", "i8"),
        ("micro_batch", "i4"),  # -1 for U and checkpoint
        ("bytes_raw", "i8"),  # before coding; 0 for actions
        ("bytes_wire", "i8"),  # after coding, header included
    ]
)
STEPS = np.dtype(
    [
        ("step", "i8"),  # counted from 1: this many updates have been made
        ("epoch", "i4"),  # counted from 0
        ("samples", "i4"),
        ("loss", "f8"),  # mean over the step's samples, before its update
        ("accuracy", "f8"),  # share of targets hit, NaN where that means nothing
        ("lr", "f8"),
        ("end", "f8"),  # seconds since the run began
        ("samples_per_s", "f8"),
    ]
)
EVALS = np.dtype([("step", "i8"), ("epoch", "i4"), ("samples", "i4"), ("loss", "f8"), ("accuracy", "f8"), ("end", "f8")])
_TEXT_BYTES = 480
EVENTS = np.dtype([("time", "f8"), ("step", "i8"), ("text", f"S{_TEXT_BYTES}")])
PLANS = np.dtype(
    [
        ("time", "f8"),  # when it began, in seconds: a row for each rank of each stage
        ("step", "i8"),  # steps made before
        ("stage", "i4"),
        ("rank", "i4"),
        ("start", "i4"),  # first layer
        ("stop", "i4"),
    ]
)
_TABLES = {"steps": STEPS, "evals": EVALS, "trace": TRACE, "events": EVENTS, "plans": PLANS}

Rows = npt.NDArray[Any]


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
        self._pending: dict[str, list[Rows]] = {name: [] for name in _TABLES}
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
            for name, dtype in _TABLES.items():
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
        self.append("events", np.array([(seconds, step, text.encode()[:_TEXT_BYTES])], EVENTS))

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
    """Open a log for reading: finished, growing, or left behind by a killed run.

    Raises UserError with one sentence where there is none, or the file is not a log of a version known here.
    """
    if not Path(path).is_file():
        raise UserError(f"{path}: there is no such log file")
    try:
        file = h5py.File(path, "r", libver="latest", swmr=True, locking=False)
    except OSError as error:
        raise UserError(f"{path}: not a readable HDF5 file ({error})") from error
    if file.attrs.get("format") != FORMAT:
        file.close()
        raise UserError(f"{path}: an HDF5 file, but not a log of accept-mpi")
    if file.attrs["version"] != VERSION:
        found = file.attrs["version"]
        file.close()
        raise UserError(f"{path}: log layout version {found}; this program reads version {VERSION}")
    return file


def read_facts(file: h5py.File) -> dict[str, Any]:
    """The run's facts, with ``job`` and ``plan`` decoded beside them."""
    facts: dict[str, Any] = json.loads(file.attrs["facts"])
    return facts | {"job": json.loads(file.attrs["job"]), "plan": json.loads(file.attrs["plan"])}

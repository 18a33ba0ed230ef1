"""The observer that writes the HDF5 log."""

import contextlib
import errno
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from accept_mpi.errors import UserError
from accept_mpi.files.hdf5 import reason
from accept_mpi.logs.format import EVALS, EVENTS, FORMAT, METRICS, STEPS, TABLES, VERSION, Rows
from accept_mpi.logs.observers import Evaluated, Observer, StepDone
from accept_mpi.logs.timeline import plan_rows
from accept_mpi.plan import Plan

_TEXT_BYTES = EVENTS["text"].itemsize
_WHOLE = 4_000_000
"""Rows of the trace, of 57 bytes each, after which it gets a tenth of the steps from then on; and so again."""
_TOGETHER = 10  # consecutive steps that it gets then


class LogWriter:
    """Writes one log. Rows are buffered, and written once per second and with every checkpoint: few steps wait for the disk.

    Methods raise UserError if the disk refuses. The file then stays as it is: HDF5 does not survive another try.
    """

    def __init__(
        self,
        path: Path,
        job: str,
        plan: str,
        facts: dict[str, Any],
        earlier: dict[str, Rows] | None = None,
        more: Callable[[h5py.File], None] = lambda file: None,
    ):
        """Create the log at ``path``. ``job`` and ``plan`` are JSON texts.

        ``earlier``: the first rows, by table (a resumed run's history). ``more``: writes further content into the open file.
        """
        self.path = path
        self._pending: dict[str, list[Rows]] = {name: [] for name in TABLES}
        self._last_flush = time.monotonic()
        with _writing(path):
            self._file = self._created(job, plan, facts, earlier, more)
            self._tables = {name: self._file[name] for name in TABLES}
            self.rows = {name: len(table) for name, table in self._tables.items()}
            """Number of each table's rows, on the disk or not yet."""
            self._place = os.stat(path)
        self._open = True

    def _created(
        self,
        job: str,
        plan: str,
        facts: dict[str, Any],
        earlier: dict[str, Rows] | None,
        more: Callable[[h5py.File], None],
    ) -> h5py.File:
        path = self.path
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        file: h5py.File | None = None
        try:
            file = h5py.File(temporary, "w", libver="latest")
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
            with contextlib.suppress(OSError, RuntimeError):
                if file is not None:
                    file.close()
            temporary.unlink(missing_ok=True)
            raise
        return file

    def newest(self, table: str) -> int:
        """The last step of which a table has a row on the disk; 0 without any."""
        return int(max(self._tables[table]["step"], default=0))

    def append(self, table: str, rows: Rows) -> None:
        """Add rows (of the table's dtype) to ``table``; they reach the disk with the next flush."""
        if len(rows):
            self._pending[table].append(np.atleast_1d(rows))
            self.rows[table] += len(self._pending[table][-1])
        if time.monotonic() - self._last_flush > 1.0:
            self.flush()

    def event(self, seconds: float, step: int, text: str) -> None:
        """Add an event at ``seconds`` of the run."""
        self.append("events", np.array([(seconds, step, text.encode(errors="backslashreplace")[:_TEXT_BYTES])], EVENTS))

    def flush(self) -> None:
        """Write all buffered rows to disk."""
        self._last_flush = time.monotonic()
        if self._open:
            with self._tried():
                self._check_place()
        # Evaluations last: where one is on the disk, so are its metrics, whenever this process dies.
        for name, parts in sorted(self._pending.items(), key=lambda one: one[0] == "evals"):
            if not parts or not self._open:
                continue
            rows = np.concatenate(parts)
            parts.clear()
            dataset = self._tables[name]
            with self._tried():
                dataset.resize((len(dataset) + len(rows),))
                dataset[-len(rows) :] = rows
                dataset.flush()

    def close(self) -> None:
        """Flush and close the file; closing it twice is harmless."""
        self.flush()
        if self._open:
            with self._tried():
                self._file.close()
            self._open = False

    def _check_place(self) -> None:
        """Raise OSError if the file is no longer under its name: what is written to it then would be lost with it."""
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self.path), self._place):
                return
        raise OSError(errno.ENOENT, "it has been removed, or replaced by another one")

    @contextlib.contextmanager
    def _tried(self) -> Iterator[None]:
        """A part of writing, after whose failure nothing more is written."""
        try:
            with _writing(self.path):
                yield
        except UserError:
            self._open = False
            raise


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn errors of the ``with`` block into a UserError. HDF5 reports a full disk by several kinds of exceptions."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise UserError(f"cannot write the log {path}: {reason(error)}") from error


class LogObserver(Observer):
    """Appends to the log what an observer sees. Raises UserError if the disk refuses."""

    def __init__(self, writer: LogWriter) -> None:
        self._writer = writer
        self._known, self._evaluated, self._measured = map(writer.newest, ("steps", "evals", "metrics"))
        self._period = _TOGETHER

    def step(self, done: StepDone) -> None:
        if done.step > self._known:  # else told again, since rank 0 was lost
            self._writer.append("steps", np.array([astuple(done)], STEPS))

    def evaluated(self, result: Evaluated) -> None:
        if result.step <= self._evaluated:  # made again after a loss
            return
        if result.step > self._measured:
            named = [(result.step, name.encode(), value) for name, value in result.metrics.items()]
            self._writer.append("metrics", np.array(named, METRICS))
        self._writer.append("evals", np.array([tuple(getattr(result, name) for name in EVALS.names or ())], EVALS))

    def trace(self, rows: Rows) -> None:
        """Of a run of weeks the trace gets some consecutive steps now and then: it would fill the disk."""
        period = _TOGETHER * 10 ** (self._writer.rows["trace"] // _WHOLE)
        if period > self._period and len(rows):
            step = int(rows["step"].max())
            self.event(float(rows["start"].max()), step, f"the trace has {_TOGETHER} of {period} steps from now on")
            self._period = period
        self._writer.append("trace", rows[rows["step"] % period < _TOGETHER])

    def event(self, seconds: float, step: int, text: str) -> None:
        self._writer.event(seconds, step, text)

    def planned(self, seconds: float, step: int, plan: Plan) -> None:
        """A deployment begins with this plan, whose ranks are numbered as in the trace."""
        self._writer.append("plans", plan_rows(plan, seconds, step))
        self._writer.flush()

    def persist(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

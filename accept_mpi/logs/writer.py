"""The observer that writes the HDF5 log."""

from dataclasses import astuple

import numpy as np

from accept_mpi.errors import UserError
from accept_mpi.logs.log import EVALS, STEPS, LogWriter, Rows
from accept_mpi.logs.observers import Evaluated, StepDone
from accept_mpi.logs.timeline import plan_rows
from accept_mpi.plan import Plan


class LogObserver:
    """Appends what happens to the log. A disk that will not have it ends the run with one sentence."""

    def __init__(self, writer: LogWriter) -> None:
        self._writer = writer

    def step(self, done: StepDone) -> None:
        self._append("steps", np.array([astuple(done)], STEPS))

    def evaluated(self, result: Evaluated) -> None:
        self._append("evals", np.array([astuple(result)], EVALS))

    def trace(self, rows: Rows) -> None:
        self._append("trace", rows)

    def event(self, seconds: float, step: int, text: str) -> None:
        try:
            self._writer.event(seconds, step, text)
        except OSError as error:
            raise UserError(f"cannot write the log {self._writer.path}: {error}") from error

    def planned(self, seconds: float, step: int, plan: Plan) -> None:
        """A term begins with this plan, its ranks as in the trace."""
        self._append("plans", plan_rows(plan, seconds, step))

    def close(self) -> None:
        self._writer.close()

    def _append(self, table: str, rows: Rows) -> None:
        try:
            self._writer.append(table, rows)
        except OSError as error:
            raise UserError(f"cannot write the log {self._writer.path}: {error}") from error

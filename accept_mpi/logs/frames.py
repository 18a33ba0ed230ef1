"""A run's log as pandas frames, for notebooks."""

import json
import os
from typing import Any

from accept_mpi.errors import UserError
from accept_mpi.files.hdf5 import text_in
from accept_mpi.logs.format import KINDS, TABLES, rows_of
from accept_mpi.logs.reader import log_in, open_log


class Run:
    """What a run has written so far. Frames: ``steps``, ``evals``, ``metrics``, ``trace``, ``events`` and ``plans``, whose
    columns ``logs.format`` describes; in ``trace``, kinds are words and directions "forward" or "backward"."""

    steps: Any
    evals: Any
    metrics: Any
    trace: Any
    events: Any
    plans: Any
    job: dict[str, Any]
    plan: dict[str, Any]
    facts: dict[str, Any]

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Read a log, or that of a run's directory. Raises UserError if there is none, or pandas is missing."""
        try:
            import pandas
        except ImportError as error:
            raise UserError("open_run needs pandas: pip install pandas") from error
        with open_log(log_in(path)) as file:
            self.job, self.plan, self.facts = (json.loads(text_in(file, name)) for name in ("job", "plan", "facts"))
            for name in TABLES:
                frame = pandas.DataFrame(rows_of(file, name))
                for column in ("text", "name"):
                    if column in frame:
                        frame[column] = frame[column].str.decode("utf-8", errors="replace")
                setattr(self, name, frame)
        if len(self.trace):
            self.trace["kind"] = pandas.Categorical.from_codes(self.trace["kind"], list(KINDS))
            self.trace["direction"] = self.trace["direction"].map({-1: "", 0: "forward", 1: "backward"})

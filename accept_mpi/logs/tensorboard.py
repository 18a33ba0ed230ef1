"""A log's curves as TensorBoard's event files."""

import math
from datetime import datetime
from pathlib import Path

from accept_mpi.errors import UserError
from accept_mpi.files.hdf5 import text_in
from accept_mpi.logs.format import rows_of
from accept_mpi.logs.reader import open_log, read_facts

_OURS = ".accept-mpi"
"""End of the names of the files that are written here, and replaced."""


def export_tensorboard(log: Path, out: Path) -> int:
    """Write losses, accuracies, metrics, speed and learning rate of a log to an event file in the folder ``out``, in place
    of the one that an earlier call has written there; returns the number of values. Raises UserError if there is no log,
    tensorboardX is missing, or nothing can be written there."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise UserError("TensorBoard's files need tensorboardX: pip install tensorboardX") from error
    with open_log(log) as file:
        facts = read_facts(file)
        began = datetime.fromisoformat(text_in(file, "created")).timestamp() - float(facts.get("created_s", 0.0))
        steps, evals, metrics = (rows_of(file, name) for name in ("steps", "evals", "metrics"))
    columns = [("train", steps, name) for name in ("loss", "accuracy", "lr", "samples_per_s")]
    columns += [("test", evals, name) for name in ("loss", "accuracy")]
    rows = [
        (f"{which}/{name}", float(row[name]), int(row["step"]), float(row["end"]))
        for which, table, name in columns
        for row in table
    ]
    ends = {int(row["step"]): float(row["end"]) for row in evals}
    rows += [
        (f"test/{name.decode(errors='replace')}", float(value), int(step), ends.get(int(step), 0.0))
        for step, name, value in metrics
    ]
    try:
        for old in out.glob(f"events.out.tfevents.*{_OURS}"):
            old.unlink()
        with SummaryWriter(str(out), filename_suffix=_OURS) as writer:
            for tag, value, step, seconds in rows:
                if math.isfinite(value):
                    writer.add_scalar(tag, value, step, walltime=began + seconds)
    except OSError as error:
        raise UserError(f"{out}: cannot write: {error.strerror or error}") from error
    return sum(math.isfinite(value) for _, value, _, _ in rows)

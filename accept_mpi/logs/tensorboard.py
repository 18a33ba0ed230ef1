"""A log's curves as TensorBoard's event files."""

import math
import tempfile
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

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
        from tensorboardX.event_file_writer import EventsWriter
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
    rows = [row for row in rows if math.isfinite(row[1])]
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out) as beside:
            _write(EventsWriter(f"{beside}/events", _OURS), rows, began)
            for old in out.glob(f"events.out.tfevents.*{_OURS}"):
                old.unlink()
            for whole in Path(beside).iterdir():
                whole.rename(out / whole.name)
    except OSError as error:
        raise UserError(f"{out}: cannot write: {error.strerror or error}") from error
    return len(rows)


def _write(writer: Any, rows: Iterable[tuple[str, float, int, float]], began: float) -> None:
    """Write rows of tag, value, step and second of the run. Raises OSError: not by tensorboardX's SummaryWriter, which
    writes in a thread, and waits for that for ever where the disk is full."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.summary import scalar

    for tag, value, step, seconds in rows:
        writer.write_event(Event(wall_time=began + seconds, step=step, summary=scalar(tag, value)))
    writer.close()

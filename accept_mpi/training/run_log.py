"""Output directory, log and observers of a run."""

import contextlib
import json
import math
from pathlib import Path
from typing import Any

from accept_mpi.errors import UserError
from accept_mpi.job import Job
from accept_mpi.logs.format import Rows
from accept_mpi.logs.observers import Evaluated
from accept_mpi.logs.reader import open_log
from accept_mpi.logs.writer import LogWriter
from accept_mpi.plan import Plan
from accept_mpi.profiling.cluster_profile import ClusterProfile


def prepare_directory(directory: Path) -> None:
    """Make the output directory. Raises UserError where it cannot be written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / ".writable"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise UserError(f"output.directory: cannot write to {directory}: {error.strerror}") from error


def begin_log(
    directory: Path,
    job: Job,
    plan: Plan,
    facts: dict[str, Any],
    resumed_step: int,
    cluster: ClusterProfile | None = None,
    run: str | None = None,
) -> LogWriter:
    """A new log in ``directory``, with the ``cluster`` that the plan rests on.

    A log that is there already is kept under another name; a resumed run's begins with the steps and evaluations that led to
    its checkpoint. ``run``: after a loss, this run's name: a log that bears it is its own, whose writer was lost, and all of
    it goes on here.
    """
    path = directory / "log.h5"
    earlier: dict[str, Rows] = {}
    try:
        if path.exists():
            if resumed_step or run:
                with contextlib.suppress(UserError):  # kept under its other name, whatever it is
                    earlier = _earlier(path, resumed_step, run)
            number = 1
            while (kept := directory / f"log.{number}.h5").exists():
                number += 1
            path.rename(kept)

        def more(file: Any) -> None:
            if cluster is not None:
                cluster.write(file.create_group("survey"))

        return LogWriter(path, job.to_json(), plan.to_json(), facts, earlier, more)
    except OSError as error:
        raise UserError(f"output.directory: cannot write {path}: {error}") from error


def _earlier(path: Path, step: int, run: str | None) -> dict[str, Rows]:
    """What led to a checkpoint, or to the loss of the writer. Raises UserError where it cannot be read."""
    with open_log(path) as old:
        earlier = {name: old[name][old[name]["step"] <= step] for name in ("steps", "evals")}
        if run and json.loads(old.attrs["facts"]).get("run") == run:
            return earlier | {name: old[name][:] for name in ("trace", "events", "plans") if name in old}
    # Times count from the beginning of this run: what came before it happened at negative times.
    ends = [rows["end"].max() for rows in earlier.values() if len(rows)]
    for rows in earlier.values():
        rows["end"] -= max(ends, default=0.0)
    return earlier


def summary_line(result: Evaluated | None) -> str:
    """The last evaluation as text."""
    if result is None:
        return "no evaluation"
    accuracy = "" if math.isnan(result.accuracy) else f"test accuracy {100 * result.accuracy:.2f} %, "
    return f"{accuracy}test loss {result.loss:.4f}"


def facts_of(hosts: list[dict[str, Any]], plan: Plan, layers: list[str], parameters: int, **more: Any) -> dict[str, Any]:
    """A run's facts for the log."""
    unlisted = ("machine_id", "versions")
    return {
        "versions": hosts[0]["versions"],
        "hosts": [
            {k: v for k, v in host.items() if k not in unlisted} | {"stage": plan.place(host["rank"]).stage}
            for host in hosts
        ],
        "layers": layers,
        "parameters": parameters,
        **more,
    }

"""The job file is rank 0's: its text goes to all ranks, and one that has another under the same name ends the run."""

from collections.abc import Sequence
from pathlib import Path

from accept_mpi.comm.runtime import Runtime
from accept_mpi.errors import UserError
from accept_mpi.job import Job, parse, read_text


def read_job(runtime: Runtime, path: Path, overrides: Sequence[str]) -> Job:
    """Rank 0's job file, on every rank; a rank that has a file under the same path must have the same text there."""
    mine = runtime.agree("the job file", lambda: read_text(path) if runtime.rank == 0 else None)
    text = runtime.messenger.broadcast(mine, runtime.startup_seconds, "the job file")

    def check() -> Job:
        if runtime.rank and path.is_file() and read_text(path) != text:
            raise UserError(f"{path}: differs from rank 0's file of the same name on {runtime.hosts[0]['host']}")
        return parse(text, str(path), overrides)

    return runtime.agree("the job file", check)

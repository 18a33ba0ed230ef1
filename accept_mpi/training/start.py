"""The job file is rank 0's: its text goes to all ranks, and one that has another under the same name ends the run."""

import contextlib
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from accept_mpi.comm.runtime import Runtime
from accept_mpi.errors import UserError
from accept_mpi.job import Job
from accept_mpi.job_file import parse, read_text
from accept_mpi.launch.ownership import Ownership
from accept_mpi.launch.run_identity import RunIdentity


def read_job(runtime: Runtime, path: Path, overrides: Sequence[str]) -> Job:
    """Rank 0's job file, on every rank; a rank that has a file under the same path must have the same text there."""
    mine = runtime.agree("the job file", lambda: read_text(path) if runtime.rank == 0 else None)
    text = runtime.messenger.broadcast(mine, runtime.startup_seconds, "the job file")

    def check() -> Job:
        if runtime.rank and path.is_file() and read_text(path) != text:
            raise UserError(f"{path}: differs from rank 0's file of the same name on {runtime.hosts[0]['host']}")
        return parse(text, str(path), overrides)

    return runtime.agree("the job file", check)


@dataclass(frozen=True)
class Options:
    """The command line of ``train``."""

    job: Path
    overrides: tuple[str, ...] = ()
    resume: Path | None = None
    quiet: bool = False
    supervised: RunIdentity | None = None
    """Under ``launch``."""


@contextlib.contextmanager
def own(runtime: "Runtime", directory: Path, supervised: RunIdentity | None) -> Iterator[Ownership]:
    """All ranks together, before a run touches anything. Rank 0 takes the directory, or where there is none yet, has to as
    soon as it has made it. Whoever is rank 0 later takes it then. Raises Agreed."""
    runtime.agree("the hosts", lambda: _check_place(supervised, runtime.rank, runtime.host))
    mine = supervised.name if supervised else secrets.token_hex(8)
    run = runtime.messenger.broadcast(mine, runtime.startup_seconds, "the run's name")
    ownership = Ownership(directory, run, supervised is not None)
    here = runtime.rank == 0 and directory.is_dir()
    runtime.agree("the output directory", lambda: ownership.take() if here else None)
    try:
        yield ownership
    finally:
        ownership.release()


def _check_place(supervised: RunIdentity | None, rank: int, host: str) -> None:
    wrong = supervised.misplaced(rank) if supervised else None
    if wrong:
        raise UserError(f"{host}: {wrong}")

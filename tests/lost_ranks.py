"""What the tests that kill ranks share."""

import contextlib
import time
from functools import cache
from pathlib import Path

import samples
import torch
from conftest import HANGS, finish, mpirun_command, python

from accept_mpi.failpoints import VARIABLE


@cache
def expected() -> dict[str, torch.Tensor]:
    """The weights of the small CNN in one plain process."""
    train = samples.CNN["train"]
    return samples.plain(samples.CNN).train(train["steps"], train["batch_size"], train["micro_batches"])


def run(folder: Path, arguments: list[object], faults: str, ranks: int, deadline: float = HANGS) -> tuple[int, str]:
    """Exit code and output of ``python *arguments`` under ULFM, with ranks that die as ``faults`` says."""
    mpirun, *count = mpirun_command(ranks)
    # A killed rank leaves Open MPI's shared memory behind: let it lie in the test's own folder.
    more = {VARIABLE: faults, "OMPI_MCA_btl_sm_backing_directory": str(folder)}
    command = [mpirun, "--with-ft", "ulfm", *count, *python(), *map(str, arguments)]
    found = finish(command, folder, more, deadline)
    return found.code, found.out


def processes(folder: Path) -> list[int]:
    """Processes that run in ``folder``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (entry / "cwd").resolve() == folder and "\nState:\tZ" not in (entry / "status").read_text():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def left_behind(folder: Path, seconds: float = 10.0) -> list[int]:
    """Processes that run in ``folder`` and go on doing so.

    mpirun has ended when what it started has, and that stands for forked ranks: they are killed a moment later.
    """
    until = time.monotonic() + seconds
    while (found := processes(folder)) and time.monotonic() < until:
        time.sleep(0.05)
    return found


def ranks_of(folder: Path) -> dict[int, int]:
    """Rank -> process id of the forked ranks (tests/programs/template.py) that run in ``folder``."""
    found = {}
    for pid in processes(folder):
        with contextlib.suppress(OSError):
            name = Path(f"/proc/{pid}/comm").read_text().split()
            if name[0] == "rank" and name[1].isdigit():
                found[int(name[1])] = pid
    return found

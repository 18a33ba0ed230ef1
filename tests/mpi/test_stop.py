"""A signal ends a run after a checkpoint, and the run can go on from there as if nothing had happened."""

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import samples
from conftest import HANGS, environment, finish, mpirun_command, python
from watch import wait_for_step

from accept_mpi.failpoints import VARIABLE
from accept_mpi.logs.reader import open_log
from accept_mpi.recovery.checkpoint import Checkpoint

STEPS = 400


def test_a_loss_does_not_make_a_run_forget_that_it_was_asked_to_stop(tmp_path: Path) -> None:
    """A rank dies in the very checkpoint that the signal asks for."""
    job = samples.write_job(
        tmp_path / "job.toml", samples.CNN, train_steps=STEPS, train_evaluate_every=0, recovery_replicate_every=1
    )
    mpirun, *count = mpirun_command(3)
    command = [mpirun, "--with-ft", "ulfm", *count, *python(), "-m", "accept_mpi", "train", str(job), "--quiet"]
    more = {VARIABLE: "1@checkpoint:1", "OMPI_MCA_btl_sm_backing_directory": str(tmp_path)}
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment() | more, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    wait_for_step(tmp_path / "run", 10, process)
    process.send_signal(signal.SIGUSR1)
    out, _ = process.communicate(timeout=HANGS)
    assert process.returncode == 3, out
    assert 10 <= Checkpoint(tmp_path / "run").manifest.step < STEPS


@pytest.mark.parametrize("schedule", ["1f1b", "1f1b-async"])
def test_sigusr1_leaves_a_checkpoint(tmp_path: Path, schedule: str) -> None:
    job = samples.write_job(
        tmp_path / "job.toml", samples.CNN, train_steps=STEPS, train_evaluate_every=0, pipeline_schedule=schedule
    )
    command = [*mpirun_command(3), *python(), "-m", "accept_mpi", "train", str(job), "--quiet"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment(), text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    wait_for_step(tmp_path / "run", 10, process)
    process.send_signal(signal.SIGUSR1)
    out, _ = process.communicate(timeout=HANGS)
    assert process.returncode == 3, out
    assert "go on with --resume" in out
    assert "Traceback" not in out
    step = Checkpoint(tmp_path / "run").manifest.step
    assert 10 <= step < STEPS
    if schedule == "1f1b":
        more = [*command, "--resume", str(tmp_path / "run"), "--set", f"train.steps={step + 5}"]
        subprocess.run(more, cwd=tmp_path, env=environment(), check=True, capture_output=True, timeout=HANGS)
        samples.assert_equal(Checkpoint(tmp_path / "run").whole(), samples.plain(samples.CNN).train(step + 5, 24, 5))


def command_of(how: str, job: Path) -> list[str]:
    train = [sys.executable, "-m", "accept_mpi", "train", str(job)]
    if how == "alone":
        return train
    launch = [sys.executable, "-m", "accept_mpi", "launch", "-n", "2", str(job)]
    return launch if how == "launch" else [*mpirun_command(2), *train]


@contextlib.contextmanager
def terminal(command: list[str], folder: Path) -> Iterator[tuple["subprocess.Popen[bytes]", Callable[[], None]]]:
    """A command on a terminal of its own, and what closes that."""
    master, slave = pty.openpty()
    closing = threading.Event()

    def own() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    def look() -> None:
        while not closing.is_set():
            if select.select([master], [], [], 0.05)[0]:
                with contextlib.suppress(OSError):  # nobody writes any more
                    os.read(master, 1 << 16)

    process = subprocess.Popen(
        command, cwd=folder, env=environment() | {"TERM": "xterm"}, stdin=slave, stdout=slave, stderr=slave,
        start_new_session=True, preexec_fn=own,
    )  # fmt: skip
    os.close(slave)
    reader = threading.Thread(target=look)
    reader.start()

    def close() -> None:
        closing.set()
        reader.join()
        os.close(master)

    try:
        yield process, close
    finally:
        closing.set()
        if process.poll() is None:
            process.kill()
        process.wait()


def ranks_in(folder: Path) -> list[int]:
    """Processes that train here and have not ended."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes()
            if b"train" in words and os.readlink(entry / "cwd") == str(folder):
                found.append(int(entry.name))
    return found


def until_all_have_ended(folder: Path, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while left := ranks_in(folder):
        assert time.monotonic() < end, f"{left} still run"
        time.sleep(0.1)


def one_of_many_steps(folder: Path) -> Path:
    """A job that goes on for long enough to be stopped."""
    return samples.write_job(folder / "job.toml", samples.CNN, train_steps=20 * STEPS, train_evaluate_every=0)


@pytest.mark.parametrize("how", ["launch", "mpirun", "alone"])
def test_a_closed_terminal(tmp_path: Path, how: str) -> None:
    """A checkpoint, and the end of all that was started; a shell hands its hangup on, so it comes twice. (After a second one
    mpirun does not wait for its ranks.)"""
    with terminal(command_of(how, one_of_many_steps(tmp_path)), tmp_path) as (process, close):
        wait_for_step(tmp_path / "run", 10, process)
        close()
        if how != "mpirun":
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGHUP)
        code = process.wait(60)
    assert code == (1 if how == "mpirun" else 3)  # mpirun's own, which has its ranks end
    until_all_have_ended(tmp_path)
    assert 10 <= Checkpoint(tmp_path / "run").manifest.step < 20 * STEPS


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_before_the_first_plan_ends_a_run_at_once(tmp_path: Path, number: signal.Signals) -> None:
    """SIGHUP too, which Open MPI ignores from its start on."""
    (tmp_path / "slow_data.py").write_text(
        "import pathlib, time\n\ndef data():\n    pathlib.Path('loading').touch()\n    time.sleep(60)\n"
    )
    job = samples.write_job(tmp_path / "job.toml", samples.CNN | {"data": 'name = "slow_data:data"'})
    with terminal(command_of("alone", job), tmp_path) as (process, _):
        until = time.monotonic() + 60
        while not (tmp_path / "loading").exists():
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(HANGS) == 128 + number


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_rank_before_the_first_plan_ends_all_at_once(tmp_path: Path, rank: int) -> None:
    """mpirun --with-ft ulfm does not count a rank with an exit code as lost: the others tried to regroup for 30 seconds."""
    (tmp_path / "slow_data.py").write_text(
        "import os, pathlib, time\n\ndef data():\n    pid, rank = os.getpid(), os.environ['OMPI_COMM_WORLD_RANK']\n"
        "    pathlib.Path(f'loading-{rank}.tmp').write_text(str(pid))\n"
        "    pathlib.Path(f'loading-{rank}.tmp').rename(f'loading-{rank}')\n"
        "    if all(pathlib.Path(f'loading-{n}').exists() for n in range(3)):  # ranks of one host take turns\n"
        "        time.sleep(60)\n"
        "    return [(0.0, 0)] * 64, [(0.0, 0)] * 64\n"
    )
    job = samples.write_job(tmp_path / "job.toml", samples.CNN | {"data": 'name = "slow_data:data"'}, pipeline_cuts="auto")
    mpirun, *count = mpirun_command(3)
    process = subprocess.Popen(
        [mpirun, "--with-ft", "ulfm", *count, *python(), "-m", "accept_mpi", "train", str(job)], cwd=tmp_path,
        env=environment() | {"OMPI_MCA_btl_sm_backing_directory": str(tmp_path)}, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    loading = [tmp_path / f"loading-{n}" for n in range(3)]
    until = time.monotonic() + HANGS
    while not all(path.exists() for path in loading):
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)
    os.kill(int(loading[rank].read_text()), signal.SIGTERM)
    out, _ = process.communicate(timeout=HANGS)
    assert process.returncode == 128 + signal.SIGTERM, out
    assert "regroup" not in out


def test_nohup(tmp_path: Path) -> None:
    """Who asks for it goes on when the terminal is closed."""
    job = samples.write_job(tmp_path / "job.toml", samples.CNN, train_steps=60, train_evaluate_every=0)
    with terminal(["nohup", *command_of("alone", job)], tmp_path) as (process, close):
        wait_for_step(tmp_path / "run", 1, process)
        close()
        process.send_signal(signal.SIGHUP)
        assert process.wait(60) == 0
    assert Checkpoint(tmp_path / "run").manifest.step == 60


def test_a_killed_supervisor_and_two_runs_in_one_directory(tmp_path: Path) -> None:
    """A second run ends with one sentence and touches nothing; mpirun and ranks end with their supervisor, even where that
    is killed; then the directory is free."""
    job = one_of_many_steps(tmp_path)
    with terminal(command_of("launch", job), tmp_path) as (process, close):
        wait_for_step(tmp_path / "run", 10, process)
        before = sorted((tmp_path / "run").rglob("*"))
        for how in ("launch", "mpirun"):
            done = finish(command_of(how, job), tmp_path, {}, HANGS)
            assert done.code == 2, done.out
            assert re.search(
                rf"^accept_mpi: .*is in use by process \d+ on host {socket.gethostname()} since 20", done.out
            ), done.out
        assert sorted((tmp_path / "run").rglob("*")) == before
        process.kill()
        until_all_have_ended(tmp_path)
        close()
    first = Checkpoint(tmp_path / "run").manifest.step  # mpirun asked its ranks to end
    last = f"train.steps={first + 2}"
    done = finish([*command_of("alone", job), "--resume", "run", "--set", last], tmp_path, {}, HANGS)
    assert done.code == 0, done.out


def test_ranks_end_with_mpirun(tmp_path: Path) -> None:
    """Also where that is killed, and cannot tell them."""
    process = subprocess.Popen(
        [*command_of("mpirun", one_of_many_steps(tmp_path)), "--quiet"], cwd=tmp_path, env=environment(),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    wait_for_step(tmp_path / "run", 10, process)
    process.kill()
    process.communicate(timeout=HANGS)
    until_all_have_ended(tmp_path)


def test_a_signal_while_a_rank_ends_by_itself_says_nothing_more(tmp_path: Path) -> None:
    """A mistake was told, and then "ended by SIGTERM": mpirun ends those who are a little later than the first."""
    code = (
        "import threading\n"
        "from accept_mpi.comm.runtime import Runtime\n"
        "from accept_mpi.errors import Agreed\n"
        "class Messenger:\n"
        "    def allgather(self, *_):\n"
        "        runtime.end_by_signal(15)\n"
        "        raise SystemExit(7)\n"
        "runtime = object.__new__(Runtime)\n"
        "runtime.rank, runtime.size, runtime.survives, runtime.messenger = 0, 2, False, Messenger()\n"
        "runtime._ended, runtime._ending = threading.Lock(), False\n"
        "runtime.fail(Agreed('a mistake'))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=HANGS)
    assert (done.returncode, done.stderr) == (7, "accept_mpi: a mistake\n")


LATE = """
import os, signal, torch
from torch import nn
from accept_mpi.comm.runtime import Runtime
from accept_mpi.training.run_log import RunLog
kind, name = (Runtime, "finish") if int(os.environ["OMPI_COMM_WORLD_RANK"]) else (RunLog, "close")
before = getattr(kind, name)
def late(self, *more):
    os.kill(os.getpid(), signal.SIGTERM)
    before(self, *more)
setattr(kind, name, late)
def model():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
def data():
    x = torch.randn(16, 4)
    return (x, x.argmax(1) % 2), (x, x.argmax(1) % 2)
"""


def test_a_signal_after_the_last_step_changes_nothing(mpirun, tmp_path: Path) -> None:
    """It ended a run at once, with a code of its own, whose last checkpoint was on the disk: while rank 0 closes the log,
    and the others wait for it."""
    (tmp_path / "net.py").write_text(LATE)
    (tmp_path / "job.toml").write_text(
        'model.name = "net:model"\ndata.name = "net:data"\ntrain = { batch_size = 8, micro_batches = 2, steps = 2 }\n'
        'pipeline.cuts = [1]\noutput.directory = "run"\n'
    )
    done = mpirun(2, "-m", "accept_mpi", "train", "job.toml")
    assert "checkpoint  run/checkpoints/step-00000002\n" in done.out
    with open_log(tmp_path / "run") as log:
        assert log["events"][-1]["text"].startswith(b"done: ")

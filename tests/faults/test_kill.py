"""kill -9 of any rank at any moment ends the run everywhere within seconds, names the rank, and leaves log and checkpoint
readable."""

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import samples
from conftest import HANGS, NOT_STARTED, environment, mpirun_command, python
from lost_ranks import ranks_of
from watch import steps_done, wait_for_step

from accept_mpi.job import Job
from accept_mpi.logs.reader import open_log
from accept_mpi.recovery.checkpoint import Checkpoint
from accept_mpi.recovery.manifest import complete

RANKS, MOMENTS, SECONDS = 4, 20, 120.0
SEED = int(os.environ.get("ACCEPT_MPI_FAULT_SEED", "20"))


def children(mpirun_pid: int) -> dict[int, int]:
    """Rank -> process id of the ranks that an mpirun has started."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                status = (entry / "status").read_text()
                variables = (entry / "environ").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if f"\nPPid:\t{mpirun_pid}\n" in status and (rank := re.search(r"OMPI_COMM_WORLD_RANK=(\d+)\0", variables)):
                found[int(rank[1])] = int(entry.name)
    return found


def is_alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def start(tmp_path: Path, job: Path, *flags: str, ulfm: bool = False, fresh: bool = False) -> "subprocess.Popen[str]":
    survive = ["--with-ft", "ulfm"] if ulfm else []
    # A killed rank leaves Open MPI's shared memory behind: let it lie in the test's own folder.
    command = [sys.executable] if fresh else python()
    backing = {"OMPI_MCA_btl_sm_backing_directory": str(tmp_path)}
    return subprocess.Popen(
        [*mpirun_command(RANKS), *survive, *command, "-m", "accept_mpi", "train", str(job), *flags],
        cwd=tmp_path, env=environment() | backing, text=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs Linux's /proc to find the ranks")
@pytest.mark.parametrize("batch", range(4))
def test_kill_any_rank_at_a_random_moment(tmp_path: Path, batch: int) -> None:
    """20 moments in all, from the log's appearing to well into the run; each rank five times, once as mpirun's own child."""
    job = samples.write_job(
        tmp_path / "job.toml", samples.CNN, train_steps=100_000, train_evaluate_every=1, output_checkpoint_every=40
    )
    rng = random.Random(SEED + batch)
    for number in range(MOMENTS // 4):
        directory = tmp_path / f"run{number}"
        job.write_text(re.sub(r'directory = ".*"', f'directory = "{directory.name}"', job.read_text()))
        victim, delay = (batch + number) % RANKS, rng.uniform(0, 3)
        what = f"seed {SEED}, batch {batch}, number {number}: rank {victim} after {delay:.3f} s"
        process = start(tmp_path, job, "--quiet", fresh=not number)
        try:
            deadline = time.monotonic() + HANGS
            while not (directory / "log.h5").exists():
                if process.poll() is not None:
                    assert NOT_STARTED in (out := process.communicate()[0]), f"{what}: {out}"
                    process = start(tmp_path, job, "--quiet", fresh=not number)
                assert time.monotonic() < deadline, f"{what}: no log"
                time.sleep(0.01)
            ranks = ranks_of(tmp_path) if number else children(process.pid)
            assert sorted(ranks) == list(range(RANKS)), what
            time.sleep(delay)
            begun = steps_done(directory)
            os.kill(ranks[victim], signal.SIGKILL)
            killed = time.monotonic()
            out, _ = process.communicate(timeout=SECONDS)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):  # it has ended, which is perhaps what is wrong
                os.killpg(process.pid, signal.SIGKILL)
            raise
        assert time.monotonic() - killed < SECONDS, what
        assert process.returncode != 0, what
        while left := [pid for pid in ranks.values() if is_alive(pid)]:
            assert time.monotonic() - killed < SECONDS, f"{what}: processes {left} left behind"
            time.sleep(0.05)
        said = re.findall(r"accept_mpi: rank (\d) on host \S+ \(stage (\d), layers .*?\)(.*) ended unexpectedly", out)
        assert len(said) == 1, f"{what}:\n{out}"
        assert said[0][:2] == (str(victim), str(victim)), f"{what}:\n{out}"
        if begun:
            assert re.search(r" in step \d+", said[0][2]), f"{what}:\n{out}"
        with open_log(directory / "log.h5") as log:
            steps = log["steps"]["step"]
            assert steps.tolist() == list(range(1, len(steps) + 1)), what
            len(log["trace"][:])
        if complete(directory):
            Checkpoint(directory)


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs Linux's /proc to find the ranks")
@pytest.mark.parametrize("count", [5, "auto"])
def test_kill_all_ranks_at_once(tmp_path: Path, run_name: str, count: object) -> None:
    """A supervised run without checkpoints: the next start goes on from the snapshot on the hosts' disks, with the number of
    micro-batches that was found."""
    more = {"pipeline_cuts": "auto", "pipeline_probe_seconds": 0.2, "pipeline_latency_db": "none"}
    found = more if count == "auto" else {}
    job = samples.write_job(
        tmp_path / "job.toml", samples.CNN, train_steps=160, train_evaluate_every=0, recovery_replicate_every=8,
        train_micro_batches=count, **found,
    )  # fmt: skip
    first = start(tmp_path, job, "--run", f"{run_name}/1", ulfm=True)
    try:
        killed = wait_for_step(tmp_path / "run", 40, first)
        for pid in ranks_of(tmp_path).values():
            os.kill(pid, signal.SIGKILL)
        first.communicate(timeout=SECONDS)
    except BaseException:
        os.killpg(first.pid, signal.SIGKILL)
        raise
    assert not complete(tmp_path / "run")
    second = start(tmp_path, job, "--run", f"{run_name}/2", ulfm=True)
    out, _ = second.communicate(timeout=HANGS)
    assert second.returncode == 0, out
    resumed = re.search(r"step (\d+)  resumed from the snapshot that hosts have kept", out)
    assert resumed, out
    assert int(resumed[1]) >= killed - 24
    assert "micro-batches: " not in out
    with open_log(tmp_path / "run" / "log.h5") as log:
        parts = Job.from_json(log.attrs["job"]).train.micro_batches
    assert count in ("auto", parts)
    last = Checkpoint(tmp_path / "run")
    assert last.manifest.step == 160, out
    samples.assert_equal(last.whole(), samples.plain(samples.CNN).train(160, 24, parts))


def test_a_rank_that_dies_before_mpi_has_started(tmp_path: Path) -> None:
    """Under ULFM mpirun lets the others wait for it; they end by themselves."""
    job = samples.write_job(tmp_path / "job.toml", samples.CNN)
    train = f"{' '.join(python())} -m accept_mpi train {job}"
    command = mpirun_command(3)
    command[1:1] = ["--with-ft", "ulfm"]
    command += ["sh", "-c", f'[ "$OMPI_COMM_WORLD_RANK" = 1 ] && kill -9 $$; exec {train}']
    more = {"ACCEPT_MPI_START_SECONDS": "3", "OMPI_MCA_btl_sm_backing_directory": str(tmp_path)}
    process = subprocess.run(command, cwd=tmp_path, env=environment() | more, capture_output=True, timeout=HANGS)
    assert process.returncode != 0
    assert b"Timeout (0:00:03)" in process.stderr

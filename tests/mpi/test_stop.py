"""A signal ends a run after a checkpoint, and the run can go on from there as if nothing had happened."""

import signal
import subprocess
from pathlib import Path

import pytest
import samples
from conftest import HANGS, environment, mpirun_command, python
from watch import wait_for_step

from accept_mpi.faults import VARIABLE
from accept_mpi.snapshot import Checkpoint

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

"""A signal ends a run after a checkpoint, and the run can go on from there as if nothing had happened."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import samples
from conftest import environment, mpirun_command
from watch import wait_for_step

from accept_mpi.snapshot import Checkpoint

STEPS = 400


@pytest.mark.parametrize("schedule", ["1f1b", "1f1b-async"])
def test_sigusr1_leaves_a_checkpoint(tmp_path: Path, schedule: str) -> None:
    job = samples.write_job(
        tmp_path / "job.toml", samples.CNN, train_steps=STEPS, train_evaluate_every=0, pipeline_schedule=schedule
    )
    command = [*mpirun_command(3), sys.executable, "-m", "accept_mpi", "train", str(job), "--quiet"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment(), text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    wait_for_step(tmp_path / "run", 10, process)
    process.send_signal(signal.SIGUSR1)
    began = time.monotonic()
    out, _ = process.communicate(timeout=30)
    assert time.monotonic() - began < 10
    assert process.returncode == 3, out
    assert "go on with --resume" in out
    assert "Traceback" not in out
    step = Checkpoint(tmp_path / "run").manifest.step
    assert 10 <= step < STEPS
    if schedule == "1f1b":
        more = [*command, "--resume", str(tmp_path / "run"), "--set", f"train.steps={step + 5}"]
        subprocess.run(more, cwd=tmp_path, env=environment(), check=True, capture_output=True, timeout=60)
        samples.assert_equal(Checkpoint(tmp_path / "run").whole(), samples.plain(samples.CNN).train(step + 5, 24, 5))

"""A device slows down in mid-run: layers move away from it, and the weights are those of a run that nothing happened to
(ARCHITECTURE, invariants)."""

import re
from pathlib import Path

import numpy as np
import pytest
import samples
from conftest import mpirun_command
from watch import slowed_after_ten_steps

from accept_mpi.logs.format import KINDS
from accept_mpi.logs.reader import open_log
from accept_mpi.recovery.checkpoint import Checkpoint

STEPS = 80


def layers_of(rank: int, plans: np.ndarray) -> list[int]:
    """Number of layers that a rank has in the first plan, and in the next one."""
    mine = plans[plans["rank"] == rank]
    return [int((mine["stop"] - mine["start"])[mine["time"] == time].sum()) for time in np.unique(plans["time"])[:2]]


@pytest.mark.parametrize(
    ("schedule", "ulfm", "lanes"), [("1f1b", False, "off"), ("1f1b-async", True, "off"), ("1f1b", False, 2)]
)
def test_layers_move_away_from_a_slow_device(tmp_path: Path, schedule: str, ulfm: bool, lanes: object) -> None:
    sleepy = samples.CNN | {"model": 'name = "slow_layers:cnn"\nargs = { width = 8, dropout = 0.2 }'}
    job = samples.write_job(
        tmp_path / "job.toml", sleepy, train_steps=STEPS, train_evaluate_every=0, pipeline_cuts="auto", pipeline_adapt=True,
        pipeline_groups=False, pipeline_lanes=lanes,
        pipeline_latency_db="none", pipeline_probe_seconds=1.0, pipeline_schedule=schedule,
    )  # fmt: skip
    command = mpirun_command(3)
    if ulfm:
        command[1:1] = ["--with-ft", "ulfm"]
    out = slowed_after_ten_steps(job, command)
    assert "moved layers: rank 1" in out, out
    with open_log(tmp_path / "run" / "log.h5") as log:
        steps, plans = log["steps"][:], log["plans"][:]
    assert steps["step"].tolist() == list(range(1, STEPS + 1))
    layers = layers_of(1, plans)
    assert layers[1] < layers[0], plans
    if schedule == "1f1b-async":  # whose pipeline drains where the plan ends: other weights are as good
        return
    plain = samples.plain(samples.CNN).train(STEPS, 24, 5)
    ours = {name.replace(".inner", ""): value for name, value in Checkpoint(tmp_path / "run").whole().items()}
    samples.assert_equal(ours, plain)


@pytest.mark.parametrize("schedule", ["1f1b", "1f1b-async"])
def test_a_slow_member_gets_fewer_micro_batches(tmp_path: Path, schedule: str) -> None:
    """Groups end a plan together, and the weights are those of a run that nothing happened to."""
    sleepy = samples.CNN | {"model": 'name = "slow_layers:cnn"\nargs = { width = 8, dropout = 0.2 }'}
    job = samples.write_job(
        tmp_path / "job.toml", sleepy, train_steps=50, train_evaluate_every=0, pipeline_adapt=True, pipeline_cuts=[6],
        pipeline_ranks=[[0, 1], 2], pipeline_latency_db="none", pipeline_probe_seconds=1.0, pipeline_schedule=schedule,
    )  # fmt: skip
    out = slowed_after_ten_steps(job, mpirun_command(3))
    assert re.search("(dealt micro-batches anew|moved layers): rank 1", out), out
    with open_log(tmp_path / "run" / "log.h5") as log:
        steps, trace, plans = log["steps"][:], log["trace"][:], log["plans"][:]
    assert steps["step"].tolist() == list(range(1, 51))
    forwards = trace[trace["kind"] == KINDS.index("F")]
    anew = int(np.unique(plans["step"])[1])
    counts = [np.count_nonzero((forwards["rank"] == 1) & (forwards["step"] == step)) for step in (5, anew + 1)]
    layers = layers_of(1, plans)
    assert counts[1] * layers[1] < counts[0] * layers[0], (counts, layers, out)
    if schedule == "1f1b":
        plain = samples.plain(samples.CNN).train(50, 24, 5)
        ours = {name.replace(".inner", ""): value for name, value in Checkpoint(tmp_path / "run").whole().items()}
        samples.assert_equal(ours, plain)

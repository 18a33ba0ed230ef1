"""Plans that adapt, together with what ends or interrupts a run: early ends, evaluations, resuming."""

import re
from pathlib import Path
from typing import Any

import pytest
import samples
import torch
from conftest import mpirun_command
from stale_weights import delayed
from test_delayed import SGD
from watch import slowed_after

from accept_mpi.logs.reader import open_log
from accept_mpi.recovery.checkpoint import Checkpoint

BATCH, MICRO, EPOCH = 240, 4, 6
"""Samples of a step, its micro-batches; and an epoch's steps, the last of which is as large."""
SLEEPY = samples.CNN | {
    "model": 'name = "slow_layers:cnn"\nargs = { width = 8, dropout = 0.2 }',
    "train": samples.CNN["train"] | {"batch_size": BATCH, "micro_batches": MICRO},
}


def write(folder: Path, name: str = "run", **keys: Any) -> Path:
    wanted = {"pipeline_cuts": "auto", "pipeline_adapt": True, "pipeline_groups": False, "pipeline_latency_db": "none"}
    wanted |= {"pipeline_probe_seconds": 1.0, "train_evaluate_every": 1} | keys
    return samples.write_job(folder / f"{name}.toml", SLEEPY, name, **wanted)


def expected(steps: int, schedule: str) -> dict[str, torch.Tensor]:
    if schedule == "1f1b-delayed":
        return delayed(SLEEPY | {"model": samples.CNN["model"], "train": SLEEPY["train"] | {"steps": steps}}, SGD)
    return samples.plain(samples.CNN).train(steps, BATCH, MICRO)


def check(run: Path, schedule: str, *ends: int) -> int:
    """Each step and evaluation is there once, and weights are those of one process; returns the last step. ``ends``: last
    steps of runs from which this one has resumed."""
    with open_log(run / "log.h5") as log:
        steps, evals = (log[table]["step"][:].tolist() for table in ("steps", "evals"))
    assert steps == list(range(1, len(steps) + 1))
    assert evals == sorted({*range(EPOCH, len(steps) + 1, EPOCH), len(steps), *ends})
    ours = {name.replace(".inner", ""): value for name, value in Checkpoint(run).whole().items()}
    samples.assert_equal(ours, expected(len(steps), schedule))
    return len(steps)


@pytest.mark.parametrize(("schedule", "group"), [("1f1b-delayed", False), ("1f1b", True)])
def test_an_early_end_after_a_new_plan(tmp_path: Path, schedule: str, group: bool) -> None:
    """Evaluations without a better one count on from plan to plan, and each is made once."""
    same = "slow_layers:always_the_same"
    given = {"pipeline_cuts": [6], "pipeline_ranks": [[0, 1], 2]} if group else {}
    job = write(
        tmp_path, pipeline_schedule=schedule, train_steps=300, train_metrics=[same], output_keep_best=same,
        train_patience=7, output_keep=1, **given,
    )  # fmt: skip
    out = slowed_after(10, job, mpirun_command(3))
    assert re.search("(dealt micro-batches anew|moved layers): rank 1", out), out
    last = check(tmp_path / "run", schedule)
    assert EPOCH * 8 < last <= EPOCH * 9, out
    assert out.count("no better slow_layers:always_the_same in 7 evaluations") == 1, out
    kept = sorted(one.name for one in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert kept == [f"step-{EPOCH:08d}", f"step-{last:08d}"]


def test_resumed_and_then_slow(tmp_path: Path) -> None:
    """A run that has adapted goes on from its checkpoint and adapts again; with evaluations and in the same directory."""
    schedule = "1f1b-delayed"
    job = write(tmp_path, pipeline_schedule=schedule, train_steps=26)
    assert "moved layers: rank 1" in slowed_after(8, job, mpirun_command(3))
    check(tmp_path / "run", schedule)
    out = slowed_after(34, job, mpirun_command(3), "--set", "train.steps=80", "--resume", "run")
    assert "moved layers: rank 1" in out, out
    assert check(tmp_path / "run", schedule, 26) == 80

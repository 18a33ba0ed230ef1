"""The pipeline computes what one plain PyTorch process computes, bit for bit (ARCHITECTURE, invariants)."""

from functools import cache
from pathlib import Path

import pytest
import samples
import torch
from conftest import ROOT

from accept_mpi.recovery.checkpoint import Checkpoint

JOBS = {"cnn": samples.CNN, "gpt": samples.GPT}
SYNCHRONOUS = ("gpipe", "1f1b", "zero-bubble")
CUTS = {2: [3], 3: [1, 4], 4: [2, 3, 5]}  # uneven, also right behind dropout


@cache
def expected(name: str) -> dict[str, torch.Tensor]:
    train = JOBS[name]["train"]
    return samples.plain(JOBS[name]).train(train["steps"], train["batch_size"], train["micro_batches"])


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_weights_equal_one_process(mpirun, tmp_path: Path, ranks: int) -> None:
    """1, 2, 3, 4 ranks x synchronous schedules x CNN (BatchNorm, dropout) and GPT, even cuts and others."""
    jobs, directories = [], []
    for name in JOBS:
        for schedule in SYNCHRONOUS:
            keys = {"pipeline_schedule": schedule, "pipeline_transfer_slack": len(schedule) % 2}
            keys["train_evaluate_every"] = int(schedule == "1f1b")  # 70 forwards, the same in all schedules
            for cuts in ("even", CUTS.get(ranks)) if schedule == "1f1b" and ranks in CUTS else ("even",):
                directory = f"{name}-{schedule}-{cuts}"
                job = samples.write_job(tmp_path / f"{directory}.toml", JOBS[name], directory, pipeline_cuts=cuts, **keys)
                jobs.append(job)
                directories.append((name, tmp_path / directory))
    mpirun(ranks, ROOT / "tests" / "programs" / "train_all.py", *jobs)
    for name, directory in directories:
        samples.assert_equal(Checkpoint(directory).whole(), expected(name))


def test_every_cut_of_mobilenet_equals_one_process(mpirun, tmp_path: Path) -> None:
    """Cuts inside blocks, where a residual crosses as a tuple, and where gradients come expanded or in channels_last."""
    mobile = {
        "model": 'name = "mobilenetv2"\nargs = { width = 0.25 }',
        "data": 'name = "digits"\nargs = { size = 16 }',
        "train": {"batch_size": 8, "micro_batches": 2, "steps": 1, "seed": 5, "evaluate_every": 0},
    }
    cuts = [*range(1, 53, 4), 2, 3, 4, 51, 52]
    jobs = [samples.write_job(tmp_path / f"{cut}.toml", mobile, f"run-{cut}", pipeline_cuts=[cut]) for cut in cuts]
    mpirun(2, ROOT / "tests" / "programs" / "train_all.py", *jobs)
    plain = samples.plain(mobile).train(1, 8, 2)
    for cut in cuts:
        samples.assert_equal(Checkpoint(tmp_path / f"run-{cut}").whole(), plain)


def test_fewer_micro_batches_than_stages_and_a_short_last_batch(mpirun, tmp_path: Path) -> None:
    """torchtitan#775 hangs with fewer micro-batches than stages; 1,438 digits leave a last batch of 38."""
    jobs = []
    for schedule in SYNCHRONOUS:
        train = {"train_batch_size": 700, "train_micro_batches": 2, "train_steps": 3, "pipeline_schedule": schedule}
        train["train_evaluate_every"] = int(schedule == "1f1b")
        jobs.append(samples.write_job(tmp_path / f"{schedule}.toml", samples.CNN, schedule, **train))
    mpirun(4, ROOT / "tests" / "programs" / "train_all.py", *jobs)
    plain = samples.plain(samples.CNN).train(3, 700, 2)
    for schedule in SYNCHRONOUS:
        samples.assert_equal(Checkpoint(tmp_path / schedule).whole(), plain)

"""Stages held by groups of ranks compute what one plain PyTorch process computes, bit for bit (ARCHITECTURE, invariants)."""

from functools import cache
from pathlib import Path

import pytest
import samples
import torch
from conftest import ROOT

from accept_mpi.logs.reader import open_log
from accept_mpi.recovery.checkpoint import Checkpoint

JOBS = {"cnn": samples.CNN, "gpt": samples.GPT}
SYNCHRONOUS = ("gpipe", "1f1b", "zero-bubble")
GROUPS = {
    2: [([], [[0, 1]])],
    3: [([], [[2, 0, 1]]), ([3], [[1, 0], 2]), ([3], [2, [0, 1]])],
    4: [([2, 4], [0, [1, 3], 2]), ([3], [[0, 1], [3, 2]])],
    5: [([3], [[0, 1, 2], [3, 4]])],
}


@cache
def expected(name: str) -> dict[str, torch.Tensor]:
    train = JOBS[name]["train"]
    return samples.plain(JOBS[name]).train(train["steps"], train["batch_size"], train["micro_batches"])


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_weights_equal_one_process(mpirun, tmp_path: Path, ranks: int) -> None:
    """2 to 5 ranks in groups x synchronous schedules x CNN (BatchNorm, dropout) and GPT; groups of the first stage, of a
    middle one, of the last, and of the only one."""
    jobs, directories = [], []
    for name in JOBS:
        for number, (cuts, held) in enumerate(GROUPS[ranks]):
            for schedule in SYNCHRONOUS if number == 0 else ("1f1b",):
                directory = f"{name}-{schedule}-{number}"
                keys = {"pipeline_schedule": schedule, "pipeline_ranks": held, "pipeline_cuts": cuts}
                jobs.append(samples.write_job(tmp_path / f"{directory}.toml", JOBS[name], directory, **keys))
                directories.append((name, tmp_path / directory))
    mpirun(ranks, ROOT / "tests" / "programs" / "train_all.py", *jobs)
    for name, directory in directories:
        samples.assert_equal(Checkpoint(directory).whole(), expected(name))


def test_reports_equal_those_of_one_rank(mpirun, tmp_path: Path) -> None:
    """Losses and accuracies of steps and evaluations, from a last stage of two."""
    job = samples.write_job(tmp_path / "one.toml", samples.CNN, "one", train_evaluate_every=2, pipeline_cuts=[])
    mpirun(1, ROOT / "tests" / "programs" / "train_all.py", job)
    keys = {"pipeline_cuts": [3], "pipeline_ranks": [2, [0, 1]], "train_evaluate_every": 2}
    job = samples.write_job(tmp_path / "three.toml", samples.CNN, "three", **keys)
    mpirun(3, ROOT / "tests" / "programs" / "train_all.py", job)
    with open_log(tmp_path / "one" / "log.h5") as one, open_log(tmp_path / "three" / "log.h5") as three:
        for table in ("steps", "evals"):
            for column in ("step", "epoch", "samples", "loss", "accuracy"):
                assert one[table][column].tolist() == three[table][column].tolist(), (table, column)

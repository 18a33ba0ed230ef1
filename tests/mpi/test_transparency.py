"""The pipeline computes what one plain PyTorch process computes, bit for bit (DESIGN, invariant 1)."""

from functools import cache
from pathlib import Path

import pytest
import samples
import torch

from accept_mpi.snapshot import Checkpoint

JOBS = {"cnn": samples.CNN, "gpt": samples.GPT}


@cache
def expected(name: str, steps: int | None = None) -> dict[str, torch.Tensor]:
    train = JOBS[name]["train"]
    return samples.plain(JOBS[name]).train(steps or train["steps"], train["batch_size"], train["micro_batches"])


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_weights_equal_one_process(mpirun, tmp_path: Path, name: str, schedule: str, ranks: int) -> None:
    job = samples.write_job(tmp_path / "job.toml", JOBS[name], pipeline_schedule=schedule)
    mpirun(ranks, "-m", "accept_mpi", "train", job)
    samples.assert_equal(Checkpoint(tmp_path / "run").whole(), expected(name))

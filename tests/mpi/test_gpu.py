"""Stages on a GPU beside stages on CPUs. Skipped where torch sees no GPU."""

from pathlib import Path

import pytest
import samples
import torch
from conftest import ROOT

from accept_mpi.logs.reader import open_log

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "1f1b-delayed"])
@pytest.mark.parametrize("model", ["cnn", "gpt"])
def test_two_ranks_on_a_gpu_and_two_on_the_cpu(mpirun, tmp_path: Path, model: str, schedule: str) -> None:
    """Losses of one process on the GPU, to 1e-4; dropout aside, whose random numbers differ from a CPU's."""
    job = {"cnn": samples.CNN, "gpt": samples.GPT}[model]
    job = job | {"model": job["model"].replace("dropout = 0.2", "dropout = 0.0").replace("dropout = 0.1", "dropout = 0.0")}
    one, four = (samples.write_job(tmp_path / f"{n}.toml", job, n, pipeline_schedule=schedule) for n in ("one", "four"))
    train = ["-m", "accept_mpi", "train"]
    mpirun(1, *train, one, "--set", "train.device=cuda")
    program = str(ROOT / "tests" / "programs" / "on_device.py")
    mpirun(4, program, "cuda,cuda,cpu,cpu", four)
    losses = []
    for name in ("one", "four"):
        with open_log(tmp_path / name / "log.h5") as log:
            losses.append(log["steps"]["loss"][:].tolist())
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)

"""Stages on a GPU beside stages on CPUs. Skipped where torch sees no GPU."""

from pathlib import Path
from typing import Any

import pytest
import samples
import torch
from conftest import ROOT
from plain_loop import plain_loop
from test_recorded import CASES, write

from accept_mpi.logs.reader import open_log
from accept_mpi.recovery.checkpoint import Checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")

ON_DEVICE = ROOT / "tests" / "programs" / "on_device.py"
TWO_AND_TWO = "cuda,cuda,cpu,cpu"
SCHEDULES = ("1f1b", "gpipe", "zero-bubble", "1f1b-delayed")


def losses(directory: Path) -> list[float]:
    with open_log(directory / "log.h5") as log:
        found: list[float] = log["steps"]["loss"][:].tolist()
        return found


def without_dropout(job: dict[str, Any]) -> dict[str, Any]:
    """Random numbers on a GPU are others than on a CPU."""
    return job | {"model": job["model"].replace("dropout = 0.2", "dropout = 0.0").replace("dropout = 0.1", "dropout = 0.0")}


def test_losses_of_one_process(mpirun, tmp_path: Path) -> None:
    """To 1e-4, two ranks on the GPU and two on CPUs."""
    jobs: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    for name, job in (("cnn", samples.CNN), ("gpt", samples.GPT)):
        for schedule in SCHEDULES:
            jobs[f"{name}-{schedule}"] = without_dropout(job), {"pipeline_schedule": schedule}
        jobs[f"{name}-again"] = without_dropout(job), {"pipeline_recompute": "on"}
        jobs[f"{name}-clipped"] = without_dropout(job), {"train_clip_norm": 0.5, "train_ema": 0.9, "train_evaluate_every": 2}
    for name, ranks, devices in (("one", 1, "cuda"), ("four", 4, TWO_AND_TWO)):
        paths = [
            samples.write_job(tmp_path / f"{name}-{n}.toml", job, f"{name}-{n}", **keys) for n, (job, keys) in jobs.items()
        ]
        mpirun(ranks, ON_DEVICE, devices, *paths)
    for job in jobs:
        assert losses(tmp_path / f"four-{job}") == pytest.approx(losses(tmp_path / f"one-{job}"), rel=1e-4), job


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_bfloat16(mpirun, tmp_path: Path, schedule: str) -> None:
    keys = {"pipeline_schedule": schedule, "train_precision": "bf16"}
    jobs = [
        samples.write_job(tmp_path / f"{n}.toml", without_dropout(job), n, **keys)
        for n, job in (("cnn", samples.CNN), ("gpt", samples.GPT))
    ]
    found = []
    for ranks in (1, 3):
        mpirun(ranks, ON_DEVICE, ",".join(["cuda"] * ranks), *jobs)
        found.append([losses(tmp_path / name) for name in ("cnn", "gpt")])
    for one, three in zip(*found, strict=True):
        assert three == pytest.approx(one, rel=1e-2)


def test_models_with_forwards_of_their_own(mpirun, tmp_path: Path) -> None:
    """Near a plain loop on the CPU; tied parameters in stages of several devices, too."""
    cases = [case for case in CASES if "lanes" not in case and case.get("gradients") != "auto"]
    paths = [write(tmp_path, f"job{n}", case) for n, case in enumerate(cases)]
    mpirun(4, ON_DEVICE, TWO_AND_TWO, *paths)
    for n, path in enumerate(paths):
        state, expected = plain_loop(path)
        assert losses(tmp_path / f"job{n}") == pytest.approx(expected, rel=1e-4), cases[n]
        found = Checkpoint(tmp_path / f"job{n}").whole()
        assert all(torch.allclose(found[name], value, rtol=1e-3, atol=1e-3) for name, value in state.items()), cases[n]


@pytest.mark.parametrize("schedule", ["zero-bubble", "1f1b-async"])
def test_a_resumed_run_ends_alike(mpirun, tmp_path: Path, schedule: str) -> None:
    """Bit for bit, dropout included, since a GPU draws and adds up the same each time."""
    job = samples.write_job(
        tmp_path / "job.toml", samples.CNN, "straight", pipeline_schedule=schedule, output_checkpoint_every=3
    )
    adamw = "train.optimizer={name='adamw', lr=0.01}"
    train = ["-m", "accept_mpi", "train", job, "--set", "train.device=cuda", "--set", adamw]
    mpirun(2, *train)
    mpirun(2, *train, "--set", "output.directory=part", "--set", "train.steps=3")
    mpirun(2, *train, "--set", "output.directory=rest", "--resume", tmp_path / "part")
    straight, rest = (Checkpoint(tmp_path / name).whole() for name in ("straight", "rest"))
    samples.assert_equal(straight, rest)

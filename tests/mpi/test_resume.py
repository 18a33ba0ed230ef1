"""A checkpoint resumes on any number of ranks and any cuts, bit for bit, and exports to the plain whole model."""

from pathlib import Path

import pytest
import samples
import torch
from safetensors.torch import load_file

from accept_mpi import models
from accept_mpi.cli import main
from accept_mpi.log import open_log
from accept_mpi.manifest import complete
from accept_mpi.snapshot import Checkpoint

ADAM = 'name = "gpt"\nargs = { context = 16, layers = 2, width = 32, heads = 2, dropout = 0.1 }'


@pytest.mark.parametrize("name", ["cnn", "gpt"])
def test_four_ranks_checkpoint_continues_on_two(mpirun, tmp_path: Path, name: str) -> None:
    job = samples.CNN if name == "cnn" else samples.GPT
    path = samples.write_job(tmp_path / "job.toml", job, train_evaluate_every=0, output_checkpoint_every=2)
    mpirun(4, "-m", "accept_mpi", "train", path)
    straight = Checkpoint(tmp_path / "run").whole()
    steps = job["train"]["steps"]
    assert [c.name for c in complete(tmp_path / "run")][-2:] == [f"step-{2 * ((steps - 1) // 2):08}", f"step-{steps:08}"]
    half = tmp_path / "run" / "checkpoints" / "step-00000004"
    mpirun(2, "-m", "accept_mpi", "train", path, "--resume", half, "--set", "output.directory=again")
    samples.assert_equal(Checkpoint(tmp_path / "again").whole(), straight)
    train = job["train"]
    plain = samples.plain(job).train(steps, train["batch_size"], train["micro_batches"])
    samples.assert_equal(straight, plain)


def test_asynchronous_adam_resumes_and_keeps_its_log(mpirun, tmp_path: Path) -> None:
    """The pipeline drains at checkpoints, so a resumed run equals one that went on; optimizer state comes along."""
    keys = {"train_evaluate_every": 0, "output_checkpoint_every": 3, "pipeline_schedule": "1f1b-async"}
    path = samples.write_job(tmp_path / "job.toml", samples.GPT | {"train": samples.GPT["train"] | {"steps": 6}}, **keys)
    adam = ("--set", 'train.optimizer={name="adamw", lr=1e-3, schedule="cosine", warmup_steps=2}')
    mpirun(3, "-m", "accept_mpi", "train", path, *adam)
    straight = Checkpoint(tmp_path / "run").whole()
    half = tmp_path / "run" / "checkpoints" / "step-00000003"
    mpirun(3, "-m", "accept_mpi", "train", path, *adam, "--resume", half)
    samples.assert_equal(Checkpoint(tmp_path / "run").whole(), straight)
    with open_log(tmp_path / "run" / "log.h5") as log:
        assert log["steps"]["step"].tolist() == [1, 2, 3, 4, 5, 6]
    assert (tmp_path / "run" / "log.1.h5").is_file()


def test_a_run_may_end_without_a_checkpoint(mpirun, tmp_path: Path) -> None:
    path = samples.write_job(tmp_path / "job.toml", samples.CNN, output_checkpoint_at_end=False)
    out = mpirun(2, "-m", "accept_mpi", "train", path).out
    assert complete(tmp_path / "run") == []
    assert "checkpoint" not in out
    out = mpirun(2, "-m", "accept_mpi", "train", path, "--set", "output.checkpoint_every=4").out
    assert [c.name for c in complete(tmp_path / "run")] == ["step-00000004"]
    assert "step-00000004" in out


def test_export_loads_into_the_plain_model(mpirun, tmp_path: Path) -> None:
    path = samples.write_job(tmp_path / "job.toml", samples.CNN, train_steps=2)
    mpirun(3, "-m", "accept_mpi", "train", path, "--quiet")
    model = models.load("cnn", {"width": 8}, 0).whole()
    for out in (tmp_path / "out.safetensors", tmp_path / "out.pt"):
        assert main(["export", str(tmp_path / "run"), str(out)]) == 0
        state = load_file(out) if out.suffix == ".safetensors" else torch.load(out, weights_only=True)
        model.load_state_dict(state, strict=True)
    assert main(["export", str(tmp_path / "nowhere"), str(tmp_path / "x.safetensors")]) == 2

"""Stages are tried before training with what may be there: layers that do not take zeros train in any stage."""

import math
from pathlib import Path

import pytest
from plain_loop import differences, plain_loop

from accept_mpi.recovery.checkpoint import Checkpoint

JOB = """
model.name = "choosy_nets:sentences"
data.name = "choosy_nets:data"
train.batch_size = 8
train.micro_batches = 4
train.steps = 4
train.optimizer = { name = "sgd", lr = 0.1 }
pipeline.cuts = "even"
pipeline.latency_db = "none"
pipeline.probe_seconds = 0.1
output.directory = "run"
"""


@pytest.mark.parametrize("ranks", [2, 3])
def test_layers_that_do_not_take_zeros(trained, tmp_path: Path, ranks: int) -> None:
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    expected, _ = plain_loop(path)
    runs: dict[str, tuple[str, ...]] = {
        "even": (),
        "zb": ("pipeline.schedule=zero-bubble",),
        "auto": ("pipeline.cuts=auto",),
    }
    if ranks == 2:
        runs |= {f"cut{n}": (f"pipeline.cuts=[{n}]",) for n in range(1, 8)} | {"codec": ("pipeline.forward=auto",)}
    trained(ranks, tmp_path, [(path, f"output.directory={name}", *keys) for name, keys in runs.items()])
    for name in runs.keys() - {"codec"}:
        assert not differences(Checkpoint(tmp_path / name).whole(), expected), name


def test_layers_that_do_not_take_what_is_made_up(trained, tmp_path: Path) -> None:
    """They are tried on true values, once others have raised an error, and train in any stage."""
    path = tmp_path / "job.toml"
    path.write_text(JOB.replace("sentences", "roots"))
    expected, _ = plain_loop(path)
    runs: dict[str, tuple[str, ...]] = {f"cut{n}": (f"pipeline.cuts=[{n}]",) for n in range(1, 4)}
    runs |= {"auto": ("pipeline.cuts=auto",), "zb": ("pipeline.cuts=[2]", "pipeline.schedule=zero-bubble")}
    trained(2, tmp_path, [(path, f"output.directory={name}", *keys) for name, keys in runs.items()])
    more = {"three": ("pipeline.cuts=[1,2]",), "two": ("pipeline.cuts=[2]", "pipeline.ranks=[0,[1,2]]")}
    trained(3, tmp_path, [(path, f"output.directory={name}", *keys) for name, keys in more.items()])
    for name in runs.keys() | {"three"}:
        assert not differences(Checkpoint(tmp_path / name).whole(), expected), name


def test_what_raises_on_true_values_is_told(mpirun, tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(
        JOB.replace('model.name = "choosy_nets:sentences"', 'model = { name = "choosy_nets:roots", args = { least = 1e9 } }')
    )
    done = mpirun(3, "-m", "accept_mpi", "train", path, "--set", "pipeline.cuts=[1,2]", code=1)
    assert "the root is too small" in done.out
    assert "positive-definite" not in done.out


@pytest.mark.parametrize("loss", ["marks", "counts_from_one"])
def test_a_loss_that_writes_into_its_target(trained, tmp_path: Path, loss: str) -> None:
    """Trials and timings give it the same target more than once."""
    path = tmp_path / "job.toml"
    job = JOB.replace("sentences", "plain").replace("choosy_nets:data", f"choosy_nets:{loss}_data")
    path.write_text(job + f'train.loss = "choosy_nets:{loss}"\n')
    expected, losses = plain_loop(path)
    runs: dict[str, tuple[str, ...]] = {
        "cut": ("pipeline.cuts=[2]",),
        "auto": ("pipeline.cuts=auto",),
        "adapt": ("pipeline.cuts=[2]", "pipeline.adapt=2"),
        "recompute": ("pipeline.cuts=[2]", "pipeline.recompute=on"),
        "zb": ("pipeline.cuts=[2]", "pipeline.schedule=zero-bubble"),
    }
    trained(2, tmp_path, [(path, f"output.directory={name}", *keys) for name, keys in runs.items()])
    assert all(map(math.isfinite, losses))
    for name in runs:
        assert not differences(Checkpoint(tmp_path / name).whole(), expected), name

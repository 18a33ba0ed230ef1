"""Stages are tried before training with what may be there: layers that do not take zeros train in any stage."""

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

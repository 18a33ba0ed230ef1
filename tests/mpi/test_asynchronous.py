"""The asynchronous schedule equals, bit for bit, a replay of PipeDream's stale-weight arithmetic in one process."""

from pathlib import Path

import samples
import torch
from conftest import ROOT
from stale_weights import replay

from accept_mpi.recovery.checkpoint import Checkpoint


def test_equals_a_replay_of_stale_weights(mpirun, tmp_path: Path) -> None:
    cases = [
        (name, ranks, slack, vertical)
        for name in ("cnn", "gpt")
        for ranks, slack, vertical in ((1, 0, False), (3, 0, False), (3, 1, False), (4, 1, True))
    ]
    jobs: dict[int, list[Path]] = {}
    for case in cases:
        name, ranks, slack, vertical = case
        directory = f"{name}-{ranks}-{slack}-{vertical}"
        keys = {"pipeline_transfer_slack": slack, "pipeline_vertical_sync": vertical, "train_evaluate_every": 0}
        job = samples.CNN if name == "cnn" else samples.GPT
        path = samples.write_job(tmp_path / f"{directory}.toml", job, directory, pipeline_schedule="1f1b-async", **keys)
        jobs.setdefault(ranks, []).append(path)
    for ranks, paths in jobs.items():
        mpirun(ranks, ROOT / "tests" / "programs" / "train_all.py", *paths)
    different = 0
    for name, ranks, slack, vertical in cases:
        job = samples.CNN if name == "cnn" else samples.GPT
        ours = Checkpoint(tmp_path / f"{name}-{ranks}-{slack}-{vertical}").whole()
        samples.assert_equal(ours, replay(job, ranks, slack, vertical))
        train = job["train"]
        plain = samples.plain(job).train(train["steps"], train["batch_size"], train["micro_batches"])
        different += any(not torch.equal(ours[n], plain[n]) for n in ours)
    assert different == 6, "with more than one stage weights are stale, so the result differs from synchronous training"


def test_given_cuts_say_how_old_weights_are(mpirun, tmp_path: Path) -> None:
    """Once, as found plans do; synchronous schedules say nothing."""
    for schedule, times in (("1f1b-async", 1), ("1f1b", 0)):
        keys = {"pipeline_schedule": schedule, "pipeline_cuts": [2, 4], "train_evaluate_every": 0}
        job = samples.write_job(tmp_path / "job.toml", samples.CNN, schedule, **keys)
        out = mpirun(3, "-m", "accept_mpi", "train", job).out
        assert out.count("weights are at most this many updates old: ") == times, out


NET = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
def model():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
def data():
    x = torch.randn(1438, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :3].argmax(1)), TensorDataset(x[:8], x[:8, :3].argmax(1))
"""
SHORT_EPOCHS = """
model.name = "short_epochs:model"
data.name = "short_epochs:data"
output.directory = "run"
[train]
batch_size = 1150
micro_batches = 4
steps = 20
evaluate_every = 0
clip_norm = 1.0
optimizer = { name = "sgd", lr = 0.05 }
[pipeline]
schedule = "1f1b-async"
cuts = [2]
ranks = [[0, 1], 2]
speeds = [[18.0, 1.0], 1.0]
transfer_slack = 0
timeout = 30
"""


def test_clipped_where_every_other_step_is_short(mpirun, tmp_path: Path) -> None:
    """Stages waited for each other's norms of a step that the others could not have made yet."""
    (tmp_path / "short_epochs.py").write_text(NET)
    (tmp_path / "job.toml").write_text(SHORT_EPOCHS)
    assert "step 20  done" in mpirun(3, "-m", "accept_mpi", "train", "job.toml").out

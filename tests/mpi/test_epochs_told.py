"""A data set that wants to know the epoch is told, on all ranks that have it, as in a plain loop."""

import runpy
from pathlib import Path

import numpy as np
import samples
import torch
from torch import nn

from accept_mpi.logs.reader import open_log
from accept_mpi.recovery.checkpoint import Checkpoint
from accept_mpi.seeds import AUGMENT, ORDER, mix, seed_all, seeded

NET = """
import torch
from torch import nn
def model():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
class Rows:
    def __init__(self, count):
        self.count, self.epoch = count, None
    def set_epoch(self, epoch):
        self.epoch, self.shift = epoch, torch.randn(6)
    def __len__(self):
        return self.count
    def __getitem__(self, n):
        x = torch.randn(6, generator=torch.Generator().manual_seed(n + 100 * (self.epoch or 0)))
        return x + (0 if self.epoch is None else self.shift), int(x[:3].argmax())
def data():
    return Rows(20), Rows(5)
"""
JOB = """
model.name = "net:model"
data.name = "net:data"
train = { batch_size = 8, micro_batches = 4, steps = 8, lr = 0.1 }
pipeline.cuts = [1]
output.directory = "run"
"""


def plain(path: Path) -> dict[str, torch.Tensor]:
    made = runpy.run_path(str(path))
    with seeded(0):
        net = made["model"]()
    rows, _ = made["data"]()
    for step in range(8):
        epoch = step // 3
        if rows.epoch != epoch:
            seed_all(mix(AUGMENT, 0, epoch))
            rows.set_epoch(epoch)
        order = np.random.Generator(np.random.Philox(mix(ORDER, 0, epoch))).permutation(20)
        batch = order[step % 3 * 8 :][:8].tolist()
        for k in range(0, len(batch), 2):
            x, y = zip(*(rows[n] for n in batch[k : k + 2]), strict=True)
            loss = nn.functional.cross_entropy(net(torch.stack(x)), torch.tensor(y))
            (loss * (len(x) / len(batch))).backward()
        with torch.no_grad():
            for parameter in net.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=0.1)
                parameter.grad = None
    state: dict[str, torch.Tensor] = net.state_dict()
    return state


def test_a_data_set_is_told_the_epoch(trained, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "job.toml").write_text(JOB)
    jobs = [
        ("job.toml", "output.directory=part", "train.steps=4", "pipeline.ranks=[0, 1]"),
        ("job.toml", "output.directory=rest", "pipeline.ranks=[[0, 1], 2]", "--resume", "part"),
        ("job.toml", "output.directory=lanes", "pipeline.ranks=[2, 0]", "pipeline.lanes=2", "train.threads=2"),
    ]
    trained(3, tmp_path, jobs)
    expected = plain(tmp_path / "net.py")
    for name in ("rest", "lanes"):
        samples.assert_equal(Checkpoint(tmp_path / name).whole(), expected)


SHARING = """
class Tests:
    def __init__(self, rows):
        self.rows = rows
    def __len__(self):
        return 8
    def __getitem__(self, n):
        return torch.full((6,), n + 10.0 * self.rows.epoch), n % 3
def sharing():
    rows = Rows(2)
    return rows, Tests(rows)
"""


def test_a_test_set_made_of_it_meets_the_epoch_that_is_over(trained, tmp_path: Path) -> None:
    """Also where a rank has taken no micro-batch of that epoch, and where a run that resumes evaluates before its first."""
    (tmp_path / "net.py").write_text(NET + SHARING)
    (tmp_path / "job.toml").write_text(JOB.replace("steps = 8", "epochs = 3"))
    jobs = [
        ("job.toml", "output.directory=alone", "pipeline.ranks=[0, 1]"),
        ("job.toml", "output.directory=group", "pipeline.ranks=[[0, 1], 2]"),
        ("job.toml", "output.directory=part", "pipeline.ranks=[0, 1]", "train.epochs=2", "train.evaluate_every=0"),
        ("job.toml", "output.directory=part", "pipeline.ranks=[0, 1]", "--resume", "part"),
    ]
    trained(3, tmp_path, jobs, "data.name=net:sharing")
    losses = {}
    for name in ("alone", "group", "part"):
        with open_log(tmp_path / name / "log.h5") as log:
            losses[name] = log["evals"]["loss"][:].tolist()
    assert losses["group"] == losses["alone"]
    assert losses["part"] == losses["alone"][1:]

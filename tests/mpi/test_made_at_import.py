"""Models that a user's module makes while it is imported."""

from pathlib import Path

import torch

from accept_mpi.recovery.checkpoint import Checkpoint

NET = """
import torch
from torch import nn

LAYERS = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
X = torch.randn(24, 6)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(LAYERS)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


MODULE = Net()


def chain():
    return LAYERS


def module():
    return MODULE


def data():
    return (X[:16], X[:16, :3].argmax(1)), (X[16:], X[16:, :3].argmax(1))
"""
JOB = """
model.name = "made_net:chain"
data.name = "made_net:data"
train = { batch_size = 8, micro_batches = 2, steps = 3 }
pipeline.cuts = "even"
output.directory = "run"
"""


def test_is_the_same_on_all_ranks(mpirun, tmp_path: Path) -> None:
    """And in each run: torch's random numbers begin elsewhere in every new process."""
    (tmp_path / "made_net.py").write_text(NET)
    (tmp_path / "job.toml").write_text(JOB)
    for ranks in (1, 2):
        mpirun(ranks, "-m", "accept_mpi", "train", "job.toml", "--set", f"output.directory=run-{ranks}", fresh=True)
    one, two = (Checkpoint(tmp_path / f"run-{ranks}").whole() for ranks in (1, 2))
    for name, value in two.items():
        assert torch.equal(value, one[name]), name


def test_a_module_that_is_recorded_must_be_made_anew(trained, tmp_path: Path) -> None:
    (tmp_path / "made_net.py").write_text(NET)
    (tmp_path / "job.toml").write_text(JOB)
    (done,) = trained(2, tmp_path, [("job.toml", "model.name=made_net:module")], code=2)
    assert "the function gives the same layers.0.weight whenever it is called: it must make it anew" in done.out

"""A parameter is of the first group that fits one of its names, wherever the layers are that have it under them."""

from pathlib import Path

import pytest

from accept_mpi.recovery.checkpoint import Checkpoint

NET = '''
import torch
from torch import nn


class Named(nn.Module):
    """One module under two names."""

    def __init__(self):
        super().__init__()
        self.i, self.a, self.m, self.o = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.b = self.a

    def forward(self, x):
        x = torch.tanh(self.a(torch.relu(self.i(x))))
        return self.o(torch.tanh(self.b(torch.relu(self.m(x)))))


class Twice(nn.Module):
    def __init__(self, inside):
        super().__init__()
        self.one = self.two = inside

    def forward(self, x):
        return self.two(torch.relu(self.one(x)))


def chain():
    """One layer in two places, and one whose weight another has, too."""
    shared, other = nn.Linear(16, 16), nn.Linear(16, 16)
    last = nn.Linear(16, 16)
    last.weight = other.weight
    return nn.Sequential(nn.Linear(6, 16), shared, nn.ReLU(), other, nn.Tanh(), Twice(shared), last, nn.Linear(16, 3))


def data():
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
    y = x[:, :3].argmax(1)
    return (x[:48], y[:48]), (x[48:], y[48:])
'''
JOB = """
model.name = "named_net:{net}"
data.name = "named_net:data"
train = {{ batch_size = 8, micro_batches = 4, steps = 5, evaluate_every = 0, optimizer = {{ name = "sgd", lr = 0.1 }} }}
pipeline = {{ cuts = {cuts}, latency_db = "none" }}
output.directory = "run"
"""
CASES = [
    ("chain", [3], "5.two.*"), ("chain", [3], "1.*"), ("chain", [4], "6.weight"), ("chain", [2, 4], "5.one.weight"),
    ("Named", [2], "b.*"), ("Named", [2], "a.*"),
]  # fmt: skip


@pytest.mark.parametrize(("net", "cuts", "pattern"), CASES)
def test_groups_go_by_all_names(trained, tmp_path: Path, monkeypatch, net: str, cuts: list[int], pattern: str) -> None:
    (tmp_path / "named_net.py").write_text(NET)
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "job.toml"
    path.write_text(JOB.format(net=net, cuts=cuts))
    group = f'train.groups=[{{ names = ["{pattern}"], lr = 0.001 }}]'
    ranks = len(cuts) + 1
    trained(
        1,
        tmp_path,
        [(path, "pipeline.cuts=[]", "output.directory=one", group), (path, "pipeline.cuts=[]", "output.directory=none")],
    )
    trained(ranks, tmp_path, [(path, "output.directory=parted", group)])
    one, parted, none = (Checkpoint(tmp_path / name).whole() for name in ("one", "parted", "none"))
    assert all((one[name] == value).all() for name, value in parted.items())
    assert any((one[name] != value).any() for name, value in none.items())

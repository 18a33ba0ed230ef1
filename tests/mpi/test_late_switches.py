"""Forwards that change something late, when a sample comes that no trial has seen. One rank does as a plain loop does; ranks
and lanes that share micro-batches would each do so for themselves, so the run ends."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_loop import plain_loop

from accept_mpi.recovery.checkpoint import Checkpoint

NET = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

FACTOR = 1.0


class Layer(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.linear, self.norm, self.kind = nn.Linear(6, 6), nn.BatchNorm1d(6), kind
        self.slope, self.scale, self.box, self.shown, self.most = 1.0, torch.ones(()), {"slope": 1.0}, None, 0.0
        self.told = {}
        self.register_buffer("gate", torch.ones(()))

    def forward(self, x):
        global FACTOR
        self.shown = float(x.detach().mean())
        self.told["mean"] = x.detach().mean()
        factor = self.slope * self.scale * self.gate * self.box["slope"] * FACTOR * getattr(self, "more", 1.0)
        y = torch.tanh(factor * self.linear(x.clamp(-2, 2)))
        if self.kind == "most":
            self.most = max(self.most, float(y.detach().abs().max()))
            y = y / self.most
        y = self.norm(y)
        if self.training and bool((x[:, 5] > 5).any()):
            if self.kind == "mode":
                self.norm.eval()
            if self.kind == "number":
                self.slope = 0.5
            if self.kind == "tensor":
                self.scale = 0.5 * self.scale
            if self.kind == "buffer":
                self.gate.mul_(0.5)
            if self.kind == "container":
                self.box["slope"] = 0.5
            if self.kind == "new":
                self.more = 0.5
            if self.kind == "python":
                FACTOR = 0.5
            if self.kind == "frozen":
                self.linear.weight.requires_grad_(False)
            if self.kind == "all frozen":
                self.requires_grad_(False)
        return y


def net(kind):
    return nn.Sequential(Layer(kind), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


def data(mark=5):
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(1)).clamp(-3, 3)
    x[mark, 5] = 9.0
    y = x[:, :3].argmax(1)
    return TensorDataset(x, y), TensorDataset(x[:6], y[:6])
"""
JOB = """
model = { name = "switching:net", args = { kind = "none" } }
data.name = "switching:data"
train = { batch_size = 16, micro_batches = 4, steps = 9, evaluate_every = 1, threads = 1 }
pipeline.cuts = []
output.directory = "run"
"""
NAMES = {
    "mode": "0.norm.training",
    "number": "0.slope",
    "tensor": "0.scale",
    "buffer": "0.gate",
    "container": "0.box",
    "new": "0.more",
    "python": "switching.FACTOR",
    "frozen": "which parameters of 0.linear are trained",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "switching.py").write_text(NET)
    (tmp_path / "job.toml").write_text(JOB)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "switching", raising=False)
    return tmp_path


def same(folder: Path, expected: dict[str, Any]) -> None:
    mine = Checkpoint(folder / "run").whole()
    assert not [name for name, value in expected.items() if not torch.equal(mine[name], value)]


def model(kind: str) -> str:
    return f'model.args={{kind="{kind}"}}'


@pytest.mark.parametrize("kind", NAMES)
def test_they_end_the_run(trained: Any, folder: Path, kind: str) -> None:
    (group,) = trained(2, folder, [("job.toml", model(kind), "pipeline.ranks=[[0, 1]]")], code=2)
    (lanes,) = trained(1, folder, [("job.toml", model(kind), "pipeline.lanes=2", "train.threads=2")], code=2)
    for one in (group, lanes):
        assert f"a forward of layers 0 to 3 has changed {NAMES[kind]}, which the first ones did not" in one.out


def test_what_always_changes_does_not(trained: Any, folder: Path) -> None:
    """What is only shown, and what evaluations change, too."""
    jobs = [
        (2, "pipeline.ranks=[[0, 1]]", "train.threads=1"),
        *((1, f"pipeline.lanes={k}", "train.threads=2") for k in ("2", '"F+B"')),
    ]
    expected, _ = plain_loop(folder / "job.toml")
    for ranks, *keys in jobs:
        trained(ranks, folder, [("job.toml", *keys)])
        same(folder, expected)


@pytest.mark.parametrize("kind", [*NAMES, "most"])
def test_one_rank_does_as_a_plain_loop(trained: Any, folder: Path, kind: str) -> None:
    jobs = [("train.threads=1",), ("train.threads=2", 'pipeline.lanes="F+B"')]
    expected, _ = plain_loop(folder / "job.toml", model(kind))
    for keys in jobs if kind not in ("most", "frozen") else jobs[:1]:
        trained(1, folder, [("job.toml", model(kind), *keys)])
        same(folder, expected)


@pytest.mark.parametrize("kind", ["frozen", "all frozen"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble", "1f1b-delayed"])
def test_what_is_frozen_between_a_forward_and_its_backward(trained: Any, folder: Path, schedule: str, kind: str) -> None:
    """In the middle of a step earlier micro-batches train it, as they do in a loop that ends each before the next."""
    for mark in (2, 5):
        keys = (model(kind), f"data.args={{mark={mark}}}", f"pipeline.schedule={schedule}")
        trained(2, folder, [("job.toml", *keys, "pipeline.cuts=[1]")])
        expected, _ = plain_loop(folder / "job.toml", *keys)
        same(folder, expected)


@pytest.mark.parametrize("kind", NAMES)
def test_forwards_that_are_computed_again(trained: Any, folder: Path, kind: str) -> None:
    """They would meet what later ones have left."""
    keys = (model(kind), "pipeline.cuts=[2]", 'pipeline.recompute="on"', "pipeline.schedule=gpipe")
    (run,) = trained(2, folder, [("job.toml", *keys)], code=2)
    assert f"a forward of layers 0 to 1 has changed {NAMES[kind]}, which the first ones did not" in run.out
    assert 'set pipeline.recompute = "off"' in run.out


def test_the_largest_so_far_is_found_before_the_first_step(trained: Any, folder: Path) -> None:
    """The same values do not make it larger again, nor do any make it so that it is not a number."""
    (group,) = trained(2, folder, [("job.toml", model("most"), "pipeline.ranks=[[0, 1]]")], code=2)
    assert 'cannot be held by several ranks: a forward changes "0.most", and reads it' in group.out

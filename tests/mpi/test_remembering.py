"""Layers and a loss that remember: runs that are resumed, lose a rank or measure first end with the same weights."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lost_ranks import run
from plain_loop import plain_loop

from accept_mpi.pipeline.state import unpacked
from accept_mpi.recovery.checkpoint import Checkpoint

NET = """
from collections import deque

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset


class Meter:
    def __init__(self):
        self.calls, self.last = 0, deque(maxlen=3)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.cell = nn.Linear(6, 6), nn.LSTMCell(6, 6)
        self.meter, self.hidden, self.centre = Meter(), None, torch.zeros(6)
        self.register_buffer("quiet", torch.zeros(6), persistent=False)
        self.random = torch.Generator().manual_seed(5)
        self.norm, self.slope, self.shift = nn.BatchNorm1d(6), 1.0, None

    def forward(self, x):
        x = self.norm(torch.tanh(self.slope * self.linear(x)))
        if self.shift is not None:
            x = x + self.shift + self.late["by"]
        if self.meter.calls == 7:  # later than any trial
            self.slope = 0.5
            self.norm.eval()
            self.shift, self.late = x.detach().mean(0), {"by": 0.5}
            self.linear.bias.requires_grad_(False)
        if not self.training:
            return x - self.centre
        mean = x.detach().mean(0)
        self.meter.calls += 1
        self.meter.last.append(mean)
        self.centre = 0.9 * self.centre + 0.1 * mean
        self.quiet.mul_(0.5).add_(mean)
        h, c = self.cell(x.mean(0, keepdim=True), self.hidden)
        self.hidden = h.detach(), c.detach()
        noise = 0.1 * torch.randn(6, generator=self.random)
        return x + h + sum(self.meter.last) / self.meter.calls - self.centre - self.quiet + noise


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(3))
        self.calls, self.factor = 0, 1.0

    def forward(self, output, target):
        if not torch.is_grad_enabled():
            return functional.cross_entropy(output, target)
        self.calls += 1
        self.centre = self.centre * 0.9 + output.detach().mean(0) * 0.1
        if self.calls == 9:
            self.factor = 0.5
        return self.factor * functional.cross_entropy(output - self.centre, target) * min(1.0, self.calls / 9)


def net():
    return nn.Sequential(Layer(), Layer(), Layer(), Layer(), nn.Linear(6, 3))


loss = Centred()


def data():
    x = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))
    y = x[:, :3].argmax(1)
    return TensorDataset(x[:16], y[:16]), TensorDataset(x[16:], y[16:])
"""
JOB = """
model.name = "remembering:net"
data.name = "remembering:data"
train = { batch_size = 4, micro_batches = 2, steps = 9, loss = "remembering:loss", evaluate_every = 0 }
pipeline.cuts = "even"
recovery.replicate_every = 2
output = { directory = "run", checkpoint_every = 4 }
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "remembering.py").write_text(NET)
    (tmp_path / "job.toml").write_text(JOB)
    return tmp_path


def weights(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return Checkpoint(folder / name).whole()


def same(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert not [name for name, value in theirs.items() if not torch.equal(mine[name], value)]


def test_they_go_on_where_they_were(mpirun: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a plain loop: on one rank, on three, where ranks measure first, and resumed with other cuts."""
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "remembering", raising=False)
    expected, _ = plain_loop(folder / "job.toml")
    arguments = ("-m", "accept_mpi", "train", "job.toml", "--set")
    mpirun(1, *arguments, "output.directory=one")
    mpirun(3, *arguments, "output.directory=three")
    mpirun(2, *arguments, "output.directory=measured", "--set", "pipeline.cuts=auto", "--set", "pipeline.probe_seconds=0.2")
    mpirun(2, *arguments, "output.directory=begun", "--set", "train.steps=5")
    mpirun(3, *arguments, "output.directory=resumed", "--resume", "begun")
    for name in ("one", "three", "measured", "resumed"):
        same(weights(folder, name), expected)


@pytest.mark.parametrize(
    ("schedule", "fault"),
    [
        ("1f1b", "1@forward:2"),  # before the first snapshot
        ("1f1b", "1@forward:13"),
        ("zero-bubble", "2@backward:13"),
        ("1f1b-delayed", "1@forward:13"),
        ("1f1b-delayed", "2@backward:13"),
    ],
)
def test_after_a_loss(folder: Path, schedule: str, fault: str) -> None:
    arguments = ["-m", "accept_mpi", "train", "job.toml", "--set", f"pipeline.schedule={schedule}", "--set"]
    assert run(folder, [*arguments, "output.directory=whole"], "", 3)[0] == 0
    code, out = run(folder, [*arguments, "output.directory=lost"], fault, 3)
    assert code == 0, out
    same(weights(folder, "lost"), weights(folder, "whole"))


@pytest.mark.parametrize("fault", ["1@forward:13", "2@backward:13"])
def test_each_micro_batch_counts_once(folder: Path, fault: str) -> None:
    """Asynchronously, snapshots are made while forwards of later steps have begun, which are made again after a loss."""
    keys = ["pipeline.schedule=1f1b-async", "recovery.replicate_every=1", "output.checkpoint_every=0"]
    words = [word for key in keys for word in ("--set", key)]
    code, out = run(folder, ["-m", "accept_mpi", "train", "job.toml", *words], fault, 3)
    assert code == 0, out
    assert "lost rank" in out, out
    assert "from step 0" not in out, out
    kept = Checkpoint(folder / "run").remembered()
    assert [unpacked(kept[f"remembered/{layer}.meter"])["calls"] for layer in range(4)] == [18] * 4


BACKWARDS = """
import torch
from torch import nn
from torch.utils.data import TensorDataset


class Dividing(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.linear, self.size = nn.Linear(6, 6), 1.0 if number else torch.ones(())
        self.register_full_backward_hook(self.divide)

    def divide(self, module, given, gradients):
        size = 10 * gradients[0].abs().mean()
        self.size = self.size + (float(size) if type(self.size) is float else size)
        return tuple(gradient / self.size for gradient in given)

    def forward(self, x):
        return torch.tanh(self.linear(x))


def net(number):
    return nn.Sequential(nn.Linear(6, 6), Dividing(number), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


def data():
    x = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :3].argmax(1)), TensorDataset(x, x[:, :3].argmax(1))
"""


@pytest.mark.parametrize("number", ["true", "false"])
def test_what_only_backwards_read(trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: str) -> None:
    """Forwards do not show it; nor did gradients of zeros, in any stage but the last."""
    text = JOB.replace("remembering:loss", "cross_entropy").replace("remembering:", "backwards:")
    (tmp_path / "backwards.py").write_text(BACKWARDS)
    (tmp_path / "job.toml").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "backwards", raising=False)
    job = ("job.toml", f"model.args={{number={number}}}", "pipeline.cuts=[2]")
    trained(2, tmp_path, [(*job, "output.directory=begun", "train.steps=5")])
    trained(2, tmp_path, [(*job, "output.directory=resumed", "--resume", "begun")])
    expected, _ = plain_loop(tmp_path / "job.toml", job[1])
    same(weights(tmp_path, "resumed"), expected)
    (refused,) = trained(3, tmp_path, [(*job, "pipeline.ranks=[[0, 1], 2]")], code=2)
    assert 'cannot be held by several ranks: a forward changes "1.size", and reads it' in refused.out


CUT = """
import torch
from torch import nn
from remembering import data
class Warming(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("step", torch.zeros((), dtype=torch.long), persistent=False)
    def forward(self, x):
        if self.training:
            self.step += 1
        return self.linear(x) * torch.cos(self.step / 10.0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.warming, self.last = nn.Linear(6, 6), Warming(), nn.Linear(6, 3)
    def forward(self, x):
        return self.last(torch.relu(self.warming(self.first(x))))
def net():
    return Net()
"""


def test_a_record_that_is_cut_within_a_module(
    trained: Any, folder: Path, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its buffer is in two layers, one of which counts, and the other reads that."""
    (folder / "warming.py").write_text(CUT)
    path = folder / "warming.toml"
    path.write_text(JOB.replace("remembering:net", "warming:net").replace("remembering:loss", "cross_entropy"))
    monkeypatch.syspath_prepend(folder)
    for name in ("remembering", "warming"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    expected, _ = plain_loop(path)
    trained(1, folder, [(path, "train.steps=5", "output.directory=begun")])
    trained(2, folder, [(path, "output.directory=resumed", "pipeline.cuts=[2]", "--resume", "begun")])
    same(weights(folder, "resumed"), expected)
    keys = ["pipeline.cuts=[2]", "output.directory=lost", "output.checkpoint_every=0"]
    arguments = ["-m", "accept_mpi", "train", "warming.toml", *(word for key in keys for word in ("--set", key))]
    code, out = run(folder, arguments, "1@forward:13", 2)
    assert code == 0, out
    same(weights(folder, "lost"), expected)


HOOKED = """
from remembering import *


class Hooked(nn.Linear):
    def __init__(self):
        super().__init__(6, 6)
        self.part, self.there = nn.Linear(6, 6), False

    def forward(self, x):
        if not self.there:
            self.part.register_forward_hook(lambda module, given, result: 0.5 * result)
            self.there = True
        return super().forward(torch.tanh(self.part(x)))


def net():
    return nn.Sequential(Hooked(), Hooked(), Hooked(), nn.Linear(6, 3))
"""


def test_hooks_that_forwards_put_on_modules(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that went on had the switch that says that they are there, and not the hooks."""
    (folder / "hooked.toml").write_text(JOB.replace('"remembering:net"', '"hooked:net"'))
    (folder / "hooked.py").write_text(HOOKED)
    monkeypatch.syspath_prepend(folder)
    for name in ("remembering", "hooked"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    expected, _ = plain_loop(folder / "hooked.toml")
    arguments = ["-m", "accept_mpi", "train", "hooked.toml", "--set"]
    assert run(folder, [*arguments, "output.directory=lost"], "1@forward:13", 3)[0] == 0
    assert run(folder, [*arguments, "output.directory=begun", "--set", "train.steps=5"], "", 2)[0] == 0
    assert run(folder, [*arguments, "output.directory=resumed", "--resume", "begun"], "", 3)[0] == 0
    for name in ("lost", "resumed"):
        same(weights(folder, name), expected)

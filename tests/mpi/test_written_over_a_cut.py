"""Layers that write into what they are given, of which an earlier layer has given another view, or keeps it: no cut parts
them, since each rank would have memory of its own."""

from pathlib import Path

import pytest
from plain_loop import differences, plain_loop

from accept_mpi.recovery.checkpoint import Checkpoint

NET = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
class First(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.linear, self.kind, self.last = nn.Linear(6, 8), kind, None
        self.register_buffer("count", torch.zeros(()))
    def forward(self, x):
        h = self.linear(x)
        if self.kind == "views":
            return h, h.t()
        if self.kind == "buffer":
            return h, self.count
        if self.kind == "read":
            if self.last is not None and self.last.shape == h.shape:
                h = h + 0.3 * self.last
            self.last = h.detach()
        self.shown = h
        return h, h * 1.0
class On(nn.Module):
    def forward(self, given):
        return given
class Second(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.linear, self.kind = nn.Linear(8, 3), kind
    def forward(self, given):
        h, more = given
        if self.kind == "views":
            more += 1.0
        elif self.kind == "buffer":
            more += self.training
            h = h * (1 + 0.1 * more)
        else:
            h *= 0.5
        return self.linear(h)
def model(kind):
    return nn.Sequential(First(kind), On(), Second(kind))
def data():
    x = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :3].argmax(1)), TensorDataset(x[:8], x[:8, :3].argmax(1))
"""
JOB = """
model = { name = "net:model", args = { kind = "KIND" } }
data.name = "net:data"
train = { batch_size = 8, micro_batches = 4, steps = 5, evaluate_every = 0, lr = 0.1 }
output.directory = "KIND"
"""
COMMON = {"views": "another value that it gives", "buffer": "0.count", "read": r"0.last (an attribute)"}


@pytest.mark.parametrize("kind", [*COMMON, "shown"])
def test_no_cut_parts_them(trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    (tmp_path / "net.py").write_text(NET)
    path = tmp_path / "job.toml"
    path.write_text(JOB.replace("KIND", kind))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "net", raising=False)
    expected, _ = plain_loop(path)
    trained(1, tmp_path, [(path, "pipeline.cuts=[]")])
    assert not differences(Checkpoint(tmp_path / kind).whole(), expected)
    for ranks, cuts in ((2, "[1]"), (3, "[1,2]")):
        wrong = kind in COMMON
        (done,) = trained(ranks, tmp_path, [(path, f"pipeline.cuts={cuts}")], code=2 if wrong else 0)
        if wrong:
            assert f"values in common with {COMMON[kind]}: behind a cut each" in done.out
        else:
            assert not differences(Checkpoint(tmp_path / kind).whole(), expected)

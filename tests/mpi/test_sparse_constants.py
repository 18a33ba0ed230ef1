"""Layers with a graph's edges as a sparse tensor, in an attribute or a buffer that is in no state: as a plain loop."""

import sys
from pathlib import Path

import pytest
from plain_loop import differences, plain_loop

from accept_mpi.recovery.checkpoint import Checkpoint

NET = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
class Graph(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        edges = torch.eye(6) + torch.diag(torch.ones(5), 1)
        edges = edges.to_sparse_csr() if kind == "rows" else edges.to_sparse()
        if kind == "buffer":
            self.register_buffer("edges", edges, persistent=False)
        else:
            self.edges = edges
    def forward(self, x):
        return torch.relu(torch.sparse.mm(self.edges, self.linear(x).t()).t())
def model(kind):
    return nn.Sequential(Graph(kind), Graph(kind), nn.Linear(6, 3))
def data():
    x = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :3].argmax(1)), TensorDataset(x[:8], x[:8, :3].argmax(1))
"""
JOB = """
model = { name = "net:model", args = { kind = "KIND" } }
data.name = "net:data"
train = { batch_size = 8, micro_batches = 4, steps = 4, lr = 0.1 }
pipeline = { probe_seconds = 0.2, latency_db = "none" }
output.directory = "KIND"
"""


@pytest.mark.parametrize("kind", ["attribute", "buffer", "rows"])
def test_as_a_plain_loop(trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    (tmp_path / "net.py").write_text(NET)
    path = tmp_path / "job.toml"
    path.write_text(JOB.replace("KIND", kind))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "net", raising=False)
    expected, _ = plain_loop(path)
    ways = [
        ("cuts", "pipeline.cuts=[1]"),
        ("auto", "pipeline.cuts=auto"),
        ("group", "pipeline.ranks=[[0,1]]", "pipeline.cuts=[]"),
    ]
    trained(2, tmp_path, [(path, f"output.directory={name}", *keys) for name, *keys in ways])
    for name, *_ in ways:
        assert not differences(Checkpoint(tmp_path / name).whole(), expected), name

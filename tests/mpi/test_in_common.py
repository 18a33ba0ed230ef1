"""Layers with a context object in common: their cuts are refused or avoided before the first step."""

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


GENTLE = True


class Context:
    mask = None


class Masks(nn.Module):
    def __init__(self, context):
        super().__init__()
        self.linear, self.context = nn.Linear(6, 6), context

    def forward(self, x):
        self.context.mask = (x > 0).float()
        return torch.tanh(self.linear(x))


class Masked(nn.Module):
    def __init__(self, context):
        super().__init__()
        self.linear, self.context = nn.Linear(6, 6), context

    def forward(self, x):
        x = self.linear(x)
        return torch.tanh(x if GENTLE and self.context.mask is None else x * self.context.mask)


def net():
    context = Context()
    return nn.Sequential(Masks(context), nn.Tanh(), Masked(context), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


def data():
    x = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))
    y = x[:, :3].argmax(1)
    return TensorDataset(x[:16], y[:16]), TensorDataset(x[16:], y[16:])
"""
JOB = """
model.name = "in_common:net"
data.name = "in_common:data"
train = { batch_size = 4, micro_batches = 2, steps = 5, evaluate_every = 0 }
pipeline.probe_seconds = 0.2
output.directory = "run"
"""


@pytest.mark.parametrize(("cuts", "code"), [("[2]", 2), ("[3]", 0), ("auto", 0)])
def test_a_context_is_not_parted(mpirun: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuts: str, code: int) -> None:
    (tmp_path / "in_common.py").write_text(NET)
    (tmp_path / "job.toml").write_text(JOB)
    done = mpirun(2, "-m", "accept_mpi", "train", "job.toml", "--set", f"pipeline.cuts={cuts}", code=code)
    if code:
        assert "layers 0 and 2 have context in common, and a forward changes it, so they must be in one stage" in done.out
        assert "step 1/" not in done.out
        (tmp_path / "in_common.py").write_text(NET.replace("GENTLE = True", "GENTLE = False"))
        done = mpirun(2, "-m", "accept_mpi", "train", "job.toml", "--set", f"pipeline.cuts={cuts}", code=1)
        assert "have context in common: what a forward leaves there does not reach another stage" in done.out
        return
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "in_common", raising=False)
    expected, _ = plain_loop(tmp_path / "job.toml")
    mine = Checkpoint(tmp_path / "run").whole()
    assert not [name for name, value in expected.items() if not torch.equal(mine[name], value)]

"""Tables that a forward makes longer when a longer sample comes than any before, after the first steps: ranks and lanes that
share micro-batches each make their own, which gives what one process computes. What only looks so ends the run."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from plain_loop import differences, plain_loop

from accept_mpi.recovery.checkpoint import Checkpoint

NET = """
import torch
from torch import nn


def angles(n):
    return torch.outer(torch.arange(n), torch.tensor([0.1, 0.2, 0.3, 0.4]))


class Positions(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.embedding, self.kind, self.longest = nn.Embedding(9, 4), kind, 5
        self.table = None if kind == "first" else angles(5)
        self.register_buffer("mask", torch.ones(5, 5).triu(), persistent=False)

    def forward(self, ids):
        x, n = self.embedding(ids), ids.shape[1]
        if self.kind == "values" and n > 6:
            self.table = torch.cat([self.table, x.detach()[0, :1]])
        if self.kind == "other" and n > 6:
            self.table = self.table * 2
        if self.kind == "switch" and n > 6:
            self.longest = 1
        if n > self.longest and self.kind == "random":
            self.table, self.longest = torch.cat([self.table, torch.randn(n - self.longest, 4)]), n
        elif n > self.longest and self.kind == "twice":
            self.longest, self.table = 2 * n, angles(2 * n)
            self.register_buffer("mask", torch.ones(2 * n, 2 * n).triu(), persistent=False)
        elif n > self.longest and self.kind == "backwards":
            self.longest, self.table = n, angles(n).flip(0)
        elif n > self.longest or self.table is None:
            self.longest = max(n, self.longest)
            self.table = angles(self.longest)
            if n > len(self.mask):
                self.register_buffer("mask", torch.ones(n, n).triu(), persistent=False)
        at = self.table[-n:] if self.kind == "backwards" else self.table[:n]
        if self.kind == "length":
            x = x / self.longest
        if len(at) < n or len(self.mask) < n:
            at, self.mask = angles(n), torch.ones(n, n).triu()
        return torch.tanh(x + at) + self.mask[:n, :n].T @ x / 10


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        return self.linear(x.mean(1))


def net(kind):
    return nn.Sequential(Positions(kind), nn.Linear(4, 4), nn.Tanh(), Last())


class Texts:
    def __init__(self, count):
        g = torch.Generator().manual_seed(1)
        self.samples = [torch.randint(0, 9, (5 + (n % 3 == 1) * (n % 8),), generator=g) for n in range(count)]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, n):
        return self.samples[n], int(self.samples[n][0]) % 3


def data():
    return Texts(64), Texts(1)
"""
JOB = """
model = { name = "growing:net", args = { kind = "usual" } }
data.name = "growing:data"
train = { batch_size = 4, micro_batches = 4, steps = 12, evaluate_every = 0, threads = 1, seed = 3 }
pipeline.cuts = []
output.directory = "run"
"""
SHARED = [(2, ("pipeline.ranks=[[0, 1]]",)), (1, ("pipeline.lanes=2", "train.threads=2"))]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "growing.py").write_text(NET)
    (tmp_path / "job.toml").write_text(JOB)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "growing", raising=False)
    return tmp_path


def model(kind: str) -> str:
    return f'model.args={{kind="{kind}"}}'


@pytest.mark.parametrize(("ranks", "share"), SHARED)
def test_each_makes_its_own(trained: Any, folder: Path, ranks: int, share: tuple[str, ...]) -> None:
    jobs = {}
    for kind in ("usual", "first", "twice"):
        for schedule in ("1f1b", "zero-bubble", "1f1b-delayed"):
            jobs[f"{kind}-{schedule}"] = (model(kind), f"pipeline.schedule={schedule}")
    trained(ranks, folder, [("job.toml", f"output.directory={name}", *keys, *share) for name, keys in jobs.items()])
    for name, keys in jobs.items():
        expected, _ = plain_loop(folder / "job.toml", *keys)
        assert not differences(Checkpoint(folder / name).whole(), expected)


def test_forwards_that_are_computed_again(trained: Any, folder: Path) -> None:
    trained(2, folder, [("job.toml", "pipeline.cuts=[2]", 'pipeline.recompute="on"')])
    expected, _ = plain_loop(folder / "job.toml")
    assert not differences(Checkpoint(folder / "run").whole(), expected)


@pytest.mark.parametrize(("ranks", "share"), SHARED)
def test_what_is_no_cache_ends_the_run(trained: Any, folder: Path, ranks: int, share: tuple[str, ...]) -> None:
    """Tables that depend on values or chance, in which shorter ones are not the beginnings of longer ones, or whose length
    matters; switches."""
    kinds = ["values", "other", "switch", "backwards", "length", *(["random"] if ranks > 1 else [])]  # lanes never draw late
    runs = trained(ranks, folder, [("job.toml", model(kind), *share) for kind in kinds], code=2)
    for kind, run in zip(kinds, runs, strict=True):
        found = re.search(r"a forward of layers 0 to 3 has changed 0\.(\w+), which the first ones did not", run.out)
        assert found, (kind, run.out)
        assert found[1] in ("longest" if kind == "switch" else "table", "longest")  # the first of several

"""Models that people copy, on several ranks."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_loop import plain_loop

from accept_mpi.recovery.checkpoint import Checkpoint

DATA = """
import torch
from torch.utils.data import TensorDataset
from copied_nets import *
from tutorial_nets import *


class Logits(MinGPT):
    def forward(self, idx):
        return super().forward(idx)[0]


def images():
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(24, 3, 32, 32, generator=generator), torch.randint(0, 10, (24,), generator=generator)
    return TensorDataset(x[:16], y[:16]), TensorDataset(x[16:], y[16:])


def series():
    x = torch.randn(24, 30, 3, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x[:16, :24], x[:16, 24:]), TensorDataset(x[16:, :24], x[16:, 24:])


def with_auxiliary(output, target):
    if isinstance(output, tuple):
        return sum(functional.cross_entropy(one, target % 5) for one in output)
    return functional.cross_entropy(output, target % 5)


def texts():
    x = torch.randint(0, 50, (24, 12), generator=torch.Generator().manual_seed(1))
    return TensorDataset(x[:16], x[:16].roll(-1, 1)), TensorDataset(x[16:], x[16:].roll(-1, 1))
"""
JOB = """
model.name = "{model}"
data.name = "{data}"
pipeline.cuts = "even"
output.directory = "run"

[train]
batch_size = 8
micro_batches = 2
steps = 3
loss = "{loss}"
memory_format = "contiguous"
optimizer = {{ name = "sgd", lr = 0.05, momentum = 0.9 }}
"""


@pytest.mark.parametrize(
    ("model", "data", "ranks", "loss"),
    [
        ("LeNet", "images", 3, "cross_entropy"),
        ("Residual", "images", 2, "cross_entropy"),
        ("Logits", "texts", 3, "cross_entropy"),
        ("GRULoop", "texts", 2, "cross_entropy"),
        ("WithAuxiliary", "images", 3, "tutorials:with_auxiliary"),
        ("PatchForecast", "series", 3, "mse"),
    ],
)
def test_equal_to_a_plain_loop(
    trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, data: str, ranks: int, loss: str
) -> None:
    """And with the format that is chosen for images, which a plain loop does not have."""
    (tmp_path / "tutorials.py").write_text(DATA)
    for name in ("copied_nets.py", "tutorial_nets.py"):
        (tmp_path / name).write_bytes((Path(__file__).parents[1] / name).read_bytes())
    (tmp_path / "job.toml").write_text(JOB.format(model=f"tutorials:{model}", data=f"tutorials:{data}", loss=loss))
    runs = [("job.toml", "output.directory=plain"), ("job.toml", "output.directory=chosen", "train.memory_format=auto")]
    trained(ranks, tmp_path, runs)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tutorials", raising=False)
    expected, _ = plain_loop(tmp_path / "job.toml")
    mine, chosen = (Checkpoint(tmp_path / name).whole() for name in ("plain", "chosen"))
    assert not [name for name, value in expected.items() if not torch.equal(mine[name], value)]
    assert not [name for name, value in expected.items() if not torch.allclose(chosen[name], value, atol=1e-3)]

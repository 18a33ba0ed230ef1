"""An nn.Sequential that does or has more than its layers trains as a plain PyTorch loop trains it."""

from pathlib import Path

import pytest
from plain_loop import differences, plain_loop

from accept_mpi.recovery.checkpoint import Checkpoint

NET = """
import types
import torch
from torch import nn
from torch.utils.data import TensorDataset
class Calling(nn.Sequential):
    def __call__(self, x):
        return super().__call__(x) * 0.5
def model(kind):
    made = (Calling if kind == "call" else nn.Sequential)(
        nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    if kind == "forward hook":
        made.register_forward_hook(lambda module, inputs, output: output * 0.5)
    elif kind == "pre-hook":
        made.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))
    elif kind == "backward pre-hook":
        made.register_full_backward_pre_hook(lambda module, gradients: tuple(2 * one for one in gradients))
    elif kind == "forward":
        made.forward = types.MethodType(lambda self, x: nn.Sequential.forward(self, x) * 0.5, made)
    elif kind == "state":
        made.scale = nn.Parameter(torch.ones(3))
        made.register_buffer("mean", torch.ones(2))
    return made
class Plain(nn.Module):  # which the plain loop calls as a whole
    def __init__(self, kind):
        super().__init__()
        self.model = model(kind)
    def forward(self, x):
        return self.model(x)
def data():
    x = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :3].argmax(1)), TensorDataset(x[:8], x[:8, :3].argmax(1))
"""
JOB = """
model = { name = "net:model", args = { kind = "KIND" } }
data.name = "net:data"
train = { batch_size = 8, micro_batches = 4, steps = 5, lr = 0.1 }
pipeline.cuts = "even"
output.directory = "KIND"
"""
KINDS = "forward hook", "pre-hook", "backward pre-hook", "forward", "call", "state"


@pytest.mark.parametrize("ranks", [1, 2])
def test_equals_the_plain_loop(trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    (tmp_path / "net.py").write_text(NET)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "net", raising=False)
    expected, jobs = {}, []
    for n, kind in enumerate(KINDS):
        if ranks > 1 and kind == "backward pre-hook":
            continue  # that of the whole model, which is one layer
        jobs.append(tmp_path / f"{n}.toml")
        jobs[-1].write_text(JOB.replace("KIND", kind))
        state, _ = plain_loop(jobs[-1], "model.name=net:Plain")
        expected[kind] = {name.removeprefix("model."): value for name, value in state.items()}
    trained(ranks, tmp_path, jobs)
    for kind, state in expected.items():
        found = Checkpoint(tmp_path / kind).whole()
        assert set(found) == set(state), kind
        assert not differences(found, state), kind

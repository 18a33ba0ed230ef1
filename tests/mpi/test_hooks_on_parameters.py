"""Hooks on parameters get the gradients that a plain loop gives them, or a sentence says that they would not.

In a group each member has those of its own micro-batches only, a copy of a tied parameter those of some uses, and what
micro-batches add up to (``register_post_accumulate_grad_hook``) is nowhere where they are set aside.
"""

import sys
from pathlib import Path

import pytest
from plain_loop import differences, plain_loop

from accept_mpi.recovery.checkpoint import Checkpoint

NET = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def clamp(parameter):
    parameter.grad.clamp_(-0.02, 0.02)

def remembering():
    state = {}
    def hook(gradient):
        state["m"] = gradient + 0.5 * state.get("m", 0)
        return state["m"]
    return hook

def model(tied=False, how="sums"):
    layers = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)]
    if tied:
        layers[2].weight = layers[0].weight
    for layer in layers[::2]:
        if how == "sums":
            layer.weight.register_post_accumulate_grad_hook(clamp)
        elif how == "clamped":
            layer.weight.register_hook(lambda gradient: gradient.clamp(-0.005, 0.005))
        elif how == "remembered":
            layer.weight.register_hook(remembering())
    return nn.Sequential(*layers)

def data():
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :3].argmax(1)), TensorDataset(x, x[:, :3].argmax(1))
"""
JOB = """
model.name = "hooks_net:model"
data.name = "hooks_net:data"
output.directory = "run"
pipeline = { cuts = [2] }
train = { batch_size = 8, micro_batches = 4, steps = 8, evaluate_every = 0, lr = 0.1 }
"""
LATE = ("pipeline.schedule=1f1b-delayed", "train.clip_norm=1e9")
GROUP, TIES = "cannot be held by several ranks: a parameter has hooks", "and a parameter has hooks, so no cut may part them"
REFUSED = [
    (("pipeline.ranks=[[0, 1], 2]",), GROUP),
    (("pipeline.ranks=[2, [0, 1]]", "model.args={how='remembered'}"), GROUP),
    (("pipeline.ranks=[0, 1]", "model.args={tied=true}"), TIES),
    (("pipeline.ranks=[0, 1]", "model.args={tied=true, how='clamped'}"), TIES),
    (
        ("pipeline.ranks=[0, 1]", *LATE),
        "with train.clip_norm sets each micro-batch's gradients aside, and a hook in stage 0",
    ),
]
TRAINED = [
    ("pipeline.ranks=[0, 1]",),
    ("pipeline.ranks=[0, 1]", "pipeline.schedule=zero-bubble"),
    ("pipeline.ranks=[0, 1]", "pipeline.schedule=1f1b-delayed"),
    ("pipeline.ranks=[0, 1]", "model.args={how='remembered'}"),
    ("pipeline.ranks=[0, 1]", "model.args={how='clamped'}", *LATE),
    ("pipeline.ranks=[0]", "pipeline.cuts=[]", "model.args={tied=true}"),
]


def test_they_get_what_a_plain_loop_gives_them_or_are_refused(
    trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hooks_net.py").write_text(NET)
    (tmp_path / "job.toml").write_text(JOB)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "hooks_net", raising=False)
    trained(3, tmp_path, [("job.toml", *keys, f"output.directory=run-{n}") for n, keys in enumerate(TRAINED)])
    for n, keys in enumerate(TRAINED):
        found, expected = Checkpoint(tmp_path / f"run-{n}").whole(), plain_loop(tmp_path / "job.toml", *keys)[0]
        assert not differences(found, expected), keys
    refused = [("job.toml", *keys, "output.directory=refused") for keys, _ in REFUSED]
    for (keys, said), done in zip(REFUSED, trained(3, tmp_path, refused, code=2), strict=True):
        assert done.out.count(said) == 1, f"{keys}\n{done.out}"
        assert "Traceback" not in done.out
        assert not (tmp_path / "refused" / "log.h5").exists()

"""Layers that share parameters are trained as in one plain process, or a sentence says why not; layers are built as the
user's function made them, hooks and all."""

import importlib
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT
from samples import assert_equal, write_job
from torch import nn

from accept_mpi.logs.reader import open_log
from accept_mpi.plan import Plan
from accept_mpi.recovery.checkpoint import Checkpoint
from accept_mpi.seeds import ORDER, forward_seed, mix, seeded

NET = '''
import torch
from torch import nn
from torch.utils.data import TensorDataset


class Head(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return x @ self.weight.T


class Bounded(Head):
    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class Masked(nn.Module):
    def __init__(self, table, writes):
        super().__init__()
        self.register_buffer("table", table)
        self.linear, self.writes = nn.Linear(8, 8), writes

    def forward(self, x):
        if self.writes:
            self.table.add_(1)
        return self.linear(x) * self.table


def tied(made="built", more=True):
    """Input and output embedding are one parameter, as in GPT-2 and most language models."""
    embedding = nn.Embedding(20, 8, max_norm=0.5 if made == "normed" else None)
    head = (Bounded if made == "bounded" else Head)(
        nn.Parameter(embedding.weight.data) if made == "memory" else embedding.weight
    )
    layers = [embedding, nn.Linear(8, 8), nn.Tanh(), head]
    if more:
        layers += [nn.LayerNorm(20), nn.Linear(20, 20)]
    if made == "functions":
        return [lambda layer=layer: layer for layer in layers]
    return nn.Sequential(*layers)


def twice():
    """A layer that is called twice, one with a convolution as well, and an activation that comes three times."""
    linear, convolution, tanh = nn.Linear(8, 8), nn.Conv1d(6, 6, 1), nn.Tanh()
    return nn.Sequential(
        nn.Embedding(20, 8), linear, convolution, tanh, linear, convolution, tanh, nn.Linear(8, 20), tanh, nn.Linear(20, 20)
    )


def masked(writes=False):
    table = torch.linspace(0.5, 1.5, 8)
    layers = [Masked(table, writes) for _ in range(3)]
    return nn.Sequential(nn.Embedding(20, 8), *layers, nn.Linear(8, 20))


def pruned(linear):
    mask = torch.ones(linear.weight.shape[0], 1)
    mask[::2] = 0
    linear.weight.register_hook(lambda gradient: gradient * mask)
    return linear


def made_as_meant(functions=False):
    """Hooks on parameters, weight norm of both kinds, a spectral norm, a frozen bias."""
    norm = nn.utils.parametrizations
    layers = [
        nn.Embedding(20, 8), pruned(nn.Linear(8, 8)), nn.utils.weight_norm(nn.Linear(8, 8)),
        norm.weight_norm(nn.Linear(8, 8)), norm.spectral_norm(nn.Linear(8, 8)), nn.ReLU(), pruned(nn.Linear(8, 20)),
    ]
    layers[3].bias.requires_grad_(False)
    return [lambda layer=layer: layer for layer in layers] if functions else layers


def data():
    x = torch.randint(0, 20, (32, 6))
    y = torch.roll(x, -1, 1)
    return TensorDataset(x, y), TensorDataset(x, y)
'''
TRAIN = {"batch_size": 16, "micro_batches": 8, "steps": 6, "seed": 4, "evaluate_every": 0}
TIED = [
    ("tied", {"made": "built"}, 4),
    ("tied", {"made": "functions"}, 5),
    ("tied", {"made": "memory"}, 4),
    ("tied", {"made": "normed"}, 4),
    ("twice", {}, 7),
]
SYNCHRONOUS = ("gpipe", "1f1b", "zero-bubble")


@pytest.fixture(autouse=True)
def _net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shared_net.py").write_text(NET)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "shared_net", raising=False)


def plain(function: str, args: dict[str, Any], steps: int) -> dict[str, torch.Tensor]:
    """The weights after so many steps of a plain loop over the model that the function makes when it is called once."""
    net = importlib.import_module("shared_net")
    seed = TRAIN["seed"]
    with seeded(seed):
        made = getattr(net, function)(**args)
    model = nn.Sequential(*(layer if isinstance(layer, nn.Module) else layer() for layer in made))
    with seeded(0):
        train, _ = net.data()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9, weight_decay=5e-4)
    for step in range(steps):
        order = np.random.Generator(np.random.Philox(mix(ORDER, seed, step // 2))).permutation(32)
        for k, indices in enumerate(order[step % 2 * 16 :][:16].reshape(8, 2)):
            x, y = train[indices]
            for index, layer in enumerate(model):
                torch.manual_seed(forward_seed(seed, step, k, index))
                x = layer(x)
            (nn.functional.cross_entropy(x.reshape(-1, x.shape[-1]), y.reshape(-1)) * 0.125).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def a_job(folder: Path, name: str, function: str, args: dict[str, Any], **keys: Any) -> Path:
    told = ", ".join(
        f"{key} = {str(value).lower() if isinstance(value, bool) else repr(value)}" for key, value in args.items()
    )
    what = {
        "model": f'name = "shared_net:{function}"\nargs = {{ {told} }}', "data": 'name = "shared_net:data"', "train": TRAIN,
    }  # fmt: skip
    path = write_job(folder / f"{name}.toml", what, name, **keys)
    assert tomllib.loads(path.read_text())
    return path


@pytest.mark.parametrize("ranks", [1, 2])
def test_layers_that_share_are_trained_as_in_one_process(mpirun, tmp_path: Path, ranks: int) -> None:
    jobs, expected = [], {}
    for number, (function, args, cut) in enumerate(TIED):
        for schedule in (*SYNCHRONOUS, "1f1b-async"):
            name = f"{number}-{schedule}"
            cuts = [cut] if ranks == 2 else "even"
            jobs.append(a_job(tmp_path, name, function, args, pipeline_schedule=schedule, pipeline_cuts=cuts))
            same = ranks == 1 or schedule in SYNCHRONOUS
            expected[name] = plain(function, args, TRAIN["steps"]) if same else None
    mpirun(ranks, ROOT / "tests" / "programs" / "train_all.py", *jobs)
    for name, weights in expected.items():
        found = Checkpoint(tmp_path / name).whole()
        one, other = ("0.weight", "3.weight") if "0.weight" in found and "3.weight" in found else ("1.weight", "4.weight")
        assert torch.equal(found[one], found[other]), name
        if weights is not None:
            assert_equal(found, weights)


def test_a_resumed_run_keeps_what_is_shared(mpirun, tmp_path: Path) -> None:
    half = a_job(tmp_path, "half", "tied", {}, pipeline_cuts=[5], train_steps=3)
    mpirun(2, "-m", "accept_mpi", "train", half)
    whole = a_job(tmp_path, "whole", "tied", {"made": "functions"}, pipeline_cuts="even")
    mpirun(1, "-m", "accept_mpi", "train", whole, "--resume", tmp_path / "half", "--set", "model.args.made=functions")
    found = Checkpoint(tmp_path / "whole").whole()
    assert_equal(found, plain("tied", {}, TRAIN["steps"]))
    net = importlib.import_module("shared_net")
    net.tied().load_state_dict(found, strict=True)


def test_plans_keep_together_what_is_shared(mpirun, tmp_path: Path) -> None:
    """Found by measuring: cut elsewhere, or not at all. Tables that nobody writes to do not matter."""
    models = {"elsewhere": ("tied", {}), "nowhere": ("tied", {"more": False}), "anywhere": ("masked", {})}
    jobs = [
        a_job(tmp_path, name, *model, pipeline_cuts="auto", pipeline_probe_seconds=0.2, pipeline_latency_db="none")
        for name, model in models.items()
    ]
    given = a_job(tmp_path, "given", "masked", {}, pipeline_cuts=[2])
    mpirun(2, ROOT / "tests" / "programs" / "train_all.py", *jobs, given)
    for name, (function, args) in models.items():
        with open_log(tmp_path / name / "log.h5") as log:
            plan = Plan.from_json(log.attrs["plan"])
        assert name == "anywhere" or {stage.start for stage in plan.stages} <= {0, 4, 5}
        assert_equal(Checkpoint(tmp_path / name).whole(), plain(function, args, TRAIN["steps"]))
    assert_equal(Checkpoint(tmp_path / "given").whole(), plain("masked", {}, TRAIN["steps"]))


@pytest.mark.parametrize(
    ("function", "args", "cuts", "message"),
    [
        (
            "tied", {"made": "functions"}, [1],
            'pipeline.cuts: layers 0 "0" and 3 "3" share a parameter (0.weight, 3.weight), so no cut may part them, as 1 '
            'does; cuts that keep such layers together are 4, 5, or "auto"',
        ),
        (
            "tied", {"made": "normed"}, [1],
            'pipeline.cuts: layers 0 "0" and 3 "3" share a parameter (0.weight, 3.weight), so no cut may part them, as 1 '
            'does; cuts that keep such layers together are 4, 5, or "auto"',
        ),
        (
            "tied", {"made": "bounded"}, [1],
            'layers 0 "0" and 3 "3" share a parameter (0.weight, 3.weight), and a forward writes to it, so no cut may',
        ),
        (
            "masked", {"writes": True}, [2],
            'layers 1 "1" and 3 "3" share a buffer (1.table, 3.table) and write to it in forward, so they must be in one',
        ),
    ],
)  # fmt: skip
def test_layers_that_share_in_two_stages(
    mpirun, tmp_path: Path, function: str, args: dict[str, Any], cuts: list[int], message: str
) -> None:
    job = a_job(tmp_path, "run", function, args, pipeline_cuts=cuts)
    out = mpirun(2, "-m", "accept_mpi", "train", job, code=2).out
    assert out.count(message) == 1, out
    assert "Traceback" not in out
    assert not list(tmp_path.glob("run/checkpoints/*"))


@pytest.mark.parametrize("ranks", [1, 2])
def test_layers_are_what_their_function_made(mpirun, tmp_path: Path, ranks: int) -> None:
    jobs = [
        a_job(tmp_path, f"{functions}-{schedule}", "made_as_meant", {"functions": functions}, pipeline_schedule=schedule)
        for functions in (False, True)
        for schedule in (*SYNCHRONOUS, "1f1b-async")[: 4 if ranks == 1 else 3]
    ]
    mpirun(ranks, ROOT / "tests" / "programs" / "train_all.py", *jobs)
    weights = plain("made_as_meant", {}, TRAIN["steps"])
    for job in jobs:
        assert_equal(Checkpoint(tmp_path / job.stem).whole(), weights)

"""Backwards that compute their forwards again give the same weights, to the bit, in all schedules; and plans use them where
memory is short."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from lost_ranks import run
from plain_loop import differences, plain_loop
from test_recorded import write

from accept_mpi.recovery.checkpoint import Checkpoint

DROPPING = {"model": "language", "data": "sentences", "args": "{ dropout = 0.2, tied = false }"}
CASES: list[dict[str, Any]] = [
    {"model": "unet", "data": "pictures", "loss": "mse"},
    {"model": "unet", "data": "pictures", "loss": "mse", "schedule": "gpipe"},
    {"model": "unet", "data": "pictures", "loss": "mse", "lanes": "2"},
    DROPPING,
    DROPPING | {"schedule": "1f1b-async"},
    {"model": "language", "data": "sentences"},
]


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_same_weights(mpirun, tmp_path: Path, ranks: int) -> None:
    jobs = []
    for n, case in enumerate(CASES):
        for how in ("off", "on"):
            jobs.append(write(tmp_path, f"{n}-{how}", case | {"recompute": how}))
    if ranks == 3:
        for how in ("off", "on"):
            case = CASES[0] | {"cuts": "[3]", "ranks": "[[0, 1], 2]", "recompute": how}
            jobs.append(write(tmp_path, f"group-{how}", case))
    mpirun(ranks, ROOT / "tests" / "programs" / "train_all.py", *jobs)
    for path in jobs:
        if path.stem.endswith("on"):
            kept, again = (Checkpoint(tmp_path / f"{path.stem[:-3]}{how}").whole() for how in ("-off", "-on"))
            assert not differences(again, kept), path.stem
    assert not differences(Checkpoint(tmp_path / "0-on").whole(), plain_loop(tmp_path / "0-on.toml")[0])


@pytest.mark.parametrize("schedule", ["1f1b", "1f1b-delayed"])
def test_a_lost_last_stage(tmp_path: Path, schedule: str) -> None:
    """Its layers go to a stage that computed forwards again, and is the last one now: its gradients are the loss's."""
    case = {"model": "unet", "data": "pictures", "loss": "mse", "recompute": "on", "schedule": schedule}
    path = write(tmp_path, "job", case)
    code, out = run(tmp_path, ["-m", "accept_mpi", "train", path], "2@update:4", 3)
    assert code == 0, out
    assert "2 stages go on" in out, out
    assert not differences(Checkpoint(tmp_path / "job").whole(), plain_loop(path)[0])


def test_what_cannot_be_computed_again(mpirun, tmp_path: Path) -> None:
    (tmp_path / "counting.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "class Counting(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.linear = nn.Embedding(20, 20)\n"
        "        self.register_buffer('seen', torch.zeros(()))\n"
        "    def forward(self, x):\n"
        "        self.seen += 1\n"
        "        return self.linear(x) * (1 + self.seen)\n"
        "def model():\n"
        "    return nn.Sequential(Counting(), nn.Linear(20, 20), nn.Linear(20, 20))\n"
    )
    path = write(tmp_path, "job", {"model": "language", "data": "sentences"})
    keys = ["model.name=counting:model", "data.name=recorded_nets:plain_sentences", "pipeline.recompute=on"]
    found = mpirun(2, "-m", "accept_mpi", "train", path, *(part for key in keys for part in ("--set", key)), code=2)
    assert "cannot compute forwards again" in found.out
    more = [part for key in ("pipeline.recompute=on", "pipeline.schedule=zero-bubble") for part in ("--set", key)]
    found = mpirun(1, "-m", "accept_mpi", "train", path, *more, code=2)
    assert 'pipeline.recompute = "on" does not go with schedule = "zero-bubble"' in found.out


def test_activations_are_let_go() -> None:
    """Between F and B a stage that computes again keeps what arrived, and no graph."""
    from accept_mpi.job import Job
    from accept_mpi.job_file import parse
    from accept_mpi.models.layers import Layers
    from accept_mpi.pipeline.stage import Stage

    text = '[model]\nname = "x"\n[data]\nname = "x"\n[train]\nsteps = 1\n[output]\ndirectory = "x"\n'
    job: Job = parse(text, "job.toml")
    layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(6)]
    names = [str(n) for n in range(6)]
    held = {}
    for again in (False, True):
        stage = Stage(Layers(0, names, layers), job, None, False)
        if again:
            stage.compute_again()
        x = torch.randn(1000, 64)
        stage.forward(0, 0, (x,))
        held[again] = stage.in_flight[0, 0].outputs[0].grad_fn is None
        stage.close()
    assert held[True]
    assert not held[False]

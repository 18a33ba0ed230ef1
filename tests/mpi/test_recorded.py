"""Models with forwards of their own, on any number of ranks, compute what a plain PyTorch loop computes, bit for bit; tied
parameters in several stages, too, and after resuming with other cuts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from plain_loop import differences, plain_loop

from accept_mpi.job import Job
from accept_mpi.logs.reader import open_log
from accept_mpi.plan import Plan
from accept_mpi.recovery.checkpoint import Checkpoint

JOB = """
[model]
name = "recorded_nets:{model}"
args = {args}
output = "{output}"
blocks = {blocks}
[data]
name = "recorded_nets:{data}"
[train]
batch_size = 8
micro_batches = {micro_batches}
steps = 7
loss = "{loss}"
memory_format = "contiguous"
optimizer = {{ name = "sgd", lr = 0.1, momentum = 0.9, weight_decay = 0.01 }}
[pipeline]
schedule = "{schedule}"
cuts = {cuts}
ranks = {ranks}
gradients = "{gradients}"
lanes = {lanes}
recompute = "{recompute}"
latency_db = "none"
probe_seconds = 0.3
[output]
directory = "{name}"
"""
USUAL = {
    "micro_batches": "4",
    "args": "{}", "output": "", "blocks": "[]", "loss": "cross_entropy", "schedule": "1f1b", "cuts": '"even"', "ranks": "[]",
    "gradients": "exact", "lanes": '"off"', "recompute": "auto",
}  # fmt: skip
MIXTURE: dict[str, Any] = {
    "model": "mixture", "data": "classified", "blocks": '"layers"', "args": "{ experts = 9, dropout = 0.0 }"
}  # fmt: skip
"""Most steps leave some experts without a gradient, so that the optimizer passes over them."""
STATELESS = MIXTURE | {"args": "{ experts = 9, dropout = 0.0, counts = false }"}
CASES: list[dict[str, Any]] = [
    {"model": "unet", "data": "pictures", "loss": "mse"},
    {"model": "unet", "data": "pictures", "loss": "mse", "schedule": "zero-bubble"},
    {"model": "language", "data": "sentences"},
    {"model": "language", "data": "sentences", "schedule": "zero-bubble"},
    {"model": "language", "data": "sentences", "schedule": "gpipe", "output": "loss"},
    {"model": "language", "data": "sentences", "lanes": "2"},
    MIXTURE,
    MIXTURE | {"schedule": "zero-bubble", "blocks": "[]"},
    STATELESS | {"lanes": "2"},
    MIXTURE | {"schedule": "1f1b-delayed"},
    {"model": "language", "data": "sentences", "schedule": "1f1b-delayed"},
    {"model": "language", "data": "sentences", "gradients": "auto"},
    {"model": "listing", "data": "few"},
    {"model": "listing", "data": "few", "schedule": "zero-bubble"},
]


def write(folder: Path, name: str, case: dict[str, Any]) -> Path:
    path = folder / f"{name}.toml"
    path.write_text(JOB.format(name=name, **(USUAL | case)))
    return path


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_equal_to_a_plain_loop(mpirun, tmp_path: Path, ranks: int) -> None:
    jobs = {f"job{n}": write(tmp_path, f"job{n}", case) for n, case in enumerate(CASES)}
    if ranks == 3:  # a group with tied parameters
        for s, held in enumerate(("[[0, 1], 2]", "[0, [1, 2]]")):
            case = CASES[2] | {"cuts": "[5]", "ranks": held}
            jobs[f"group{s}"] = write(tmp_path, f"group{s}", case)
            jobs[f"delayed{s}"] = write(tmp_path, f"delayed{s}", case | {"schedule": "1f1b-delayed"})
            jobs[f"experts{s}"] = write(tmp_path, f"experts{s}", STATELESS | {"cuts": "[3]", "ranks": held})
    mpirun(ranks, ROOT / "tests" / "programs" / "train_all.py", *jobs.values())
    for name, path in jobs.items():
        state, losses = plain_loop(path)
        found = Checkpoint(tmp_path / name).whole()
        assert set(found) == set(state), name
        assert not differences(found, state), name
        with open_log(tmp_path / name / "log.h5") as log:
            assert log["steps"]["loss"][:].tolist() == pytest.approx(losses, rel=1e-5), name


def test_each_rank_sums_for_itself(mpirun, tmp_path: Path) -> None:
    """Without exact sums all copies of a tied parameter stay the same, and near a plain loop's."""
    path = write(tmp_path, "own", CASES[2] | {"gradients": "none"})
    mpirun(3, ROOT / "tests" / "programs" / "train_all.py", path)
    found, (state, _) = Checkpoint(tmp_path / "own").whole(), plain_loop(path)
    assert torch.equal(found["words.weight"], found["head.weight"])
    assert all(torch.allclose(found[name], value, atol=1e-4) for name, value in state.items())


def test_resumed_with_other_cuts(mpirun, tmp_path: Path) -> None:
    """From one rank to three, among which the tied parameter is divided, and back: momentum included."""
    path = write(tmp_path, "whole", CASES[2])
    state, _ = plain_loop(path)
    train = ["-m", "accept_mpi", "train", path, "--set"]
    for name, before, after in (("parting", 1, 3), ("joining", 3, 1)):
        mpirun(before, *train, "train.steps=3", "--set", f"output.directory={name}1")
        mpirun(after, *train, f"output.directory={name}2", "--resume", tmp_path / f"{name}1")
        assert not differences(Checkpoint(tmp_path / f"{name}2").whole(), state), name


def test_found_plans(mpirun, tmp_path: Path) -> None:
    jobs = [
        write(tmp_path, "tied", CASES[2] | {"cuts": '"auto"'}),
        write(tmp_path, "untied", CASES[0] | {"cuts": '"auto"'}),
        write(tmp_path, "parts", CASES[2] | {"cuts": '"auto"', "micro_batches": '"auto"'}),
        write(tmp_path, "late", CASES[2] | {"cuts": '"auto"', "schedule": "1f1b-async"}),
    ]
    mpirun(2, ROOT / "tests" / "programs" / "train_all.py", *jobs)
    for name in ("tied", "untied"):
        assert not differences(Checkpoint(tmp_path / name).whole(), plain_loop(tmp_path / f"{name}.toml")[0]), name
    with open_log(tmp_path / "parts" / "log.h5") as log:
        found = f"train.micro_batches={Job.from_json(log.attrs['job']).train.micro_batches}"
    state, _ = plain_loop(tmp_path / "parts.toml", found)
    assert not differences(Checkpoint(tmp_path / "parts").whole(), state)
    with open_log(tmp_path / "late" / "log.h5") as log:
        assert len(Plan.from_json(log.attrs["plan"]).stages) == 1  # copies would be updated at different times


def test_muon_with_tied_parameters(mpirun, tmp_path: Path) -> None:
    """AdamW updates all copies of what a table of embeddings and the head have in common, on whichever ranks they are."""
    found = []
    for ranks in (1, 3):
        path = write(tmp_path, f"on{ranks}", CASES[2])
        sgd = 'name = "sgd", lr = 0.1, momentum = 0.9'
        path.write_text(path.read_text().replace(sgd, 'name = "muon", lr = 0.01'))
        mpirun(ranks, ROOT / "tests" / "programs" / "train_all.py", path)
        checkpoint = Checkpoint(tmp_path / f"on{ranks}")
        kept = checkpoint.tensors("optimizer", range(len(checkpoint.manifest.layers)))
        assert {key.partition("/")[0] for key in kept if key.endswith("words.weight")} == {"step", "exp_avg", "exp_avg_sq"}
        assert any(key.startswith("momentum_buffer/") for key in kept)
        found.append(checkpoint.whole())
    assert not differences(*found)


def test_dropout_is_the_same_on_any_number_of_ranks(mpirun, tmp_path: Path) -> None:
    found = []
    for ranks in (1, 3):
        path = write(tmp_path, f"on{ranks}", CASES[2] | {"args": "{ dropout = 0.2 }"})
        mpirun(ranks, ROOT / "tests" / "programs" / "train_all.py", path)
        found.append(Checkpoint(tmp_path / f"on{ranks}").whole())
    assert not differences(*found)


def test_a_forward_that_cannot_be_recorded(mpirun, tmp_path: Path) -> None:
    (tmp_path / "branching.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.one, self.two = nn.Conv2d(3, 2, 1), nn.Conv2d(2, 2, 1)\n"
        "    def forward(self, x):\n"
        "        x = self.one(x)\n"
        "        return self.two(x) if x.mean() > 0 else x\n"
    )
    path = write(tmp_path, "branch", CASES[0])
    found = mpirun(2, "-m", "accept_mpi", "train", path, "--set", "model.name=branching:Net", code=2)
    assert "forward depends on the values of its data (bool() of a tensor)" in found.out
    assert "branching.py, line 8" in found.out


def test_a_part_that_small_batches_alone_use(trained, tmp_path: Path) -> None:
    """What chooses between parts by its input's shape is told to be a block, and as one trains as in plain PyTorch."""
    path = tmp_path / "job.toml"
    path.write_text(
        JOB.format(**USUAL, model="choosing", data="few", name="run").replace("batch_size = 8", "batch_size = 9")
    )
    (refused,) = trained(1, tmp_path, [(path, "train.micro_batches=3")], code=2)
    assert 'model.blocks = ["x"] keeps in one layer what chooses between them' in refused.out
    keys = "train.micro_batches=3", 'model.blocks=["x"]'
    expected, _ = plain_loop(path, *keys)
    trained(2, tmp_path, [(path, *keys)])
    assert not differences(Checkpoint(tmp_path / "run").whole(), expected)

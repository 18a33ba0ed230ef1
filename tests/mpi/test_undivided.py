"""A model of which no forward can be recorded trains as it is, on one rank or on a group of ranks that have copies of it: as
in a plain PyTorch loop, bit for bit."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_loop import differences, plain_loop
from undivided_nets import Attending, Carrying, Mapped, Packing, sentences

from accept_mpi.errors import UserError
from accept_mpi.logs.reader import open_log
from accept_mpi.models import Whole
from accept_mpi.models.layers import build_layers
from accept_mpi.plan import Plan
from accept_mpi.recovery.checkpoint import Checkpoint

JOB = """
[model]
name = "undivided_nets:{model}"
output = "{output}"
[data]
name = "undivided_nets:{data}"
[train]
batch_size = 16
micro_batches = 4
steps = 5
optimizer = {{ name = "sgd", lr = 0.1, momentum = 0.9, weight_decay = 0.01 }}
[pipeline]
latency_db = "none"
probe_seconds = 0.3
[output]
directory = "run"
"""
CASES = {
    "Branching": {},
    "Packing": {"data": "sentences"},
    "Attending": {"data": "sentences"},
    "Dropping": {},
    "Mapped": {},
    "Recursing": {},
    "Carrying": {},
    "Scored": {"data": "labelled", "output": "loss"},
}
ALONE = ("Carrying",)
"""Those that a group cannot hold."""


def write(folder: Path, model: str) -> Path:
    path = folder / f"{model}.toml"
    path.write_text(JOB.format(model=model, **({"data": "rows", "output": ""} | CASES[model])))
    return path


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("plain")
    return {model: plain_loop(write(folder, model))[0] for model in CASES}


def test_on_one_rank(trained, plain: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    schedules = ("1f1b", "zero-bubble", "1f1b-async")
    runs = [(model, schedule) for model in CASES for schedule in schedules]
    jobs = [
        (write(tmp_path, model), f"pipeline.schedule={schedule}", f"output.directory={model}-{schedule}")
        for model, schedule in runs
    ]
    for one in trained(1, tmp_path, jobs):
        assert "the model is one layer, which ranks may share but not divide: " in one.out
    for model, schedule in runs:
        found = Checkpoint(tmp_path / f"{model}-{schedule}").whole()
        assert set(found) == set(plain[model]), model
        assert not differences(found, plain[model]), (model, schedule)


def test_on_a_group(trained, plain: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    shared = [model for model in CASES if model not in ALONE]
    group = ("pipeline.cuts=[]", "pipeline.ranks=[[0, 1, 2]]")
    trained(3, tmp_path, [(write(tmp_path, model), *group, f"output.directory={model}") for model in shared])
    for model in shared:
        assert not differences(Checkpoint(tmp_path / model).whole(), plain[model]), model


def test_found_plans(trained, plain: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    auto = ("pipeline.cuts=auto", "pipeline.gradients=exact")
    trained(2, tmp_path, [(write(tmp_path, model), *auto, f"output.directory={model}") for model in CASES])
    for model in CASES:
        assert not differences(Checkpoint(tmp_path / model).whole(), plain[model]), model
        with open_log(tmp_path / model / "log.h5") as log:
            (stage,) = Plan.from_json(log.attrs["plan"]).stages
        assert len(stage.ranks) == 1 or model not in ALONE


def test_resumed(trained, plain: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """What one goes on from is in checkpoints."""
    models = ("Carrying", "Dropping")
    trained(1, tmp_path, [(write(tmp_path, m), "train.steps=2", f"output.directory=first-{m}") for m in models])
    again = [(write(tmp_path, m), f"output.directory=second-{m}", "--resume", f"first-{m}") for m in models]
    trained(1, tmp_path, again)
    for model in models:
        assert not differences(Checkpoint(tmp_path / f"second-{model}").whole(), plain[model]), model


def test_even_cuts_are_refused(mpirun, tmp_path: Path) -> None:
    path = write(tmp_path, "Branching")
    found = mpirun(2, "-m", "accept_mpi", "train", path, "--set", "pipeline.cuts=even", code=2)
    assert "2 stages for a model of 1 layer, which cannot be divided (forward depends on the values of its data" in found.out
    assert "undivided_nets.py, line 22" in found.out
    assert 'have ranks share it (pipeline.cuts = "auto")' in found.out


def test_evaluated_and_exported(mpirun, tmp_path: Path) -> None:
    path = write(tmp_path, "Packing")
    mpirun(1, "-m", "accept_mpi", "train", path, "--set", "train.evaluate_every=5")
    mpirun(1, "-m", "accept_mpi", "export", "run", "weights.pt")
    model = Packing()
    model.load_state_dict(torch.load(tmp_path / "weights.pt"), strict=True)
    with open_log(tmp_path / "run" / "log.h5") as log:
        (row,) = log["evals"][:]
    test = torch.utils.data.default_collate([sentences()[1][n] for n in range(8)])
    model.eval()
    loss = torch.nn.functional.cross_entropy(model(test["ids"], test["lengths"])["logits"], test["labels"])
    assert float(row["loss"]) == pytest.approx(loss.item(), rel=1e-5)
    said = mpirun(1, "-m", "accept_mpi", "predict", "run").out
    assert len(said.strip().splitlines()) >= 8


class _Broken(Carrying):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x) if x.sum() > 0 else self.head(x[:, :3])


class _Strange(Carrying):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) @ torch.nn.Linear(3, 3).weight


def _chain(kind: type[Carrying], output: str = "") -> Any:
    return Whole(kind, "a model", output).record(torch.zeros(4, 6))


def test_what_does_not_train_either() -> None:
    """A mistake in the forward, a parameter that is not the model's, a part of the result that there is not."""
    with pytest.raises(UserError, match=r"depends on the values of its data \(bool\(\) of a tensor\)"):
        _chain(_Broken)
    with pytest.raises(UserError, match="a parameter that is no part of the model"):
        _chain(_Strange)
    with pytest.raises(UserError, match='gives no tensors under "scores"'):
        _chain(Carrying, "scores")


@pytest.mark.parametrize("in_place", [False, True])
def test_a_model_that_is_compiled(in_place: bool) -> None:
    """It lost what it was given when it was copied."""

    def make() -> torch.nn.Module:
        model = Mapped()
        if not in_place:
            return torch.compile(model, backend="eager")
        model.compile(backend="eager")
        return model

    chain = Whole(make, "a model", "").record(torch.zeros(4, 6))
    assert "compiled as a whole (torch.compile)" in chain.one_layer
    layer = chain.abstract(0, 0)
    assert copy.deepcopy(build_layers(chain, 0, 1, 0).modules[0])(torch.zeros(4, 6)).shape == (4, 3)
    assert layer.state_dict().keys() == make().state_dict().keys()


def test_parts_whose_shapes_depend_on_values() -> None:
    """Such a part was taken for one that can stay whole, and failed in the first step."""
    sample = {"ids": torch.zeros(4, 9, dtype=torch.long), "lengths": torch.zeros(4, dtype=torch.long)}
    chain = Whole(Attending, "a model", "").record(sample)
    assert chain.one_layer.startswith("what Encoder gives has other shapes, types or constants for other values")
    assert "undivided_nets.py, line" in chain.one_layer


def test_the_only_layer_has_the_model_s_name() -> None:
    assert _chain(Carrying).names == ["Carrying"]

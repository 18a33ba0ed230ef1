"""1f1b-delayed computes the same on any number of ranks, wherever the model is cut, after a new plan, a loss, resuming:
what one process computes whose weights are always one update older."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import samples
import torch
from conftest import ROOT, mpirun_command
from lost_ranks import run
from stale_weights import delayed
from watch import slowed_after_ten_steps

from accept_mpi.logs.format import KINDS
from accept_mpi.logs.reader import open_log
from accept_mpi.pipeline.lion import Lion
from accept_mpi.pipeline.muon import Muon
from accept_mpi.recovery.checkpoint import Checkpoint

JOBS = {"cnn": samples.CNN, "gpt": samples.GPT}
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=5e-4)


def muon(parameters: list[torch.nn.Parameter]) -> Muon:
    """Muon for the matrices of one of the models; a gpt begins with two tables of embeddings."""
    tables = 2 if parameters[0].dim() == 2 else 0
    matrices = [n >= tables and p.dim() > 1 for n, p in enumerate(parameters)]
    groups = [
        {"params": [p for p, is_matrix in zip(parameters, matrices, strict=True) if is_matrix == wanted], "matrix": wanted}
        for wanted in (False, True)
    ]
    return Muon(groups, lr=0.01, weight_decay=0.1)


OPTIMIZERS: dict[str, tuple[str, Callable[..., torch.optim.Optimizer]]] = {
    "nadam": (
        'name = "nadam", lr = 0.002, betas = [0.99, 0.999], weight_decay = 0.01',
        partial(torch.optim.NAdam, lr=0.002, betas=(0.99, 0.999), weight_decay=0.01, decoupled_weight_decay=True),
    ),
    "lion": ('name = "lion", lr = 0.001, weight_decay = 0.1', partial(Lion, lr=0.001, betas=(0.9, 0.999), weight_decay=0.1)),
    "corrected": (
        'name = "adamw", lr = 0.002, weight_decay = 0.01, correction = "extrapolate"',
        partial(torch.optim.AdamW, lr=0.002, weight_decay=0.01),
    ),
    "muon": ('name = "muon", lr = 0.01, weight_decay = 0.1', muon),
    "clipped": ('name = "sgd", lr = 0.05, momentum = 0.9, weight_decay = 5e-4', SGD),
}


def write(folder: Path, model: str, name: str, **keys: Any) -> Path:
    wanted = {"pipeline_schedule": "1f1b-delayed", "train_evaluate_every": 0} | keys
    return samples.write_job(folder / f"{name}.toml", JOBS[model], name, **wanted)


def expected(model: str, **keys: Any) -> dict[str, torch.Tensor]:
    return delayed(JOBS[model], SGD, **keys)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_equals_one_process(mpirun, tmp_path: Path, ranks: int) -> None:
    """However many micro-batches are in flight, with evaluations, which drain the pipeline, groups and lanes."""
    cases: dict[str, dict[str, Any]] = {"slack-0": {"pipeline_transfer_slack": 0}, "slack-2": {}}
    cases["evaluated"] = {"train_evaluate_every": 2, "output_checkpoint_every": 3}
    cases["lanes"] = {"pipeline_lanes": 2, "train_threads": 2}
    if ranks == 3:
        cases["group-first"] = {"pipeline_cuts": [3], "pipeline_ranks": [[0, 1], 2]}
        cases["group-last"] = {"pipeline_cuts": [3], "pipeline_ranks": [0, [2, 1]]}
    if ranks == 4:
        cases["groups"] = {"pipeline_cuts": [4], "pipeline_ranks": [[0, 3], [2, 1]]}
    jobs = [
        write(tmp_path, model, f"{model}-{name}", **keys)
        for model in JOBS
        for name, keys in cases.items()
        if (model, name) != ("cnn", "lanes") or ranks < 4
    ]
    mpirun(ranks, ROOT / "tests" / "programs" / "train_all.py", *jobs)
    weights = {model: expected(model) for model in JOBS}
    for job in jobs:
        samples.assert_equal(Checkpoint(tmp_path / job.stem).whole(), weights[job.stem.partition("-")[0]])


def test_it_differs_from_synchronous_training() -> None:
    for model, job in JOBS.items():
        train = job["train"]
        plain = samples.plain(job).train(train["steps"], train["batch_size"], train["micro_batches"])
        ours = expected(model)
        assert any(not torch.equal(ours[name], value) for name, value in plain.items()), model


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(mpirun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """nadam, lion, muon, corrected updates, gradients clipped by their norm over all stages; then resumed in the middle."""
    text, make = OPTIMIZERS[name]
    monkeypatch.setattr(samples, "OPTIMIZER", f"optimizer = {{ {text} }}")
    keys: dict[str, Any] = {"train_clip_norm": 0.5} if name == "clipped" else {}
    jobs = [write(tmp_path, model, model, **keys) for model in JOBS]
    if name == "clipped":
        jobs.append(write(tmp_path, "gpt", "gpt-group", pipeline_cuts=[3], pipeline_ranks=[[0, 1], 2], **keys))
        jobs.append(write(tmp_path, "gpt", "gpt-lanes", pipeline_lanes=2, train_threads=2, **keys))
        jobs.append(write(tmp_path, "cnn", "cnn-slack-0", pipeline_transfer_slack=0, train_evaluate_every=2, **keys))
    mpirun(3, ROOT / "tests" / "programs" / "train_all.py", *jobs)
    weights = {model: delayed(job, make, name == "corrected", keys.get("train_clip_norm")) for model, job in JOBS.items()}
    for job in jobs:
        samples.assert_equal(Checkpoint(tmp_path / job.stem).whole(), weights[job.stem.partition("-")[0]])
    if name == "clipped":  # no stage waits for the others' norms directly after its last B
        with open_log(tmp_path / "gpt" / "log.h5") as log:
            rows = log["trace"][:]
        last = rows[rows["stage"] == 2]
        begun = {kind: last[last["kind"] == KINDS.index(kind)] for kind in "BU"}
        for step in range(1, JOBS["gpt"]["train"]["steps"]):
            update = begun["U"][begun["U"]["step"] == step]["start"].min()
            assert (begun["B"][begun["B"]["step"] == step + 1]["start"] < update).any()
    part = ["-m", "accept_mpi", "train", jobs[1], "--set", "output.directory=part", "--set"]
    mpirun(2, *part, "output.checkpoint_every=2", "--set", "train.steps=2")
    mpirun(3, "-m", "accept_mpi", "train", jobs[1], "--set", "output.directory=rest", "--resume", tmp_path / "part")
    samples.assert_equal(Checkpoint(tmp_path / "rest").whole(), weights["gpt"])


def test_with_other_keys_and_found_plans(mpirun, tmp_path: Path) -> None:
    """Three ranks with the plan that they find, backwards that compute forwards again, averages of the weights."""
    keys = {"train_ema": 0.9, "pipeline_recompute": "on", "train_evaluate_every": 2}
    found = {"pipeline_cuts": "auto", "pipeline_latency_db": "none", "pipeline_probe_seconds": 0.3}
    one, three = write(tmp_path, "gpt", "one", **keys), write(tmp_path, "gpt", "three", **keys, **found)
    mpirun(1, "-m", "accept_mpi", "train", one)
    mpirun(3, "-m", "accept_mpi", "train", three)
    samples.assert_equal(Checkpoint(tmp_path / "one").whole(), expected("gpt"))
    samples.assert_equal(Checkpoint(tmp_path / "three").whole(), expected("gpt"))
    losses = []
    for name in ("one", "three"):
        with open_log(tmp_path / name / "log.h5") as log:
            losses.append(log["evals"]["loss"][:].tolist())
    assert losses[0] == losses[1]


@pytest.mark.parametrize("ranks", ["", "[[0, 1], 2]"])
def test_resuming_with_other_ranks(mpirun, tmp_path: Path, ranks: str) -> None:
    """The checkpoint has the weights from before its last update, too."""
    job = write(tmp_path, "cnn", "cnn")
    train = ["-m", "accept_mpi", "train", job, "--set"]
    mpirun(2, *train, "output.directory=part", "--set", "train.steps=3")
    where = ["--set", f"pipeline.ranks={ranks}", "--set", "pipeline.cuts=[4]"] if ranks else []
    mpirun(3, *train, "output.directory=rest", *where, "--resume", tmp_path / "part")
    samples.assert_equal(Checkpoint(tmp_path / "rest").whole(), expected("cnn"))


def lose(folder: Path, ranks: list[Any], faults: str, clip: float | None = None) -> None:
    """Train with ranks that fail: the others go on, and the weights are those of a run that nothing happened to, running
    statistics included."""
    train = samples.CNN["train"] | {"steps": 16}
    job = samples.write_job(
        folder / "job.toml", samples.CNN | {"train": train}, train_evaluate_every=0, pipeline_schedule="1f1b-delayed",
        pipeline_cuts=[2, 4] if len(ranks) == 3 else [2, 3, 5], pipeline_ranks=ranks, recovery_replicate_every=3,
        **({} if clip is None else {"train_clip_norm": clip}),
    )  # fmt: skip
    code, out = run(folder, ["-m", "accept_mpi", "train", job, "--quiet"], faults, 4)
    assert code == 0, out
    assert "lost rank" in out, out
    samples.assert_equal(Checkpoint(folder / "run").whole(), delayed(samples.CNN | {"train": train}, SGD, clip_norm=clip))


@pytest.mark.parametrize("ranks", [[0, 1, 2, 3], [[0, 3], 2, 1], [0, [1, 2], 3]])
@pytest.mark.parametrize("faults", ["2@backward:25", "0@forward:41", "3@update:5 1@forward:20"])
def test_a_lost_rank(tmp_path: Path, ranks: list[Any], faults: str) -> None:
    lose(tmp_path, ranks, faults)


@pytest.mark.parametrize("faults", ["2@backward:25", "0@forward:41", "3@update:5 1@forward:20"])
def test_a_lost_rank_while_updates_are_late(tmp_path: Path, faults: str) -> None:
    """As those of clipped gradients are: some of a step's gradients are set aside when a rank fails."""
    lose(tmp_path, [0, 1, 2, 3], faults, clip=0.5)


def test_a_new_plan(tmp_path: Path) -> None:
    """Layers move away from a device that becomes slow."""
    sleepy = samples.CNN | {"model": 'name = "slow_layers:cnn"\nargs = { width = 8, dropout = 0.2 }'}
    job = samples.write_job(
        tmp_path / "job.toml", sleepy, train_steps=80, train_evaluate_every=0, pipeline_cuts="auto", pipeline_adapt=True,
        pipeline_groups=False, pipeline_latency_db="none", pipeline_probe_seconds=1.0, pipeline_schedule="1f1b-delayed",
    )  # fmt: skip
    out = slowed_after_ten_steps(job, mpirun_command(3))
    assert "moved layers: rank 1" in out, out
    ours = {name.replace(".inner", ""): value for name, value in Checkpoint(tmp_path / "run").whole().items()}
    samples.assert_equal(ours, delayed(samples.CNN | {"train": samples.CNN["train"] | {"steps": 80}}, SGD))


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_start_says_that_gradients_are_not_clipped(mpirun, tmp_path: Path, clip: float | None) -> None:
    """Momentum makes much of gradients that are an update old: MobileNetV2 did not learn so."""
    more = {"train_clip_norm": clip} if clip else {}
    path = write(tmp_path, "cnn", "run", train_steps=1, **more)
    out = mpirun(2, "-m", "accept_mpi", "train", path).out
    assert ("set train.clip_norm" in out) == (clip is None)

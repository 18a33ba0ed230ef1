"""Metrics of the test set, the best checkpoint by one of them, and the end of a run that no longer gets better."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from lost_ranks import run
from plain_loop import plain_loop
from recorded_nets import Language, Sentences
from safetensors.torch import load_file
from test_recorded import write
from torch import nn

from accept_mpi.logs.reader import open_log

CASE = {"model": "language", "data": "sentences", "ranks": "[]"}
METRICS = 'train.metrics=["top3", "perplexity", "recorded_nets:certainty"]'


def test_metrics_and_the_best_checkpoint(mpirun, tmp_path: Path) -> None:
    path = write(tmp_path, "run", CASE)
    keys = ["--set", METRICS, "--set", "output.keep_best=top3", "--set", "output.keep=1", "--set", "train.steps=15"]
    found = mpirun(2, "-m", "accept_mpi", "train", path, *keys)
    with open_log(tmp_path / "run" / "log.h5") as log:
        rows, evals = log["metrics"][:], log["evals"][:]
    table = {(int(step), name.decode()): value for step, name, value in rows}
    best = max(evals["step"], key=lambda step: table[int(step), "top3"])
    told = json.loads((tmp_path / "run" / "checkpoints" / "best.json").read_text())
    assert told["step"] == best
    assert told["value"] == table[int(best), "top3"]
    kept = sorted(one.name for one in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert kept == sorted({f"step-{best:08d}", "step-00000015"})
    assert f"best        run/checkpoints/step-{best:08d}" in found.out

    mpirun(1, "-m", "accept_mpi", "export", tmp_path / "run", tmp_path / "best.safetensors", "--best")
    net, data = Language(), Sentences(9)
    net.load_state_dict(load_file(tmp_path / "best.safetensors"))
    state, _ = plain_loop(path, f"train.steps={best}")
    assert all(torch.equal(net.state_dict()[name], value) for name, value in state.items())
    with torch.no_grad():
        logits, target = net.eval()(data.ids, data.mask)["logits"], data.ids.roll(-1, 1)
    three = (logits.topk(3).indices == target[..., None]).any(-1).float().mean()
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
    assert table[int(best), "top3"] == pytest.approx(float(three))
    assert table[int(best), "perplexity"] == pytest.approx(float(loss.exp()), rel=1e-5)
    sure = logits.softmax(-1).amax(-1).mean()
    assert table[int(best), "recorded_nets:certainty"] == pytest.approx(float(sure), rel=1e-5)
    assert re.search(r"test loss .* top3 0\.\d+  perplexity [\d.]+  certainty 0\.\d+", found.out)


def test_a_resumed_run_ends_where_it_would_have(mpirun, tmp_path: Path) -> None:
    """In the same directory it goes on counting what was no better. Evaluations are three steps apart."""
    path = write(tmp_path, "run", CASE)
    keys = ["--set", "output.keep_best=loss", "--set", "train.patience=4", "--set", "train.lr=1e-12"]
    ends = []
    for parts in ((60,), (9, 60)):
        for steps in parts:
            more = ["--resume", "run"] if steps != parts[0] else []
            mpirun(2, "-m", "accept_mpi", "train", path, *keys, "--set", f"train.steps={steps}", *more)
        with open_log(tmp_path / "run" / "log.h5") as log:
            ends.append([int(row["step"]) for row in log["events"][:] if row["text"].startswith(b"no better")])
        shutil.rmtree(tmp_path / "run")
    assert ends == [[15], [15]]


@pytest.mark.parametrize(("ranks", "more"), [(1, ()), (3, ()), (2, ("pipeline.schedule=1f1b-delayed",)), (3, ("idle",))])
def test_a_run_that_no_longer_gets_better_ends(mpirun, tmp_path: Path, ranks: int, more: tuple[str, ...]) -> None:
    """It is evaluated and kept as it is then."""
    path = write(tmp_path, "run", CASE)
    keys = ["output.keep_best=loss", "train.patience=2", "train.steps=60", "train.lr=1e-12"]
    keys += ["pipeline.cuts=[2]", "pipeline.ranks=[1, 2]"] if more == ("idle",) else more
    found = mpirun(ranks, "-m", "accept_mpi", "train", path, *(part for key in keys for part in ("--set", key)))
    assert "no better loss in 2 evaluations" in found.out
    with open_log(tmp_path / "run" / "log.h5") as log:
        last = len(log["steps"])
        assert last < 30
        assert len(log["evals"]) >= 3
        assert (log["evals"]["step"][-1], log["steps"]["step"][-1]) == (last, last)
        loss = log["evals"]["loss"][-1]
    assert (tmp_path / "run" / "checkpoints" / f"step-{last:08d}" / "manifest.json").exists()
    assert re.search(rf"^step {last}  done: .*test loss {loss:.4f}$", found.out, re.MULTILINE)
    assert f"checkpoint  run/checkpoints/step-{last:08d}\n" in found.out


MISTAKEN = """
def misspelt(output, target):
    return output["logits"].argmx(-1)
def particular(output, target):
    if output["logits"].isfinite().all():
        raise ValueError("not these values")
"""


@pytest.mark.parametrize(("name", "steps"), [("misspelt", 0), ("particular", 3)])
def test_a_metric_that_cannot_be_taken_is_told_before_the_first_step(mpirun, tmp_path: Path, name: str, steps: int) -> None:
    """But not one to which only these values are a problem: they are made up then."""
    path = write(tmp_path, "run", CASE)
    (tmp_path / "mistaken.py").write_text(MISTAKEN)
    keys = ["--set", f'train.metrics=["mistaken:{name}"]', "--set", "train.steps=3"]
    out = mpirun(2, "-m", "accept_mpi", "train", path, *keys, code=1).out
    assert f'the metric "mistaken:{name}" raised' in out
    assert f"in {name}" in out
    assert ("step 1/3" in out) == bool(steps), out


@pytest.mark.parametrize("schedule", ["1f1b", "1f1b-delayed"])
@pytest.mark.parametrize("faults", ["", "1@evaluate:8", "2@evaluate:6", "0@evaluate:7", "1@checkpoint:2"])
def test_a_rank_that_is_lost_while_the_run_pauses(tmp_path: Path, schedule: str, faults: str) -> None:
    """The evaluation and its checkpoint are made nevertheless, and each counts once."""
    path = write(tmp_path, "run", CASE | {"schedule": schedule})
    keys = ["output.keep_best=loss", "output.keep=0", "train.steps=12", "train.lr=1e-12", "recovery.replicate_every=1"]
    code, out = run(tmp_path, ["-m", "accept_mpi", "train", path, *(w for key in keys for w in ("--set", key))], faults, 3)
    assert code == 0, out
    assert ("lost rank" in out) == bool(faults), out
    kept = sorted(one.name for one in (tmp_path / "run" / "checkpoints").glob("step-*"))
    known = 3 if faults.startswith("0") else 4  # a new rank 0 may lack the first, which was on its way to the disk
    assert kept[-known:] == [f"step-{step:08d}" for step in (3, 6, 9, 12)][-known:], out
    told = json.loads((tmp_path / "run" / "checkpoints" / "best.json").read_text())
    with open_log(tmp_path / "run" / "log.h5") as log:
        evals = log["evals"]["step"][:].tolist()
    for found in (sorted([told["step"], *told["worse"]]), evals):
        assert found in ([3, 6, 9, 12], [3, 6, 9, 12][-known:]), out


def test_what_must_get_better_is_known(mpirun, tmp_path: Path) -> None:
    path = write(tmp_path, "run", CASE)
    for key, message in (
        ("output.keep_best=top7", '"top7" is neither "loss" nor "accuracy" nor one of train.metrics'),
        ("train.patience=3", "train.patience goes with output.keep_best"),
        ('train.metrics=["topp"]', 'train.metrics: unknown name "topp"; did you mean "top5"?'),
    ):
        assert message in mpirun(1, "-m", "accept_mpi", "train", path, "--set", key, code=2).out

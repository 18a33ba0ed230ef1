"""Ranks that compute several actions at a time give what one plain PyTorch process gives, bit for bit, if that computes with
as many threads as a lane does (here one)."""

import json
from functools import cache
from pathlib import Path

import pytest
import samples
import torch
from conftest import ROOT
from stale_weights import replay

from accept_mpi.device import memory
from accept_mpi.logs.reader import open_log
from accept_mpi.recovery.checkpoint import Checkpoint

JOBS = {"cnn": samples.CNN, "gpt": samples.GPT}
SYNCHRONOUS = ("gpipe", "1f1b", "zero-bubble")
TRAIN_ALL = ROOT / "tests" / "programs" / "train_all.py"


@cache
def expected(name: str) -> dict[str, torch.Tensor]:
    train = JOBS[name]["train"]
    return samples.plain(JOBS[name]).train(train["steps"], train["batch_size"], train["micro_batches"])


def keys(lanes: object, **more: object) -> dict[str, object]:
    """Keys of a job with these lanes of one thread each."""
    return {"pipeline_lanes": lanes, "train_threads": 2 if lanes == "F+B" else lanes, "train_evaluate_every": 0} | more


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_weights_equal_one_process(mpirun, tmp_path: Path, ranks: int) -> None:
    cuts = {1: [], 2: [3], 3: [2, 4]}[ranks]
    cases = [
        (name, schedule, lanes, slack)
        for name in JOBS
        for schedule in SYNCHRONOUS
        for lanes, slack in ((2, 0), (3, 2), ("F+B", 1))
    ]
    cases += [(name, "1f1b-async", 3, 0) for name in JOBS if ranks == 1]
    jobs = [
        samples.write_job(
            tmp_path / f"{number}.toml", JOBS[name], str(number),
            **keys(lanes, pipeline_cuts=cuts, pipeline_schedule=schedule, pipeline_transfer_slack=slack),
        )
        for number, (name, schedule, lanes, slack) in enumerate(cases)
    ]  # fmt: skip
    mpirun(ranks, TRAIN_ALL, *jobs)
    for number, (name, *_) in enumerate(cases):
        samples.assert_equal(Checkpoint(tmp_path / str(number)).whole(), expected(name))


def test_asynchronous_lanes_equal_a_replay_of_stale_weights(mpirun, tmp_path: Path) -> None:
    """A stage of two lanes updates like a group of two."""
    cases = [
        (name, lanes, slack, vertical)
        for name in JOBS
        for lanes, slack, vertical in ((2, 0, False), (2, 2, True), (4, 0, True), (3, 1, False))
    ]
    jobs = [
        samples.write_job(
            tmp_path / f"{number}.toml", JOBS[name], str(number),
            **keys(
                lanes, pipeline_cuts=[2, 4], pipeline_schedule="1f1b-async", pipeline_transfer_slack=slack,
                pipeline_vertical_sync=vertical,
            ),
        )
        for number, (name, lanes, slack, vertical) in enumerate(cases)
    ]  # fmt: skip
    mpirun(3, TRAIN_ALL, *jobs)
    for number, (name, lanes, slack, vertical) in enumerate(cases):
        ours = Checkpoint(tmp_path / str(number)).whole()
        samples.assert_equal(ours, replay(JOBS[name], 3, slack, vertical, [2, 4], [lanes] * 3))


@pytest.mark.parametrize("gradients", ["exact", "none"])
def test_lanes_of_ranks_that_share_a_stage(mpirun, tmp_path: Path, gradients: str) -> None:
    for name, job in JOBS.items():
        more = {"pipeline_cuts": [3], "pipeline_ranks": [[0, 1], 2], "pipeline_gradients": gradients}
        for lanes in (2, "F+B"):
            path = samples.write_job(tmp_path / "job.toml", job, f"{name}-{lanes}", **keys(lanes, **more))
            mpirun(3, TRAIN_ALL, path)
            ours = Checkpoint(tmp_path / f"{name}-{lanes}").whole()
            if gradients == "exact":
                samples.assert_equal(ours, expected(name))
            else:
                for key, value in expected(name).items():
                    torch.testing.assert_close(ours[key], value, rtol=1e-4, atol=1e-6)


def test_log_and_results(mpirun, tmp_path: Path) -> None:
    """Loss, accuracy and evaluations are one process's; the log says which lane computed what."""
    one = samples.write_job(tmp_path / "one.toml", samples.CNN, "one", train_evaluate_every=2, pipeline_cuts=[])
    mpirun(1, TRAIN_ALL, one)
    more = {"pipeline_cuts": [3], "train_evaluate_every": 2}
    two = samples.write_job(tmp_path / "two.toml", samples.CNN, "two", **(keys(2) | more))
    mpirun(2, TRAIN_ALL, two)
    with open_log(tmp_path / "one" / "log.h5") as one_log, open_log(tmp_path / "two" / "log.h5") as log:
        for table in ("steps", "evals"):
            for column in ("step", "epoch", "samples", "loss", "accuracy"):
                assert one_log[table][column].tolist() == log[table][column].tolist(), (table, column)
        trace = log["trace"][:]
        for k in range(5):
            assert set(trace["lane"][(trace["micro_batch"] == k) & (trace["kind"] < 2)].tolist()) == {k % 2}


MEASURED = """
model = {{ name = "mobilenetv2", args = {{ classes = 10 }} }}
data = {{ name = "digits", args = {{ size = 32 }} }}
output = {{ directory = "out", checkpoint_at_end = false }}
pipeline = {{ cuts = [], lanes = {lanes} }}
[train]
batch_size = 192
micro_batches = 6
steps = 2
threads = {threads}
evaluate_every = 0
optimizer = {{ name = "sgd", lr = 0.05, momentum = 0.9 }}
"""


@pytest.mark.parametrize("lanes", ["off", 2, 3, "F+B"])
def test_memory_is_within_what_the_plan_foresees(mpirun, tmp_path: Path, lanes: object) -> None:
    """MobileNetV2 in micro-batches of 32 samples on one rank."""
    threads = {"off": 1, "F+B": 2}.get(str(lanes), lanes)
    path = tmp_path / "job.toml"
    path.write_text(MEASURED.format(lanes=json.dumps(lanes), threads=threads))
    mpirun(1, ROOT / "tests" / "programs" / "train_measured.py", path, tmp_path / "memory.json")
    foreseen, taken = json.loads((tmp_path / "memory.json").read_text())
    print(f"{lanes}: {taken / 2**20:.0f} MiB taken, {foreseen / 2**20:.0f} foreseen")
    assert 0.4 * foreseen < taken
    assert memory.planned(taken) <= foreseen, f"{taken / 2**20:.0f} MiB for {foreseen / 2**20:.0f}"


def test_a_run_goes_on_with_other_lanes(mpirun, tmp_path: Path) -> None:
    """From a checkpoint of two lanes on two ranks, with three on one, then with none."""
    first = samples.write_job(tmp_path / "1.toml", samples.CNN, "a", **keys(2, pipeline_cuts=[3], train_steps=2))
    mpirun(2, "-m", "accept_mpi", "train", first, "--quiet")
    second = samples.write_job(tmp_path / "2.toml", samples.CNN, "b", **keys(3, pipeline_cuts=[], train_steps=4))
    mpirun(1, "-m", "accept_mpi", "train", second, "--quiet", "--resume", "a")
    third = samples.write_job(tmp_path / "3.toml", samples.CNN, "c", pipeline_cuts=[2], train_evaluate_every=0)
    mpirun(2, "-m", "accept_mpi", "train", third, "--quiet", "--resume", "b")
    samples.assert_equal(Checkpoint(tmp_path / "c").whole(), expected("cnn"))


LAYERS = """
import itertools
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
class Again(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1))
    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)
NUMBERS = itertools.count()
class Late(nn.Module):
    \"\"\"Draws from its eleventh micro-batch on, by a counter where nobody looks.\"\"\"
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)
    def forward(self, x):
        return nn.functional.dropout(self.linear(x), 0.1) if next(NUMBERS) > 20 else self.linear(x)
CALLS = [0]
class Aside(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)
    def forward(self, x):
        CALLS[0] += 1
        return self.linear(x) * CALLS[0]
class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.register_buffer("calls", torch.zeros(()))
    def forward(self, x):
        if x.device.type != "meta":
            self.calls += 1
        return self.linear(x)
class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)
    def forward(self, x):
        return self.linear(self.linear(x).tanh())
class Hooked(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.linear.weight.register_hook(lambda g: 0.5 * g)
    def forward(self, x):
        return self.linear(x)
def net(kind):
    kinds = {"again": Again, "late": Late, "aside": Aside, "counts": Counts, "twice": Twice, "hooked": Hooked}
    return [nn.Flatten(), nn.Linear(192, 64), kinds[kind](), nn.ReLU(), nn.Linear(64, 10)]
"""


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("again", "computes forwards again in its backward"),
        ("counts", "writes into its own parameters or buffers"),
        ("hooked", "a parameter has hooks"),
        ("twice", "a forward uses a parameter twice in lower precision"),
        ("aside", "a forward changes nets.CALLS"),
        ("late", "draws random numbers that it did not draw in its first forward"),
    ],
)
def test_what_lanes_cannot_compute_is_refused(mpirun, tmp_path: Path, kind: str, why: str) -> None:
    (tmp_path / "nets.py").write_text(LAYERS)
    job = samples.CNN | {"model": f'name = "nets:net"\nargs = {{ kind = "{kind}" }}'}
    more = {"train_precision": "bf16"} if kind == "twice" else {}
    path = samples.write_job(tmp_path / "job.toml", job, "run", **keys(2, pipeline_cuts=[2], **more))
    said = mpirun(2, "-m", "accept_mpi", "train", path, code=2).out
    assert why in said, said
    assert "Traceback" not in said


ROWS = """
import sqlite3
import numpy as np
from accept_mpi.data import load
class Rows:
    def __init__(self, digits):
        self.digits, self.opened = digits, sqlite3.connect(":memory:")
    def __len__(self):
        return len(self.digits)
    def __getitem__(self, n):
        (n,) = self.opened.execute("select ?", (n,)).fetchone()
        return self.digits.inputs(np.array([n]))[0], self.digits.targets(np.array([n]))[0]
def data():
    return [Rows(one) for one in load("digits", {"size": 8})]
"""


def test_a_data_set_that_is_bound_to_a_thread(mpirun, tmp_path: Path) -> None:
    """As one with a connection to SQLite is: all samples are asked for in the thread that made it."""
    (tmp_path / "rows.py").write_text(ROWS)
    job = samples.CNN | {"data": 'name = "rows:data"'}
    cases: list[tuple[object, dict[str, object]]] = [(2, {"pipeline_ranks": [[0, 1]], "pipeline_cuts": []}), ("F+B", {})]
    for lanes, more in cases:
        more = keys(lanes, **{"pipeline_cuts": [3], "train_evaluate_every": 1, **more})
        path = samples.write_job(tmp_path / f"{lanes}.toml", job, str(lanes), **more)
        mpirun(2, "-m", "accept_mpi", "train", path)
        samples.assert_equal(Checkpoint(tmp_path / str(lanes)).whole(), expected("cnn"))

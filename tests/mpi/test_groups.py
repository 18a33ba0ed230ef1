"""Stages held by groups of ranks compute what one plain PyTorch process computes, bit for bit (ARCHITECTURE, invariants)."""

import re
from functools import cache
from pathlib import Path

import pytest
import samples
import torch
from conftest import ROOT
from stale_weights import delayed, replay
from test_delayed import SGD

from accept_mpi.logs.reader import open_log
from accept_mpi.plan import Plan
from accept_mpi.recovery.checkpoint import Checkpoint

JOBS = {"cnn": samples.CNN, "gpt": samples.GPT}
SYNCHRONOUS = ("gpipe", "1f1b", "zero-bubble")
GROUPS = {
    2: [([], [[0, 1]])],
    3: [([], [[2, 0, 1]]), ([3], [[1, 0], 2]), ([3], [2, [0, 1]])],
    4: [([2, 4], [0, [1, 3], 2]), ([3], [[0, 1], [3, 2]])],
    5: [([3], [[0, 1, 2], [3, 4]])],
}


@cache
def expected(name: str) -> dict[str, torch.Tensor]:
    train = JOBS[name]["train"]
    return samples.plain(JOBS[name]).train(train["steps"], train["batch_size"], train["micro_batches"])


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_weights_equal_one_process(mpirun, tmp_path: Path, ranks: int) -> None:
    """2 to 5 ranks in groups x synchronous schedules x CNN (BatchNorm, dropout) and GPT; groups of the first stage, of a
    middle one, of the last, and of the only one, whose weights are the newest in the asynchronous schedule, too."""
    jobs, directories = [], []
    for name in JOBS:
        for number, (cuts, held) in enumerate(GROUPS[ranks]):
            schedules = (*SYNCHRONOUS, "1f1b-async") if not cuts else SYNCHRONOUS if number == 0 else ("1f1b",)
            for schedule in schedules:
                directory = f"{name}-{schedule}-{number}"
                keys = {"pipeline_schedule": schedule, "pipeline_ranks": held, "pipeline_cuts": cuts}
                jobs.append(samples.write_job(tmp_path / f"{directory}.toml", JOBS[name], directory, **keys))
                directories.append((name, tmp_path / directory))
    mpirun(ranks, ROOT / "tests" / "programs" / "train_all.py", *jobs)
    for name, directory in directories:
        samples.assert_equal(Checkpoint(directory).whole(), expected(name))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_gradients_that_are_passed_on_early_change_nothing(mpirun, tmp_path: Path, ranks: int) -> None:
    """Later layers' sums begin while B computes the earlier ones: micro-batch by micro-batch, and as ranks' own sums, which
    are compared with those that are passed on whole."""
    jobs, found = [], []
    for name in JOBS:
        for number, (cuts, held) in enumerate(GROUPS[ranks]):
            for schedule in SYNCHRONOUS if not cuts else ("1f1b",):
                keys = {
                    "pipeline_schedule": schedule,
                    "pipeline_ranks": held,
                    "pipeline_cuts": cuts,
                    "train_evaluate_every": 0,
                }
                for gradients in ("exact", "none"):
                    directory = f"{name}-{schedule}-{number}-{gradients}"
                    keys["pipeline_gradients"] = gradients
                    jobs.append(samples.write_job(tmp_path / f"{directory}.toml", JOBS[name], directory, **keys))
                    found.append((name, gradients, directory))
    out = mpirun(ranks, ROOT / "tests" / "programs" / "train_early.py", *jobs).out
    assert len(re.findall("passed on early: [1-9]", out)) == ranks
    weights = {directory: Checkpoint(tmp_path / directory).whole() for *_, directory in found}
    whole = [job for job, (_, gradients, _) in zip(jobs, found, strict=True) if gradients == "none"]
    mpirun(ranks, ROOT / "tests" / "programs" / "train_all.py", *whole)
    for name, gradients, directory in found:
        wanted = expected(name) if gradients == "exact" else Checkpoint(tmp_path / directory).whole()
        samples.assert_equal(weights[directory], wanted)


def test_reports_equal_those_of_one_rank(mpirun, tmp_path: Path) -> None:
    """Losses and accuracies of steps and evaluations, from a last stage of two."""
    job = samples.write_job(tmp_path / "one.toml", samples.CNN, "one", train_evaluate_every=2, pipeline_cuts=[])
    mpirun(1, ROOT / "tests" / "programs" / "train_all.py", job)
    keys = {"pipeline_cuts": [3], "pipeline_ranks": [2, [0, 1]], "train_evaluate_every": 2}
    job = samples.write_job(tmp_path / "three.toml", samples.CNN, "three", **keys)
    mpirun(3, ROOT / "tests" / "programs" / "train_all.py", job)
    with open_log(tmp_path / "one" / "log.h5") as one, open_log(tmp_path / "three" / "log.h5") as three:
        for table in ("steps", "evals"):
            for column in ("step", "epoch", "samples", "loss", "accuracy"):
                assert one[table][column].tolist() == three[table][column].tolist(), (table, column)


def test_asynchronous_groups_equal_a_replay_of_stale_weights(mpirun, tmp_path: Path) -> None:
    """A group's update waits until each member has had one more micro-batch; the others as ever."""
    cases = [
        (name, cuts, held, slack, vertical)
        for name in JOBS
        for cuts, held, slack, vertical in (
            ([3], [[0, 1], [2, 3]], 0, False),
            ([2, 4], [0, [1, 3], 2], 1, False),
            ([3], [[3, 1, 0], 2], 2, True),
            ([3], [2, [3, 1, 0]], 0, True),
            ([3], [2, [3, 1, 0]], 2, True),
            ([], [[0, 1, 2, 3]], 0, False),
        )
    ]
    jobs = []
    for number, (name, cuts, held, slack, vertical) in enumerate(cases):
        keys = {"pipeline_cuts": cuts, "pipeline_ranks": held, "pipeline_transfer_slack": slack, "train_evaluate_every": 0}
        keys |= {"pipeline_schedule": "1f1b-async", "pipeline_vertical_sync": vertical}
        jobs.append(samples.write_job(tmp_path / f"{number}.toml", JOBS[name], str(number), **keys))
    mpirun(4, ROOT / "tests" / "programs" / "train_all.py", *jobs)
    for number, (name, cuts, held, slack, vertical) in enumerate(cases):
        sizes = [len(one) if isinstance(one, list) else 1 for one in held]
        ours = Checkpoint(tmp_path / str(number)).whole()
        samples.assert_equal(ours, replay(JOBS[name], len(held), slack, vertical, cuts, sizes))


def test_a_leader_without_micro_batches(mpirun, tmp_path: Path) -> None:
    """The first stage's leader says how steps end, before other members begin them, even if it takes no part in them."""
    jobs = []
    for name, held, speeds in (("slow", [[0, 1], 2], [[1, 4], 1]), ("fast", [[1, 0], 2], [[4, 1], 1])):
        keys = {"pipeline_cuts": [3], "pipeline_ranks": held, "pipeline_speeds": speeds, "train_micro_batches": 2}
        keys |= {"pipeline_schedule": "1f1b-async", "train_evaluate_every": 0, "pipeline_timeout": 20.0}
        jobs.append(samples.write_job(tmp_path / f"{name}.toml", samples.CNN, name, **keys))
    mpirun(3, ROOT / "tests" / "programs" / "train_all.py", *jobs)
    samples.assert_equal(*(Checkpoint(tmp_path / name).whole() for name in ("slow", "fast")))


def test_sums_of_ranks_differ_by_rounding(mpirun, tmp_path: Path) -> None:
    """With gradients = "none" each rank adds its own micro-batches first: the same bits in every run, and nearly those of
    one process."""
    found = []
    for name in ("one", "two"):
        keys = {"pipeline_cuts": [3], "pipeline_ranks": [[0, 1], 2], "pipeline_gradients": "none"}
        job = samples.write_job(tmp_path / f"{name}.toml", samples.CNN, name, **keys)
        mpirun(3, ROOT / "tests" / "programs" / "train_all.py", job)
        found.append(Checkpoint(tmp_path / name).whole())
    samples.assert_equal(*found)
    for key, value in expected("cnn").items():
        torch.testing.assert_close(found[0][key], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("codec", ["bf16", "uniform:8", "uniform:4"])
def test_coded_sums_are_the_same_on_all_members(mpirun, tmp_path: Path, codec: str) -> None:
    """What coding leaves out is added to the next sum, so training goes nearly as it does uncoded; each member ends with the
    same bits, or the next steps would drift apart (the checkpoint has the leader's; the loss is that of all)."""
    found = {}
    for name, gradients in (("coded", codec), ("again", codec), ("plain", "none")):
        keys = {"pipeline_cuts": [3], "pipeline_ranks": [[0, 1], [2, 3]], "pipeline_gradients": gradients}
        job = samples.write_job(tmp_path / f"{name}.toml", samples.CNN, name, train_steps=30, **keys)
        mpirun(4, ROOT / "tests" / "programs" / "train_all.py", job)
        found[name] = Checkpoint(tmp_path / name).whole()
    samples.assert_equal(found["coded"], found["again"])
    with open_log(tmp_path / "coded" / "log.h5") as coded, open_log(tmp_path / "plain" / "log.h5") as plain:
        last, uncoded = coded["steps"]["loss"][-5:].mean(), plain["steps"]["loss"][-5:].mean()
    assert last < 1.15 * uncoded + 0.05, (last, uncoded)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_members_go_on_with_the_same_weights(mpirun, tmp_path: Path, dtype: str) -> None:
    """Where coding goes over what is not float32, the owner of a sum kept it as it was, and the others what they decoded."""
    keys = {"pipeline_cuts": [], "pipeline_ranks": [[0, 1, 2]], "pipeline_gradients": "uniform:4", "train_evaluate_every": 0}
    net = {"model": f'name = "nets:of_dtype"\nargs = {{ dtype = "{dtype}" }}'}
    job = samples.write_job(tmp_path / "job.toml", samples.CNN | net, "run", **keys)
    out = mpirun(3, ROOT / "tests" / "programs" / "train_and_hash.py", job).out
    found = [line for line in out.splitlines() if line.startswith("weights")]
    assert len(found) == 3
    assert len(set(found)) == 1


EPOCHS = {
    "model": samples.CNN["model"],
    "data": samples.CNN["data"],
    "train": {"batch_size": 700, "micro_batches": 5, "steps": 4, "seed": 3, "evaluate_every": 2},
}


def test_fewer_micro_batches_than_ranks(mpirun, tmp_path: Path) -> None:
    """An epoch that ends with one micro-batch (1,438 digits leave 38), and steps of one, in groups of two and three."""
    jobs, wanted = [], {}
    one = EPOCHS | {"train": EPOCHS["train"] | {"batch_size": 8, "micro_batches": 1}}
    for number, (job, schedule) in enumerate([(EPOCHS, "1f1b"), (EPOCHS, "gpipe"), (one, "1f1b"), (one, "zero-bubble")]):
        keys = {"pipeline_cuts": [3], "pipeline_ranks": [[0, 1], [2, 3, 4]], "pipeline_schedule": schedule}
        jobs.append(samples.write_job(tmp_path / f"{number}.toml", job, str(number), **keys))
        wanted[number] = job
    mpirun(5, ROOT / "tests" / "programs" / "train_all.py", *jobs)
    for number, job in wanted.items():
        train = job["train"]
        plain = samples.plain(job).train(train["steps"], train["batch_size"], train["micro_batches"])
        samples.assert_equal(Checkpoint(tmp_path / str(number)).whole(), plain)


@pytest.mark.parametrize("schedule", ["1f1b-delayed", "1f1b-async"])
def test_members_without_a_part_in_the_last_step(mpirun, tmp_path: Path, schedule: str) -> None:
    """Where a plan or a run ends early, they hear of it before they wait for micro-batches of a later step."""
    keys = {"pipeline_cuts": [3], "pipeline_ranks": [0, [1, 2, 3]], "pipeline_schedule": schedule, "pipeline_timeout": 20.0}
    job = samples.write_job(tmp_path / "job.toml", EPOCHS, train_steps=6, train_evaluate_every=0, **keys)
    mpirun(4, ROOT / "tests" / "programs" / "ends_early.py", job, 2)
    assert Checkpoint(tmp_path / "run").manifest.step == 3
    if schedule == "1f1b-delayed":
        three = EPOCHS | {"train": EPOCHS["train"] | {"steps": 3}}
        samples.assert_equal(Checkpoint(tmp_path / "run").whole(), delayed(three, SGD))


def test_members_of_unequal_speeds(mpirun, tmp_path: Path) -> None:
    """7:1, where the slow one takes one of eight micro-batches or none, first and last, and the fast one second."""
    eight = samples.CNN | {"train": samples.CNN["train"] | {"micro_batches": 8}}
    jobs, wanted = [], {}
    for number, (job, held, speeds) in enumerate(
        [
            (eight, [[0, 1], 2], [[7.0, 1.0], 1.0]),
            (eight, [0, [2, 1]], [1.0, [1.0, 7.0]]),
            (samples.CNN, [[0, 1], 2], [[7.0, 1.0], 1.0]),
        ]
    ):
        for schedule in ("1f1b", "zero-bubble"):
            keys = {"pipeline_cuts": [3], "pipeline_ranks": held, "pipeline_speeds": speeds, "pipeline_schedule": schedule}
            name = f"{number}-{schedule}"
            jobs.append(samples.write_job(tmp_path / f"{name}.toml", job, name, **keys))
            wanted[name] = job
    mpirun(3, ROOT / "tests" / "programs" / "train_all.py", *jobs)
    for name, job in wanted.items():
        train = job["train"]
        plain = samples.plain(job).train(train["steps"], train["batch_size"], train["micro_batches"])
        samples.assert_equal(Checkpoint(tmp_path / name).whole(), plain)


HEAVY = """
import torch
from torch import nn
class Heavy(nn.Module):
    def __init__(self, counts):
        super().__init__()
        self.linear, self.counts = nn.Linear(64, 64), counts
        self.register_buffer("calls", torch.zeros(()))
    def forward(self, x):
        if x.device.type != "meta":  # which is how a model is outlined
            with torch.no_grad():
                a = torch.ones(256, 256)
                for _ in range(20): a = torch.mm(a, a).clamp(max=1)
            if self.counts: self.calls += 1
        return torch.tanh(self.linear(x))
def net(counts=False):
    return [nn.Flatten(), nn.Linear(192, 64), nn.ReLU(), Heavy(counts), nn.BatchNorm1d(64), nn.Linear(64, 10)]
"""


@pytest.mark.parametrize("counts", [False, True])
def test_groups_that_rank_0_finds(mpirun, tmp_path: Path, counts: bool) -> None:
    """A layer that takes longer than all others is shared; not if its forward changes a buffer, which shows at the start."""
    (tmp_path / "nets.py").write_text(HEAVY)
    model = f'name = "nets:net"\nargs = {{ counts = {str(counts).lower()} }}'
    job = samples.CNN | {"model": model}
    keys = {"pipeline_cuts": "auto", "pipeline_probe_seconds": 1.0, "pipeline_latency_db": "none"}
    path = samples.write_job(tmp_path / "job.toml", job, **keys)
    out = mpirun(3, "-m", "accept_mpi", "train", str(path)).out
    lone = samples.write_job(tmp_path / "lone.toml", job, "lone", pipeline_cuts=[])
    mpirun(1, "-m", "accept_mpi", "train", str(lone))
    samples.assert_equal(Checkpoint(tmp_path / "run").whole(), Checkpoint(tmp_path / "lone").whole())
    with open_log(tmp_path / "run" / "log.h5") as log:
        hybrid = Plan.from_json(log.attrs["plan"]).hybrid
    assert hybrid != counts, out
    if counts:
        assert 'changes the buffer "3.calls"' in out


def test_layers_that_cannot_be_shared_are_refused_in_one_sentence(mpirun, tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(HEAVY)
    job = samples.CNN | {"model": 'name = "nets:net"\nargs = { counts = true }'}
    keys = {"pipeline_cuts": [2], "pipeline_ranks": [0, [1, 2]]}
    path = samples.write_job(tmp_path / "job.toml", job, **keys)
    out = mpirun(3, "-m", "accept_mpi", "train", str(path), code=2).out
    assert "layers 2 to 5 cannot be held by several ranks" in out
    assert out.count("accept_mpi:") == 1
    assert not (tmp_path / "run" / "log.h5").exists()

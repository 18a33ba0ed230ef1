"""Ranks are killed; the others go on, and end with the weights of a run that lost none (ARCHITECTURE, invariants)."""

import re
from pathlib import Path

import pytest
import samples
from lost_ranks import expected, run

from accept_mpi.errors import TooFewDevices
from accept_mpi.logs.reader import open_log
from accept_mpi.recovery.checkpoint import Checkpoint

RANKS = 5


@pytest.mark.parametrize(
    "faults",
    [
        "3@backward:13",
        "0@forward:18",
        "4@update:4",
        "1@backward:7 2@backward:7",
        "0@snapshot:2 3@backward:22",
        "0@update:3 1@backward:20 4@forward:21",
        "2@forward:1",
        "1@end",
        "0@end",
    ],
)
def test_the_others_go_on(tmp_path: Path, faults: str) -> None:
    """One, two and three of five; rank 0 too; neighbours at once; in the first step and after the last."""
    job = samples.write_job(tmp_path / "job.toml", samples.CNN, recovery_replicate_every=1)
    code, out = run(tmp_path, ["-m", "accept_mpi", "train", job, "--quiet"], faults, RANKS)
    assert code == 0, out
    samples.assert_equal(Checkpoint(tmp_path / "run").whole(), expected())
    with open_log(tmp_path / "run" / "log.h5") as log:
        steps = log["steps"]["step"][:].tolist()
    assert steps == sorted(set(steps)), out
    assert steps[-1] == 6, out
    # The last stage tells again what was on its way, or what rank 0 had not written out, unless it is lost itself.
    assert "4@" in faults or steps == [1, 2, 3, 4, 5, 6], out
    assert "0@" in faults or steps[0] == 1, out
    assert "lost rank" in out


@pytest.mark.parametrize(("held", "cuts", "faults"), [([1], [], "1@backward:13"), ([2, 1], [3], "1@update:4 2@update:4")])
def test_idle_ranks_go_on_without_all_others(tmp_path: Path, held: list[int], cuts: list[int], faults: str) -> None:
    keys = {"pipeline_cuts": cuts, "pipeline_ranks": held, "recovery_replicate_every": 1}
    job = samples.write_job(tmp_path / "job.toml", samples.CNN, **keys)
    code, out = run(tmp_path, ["-m", "accept_mpi", "train", job, "--quiet"], faults, 3)
    assert code == 0, out
    assert "lost rank" in out, out
    samples.assert_equal(Checkpoint(tmp_path / "run").whole(), expected())


@pytest.mark.parametrize("faults", ["3@backward:22", "2@snapshot:4 0@forward:23"])
def test_copies_without_what_is_not_trained(tmp_path: Path, faults: str) -> None:
    """After the first one a copy has none of the frozen weights; each new plan begins with a whole one again."""
    keys = {"train_freeze": ["*.weight"], "recovery_replicate_every": 1}
    ends = []
    for name, killed in (("whole", ""), ("run", faults)):
        job = samples.write_job(tmp_path / f"{name}.toml", samples.CNN, name, **keys)
        code, out = run(tmp_path, ["-m", "accept_mpi", "train", job, "--quiet"], killed, RANKS)
        assert code == 0, out
        assert ("lost rank" in out) == bool(killed), out
        ends.append(Checkpoint(tmp_path / name).whole())
    samples.assert_equal(*ends)


@pytest.mark.parametrize("schedule", ["1f1b", "1f1b-async"])
def test_a_lost_member_of_a_group_costs_few_steps(tmp_path: Path, schedule: str) -> None:
    """The others have its state, and copies of every few steps, however rare snapshots are (here: none)."""
    keys = {"pipeline_cuts": [3], "pipeline_ranks": [[0, 1], [2, 3]], "pipeline_schedule": schedule}
    more = {"train_steps": 40, "recovery_replicate_every": 1000}
    job = samples.write_job(tmp_path / "job.toml", samples.CNN, **keys, **more)
    code, out = run(tmp_path, ["-m", "accept_mpi", "train", job, "--quiet"], "1@update:30", 4)
    assert code == 0, out
    told = re.search(r"could begin \d+ ms later; 2 stages go on from step (\d+)", out)
    assert told, out
    assert int(told[1]) > 0, out
    if schedule == "1f1b":
        train = samples.CNN["train"]
        plain = samples.plain(samples.CNN).train(40, train["batch_size"], train["micro_batches"])
        samples.assert_equal(Checkpoint(tmp_path / "run").whole(), plain)


@pytest.mark.parametrize("faults", ["3@backward:13", "0@forward:18", "4@update:4"])
@pytest.mark.parametrize("lanes", [2, "F+B"])
def test_ranks_with_lanes_go_on(tmp_path: Path, faults: str, lanes: object) -> None:
    keys = {"pipeline_lanes": lanes, "train_threads": 2, "recovery_replicate_every": 1}
    job = samples.write_job(tmp_path / "job.toml", samples.CNN, **keys)
    code, out = run(tmp_path, ["-m", "accept_mpi", "train", job, "--quiet"], faults, RANKS)
    assert code == 0, out
    assert "lost rank" in out
    samples.assert_equal(Checkpoint(tmp_path / "run").whole(), expected())


@pytest.mark.parametrize(("every", "schedule"), [(0, "1f1b"), (1, "zero-bubble")])
def test_a_users_own_layers_go_on(tmp_path: Path, every: int, schedule: str) -> None:
    """They exist before the run, but whatever it did to them is not in the next term: neither their weights, where it begins
    again at step 0, nor what a schedule taught them."""
    built = samples.CNN | {"model": 'name = "plain_sequential:cnn"\nargs = { width = 8, dropout = 0.2 }'}
    job = samples.write_job(tmp_path / "job.toml", built, recovery_replicate_every=every, pipeline_schedule=schedule)
    code, out = run(tmp_path, ["-m", "accept_mpi", "train", job, "--quiet"], "1@backward:13", 3)
    assert code == 0, out
    samples.assert_equal(Checkpoint(tmp_path / "run").whole(), expected())


def test_a_loss_while_others_wait_to_send(tmp_path: Path) -> None:
    """In an evaluation stages run ahead of a slow one until there is no more room."""
    (tmp_path / "slow-2").touch()
    sleepy = samples.CNN | {"model": 'name = "slow_layers:cnn"\nargs = { width = 8, dropout = 0.2 }'}
    job = samples.write_job(tmp_path / "job.toml", sleepy, recovery_replicate_every=1, train_steps=1)
    code, out = run(tmp_path, ["-m", "accept_mpi", "train", job, "--quiet"], "2@evaluate:30", 3)
    assert code == 0, out
    assert "lost rank 2" in out, out


def test_too_few_are_left_to_hold_the_model(tmp_path: Path) -> None:
    """Each of three devices has room for 0.7 of it, snapshots included: one may be lost, not two. The checkpoint stays."""
    cramped = samples.CNN | {"model": 'name = "little_memory:mlp"\nargs = { memory = 19e6 }'}
    job = samples.write_job(
        tmp_path / "job.toml", cramped, train_steps=40, recovery_replicate_every=1, output_checkpoint_every=2,
        pipeline_cuts="auto", pipeline_latency_db="none", pipeline_probe_seconds=0.3,
    )  # fmt: skip
    code, out = run(tmp_path, ["-m", "accept_mpi", "train", job, "--quiet"], "1@backward:30 2@backward:60", 3)
    assert code == TooFewDevices.exit_code, out
    assert out.count("lost rank") == 1, out
    assert "no cuts fit" in out, out
    assert Checkpoint(tmp_path / "run").manifest.step >= 2


def test_devices_that_would_not_hold_the_model_even_together(tmp_path: Path) -> None:
    cramped = samples.CNN | {"model": 'name = "little_memory:mlp"\nargs = { memory = 5e5 }'}
    job = samples.write_job(
        tmp_path / "job.toml", cramped, pipeline_cuts="auto", pipeline_latency_db="none", pipeline_probe_seconds=0.3
    )
    code, out = run(tmp_path, ["-m", "accept_mpi", "train", job, "--quiet"], "", 3)
    assert code == 2, out
    assert "layer 3 alone needs 3.0 MiB and the largest device has 0.5 MiB" in out, out
    assert "recovery.replicate_every = 0" in out, out


def test_a_supervised_run_that_had_all_but_ended(tmp_path: Path, run_name: str) -> None:
    """Its last checkpoint was on the disk when a host was lost: there is nothing to do, and nothing wrong."""
    job = samples.write_job(tmp_path / "job.toml", samples.CNN, train_evaluate_every=0)
    command: list[object] = ["-m", "accept_mpi", "train", job, "--run", f"{run_name}/1"]
    for again in ("no evaluation", "an earlier start has made the last checkpoint"):
        code, out = run(tmp_path, command, "", 2)
        assert code == 0, out
        assert f"step 6  done: {again}" in out, out


COUNTING = """
import torch
from torch import nn

class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.calls += 1
        return x * self.calls.clamp(max=20) / 20

def net():
    return [nn.Flatten(), nn.Linear(192, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), Counting(), nn.Linear(32, 10)]
"""


@pytest.mark.parametrize(("held", "cuts", "lost"), [([[0, 1], 2], [5], 2), ([0, [1, 2]], [6], 0)])
def test_a_group_that_cannot_hold_what_a_lost_rank_held(
    tmp_path: Path, held: list[object], cuts: list[int], lost: int
) -> None:
    """One of it goes on alone then, as with a model that no group can hold from the beginning."""
    (tmp_path / "counting.py").write_text(COUNTING)
    job = samples.CNN | {"model": 'name = "counting:net"'}
    keys = {"pipeline_cuts": cuts, "pipeline_ranks": held, "recovery_replicate_every": 2}
    path = samples.write_job(tmp_path / "job.toml", job, **keys)
    whole = samples.write_job(tmp_path / "whole.toml", job, "whole", pipeline_cuts=[])
    assert run(tmp_path, ["-m", "accept_mpi", "train", whole, "--quiet"], "", 1)[0] == 0
    code, out = run(tmp_path, ["-m", "accept_mpi", "train", path, "--quiet"], f"{lost}@backward:18", 3)
    assert code == 0, out
    assert "lost rank" in out, out
    assert 'a forward changes the buffer "5.calls"; the plan is made again without groups' in out, out
    samples.assert_equal(Checkpoint(tmp_path / "run").whole(), Checkpoint(tmp_path / "whole").whole())

"""What few runs would ever meet: ranks that lose each other, or end, at a bad moment."""

import re
import sys
from pathlib import Path

import pytest
import samples
from conftest import HANGS, ROOT, finish, mpirun_command
from lost_ranks import expected, left_behind, run

from accept_mpi.logs.reader import open_log
from accept_mpi.recovery.checkpoint import Checkpoint
from accept_mpi.recovery.manifest import complete

PAUSES = 20  # of bad_moments.py


@pytest.mark.parametrize(
    ("what", "said"),
    [("revoked", "heard"), ("late", "done"), ("twice", "lives"), ("unanswered", "hears"), ("apart", "goes on")],
)
def test_both_ranks_come_through(tmp_path: Path, what: str, said: str) -> None:
    code, out = run(tmp_path, [ROOT / "tests" / "programs" / "bad_moments.py", what], "", 2)
    assert code == 0, out
    assert out.count(said) == 2, out


def test_polls_are_rare_where_they_cost_the_core_that_computes(tmp_path: Path) -> None:
    """A poll takes 0.1 ms of it, 125 a second were 3 % of a host of 0.4 core. Going through all channels takes as long
    again, and is for when there is news."""
    code, out = run(tmp_path, [ROOT / "tests" / "programs" / "bad_moments.py", "looks"], "", 2)
    assert code == 0, out
    lines = [line.split()[1:] for line in out.splitlines() if line.startswith("looks")]
    assert len(lines) == 6, out
    assert all(int(polled) <= PAUSES + 2 for polled, _, _ in lines), out  # nothing but the end of a pause makes it poll
    assert all(int(looked) <= 3 for _, looked, _ in lines), out
    usual, *_, rare = sorted({float(pause) for *_, pause in lines})
    assert rare >= 1 / 40
    assert usual < rare
    assert sum(float(pause) == rare for *_, pause in lines) == 2, out


def test_a_pair_that_is_held_up_once_keeps_its_rate(tmp_path: Path) -> None:
    """A quota stops hosts at random: of equal links of 20 Mbit/s some seemed to carry 11."""
    code, out = run(tmp_path, [ROOT / "tests" / "programs" / "bad_moments.py", "links"], "", 3)
    assert code == 0, out
    found = sorted(line.split()[1:] for line in out.splitlines() if line.startswith("links"))
    assert found == [["0.5", "1.0", "inf"], ["1.0", "inf", "1.0"], ["inf", "1.0", "0.5"]], out


def test_training_does_not_wait_for_a_checkpoint(mpirun, tmp_path: Path) -> None:
    """The norms that clip gradients queued behind it; where it took longer than ``timeout``, the run ended."""
    job = samples.write_job(
        tmp_path / "job.toml", samples.CNN, "run", train_clip_norm=1.0, train_steps=8, train_evaluate_every=0,
        pipeline_cuts=[3], pipeline_timeout=5.0, output_checkpoint_every=3,
    )  # fmt: skip
    mpirun(2, ROOT / "tests" / "programs" / "slow_checkpoint.py", job, 8.0, 1)
    with open_log(tmp_path / "run" / "log.h5") as log:
        ends = log["steps"]["end"][:]
    assert len(ends) == 8
    assert ends[-1] - ends[2] < 6.0


def test_checkpoints_that_are_made_faster_than_sent_do_not_pile_up(mpirun, tmp_path: Path) -> None:
    """Each was a copy of the state that waited in memory: a device ran out of it, however small the model."""
    job = samples.write_job(
        tmp_path / "job.toml", samples.CNN, "run", train_steps=6, train_evaluate_every=0, pipeline_cuts=[3],
        output_checkpoint_every=1, output_keep=0,
    )  # fmt: skip
    mpirun(2, ROOT / "tests" / "programs" / "slow_checkpoint.py", job, 1.0, 12)
    with open_log(tmp_path / "run" / "log.h5") as log:
        ends, events = log["steps"]["end"][:], log["events"]["text"][:]
    assert ends[-1] - ends[0] > 6.0  # the sixth step waits for the fourth checkpoint; each takes two seconds
    assert 1 <= sum(b"made faster than sent" in text for text in events) <= 2
    assert len(complete(tmp_path / "run")) == 6


def test_the_last_checkpoint_has_time_as_long_as_it_arrives(mpirun, tmp_path: Path) -> None:
    """A gigabyte takes ten minutes at 20 Mbit/s, and more than the deadline; the other ranks wait for it at the end."""
    job = samples.write_job(
        tmp_path / "job.toml", samples.CNN, "run", train_evaluate_every=0, pipeline_startup_timeout=16.0,
        pipeline_cuts=[2, 4],
    )  # fmt: skip
    mpirun(3, ROOT / "tests" / "programs" / "slow_checkpoint.py", job, 10.0, 2)
    samples.assert_equal(Checkpoint(tmp_path / "run").whole(), expected())


@pytest.mark.parametrize("options", [[], ["--with-ft", "ulfm"]])
def test_a_rank_that_hangs_ends_the_run_with_a_sentence(tmp_path: Path, options: list[str]) -> None:
    """Rank 0 hangs here, to whom the others had told why they end: nobody said it."""
    (tmp_path / "own.py").write_text(
        "import os, signal\nfrom torch import nn\n\n"
        "class Hangs(nn.Linear):\n"
        "    calls = 0\n\n"
        "    def forward(self, x):\n"
        "        Hangs.calls += 1\n"
        "        if Hangs.calls == 40:\n"
        "            os.kill(os.getpid(), signal.SIGSTOP)\n"
        "        return super().forward(x)\n\n"
        "def model():\n"
        "    return nn.Sequential(nn.Flatten(), Hangs(3 * 8 * 8, 8), nn.Linear(8, 10))\n"
    )
    job = samples.write_job(
        tmp_path / "job.toml", samples.CNN | {"model": 'name = "own:model"'}, train_steps=400, train_evaluate_every=0,
        pipeline_cuts=[2], pipeline_timeout=3.0, pipeline_startup_timeout=8.0,
    )  # fmt: skip
    mpirun, *count = mpirun_command(2)
    command = [mpirun, *options, *count, sys.executable, "-m", "accept_mpi", "train", str(job), "--quiet"]
    found = finish(command, tmp_path, {}, HANGS)
    assert found.code == 1, found.out
    assert re.search(r"accept_mpi: rank 1 on host .*: waited 3 s for ", found.out), found.out
    assert not left_behind(tmp_path)

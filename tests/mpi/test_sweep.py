"""A sweep runs what is missing, goes on after a failure, and ends with results, table and plot."""

import os
import subprocess
import sys
from pathlib import Path

import h5py
import pytest
from conftest import HANGS, ROOT, environment, python
from lost_ranks import left_behind
from watch import wait_for_step

JOB = """
[model]
name = "cnn"
[data]
name = "digits"
args = { size = 8 }
[train]
batch_size = 32
micro_batches = 2
steps = 3
[pipeline]
cuts = "even"
[output]
directory = "elsewhere"
"""
SWEEP = """
job = "job.toml"
ranks = 2
output = "out"
metric = "loss"
repeat = "seed"
[axes.codec]
"pipeline.forward" = ["none", "uniform:4"]
"pipeline.backward" = ["none", "uniform:4"]
[axes.seed]
"train.seed" = [0, 1]
"""


# It starts its runs with the interpreter that it runs in: one that forks them (conftest.python).
SWEEP_COMMAND = f"""
import os, runpy, sys
sys.path.insert(0, {str(ROOT / "jobs")!r})
sys.executable = os.path.join(os.environ["ACCEPT_MPI_TEMPLATE"], "python")
sys.argv = ["sweep", "sweep.toml", *sys.argv[1:]]
runpy.run_module("harness.sweep", run_name="__main__")
"""


def start(folder: Path, *words: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*python(), "-c", SWEEP_COMMAND, *words],
        cwd=folder,
        env=environment() | {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def sweep(folder: Path, *words: str, code: int = 0) -> str:
    with start(folder, *words) as process:
        said, _ = process.communicate(timeout=HANGS)
    assert process.returncode == code, said
    return said


def test_what_is_finished_is_not_run_again(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "sweep.toml").write_text(SWEEP)
    first = sweep(tmp_path)
    assert next(line for line in first.splitlines() if "/4: " in line) == "1/4: out/none-none-0"
    assert "| codec | test loss | ± one run | against the first, ± standard error | runs |" in first
    assert (tmp_path / "out" / "plot.png").stat().st_size > 5000
    with h5py.File(tmp_path / "out" / "results.h5") as file:
        assert len(file["points"]) == 4
        assert 0 < file["points/00000"].attrs["loss"] < 10

    # Interrupted: one run is damaged and results.h5 is lost. Only that run is made again.
    (tmp_path / "out" / "results.h5").unlink()
    (tmp_path / "out" / "uniform-4-uniform-4-1" / "log.h5").write_bytes(b"torn")
    second = sweep(tmp_path)
    assert [line for line in second.splitlines() if "/4: " in line] == ["4/4: out/uniform-4-uniform-4-1"]
    # Another job: everything is run again. One point is impossible, the others get their results.
    (tmp_path / "job.toml").write_text(JOB.replace("steps = 3", "steps = 2"))
    (tmp_path / "sweep.toml").write_text(SWEEP.replace("[0, 1]", "[0]").replace('["none", "uniform:4"]', '["none", "fp16"]'))
    third = sweep(tmp_path, "--", "-x", "NOTHING_SUCH=1")
    assert [line for line in third.splitlines() if "/2: " in line] == ["1/2: out/none-none-0", "2/2: out/fp16-fp16-0"]


def test_a_failing_point_does_not_end_the_others(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    text = SWEEP.replace("[axes.seed]", '[axes.cuts]\n"pipeline.cuts" = [[99], [2]]\n[axes.seed]').replace("[0, 1]", "[0]")
    (tmp_path / "sweep.toml").write_text(text.replace('["none", "uniform:4"]', '["none"]'))
    out = sweep(tmp_path, code=1)
    assert "cuts [99]" in out
    assert "| none / none | [2] |" in out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('metric = "loss"', 'metric = "speed"'), "expected one of accuracy, loss, samples_per_s"),
        (('repeat = "seed"', 'repeat = "seeds"'), 'repeat = "seeds" is none of the axes codec, seed'),
        (("[0, 1]", "[]"), "axes.seed: expected keys with lists of one length"),
        (("ranks = 2", "rank = 2"), "unknown field `rank`"),
        (('"pipeline.forward"', '"pipeline.forwards"'), "pipeline.forwards"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "sweep.toml").write_text(SWEEP.replace(*change))
    out = sweep(tmp_path, code=2)
    assert message in out
    assert len(out.splitlines()) == 1


def test_sigterm_leaves_no_ranks_behind(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB.replace("steps = 3", "steps = 100_000"))
    (tmp_path / "sweep.toml").write_text(SWEEP)
    with start(tmp_path) as process:
        wait_for_step(tmp_path / "out" / "none-none-0", 2, process)
        process.terminate()
        said, _ = process.communicate(timeout=HANGS)
    assert process.returncode != 0
    assert "2/4" not in said
    assert not left_behind(tmp_path), said

"""The machinery of the experiments, with every peer, on two hosts and a small model."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, environment
from labs import reason

pytestmark = pytest.mark.skipif(reason is not None, reason=str(reason))

FLEET = '[[hosts]]\nname = "edge"\ncount = 2\ncpu = 0.8\n'
JOB = """
[model]
name = "cnn"
args = { classes = 10 }
[data]
name = "digits"
args = { size = 16 }
[train]
batch_size = 16
micro_batches = 4
steps = 4
evaluate_every = 0
[pipeline]
schedule = "1f1b-async"
probe_seconds = 0.5
[output]
directory = "set by the experiment"
"""
EXPERIMENT = """
from harness.experiment import Experiment, run
from harness.side_by_side import Case, compare

CASE = Case(
    "test", links=(0, 50), untuned=(0,), cuts=[3], samples=16, seconds=0.3, turns=1,
    ours={"1f1b-async": ("none", "auto"), "1f1b": ("uniform:4",)},
)
def main():
    compare(__file__, CASE)
    experiment = Experiment(__file__)
    with experiment.lab("fleet.toml"):
        for program, more in (("ddp", {"powersgd": True}), ("pipelining", {"cuts": [3]})):
            asked = {"job": experiment.job(), "tuned": True, "until": 0.05, "seconds": 60} | more
            found = experiment.measure(program, {"system": "until an accuracy"}, asked)
            assert 0.05 <= found["evals"][-1][1] <= 1, found

run(main)
"""


def test_side_by_side(tmp_path: Path) -> None:
    folder = tmp_path / f"t{os.getpid()}"
    folder.mkdir()
    (folder / "fleet.toml").write_text(FLEET)
    (folder / "job.toml").write_text(JOB)
    (folder / "experiment.py").write_text(EXPERIMENT)
    path = os.pathsep.join([str(ROOT), str(ROOT / "jobs"), str(ROOT / "jobs" / "lab")])
    command = [sys.executable, str(folder / "experiment.py")]
    for attempt in range(2):
        done = subprocess.run(
            command, cwd=tmp_path, env=environment() | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=280
        )
        assert done.returncode == 0, done.stdout + done.stderr
        # 6 of ours, 9 and 2 of peers, 8 alone, 4 in turn at both links; the second time nothing is measured again.
        assert done.stdout.count("samples/s\n") == (0 if attempt else 33), done.stdout
        assert done.stdout.count("its plan at ") == (0 if attempt else 2), done.stdout
    out = tmp_path / "runs" / "experiments" / folder.name
    shown = (out / "table.md").read_text()
    assert shown.count("| accept_mpi ") == 3
    assert shown.count("| torch ") == 6
    best = next(line for line in shown.splitlines() if line.startswith("| async, best of all / sum of the hosts alone | "))
    assert best.count("(") == 2, shown
    assert (out / "plot.png").stat().st_size > 10_000
    assert f"experiment-{folder.name}" not in subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout

"""Batch scripts run on a real Slurm, without a host file."""

import sys
from pathlib import Path

import pytest
from conftest import ROOT

sys.path.insert(0, str(Path(__file__).parent))
from accept_mpi.logs.reader import open_log, read_facts
from slurm import Slurm, why_not

reason = why_not()
pytestmark = pytest.mark.skipif(reason is not None, reason=str(reason))


@pytest.fixture(scope="module")
def slurm():
    with Slurm() as running:
        yield running


def submit(slurm: Slurm, folder: Path, script: str, *words: str, code: int = 0) -> str:
    """Submit from the checkout's root and wait until the job ends with ``code``; what it printed."""
    out = folder / "out.txt"
    command = ["sbatch", "--parsable", f"--output={out}", "--ntasks=2", f"jobs/slurm/{script}", *words]
    number = slurm.run(command, 20, cwd=ROOT).strip()
    state, ended = slurm.wait(number, 240)
    assert ended == code, f"{state}, exit code {ended}\n{out.read_text() if out.exists() else ''}"
    return out.read_text()


def test_a_job(slurm: Slurm, tmp_path: Path) -> None:
    settings = ["train.steps=3", f"output.directory={tmp_path}/run", "data.args={size=16}"]
    words = [word for setting in settings for word in ("--set", setting)]
    (tmp_path / "job.toml").write_text((ROOT / "jobs" / "quickstart.toml").read_text().replace("epochs", "#epochs"))
    submit(slurm, tmp_path, "train.sbatch", str(tmp_path / "job.toml"), *words)
    with open_log(tmp_path / "run" / "log.h5") as log:
        assert len(log["steps"]) == 3
        assert len(read_facts(log)["hosts"]) == 2


def test_a_failing_job_fails(slurm: Slurm, tmp_path: Path) -> None:
    assert "nothing.toml" in submit(slurm, tmp_path, "train.sbatch", "nothing.toml", code=2)


def test_a_sweep(slurm: Slurm, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(
        '[model]\nname = "cnn"\n[data]\nname = "digits"\nargs = { size = 8 }\n[train]\nbatch_size = 16\nmicro_batches = 2\n'
        'steps = 2\n[output]\ndirectory = "x"\n'
    )
    (tmp_path / "sweep.toml").write_text(
        f'job = "job.toml"\nranks = 2\noutput = "{tmp_path}/out"\n[axes.seed]\n"train.seed" = [0, 1]\n'
    )
    assert "| seed | test accuracy, %" in submit(slurm, tmp_path, "sweep.sbatch", str(tmp_path / "sweep.toml"))
    assert (tmp_path / "out" / "results.h5").exists()

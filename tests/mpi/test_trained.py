"""Ranks that train several jobs (the fixture ``trained``): what each does is not known to the next."""

from pathlib import Path

import pytest
import samples
from conftest import environment

from accept_mpi.recovery.checkpoint import Checkpoint

NET = """
import os
from torch import nn
os.environ["OMP_NUM_THREADS"] = "x"
calls = 0
class Bug(nn.Module):
    def forward(self, x):
        global calls
        calls += 1
        if calls > 9 and self.training: raise KeyError("a bug")
        return x
def bug(): return [nn.Flatten(), Bug(), nn.Linear(192, 10)]
def net(): return [nn.Flatten(), nn.Linear(192, 10)]
"""


def test_each_as_in_a_new_process(trained, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET)
    job = samples.write_job(tmp_path / "job.toml", samples.CNN)
    own = ("model.args={}", "train.threads=1")
    outcomes = trained(
        2,
        tmp_path,
        [
            "job.toml",
            (job, "train.steps=2", "output.directory=half"),
            (job, "train.epoch=3"),
            (job, "--resume", "half", "pipeline.schedule=gpipe", "output.directory=again"),
            (job, "model.name=net:bug", *own, "train.steps=1", "train.evaluate_every=0"),
            (job, "model.name=net:bug", *own, "train.steps=1", "train.evaluate_every=0"),
            (job, "model.name=net:bug", *own),
            (job, "model.name=net:net", *own, "output.directory=own"),
            (job, "output.directory=last"),
        ],
        "output.keep=1",
        code=None,
    )
    assert [one.code for one in outcomes] == [0, 0, 2, 0, 0, 0, 1, 0, 0], outcomes
    assert outcomes[2].out == f'accept_mpi: {job}: unknown key "train.epoch"; did you mean "epochs"?\n'
    assert outcomes[3].out.startswith("step 2  resumed from")
    assert outcomes[6].out.count("KeyError: 'a bug'") == 1, outcomes[6].out
    plain = samples.plain(samples.CNN).train(6, 24, 5)
    for directory in ("again", "last"):
        samples.assert_equal(Checkpoint(tmp_path / directory).whole(), plain)


def test_forked_ranks_end_as_they_would_alone(mpirun, tmp_path: Path) -> None:
    """Exit codes, signals, arguments, environment, working directory."""
    (tmp_path / "script.py").write_text(
        "import os, sys\nprint(sys.argv[1:], os.getcwd(), os.environ['OMPI_COMM_WORLD_RANK'], flush=True)\n"
        "if sys.argv[1] == 'kill':\n    os.kill(os.getpid(), 9)\nsys.exit(int(sys.argv[1]))\n"
    )
    for fresh in (False, True):
        assert mpirun(2, "script.py", 0, "a b", fresh=fresh).out.count(f"['0', 'a b'] {tmp_path} ") == 2
        assert f"['3'] {tmp_path} 0" in mpirun(1, "script.py", 3, code=3, fresh=fresh).out
        assert "signal 9 (Killed)" in mpirun(1, "script.py", "kill", code=137, fresh=fresh).out
        assert mpirun(1, "-c", "import torch, sys; print(sys.argv)", "x", fresh=fresh).out == "['-c', 'x']\n"
        assert "ZeroDivisionError" in mpirun(1, "-c", "1 / 0", code=1, fresh=fresh).out


def test_ranks_are_forked_whatever_torch_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a test had used torch's optimizers, which set this, all later ones started new interpreters."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "somewhere")
    assert not [name for name in environment() if name.startswith("TORCHINDUCTOR_")]

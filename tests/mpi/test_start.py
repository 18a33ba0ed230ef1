"""What a rank does not need it does not import: seconds of CPU at each start, and memory for as long as it runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import samples
from conftest import HANGS

from accept_mpi.cli.export import export

_HEAVY = ("numba", "sklearn.utils", "scipy", "sympy", "matplotlib")
_WATCHED = f"""
import sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name in {_HEAVY}:
            print("imports", name, flush=True)
sys.meta_path.insert(0, Watch())
from accept_mpi.cli import main
main()
"""


def test_given_cuts_and_no_codec_need_torch_and_mpi_alone(mpirun, tmp_path: Path) -> None:
    job = samples.write_job(tmp_path / "job.toml", samples.CNN, pipeline_cuts="even", train_steps=2, train_evaluate_every=0)
    (tmp_path / "watched.py").write_text(_WATCHED)
    out = mpirun(2, "watched.py", "train", job, fresh=True).out
    assert "done" in out
    assert "imports" not in out, out


@pytest.mark.parametrize("how", [["launch", "-n", "1"], ["train"]])
def test_no_home(tmp_path: Path, how: list[str]) -> None:
    """As in a service of systemd; Open MPI would not start."""
    job = samples.write_job(tmp_path / "job.toml", samples.CNN, pipeline_cuts="even", train_steps=2, train_evaluate_every=0)
    kept = {key: value for key, value in os.environ.items() if key != "HOME"}
    command = [sys.executable, "-m", "accept_mpi", *how, str(job)]
    done = subprocess.run(command, cwd=tmp_path, env=kept, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("error", ["OSError('no more files')", "KeyboardInterrupt"])
def test_an_error_before_ranks_have_met_ends_all_of_them(mpirun, tmp_path: Path, error: str) -> None:
    """The others waited for the rank that had raised it, and it for them in MPI_Finalize."""
    (tmp_path / "fails.py").write_text(
        "import os\nfrom accept_mpi.comm import runtime\nmeet = runtime.host_facts\n"
        "def facts(rank, library):\n"
        f"    if rank == 1:\n        raise {error}\n"
        "    return meet(rank, library)\n"
        "runtime.host_facts = facts\nruntime.Runtime.start()\n"
    )
    out = mpirun(3, "fails.py", deadline=60, code=None)
    assert out.code not in (0, 124), out.out
    assert ("no more files" if "OSError" in error else "interrupted") in out.out


def test_ranks_that_do_not_meet_say_so(mpirun, tmp_path: Path) -> None:
    """They waited within MPI for ever: for one that hangs, or over a network that carries none of its messages."""
    (tmp_path / "hangs.py").write_text(
        "import os, signal\nfrom accept_mpi.comm import runtime\nruntime._AGREE_SECONDS = 3.0\n"
        "runtime._MEET_SECONDS = 1.0\n"
        "if runtime.MPI.COMM_WORLD.rank == 1:\n    os.kill(os.getpid(), signal.SIGSTOP)\n"
        "runtime.Runtime.start()\n"
    )
    out = mpirun(2, "hangs.py", deadline=60, code=None, fresh=True)
    assert out.code == 1, out.out
    assert "rank 0 on host" in out.out
    assert "could not reach each other through MPI within 3 s" in out.out
    assert "note: the ranks do not reach each other through MPI yet, after 1 s; this host's networks: " in out.out


DOWNLOADS = """
import os, time
import torch
from torch import nn
def model():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
def data():
    if not os.path.exists("rows"):
        with open("rows", "w") as file:
            for n in range(16):
                print(n, file=file, flush=True)
                time.sleep(0.05)
    x = torch.tensor([[float(line)] * 4 for line in open("rows")])
    assert len(x) == 16, len(x)
    return (x, x[:, 0].long() % 2), (x[:4], x[:4, 0].long() % 2)
"""
DOWNLOADING = """
model.name = "net:model"
data.name = "net:data"
train = { batch_size = 8, micro_batches = 2, steps = 2 }
pipeline.probe_seconds = 0.1
pipeline.latency_db = "none"
output.directory = "run"
"""


@pytest.mark.parametrize("plan", ["cuts=[1]", "cuts=auto"])
def test_a_data_set_that_is_downloaded_first(mpirun, tmp_path: Path, plan: str) -> None:
    """One rank of a host makes the files, and the others find them whole."""
    (tmp_path / "net.py").write_text(DOWNLOADS)
    (tmp_path / "job.toml").write_text(DOWNLOADING)
    mpirun(2, "-m", "accept_mpi", "train", "job.toml", "--set", f"pipeline.{plan}")


CHANGES = """
import os
import torch
from torch import nn
def elsewhere():
    os.makedirs("elsewhere", exist_ok=True)
    os.chdir("elsewhere")
def model(first=False):
    if first: elsewhere()
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
def data():
    elsewhere()
    x = torch.randn(16, 4)
    return (x, x.argmax(1) % 2), (x, x.argmax(1) % 2)
"""


def test_code_that_changes_the_working_directory(trained, tmp_path: Path) -> None:
    """What the job and the command line name lies where the run began, whichever ranks have run that code."""
    (tmp_path / "net.py").write_text(CHANGES)
    (tmp_path / "job.toml").write_text(
        'model.name = "net:model"\ndata.name = "net:data"\ntrain = { batch_size = 8, micro_batches = 2, steps = 2 }\n'
        'pipeline.cuts = [1, 2]\npipeline.ranks = [1, 0, 2]\noutput.directory = "run"\n'
    )
    (first,) = trained(3, tmp_path, ["job.toml"])  # rank 0 needs no data
    assert "log         run/log.h5\n" in first.out
    export(tmp_path / "run", tmp_path / "net.safetensors")
    moved = "model.args.first=true"
    outcomes = trained(
        2,
        tmp_path,
        [
            ("job.toml", moved, "output.directory=other", "model.weights=net.safetensors"),
            ("job.toml", moved, "output.directory=other", "train.steps=4", "--resume", "run"),
        ],
        "pipeline.cuts=[1]",
        "pipeline.ranks=[]",
    )
    assert "log         other/log.h5\n" in outcomes[0].out
    assert (tmp_path / "other" / "checkpoints" / "step-00000004").is_dir()
    assert not list(tmp_path.rglob("elsewhere/**/log.h5"))

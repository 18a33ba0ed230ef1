"""Hosts with empty caches compile each kernel once, and train as with kernels of their own."""

import ast
from pathlib import Path

import pytest
import samples

# What a rank does: train with a cache of its own, or one that cannot be written, and tell whose kernels it compiled itself.
_RANK = """
import os, sys
rank = os.environ["OMPI_COMM_WORLD_RANK"]
os.environ["ACCEPT_MPI_CACHE"] = sys.argv.pop(1).replace("RANK", rank)
from numba.core import event
from accept_mpi.training import auto_plan, deployment
made = event.RecordingListener()
event.register("numba:compile", made)
alone = auto_plan.compile_together
def told(*arguments):
    took = alone(*arguments)
    begun = [one.data["dispatcher"].__module__ for _, one in made.buffer if one.is_start]
    print(f"rank {rank}", {name.rpartition(".")[2] for name in begun if "accept_mpi" in name}, flush=True)
    return took
auto_plan.compile_together = deployment.compile_together = told
from accept_mpi.cli import main
main()
"""
_ENDS = {"uniform", "search", "simulator"}  # of the modules, those that no other one needs


def compiled(out: str) -> list[set[str]]:
    """What each rank has compiled in all."""
    last = {line.split()[1]: line.split(maxsplit=2)[2] for line in out.splitlines() if line.startswith("rank ")}
    return [ast.literal_eval(last[rank]) & _ENDS for rank in sorted(last)]


@pytest.mark.parametrize("place", ["cache-RANK", "cache", "/proc/no/such"])
def test_each_kernel_is_compiled_once(mpirun, tmp_path: Path, place: str) -> None:
    codecs = {"pipeline_forward": "uniform:4", "pipeline_backward": "uniform:4"}
    job = samples.write_job(tmp_path / "job.toml", samples.CNN, "auto", pipeline_cuts="auto", train_steps=3, **codecs)
    (tmp_path / "told.py").write_text(_RANK)
    out = mpirun(3, "told.py", str(tmp_path / place), "train", job, fresh=True).out
    assert "done" in out
    expected = [{"simulator"}, {"uniform"}, {"search"}]  # rank 0 outlines the model meanwhile
    assert compiled(out) == ([_ENDS, {"uniform"}, {"uniform"}] if place == "/proc/no/such" else expected), out

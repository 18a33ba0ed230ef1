"""Clocks that part while a run trains are set right, so that a trace shows what happened when."""

from pathlib import Path

from conftest import ROOT
from samples import CNN, write_job

from accept_mpi.logs.format import KINDS
from accept_mpi.logs.reader import open_log


def test_what_happens_on_all_hosts_is_told_in_one_time(mpirun, tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.toml", CNN, train_steps=120, pipeline_cuts=[2, 5])
    mpirun(3, ROOT / "tests" / "programs" / "train_by_wrong_clocks.py", job, "--quiet")
    with open_log(tmp_path / "run" / "log.h5") as log:
        trace = log["trace"][:]
    updates = trace[trace["kind"] == KINDS.index("U")]
    apart = [max(ends) - min(ends) for ends in (updates["end"][updates["step"] == step] for step in (1, 120))]
    assert apart[0] > 13  # as wrong as it was made
    assert apart[1] < 1

"""Clocks that part while a run trains are set right, so that a trace shows what happened when."""

from pathlib import Path

import numpy as np
from conftest import ROOT
from samples import CNN, write_job

from accept_mpi.logs.format import KINDS
from accept_mpi.logs.reader import open_log


def test_messages_do_not_arrive_before_they_were_sent(mpirun, tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.toml", CNN, train_steps=120, pipeline_cuts=[2, 5])
    mpirun(3, ROOT / "tests" / "programs" / "train_by_wrong_clocks.py", job, "--quiet")
    with open_log(tmp_path / "run" / "log.h5") as log:
        trace = log["trace"][:]
    sent = trace[(trace["kind"] == KINDS.index("send")) & (trace["step"] > 0)]
    took = sent["end"] - sent["start"]
    assert np.abs(took[sent["step"] == 1]).min() > 6  # as wrong as it was made
    assert np.abs(took[sent["step"] > 60]).max() < 1

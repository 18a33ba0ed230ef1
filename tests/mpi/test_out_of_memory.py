"""A device whose memory does not suffice is named, and gets less to hold at the next start."""

import subprocess
import sys
from pathlib import Path

import numpy as np
from conftest import HANGS, environment

from accept_mpi.logs.reader import open_log

JOB = """
[model]
name = "nets:hungry"
[data]
name = "nets:pairs"
[train]
batch_size = 8
micro_batches = 2
steps = 3
lr = 0.1
[pipeline]
probe_seconds = 0.2
latency_db = "none"
[output]
directory = "run"
"""


def test_the_next_start_gives_less_to_who_had_too_much(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    command = [sys.executable, "-m", "accept_mpi", "launch", "-n", "2", "job.toml"]
    more = {"ACCEPT_MPI_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment() | more, capture_output=True, text=True, timeout=HANGS
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "ran out of memory" in said
    assert "torch.empty(1 << 50)" in said
    with open_log(tmp_path / "run" / "log.h5") as log:
        stages = {int(row["stage"]) for row in log["trace"][:]}
        assert len(log["steps"]) == 3
        assert np.isfinite(log["steps"]["loss"]).all()
    assert stages, "which layers went where is in the log's plan"

"""Ranks are killed; the others go on, and end with the weights of a run that lost none (DESIGN, invariant 2)."""

from pathlib import Path

import pytest
import samples
from losses import expected, run

from accept_mpi.log import open_log
from accept_mpi.snapshot import Checkpoint

RANKS = 5


@pytest.mark.parametrize(
    "faults",
    [
        "3@backward:13",
        "0@forward:18",
        "4@update:4",
        "1@backward:7 2@backward:7",
        "0@snapshot:2 3@backward:22",
        "0@update:3 1@backward:20 4@forward:21",
        "2@forward:1",
        "1@end",
        "0@end",
    ],
)
def test_the_others_go_on(tmp_path: Path, faults: str) -> None:
    """One, two and three of five; rank 0 too; neighbours at once; in the first step and after the last."""
    job = samples.write_job(tmp_path / "job.toml", samples.CNN, recovery_replicate_every=1)
    code, out = run(tmp_path, ["-m", "accept_mpi", "train", job, "--quiet"], faults, RANKS)
    assert code == 0, out
    samples.assert_equal(Checkpoint(tmp_path / "run").whole(), expected())
    with open_log(tmp_path / "run" / "log.h5") as log:
        steps = log["steps"]["step"][:].tolist()
    # What rank 0 had not written out in its last second is lost with it.
    assert steps == sorted(set(steps)), out
    assert steps[-1] == 6, out
    assert "0@" in faults or steps[0] == 1, out
    assert "lost rank" in out

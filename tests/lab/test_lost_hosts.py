"""The supervisor: a host whose cable is pulled, or that loses its power, is dropped, and taken back when it answers."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import samples
from conftest import environment
from labs import lab_of, reason

from accept_mpi.errors import UserError
from accept_mpi.log import open_log
from accept_mpi.snapshot import Checkpoint

pytestmark = pytest.mark.skipif(reason is not None, reason=str(reason))

STEPS = 600


def say(out: Path, what: str, process: "subprocess.Popen[bytes]", deadline: float) -> float:
    """Wait until the supervisor has printed something; the seconds that took."""
    began = time.monotonic()
    while what not in out.read_text():
        assert process.poll() is None, out.read_text()
        assert time.monotonic() - began < deadline, f"no '{what}' in:\n{out.read_text()}"
        time.sleep(0.1)
    return time.monotonic() - began


def steps(folder: Path) -> int:
    try:
        with open_log(folder / "run" / "log.h5") as log:
            return int(log["steps"]["step"][-1]) if len(log["steps"]) else 0
    except (UserError, OSError):
        return 0


@pytest.mark.parametrize("loss", ["cut", "kill"])
def test_a_lost_host_is_dropped_and_taken_back(tmp_path: Path, loss: str) -> None:
    job = samples.write_job(
        tmp_path / "job.toml", samples.CNN, train_steps=STEPS, train_evaluate_every=0, output_checkpoint_every=20
    )
    out = tmp_path / "out.txt"
    with lab_of(3, 100) as lab:
        last = lab.hostfile.read_text().split("\n")[2].split()[0]
        command = [sys.executable, "-m", "accept_mpi", "launch", "-hostfile", lab.hostfile, job]
        with (
            open(out, "w") as file,
            lab.start(
                command, cwd=tmp_path, env=environment(), stdin=subprocess.DEVNULL, stdout=file, stderr=file
            ) as running,
        ):
            while steps(tmp_path) < 25:
                assert running.process.poll() is None, out.read_text()
                time.sleep(0.1)
            getattr(lab, loss)(lab.hosts[2].name)
            say(out, f"starting 2 ranks without {last}", running.process, 30)
            before = steps(tmp_path)
            while steps(tmp_path) <= before:
                time.sleep(0.1)
            lab.mend(lab.hosts[2].name)
            say(out, f"{last} answers again", running.process, 30)
            assert running.process.wait(200) == 0, out.read_text()
    samples.assert_equal(Checkpoint(tmp_path / "run").whole(), samples.plain(samples.CNN).train(STEPS, 24, 5))

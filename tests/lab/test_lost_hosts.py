"""The supervisor: a host whose cable is pulled, or that loses its power, is dropped, and taken back when it answers."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import samples
from conftest import environment
from labs import lab_of, reason
from watch import wait_for_step

from accept_mpi.recovery.checkpoint import Checkpoint

pytestmark = pytest.mark.skipif(reason is not None, reason=str(reason))


LAST = 4000  # more steps than either case makes


def say(out: Path, what: str, process: "subprocess.Popen[bytes]", deadline: float, times: int = 1) -> float:
    """Wait until the supervisor has printed something so many times; the seconds that took."""
    began = time.monotonic()
    while out.read_text().count(what) < times:
        assert process.poll() is None, out.read_text()
        assert time.monotonic() - began < deadline, f"no '{what}' in:\n{out.read_text()}"
        time.sleep(0.1)
    return time.monotonic() - began


@pytest.mark.parametrize(("loss", "checkpoint_every", "cuts"), [("cut", 20, "even"), ("kill", 0, "auto")])
def test_a_lost_host_is_dropped_and_taken_back(tmp_path: Path, loss: str, checkpoint_every: int, cuts: str) -> None:
    """Without checkpoints from the snapshots that the other hosts have on their own disks; devices are measured once."""
    job = samples.write_job(
        tmp_path / "job.toml",
        samples.CNN,
        train_steps=LAST,
        train_evaluate_every=0,
        output_checkpoint_every=checkpoint_every,
        recovery_replicate_every=8,
        pipeline_cuts=cuts,
        pipeline_latency_db="none",
        pipeline_probe_seconds=1.0,
    )
    out = tmp_path / "out.txt"
    with lab_of(3, 100) as lab:
        lost_name = lab.hostfile.read_text().split("\n")[2].split()[0]
        command = [sys.executable, "-m", "accept_mpi", "launch", "-hostfile", lab.hostfile, job]
        with (
            open(out, "w") as file,
            lab.start(
                command, cwd=tmp_path, env=environment(), stdin=subprocess.DEVNULL, stdout=file, stderr=file
            ) as running,
        ):
            lost = wait_for_step(tmp_path / "run", 40 if cuts == "even" else 300, running.process, 120)
            getattr(lab, loss)(lab.hosts[2].name)
            say(out, f"starting 2 ranks without {lost_name}", running.process, 30)
            say(out, "  resumed from ", running.process, 60)
            resumed = re.search(r"step (\d+)  resumed from (.*)", out.read_text())
            assert resumed, out.read_text()
            # Or what those who were left had time to recover before mpirun ended them, with a checkpoint.
            newer = int(resumed[1]) > lost
            assert checkpoint_every or newer or resumed[2] == "the snapshot that hosts have kept"
            assert lost - (24 if cuts == "even" else 250) <= int(resumed[1])  # two stages are much faster
            wait_for_step(tmp_path / "run", int(resumed[1]) + 1, running.process)
            lab.mend(lab.hosts[2].name)
            say(out, f"{lost_name} answers again", running.process, 30)
            say(out, "starting 3 ranks", running.process, 60, times=2)
            say(out, "  resumed from ", running.process, 60, times=2)
            wait_for_step(tmp_path / "run", 1 + int(re.findall(r"step (\d+)  resumed", out.read_text())[1]), running.process)
            running.process.send_signal(signal.SIGTERM)  # at the rate of two hosts the rest would take a minute
            assert running.process.wait(60) == 3, out.read_text()
    assert out.read_text().count("measuring took") == (cuts == "auto")
    newest = Checkpoint(tmp_path / "run")
    samples.assert_equal(newest.whole(), samples.plain(samples.CNN).train(newest.manifest.step, 24, 5))

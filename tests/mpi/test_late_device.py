"""Stages on devices to and from which tensors take a while: nothing is sent or computed with before it has arrived."""

from pathlib import Path

import pytest
import samples
from conftest import ROOT

from accept_mpi.recovery.checkpoint import Checkpoint


@pytest.mark.parametrize("devices", ["late,late,late", "cpu,late,cpu", "late,cpu"])
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_results_do_not_depend_on_it(mpirun, tmp_path: Path, devices: str, schedule: str) -> None:
    job = samples.write_job(tmp_path / "job.toml", samples.CNN, pipeline_schedule=schedule)
    mpirun(devices.count(",") + 1, str(ROOT / "tests" / "programs" / "on_device.py"), devices, job)
    samples.assert_equal(Checkpoint(tmp_path / "run").whole(), samples.plain(samples.CNN).train(6, 24, 5))


def test_codecs_wait_as_well(mpirun, tmp_path: Path) -> None:
    """Coded runs on such devices and on CPUs end alike."""
    ends = []
    for name, devices in (("late", "late,late"), ("there", "cpu,cpu")):
        keys = {"pipeline_forward": "uniform:4", "pipeline_backward": "uniform:4"}
        job = samples.write_job(tmp_path / f"{name}.toml", samples.GPT, name, **keys)
        mpirun(2, str(ROOT / "tests" / "programs" / "on_device.py"), devices, job)
        ends.append(Checkpoint(tmp_path / name).whole())
    samples.assert_equal(*ends)

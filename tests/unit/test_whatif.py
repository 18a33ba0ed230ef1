"""Surveys of what is not there: fleets on paper, more devices, other links; kept in HDF5 and read back."""

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
from test_planner import job as planner_job
from test_planner import survey

from accept_mpi.cli import main
from accept_mpi.errors import UserError
from accept_mpi.planner import plan_for
from accept_mpi.survey import Survey
from accept_mpi.whatif import joined, with_link

JOB = """
[model]
name = "cnn"
args = { width = 8 }
[data]
name = "digits"
args = { size = 8 }
[train]
steps = 1
batch_size = 32
micro_batches = 4
[pipeline]
schedule = "1f1b-async"
probe_seconds = 0.2
[output]
directory = "r"
"""


def test_a_survey_comes_back_from_hdf5(tmp_path: Path) -> None:
    before = survey(1, 2, rate=1e6)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        before.write(file.create_group("survey"))
        assert Survey.read(file["survey"]) == before
        del file["survey/times"]
        with pytest.raises(UserError, match="cannot be read"):
            Survey.read(file["survey"])


def test_a_slower_link_changes_the_plan() -> None:
    fast = survey(1, 1, rate=1e9)
    slow = with_link(fast, "edge1", 0.01)
    assert np.array(slow.rate)[0, 1] == pytest.approx(0.93 * 1e4 / 8)
    assert len(plan_for(fast, planner_job()).plan.stages) == 2
    assert len(plan_for(slow, planner_job()).plan.stages) == 1
    with pytest.raises(UserError, match="no such host; there are edge0, edge1"):
        with_link(fast, "edge7", 10)


def test_more_devices_bring_their_links() -> None:
    both = joined(survey(1, 1, rate=1e6), survey(2, rate=5e5))
    assert len(both.devices) == 3
    rate = np.array(both.rate)
    assert rate[0, 1] == 1e6
    assert len(plan_for(both, planner_job()).plan.stages) == 3


def plan(capsys: pytest.CaptureFixture[str], tmp_path: Path, *words: str) -> str:
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    assert main(["plan", str(path), *words]) == 0
    return capsys.readouterr().out


def test_plan_for_a_fleet_on_paper(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "fleet.toml").write_text('[[hosts]]\nname = "quick"\n[[hosts]]\nname = "slow"\ncpu = 0.25\nlink = 100\n')
    picture = tmp_path / "picture.png"
    words = ("--fleet", str(tmp_path / "fleet.toml"), "--timeline", str(picture))
    out = plan(capsys, tmp_path, *words)
    assert "quick (rank 0)" in out
    assert "even cuts:" in out
    assert "a step should take" in out
    assert picture.stat().st_size > 5000
    found = json.loads(plan(capsys, tmp_path, *words[:2], "--json"))
    assert sum(stage["stop"] - stage["start"] for stage in found["plan"]["stages"]) == 8
    assert found["plan"]["step_seconds"] <= found["even"]["step_seconds"]


def test_a_jobs_own_cuts_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    words = ["plan", str(tmp_path / "job.toml"), "--add", "pi4", "--add", "pi5", "--set", "pipeline.ranks=[1, 0]"]
    words += ["--set", "pipeline.cuts=[1]"]
    assert main(words) == 0
    shown = capsys.readouterr().out.partition("the job's own cuts:")[2].splitlines()
    assert [line.split()[:2] for line in shown[2:4]] == [["0", "pi5-new1"], ["1", "pi4-new1"]]
    assert "x the plan's)" in shown[4]
    assert main([*words, "--set", "pipeline.ranks=[1, 2]"]) == 2
    assert "rank 2 of [1, 2]" in capsys.readouterr().err


def test_plan_for_personas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = plan(capsys, tmp_path, "--add", "pi5:2", "--link", "pi5-new1=10")
    assert "pi5-new" in out


def test_plan_where_no_time_was_left_to_measure_all_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(plan(capsys, tmp_path, "--add", "pi5:2", "--json", "--set", "pipeline.probe_seconds=0.001"))
    assert 0 < found["plan"]["step_seconds"] < 100


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "plan needs devices"),
        (["--add", "pi9"], 'no persona "pi9"'),
        (["--add", "pi5:many"], "expected a persona and how many"),
        (["--log", "none.h5"], "no such log"),
        (["--add", "pi5", "--link", "edge=5"], "no such host"),
    ],
)
def test_mistakes(words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    assert main(["plan", str(path), *words]) == 2
    assert message in capsys.readouterr().err

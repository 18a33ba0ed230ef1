"""How a run's log begins: anew, after a resume, and after the rank that wrote it was lost."""

from pathlib import Path
from unittest.mock import Mock

import clusters
import msgspec
import numpy as np
import pytest

from accept_mpi.errors import UserError
from accept_mpi.job_file import parse
from accept_mpi.logs.format import METRICS, STEPS, TRACE
from accept_mpi.logs.observers import Evaluated
from accept_mpi.logs.reader import open_log, read_facts
from accept_mpi.logs.writer import LogWriter
from accept_mpi.plan import Plan, make_plan
from accept_mpi.profiling.cluster_profile import ClusterProfile
from accept_mpi.recovery.checkpoint import directory_of
from accept_mpi.training import run_log
from accept_mpi.training.best import Best
from accept_mpi.training.lineage import ancestors, lineage, shared
from accept_mpi.training.run_log import begin_log

JOB = parse('[model]\nname = "m"\n[data]\nname = "d"\n[train]\nsteps = 9\n[output]\ndirectory = "r"\n', "job")
PLAN = make_plan(4, [2])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the log of a run of five steps, lost after its writer was."""
    log = LogWriter(tmp_path / "log.h5", JOB.to_json(), PLAN.to_json(), {"run": "this"})
    for step in range(1, 6):
        log.append("steps", np.array([(step, 0, 8, 1.0, 0.5, 0.1, 10.0 + step, 8.0)], STEPS))
        log.append("metrics", np.array([(step, b"top5", 0.9)], METRICS))
    log.append("trace", np.ones(7, TRACE))
    log.event(12.0, 2, "lost rank 3")
    log.close()
    return tmp_path


def begun(folder: Path, step: int, run: str | None, origin: str = "this") -> tuple[list[int], list[float], int, int]:
    """Steps and their ends, and numbers of rows of the trace and the events, of the log that goes on from a state of the run
    ``origin``."""
    facts = {"run": run or "new", "ancestors": ancestors(folder / "log.h5", origin, step), "created_s": 0.0}
    begin_log(folder, JOB, PLAN, facts, step, None, run).close()
    assert (folder / "log.1.h5").is_file()
    with open_log(folder / "log.h5") as log:
        steps = log["steps"][:]
        return steps["step"].tolist(), steps["end"].tolist(), len(log["trace"]), len(log["events"])


def test_anew(folder: Path) -> None:
    assert begun(folder, 0, None) == ([], [], 0, 0)


def test_after_a_resume_earlier_steps_have_negative_times(folder: Path) -> None:
    assert begun(folder, 3, None) == ([1, 2, 3], [-2.0, -1.0, 0.0], 0, 0)


def test_after_its_writer_was_lost_all_goes_on(folder: Path) -> None:
    assert begun(folder, 3, "this") == ([1, 2, 3], [11.0, 12.0, 13.0], 7, 1)


def test_after_its_writer_was_lost_it_says_how_the_run_began(tmp_path: Path) -> None:
    """It had the hosts that were left, with the stages of others, and no survey: plan took the run for one of given cuts."""
    cluster = clusters.cluster(1.0, 2.0)
    facts = {"run": "this", "first_step": 0, "created_s": 0.5, "hosts": [{"rank": 0, "stage": 0}, {"rank": 1, "stage": 1}]}
    begin_log(tmp_path, JOB, PLAN, facts, 0, cluster).close()
    later = {"run": "this", "first_step": 3, "created_s": 20.0, "hosts": [{"rank": 1, "stage": 0}]}
    begin_log(tmp_path, JOB, make_plan(4, []).renamed({0: 1}), later, 3, cluster.only([1]), "this").close()
    with open_log(tmp_path / "log.h5") as log:
        said = read_facts(log)
        assert ClusterProfile.read(log["survey"]) == cluster
    assert Plan.from_json(msgspec.json.encode(said.pop("plan")).decode()) == PLAN
    assert said == facts | {"created_s": 20.0, "job": said["job"]}


def test_a_full_disk_takes_no_steps_from_a_later_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were in a log that had got another name."""
    with monkeypatch.context() as patch:
        patch.setattr(run_log, "LogWriter", Mock(side_effect=UserError("no space")))
        with pytest.raises(UserError, match="no space"):
            begun(folder, 3, None)
    assert begun(folder, 3, None)[0] == [1, 2, 3]


@pytest.mark.parametrize("run", [None, "this"])
def test_metrics_of_earlier_evaluations_are_kept(folder: Path, run: str | None) -> None:
    begun(folder, 3, run)
    with open_log(folder / "log.h5") as log:
        assert log["metrics"][:].tolist() == [(step, b"top5", 0.9) for step in (1, 2, 3)]


def test_another_run_s_log_is_not_gone_on_with(folder: Path) -> None:
    """A run whose rank 0 was lost before it had a log."""
    assert begun(folder, 0, "another") == ([], [], 0, 0)


def test_history_comes_from_the_run_that_made_the_checkpoint(folder: Path) -> None:
    """Here it is resumed from a run in another directory."""
    assert begun(folder, 3, None, "elsewhere") == ([], [], 0, 0)


def test_history_over_several_resumes(folder: Path) -> None:
    """Each run but the first goes on from one before it; also from a checkpoint that is older than the newest run."""
    path = folder / "log.h5"
    facts = {"run": "second", "ancestors": ancestors(path, "this", 4)}
    assert facts["ancestors"] == {"this": 4}
    begin_log(folder, JOB, PLAN, facts, 4).close()
    assert ancestors(path, "second", 7) == {"this": 4, "second": 7}
    assert ancestors(path, "this", 3) == {"this": 3}
    assert ancestors(path, "elsewhere", 3) == {"elsewhere": 3}
    assert ancestors(folder / "none.h5", "this", 3) == {"this": 3}
    third = lineage({"run": "third", "ancestors": {"this": 4, "second": 7}})
    assert shared(third, lineage(facts)) == 7
    assert shared(third, lineage({"run": "another", "ancestors": {"this": 2}})) == 2
    assert shared(third, lineage({"run": "another"})) == 0


def test_the_best_checkpoint_of_another_run_is_not_this_one_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = [directory_of(tmp_path, 4)]
    monkeypatch.setattr("accept_mpi.training.best.made_by", lambda run, who: there if who == "other" else [])

    def best(run: str, before: dict[str, int]) -> Best:
        return Best(tmp_path, run, "loss", None, before, lambda text: None)

    other = best("other", {})
    other.kept(4)  # the checkpoint may be on the disk first
    assert not (tmp_path / "checkpoints").exists()
    other.evaluated(Evaluated(step=4, epoch=0, samples=8, loss=0.1, accuracy=0.5, end=1.0))
    assert best("new", {"this": 9}).at is None
    assert best("new", {"other": 3}).at is None
    assert best("new", {"other": 4, "this": 9}).at == 4
    assert best("other", {"other": 6}).at == 4
    there.clear()  # a run that kept no best one has removed it
    assert best("other", {"other": 6}).at is None
    (tmp_path / "checkpoints" / "best.json").write_text('{"step": 4, "metric": "loss", "value": 0.1}')
    assert best("new", {"other": 4}).at is None


@pytest.mark.parametrize("links", [True, False])
def test_a_full_disk_leaves_the_log_where_it_was(folder: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    before = (folder / "log.h5").read_bytes()
    monkeypatch.setattr(run_log, "LogWriter", Mock(side_effect=UserError("no room")))
    if not links:
        monkeypatch.setattr(run_log.os, "link", Mock(side_effect=PermissionError(1, "as FAT has none")))
    with pytest.raises(UserError, match="no room"):
        begin_log(folder, JOB, PLAN, {"run": "new"}, 3)
    assert [path.name for path in folder.iterdir()] == ["log.h5"]
    assert (folder / "log.h5").read_bytes() == before


def test_a_kill_while_a_log_begins_leaves_the_one_before(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There was none for a moment: the next start knew nothing of the steps before, nor of the best checkpoint."""
    before = (folder / "log.h5").read_bytes()
    monkeypatch.setattr(run_log, "LogWriter", Mock(side_effect=SystemExit))
    with pytest.raises(SystemExit):
        begin_log(folder, JOB, PLAN, {"run": "new"}, 3)
    assert (folder / "log.h5").read_bytes() == before
    monkeypatch.undo()
    assert begun(folder, 3, None)[0] == [1, 2, 3]

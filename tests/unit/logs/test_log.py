"""The log: round trip, followed live by another process, readable after kill -9 at any moment."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
from conftest import environment

from accept_mpi.errors import UserError
from accept_mpi.logs.format import STEPS, TRACE, rows_of
from accept_mpi.logs.observers import Evaluated, StepDone
from accept_mpi.logs.reader import open_log, read_facts
from accept_mpi.logs.writer import LogObserver, LogWriter
from accept_mpi.plan import make_plan

JOB = json.dumps({"model": {"name": "cnn"}, "data": {"name": "digits"}, "pipeline": {"schedule": "1f1b"}})
PLAN = make_plan(6, [2, 4]).to_json()
WRITER = f"""
import sys, numpy as np
from pathlib import Path
from accept_mpi.logs.format import STEPS, TRACE, rows_of
from accept_mpi.logs.writer import LogWriter
log = LogWriter(Path(sys.argv[1]), {JOB!r}, {PLAN!r}, {{}})
n = 0
while True:
    n += 1
    log.append("steps", np.array([(n, 0, 8, 1.0, 0.5, 0.1, n, 80.0)], STEPS))
    log.append("trace", np.zeros(200, TRACE))
    log.flush()
"""


def test_round_trip(tmp_path: Path) -> None:
    log = LogWriter(tmp_path / "log.h5", JOB, PLAN, {"hosts": []})
    log.append("steps", np.array([(1, 0, 8, 2.5, 0.5, 0.1, 1.0, 80.0)], STEPS))
    log.append("trace", np.zeros(3, TRACE))
    log.event(1.5, 1, "something happened: naïve")
    log.close()
    log.close()
    with open_log(tmp_path / "log.h5") as file:
        assert read_facts(file) == {"hosts": [], "job": json.loads(JOB), "plan": json.loads(PLAN)}
        assert file["steps"]["loss"].tolist() == [2.5]
        assert len(file["trace"]) == 3
        assert file["events"][0]["text"].decode() == "something happened: naïve"
    assert [p.name for p in tmp_path.iterdir()] == ["log.h5"]


def test_what_a_checkpoint_follows_is_on_the_disk(tmp_path: Path) -> None:
    log = LogObserver(LogWriter(tmp_path / "log.h5", JOB, PLAN, {}))
    log.step(StepDone(1, 0, 8, 0.5, 0.5, 0.1, 1.0, 8.0))
    log.persist()
    shutil.copy(tmp_path / "log.h5", tmp_path / "then.h5")
    with open_log(tmp_path / "then.h5") as found:
        assert found["steps"]["step"].tolist() == [1]
    log.close()


def test_a_run_of_weeks_does_not_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its trace grew by a gigabyte a day."""
    monkeypatch.setattr("accept_mpi.logs.writer._WHOLE", 600)
    log = LogObserver(LogWriter(tmp_path / "log.h5", JOB, PLAN, {}))
    rows = np.zeros(20, TRACE)
    for step in range(1, 3001):
        rows["step"], rows["start"] = step, step + 0.5
        log.trace(rows)
    log.close()
    with open_log(tmp_path / "log.h5") as file:
        steps = sorted(set(file["trace"]["step"].tolist()))
        events = [(event["step"], event["text"].decode()) for event in file["events"]]
    assert steps[:30] == [*range(1, 31)]
    assert steps[30:60] == [*range(100, 110), *range(200, 210), *range(300, 310)]
    assert steps[60:] == [*range(1000, 1010), *range(2000, 2010), 3000]
    assert events == [
        (31, "the trace has 10 of 100 steps from now on"), (310, "the trace has 10 of 1000 steps from now on"),
    ]  # fmt: skip


def test_a_plan_is_on_the_disk_when_it_begins(tmp_path: Path) -> None:
    """Whoever is rank 0 may be lost in the next moment, and the plan's steps live on in copies of others."""
    log = LogWriter(tmp_path / "log.h5", JOB, PLAN, {})
    LogObserver(log).planned(0.5, 8, make_plan(6, [3]))
    shutil.copy(tmp_path / "log.h5", tmp_path / "then.h5")
    with open_log(tmp_path / "then.h5") as file:
        assert file["plans"]["step"].tolist() == [8, 8]
    log.close()


FULL = f"""
import os, resource, sys, numpy as np
from pathlib import Path
from accept_mpi.errors import UserError
from accept_mpi.logs.format import TRACE
from accept_mpi.logs.writer import LogWriter
path, room = Path(sys.argv[1]), int(sys.argv[2])
if room < 0:
    resource.setrlimit(resource.RLIMIT_FSIZE, (-room, -1))
try:
    log = LogWriter(path, {JOB!r}, {PLAN!r}, {{}})
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + room, -1))
    for _ in range(room // 10_000):
        log.append("trace", np.zeros(200, TRACE))
        log.flush()
    log.append("trace", np.zeros(2000, TRACE))
    log.close()
except UserError as mistake:
    print(mistake, flush=True)
    if room < 0:
        os._exit(0)
log.event(2.0, 1, "the run ends")
log.close()
os._exit(0)  # as a run ends after an error
"""


@pytest.mark.parametrize("room", [0, 1000, 100_000, 300_000])
def test_a_full_disk_is_one_sentence(tmp_path: Path, room: int) -> None:
    path = tmp_path / "log.h5"
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(path), str(room)], env=environment(), capture_output=True, text=True, timeout=600
    )
    assert done.stdout == f"cannot write the log {path}: File too large\n"
    assert (done.stderr, done.returncode) == ("", 0)


@pytest.mark.parametrize("room", [1, 1000])
def test_a_disk_that_is_full_from_the_beginning_keeps_nothing_of_a_log(tmp_path: Path, room: int) -> None:
    """Each start in vain left a hidden file in the output directory."""
    path = tmp_path / "log.h5"
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(path), str(-room)], env=environment(), capture_output=True, text=True, timeout=600
    )
    assert done.stdout == f"cannot write the log {path}: File too large\n"
    assert (done.stderr, done.returncode) == ("", 0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("instead", ["nothing", "no directory", "another log"])
def test_a_log_that_is_removed_ends_the_run(tmp_path: Path, instead: str) -> None:
    """HDF5 would go on writing to a file that has no name any more."""
    path = tmp_path / "run" / "log.h5"
    path.parent.mkdir()
    log = LogWriter(path, JOB, PLAN, {})
    log.flush()
    path.unlink()
    if instead == "no directory":
        path.parent.rmdir()
    elif instead == "another log":
        LogWriter(path, JOB, PLAN, {}).close()
    log.append("trace", np.zeros(3, TRACE))
    with pytest.raises(UserError, match=r"cannot write the log .*: .*it has been removed, or replaced by another one"):
        log.flush()
    log.close()


def start(path: Path) -> "subprocess.Popen[bytes]":
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], env=environment())
    deadline = time.monotonic() + 600
    while not path.exists():
        assert writer.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return writer


def test_another_process_follows_live(tmp_path: Path) -> None:
    writer = start(tmp_path / "log.h5")
    try:
        with open_log(tmp_path / "log.h5") as file:
            steps, seen = file["steps"], []
            deadline = time.monotonic() + 600
            while len(seen) < 5 and time.monotonic() < deadline:
                steps.refresh()
                if not seen or len(steps) > seen[-1]:
                    seen.append(len(steps))
                time.sleep(0.01)
            assert len(seen) == 5
            assert steps["step"].tolist() == list(range(1, len(steps) + 1))
    finally:
        writer.kill()
        writer.wait()


def test_opens_after_kill_at_any_moment(tmp_path: Path) -> None:
    rng = random.Random(7)
    for number in range(10):
        path = tmp_path / f"{number}.h5"
        writer = start(path)
        time.sleep(rng.uniform(0, 0.3))
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        with open_log(path) as file:
            steps = file["steps"]["step"]
            assert steps.tolist() == list(range(1, len(steps) + 1))
            file["trace"][:]


def test_what_is_no_log(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such log"):
        open_log(tmp_path / "missing.h5")
    (tmp_path / "text.h5").write_text("hello")
    with pytest.raises(UserError, match="not a readable HDF5 file"):
        open_log(tmp_path / "text.h5")
    with h5py.File(tmp_path / "foreign.h5", "w") as file:
        file["x"] = 1
    with pytest.raises(UserError, match="not a log of accept-mpi"):
        open_log(tmp_path / "foreign.h5")
    LogWriter(tmp_path / "new.h5", JOB, PLAN, {}).close()
    with h5py.File(tmp_path / "new.h5", "r+") as file:
        file.attrs["version"] = 99
    with pytest.raises(UserError, match="layout version 99"):
        open_log(tmp_path / "new.h5")


def test_a_folder_that_cannot_be_entered(tmp_path: Path) -> None:
    """A log in it may well be there."""
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UserError, match=r"loop/log\.h5: cannot read the log: Too many levels of symbolic links$"):
        open_log(tmp_path / "loop" / "log.h5")
    for path in ("none.h5", "a\0b", tmp_path):
        with pytest.raises(UserError, match=r"there is no such log file$"):
            open_log(path)


def test_an_evaluation_has_its_metrics_whenever_the_log_ends(tmp_path: Path) -> None:
    """Rank 0 may die between two writes; where the run goes on, the evaluation is told again, and is there once."""
    log, found = LogWriter(tmp_path / "log.h5", JOB, PLAN, {}), Evaluated(8, 1, 10, 0.5, 0.9, 1.0, {"top5": 0.75})
    log._last_flush -= 10
    LogObserver(log).evaluated(found)
    shutil.copy(tmp_path / "log.h5", tmp_path / "killed.h5")
    log.close()
    for name in ("killed.h5", "log.h5"):
        with open_log(tmp_path / name) as old:
            earlier = {table: rows_of(old, table) for table in ("evals", "metrics")}
        again = LogWriter(tmp_path / "again.h5", JOB, PLAN, {}, earlier)
        LogObserver(again).evaluated(found)
        again.close()
        with open_log(tmp_path / "again.h5") as log_again:
            assert log_again["evals"]["step"][:].tolist() == log_again["metrics"]["step"][:].tolist() == [8]
        (tmp_path / "again.h5").unlink()

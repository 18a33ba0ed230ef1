"""A run is watched while it trains: as a page in a browser, on the terminal, as frames in a notebook."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import h5py
import pytest
from conftest import HANGS, environment, mpirun_command, python
from samples import CNN, write_job

import accept_mpi
from accept_mpi.errors import UserError
from accept_mpi.logs.live import Live

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
STEPS = 40


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a run."""
    folder = tmp_path_factory.mktemp("watched")
    job = write_job(folder / "job.toml", CNN, train_steps=STEPS, pipeline_cuts=[2, 5], train_metrics=["top3"])
    command = [*mpirun_command(3), *python(), "-m", "accept_mpi", "train", str(job)]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=HANGS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run"


@contextmanager
def served(log: Path) -> Iterator[str]:
    """Address of the page of a log."""
    command = [sys.executable, "-m", "accept_mpi", "watch", str(log), "--port", "0"]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        yield line.split()[0]
    finally:
        process.terminate()
        process.wait(HANGS)


def test_state(run: Path) -> None:
    with served(run) as address, urllib.request.urlopen(f"{address}state", timeout=HANGS) as answer:
        state = json.load(answer)
    assert (state["step"], state["steps"], state["over"]) == (STEPS, STEPS, True)
    assert [rank["first"] for rank in state["ranks"]] == [0, 2, 5]
    assert all(0 < rank["busy"] <= 1 for rank in state["ranks"])
    assert {bar[1] for bar in state["bars"]} >= {"F", "B", "U", "send"}
    assert {(link["boundary"], link["way"]) for link in state["links"]} >= {(0, "forward"), (1, "backward")}
    assert len(state["loss"]) == STEPS
    assert state["metrics"]["top3"][-1][0] == STEPS


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_the_page_in_a_browser(run: Path, tmp_path: Path) -> None:
    command = [
        str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
        "--disable-background-networking", "--disable-component-update", f"--user-data-dir={tmp_path / 'browser'}",
        "--virtual-time-budget=5000", "--dump-dom",
    ]  # fmt: skip
    with served(run / "log.h5") as address:
        done = subprocess.run([*command, address], capture_output=True, text=True, timeout=HANGS, check=True)
    page = done.stdout
    assert 'data-ready="yes"' in page
    assert f"<title>{STEPS}/{STEPS} cnn on digits</title>" in page
    for words in ("samples/s", "test accuracy", "top3", "conv1 .. conv2", "forward", "done: test accuracy"):
        assert words in page
    assert re.search(r'<i id="done" style="width: 100%', page)


def test_on_the_terminal(run: Path) -> None:
    command = [sys.executable, "-m", "accept_mpi", "watch", str(run), "--terminal"]
    more = environment() | {"COLUMNS": "100", "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(command, env=more, capture_output=True, text=True, timeout=HANGS, check=True)
    assert f"cnn on digits  1f1b, step {STEPS} of {STEPS}, done" in done.stdout
    assert re.search(r"1  \S+ \(rank 1\)  2\.\.4 +\d+ %  [FBUE·]{20,}", done.stdout)


def test_a_run_of_which_no_process_is_left(run: Path, tmp_path: Path) -> None:
    """It seemed to go on for ever."""
    shutil.copytree(run, tmp_path / "run")
    log = tmp_path / "run" / "log.h5"
    with h5py.File(log, "r+") as file:
        events = file["events"][:]
        events["text"] = b"killed"
        file["events"][:] = events
    for seconds, words in ((0, f"step {STEPS} of {STEPS}, 0:00 left"), (100, "ended before its last step")):
        os.utime(log, (time.time() - seconds,) * 2)
        command = [sys.executable, "-m", "accept_mpi", "watch", str(log), "--terminal"]
        more = environment() | {"COLUMNS": "100", "PYTHONIOENCODING": "utf-8"}
        done = subprocess.run(command, env=more, capture_output=True, text=True, timeout=HANGS, check=True)
        assert words in done.stdout


def test_a_growing_log(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.toml", CNN, train_steps=100000)
    command = [*mpirun_command(1), *python(), "-m", "accept_mpi", "train", str(job), "--quiet"]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        until = time.monotonic() + HANGS
        while not (tmp_path / "run" / "log.h5").exists():
            assert time.monotonic() < until
            time.sleep(0.1)
        live = Live(tmp_path / "run" / "log.h5")
        seen: list[int] = []
        while len(set(seen)) < 3:
            assert time.monotonic() < until, seen
            seen.append(live.state()["step"])
            time.sleep(0.3)
        assert seen == sorted(seen)
        live.close()
    finally:
        process.terminate()
        process.wait(HANGS)


def test_no_log_and_a_taken_port(run: Path, tmp_path: Path) -> None:
    def says(*arguments: str) -> str:
        command = [sys.executable, "-m", "accept_mpi", "watch", *arguments]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=HANGS, check=False)
        assert done.returncode == 2
        return done.stderr

    assert "there is no such log file" in says(str(tmp_path))
    with served(run) as address:
        port = address.rstrip("/").rpartition(":")[2]
        assert f"--port {port}: Address already in use" in says(str(run), "--port", port)


def test_frames(run: Path) -> None:
    pytest.importorskip("pandas")
    found = accept_mpi.open_run(run)
    assert found.steps["step"].tolist() == list(range(1, STEPS + 1))
    assert found.job["model"]["name"] == "cnn"
    assert found.metrics["name"].unique().tolist() == ["top3"]
    busy = found.trace[found.trace.kind.isin(["F", "B"])].groupby("rank").size()
    assert busy.tolist() == [2 * 5 * STEPS] * 3
    assert set(found.trace["direction"]) == {"", "forward", "backward"}
    with pytest.raises(UserError, match="no such log"):
        accept_mpi.open_run(run / "nowhere.h5")

"""Timeline figures, Chrome's trace, pictures and the page, from a log with a simulated pipeline in it."""

import io
import json
import re
import struct
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from conftest import environment
from rich.console import Console

from accept_mpi.cli import main, watch
from accept_mpi.errors import UserError
from accept_mpi.logs import figures
from accept_mpi.logs.format import EVALS, KINDS, METRICS, STEPS, TRACE
from accept_mpi.logs.html_report import write_report
from accept_mpi.logs.live import Live
from accept_mpi.logs.timeline import busy_seconds, plan_rows, rank_use, steady_window
from accept_mpi.logs.writer import LogWriter
from accept_mpi.pipeline.schedule import actions
from accept_mpi.pipeline.simulator import simulate
from accept_mpi.plan import make_plan

STAGES, COUNT, PERIOD = 3, 4, 30.0


def rows(*entries: tuple) -> np.ndarray:
    """(start, end, stage, kind[, boundary, direction, step, micro-batch, bytes])."""
    made = []
    for start, end, stage, kind, *more in entries:
        boundary, direction, step, micro_batch, size = (*more, *(-1, -1, 1, 0, 0)[len(more) :])
        made.append(
            (start, end, stage, stage, KINDS.index(kind), boundary, direction, step, micro_batch, size, size // 2, 0)
        )
    return np.array(made, TRACE)


def pipeline(steps: int) -> np.ndarray:
    walks = [actions("1f1b", s, STAGES, [COUNT], 1) for s in range(STAGES)]
    simulated = simulate(walks, lambda s, a: {"F": 1.0, "B": 2.0, "U": 0.1}[a.kind], lambda source, target: 0.5)
    entries = []
    for step in range(1, steps + 1):
        for s, (walk, spans) in enumerate(zip(walks, simulated.spans, strict=True)):
            for action, (start, end) in zip(walk, spans, strict=True):
                at = PERIOD * step
                entries.append((at + start, at + end, s, action.kind, -1, -1, step, action.micro_batch, 0))
                peer = s if action.kind == "F" else s - 1
                if action.kind in "FB" and 0 <= peer < STAGES - 1:
                    way = int(action.kind == "B")
                    entries.append((at + end, at + end + 0.5, s, "send", peer, way, step, action.micro_batch, 4096))
                    place = (peer, way, step, action.micro_batch, 4096)
                    entries.append((at + end + 0.5, at + end + 0.6, s + 1 - 2 * way, "decode", *place))
    return rows(*entries)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write_log(tmp_path)


def write_log(tmp_path: Path, *events: str) -> Path:
    """A run of nine steps; ``events`` happen in the middle."""
    job = {"model": {"name": "<b>cnn</b>"}, "data": {"name": "digits"}, "pipeline": {"schedule": "1f1b"}}
    hosts = [{"rank": r, "stage": r, "host": f"edge{r}", "cores": 4, "memory_bytes": 2**32} for r in range(STAGES)]
    facts = {"versions": {"torch": "2"}, "hosts": hosts, "layers": list("abcdef"), "parameters": 12345, "last_step": 9}
    facts["created_s"] = 7.5
    writer = LogWriter(tmp_path / "log.h5", json.dumps(job), make_plan(6, [2, 4]).to_json(), facts)
    for n in range(1, 10):
        writer.append("steps", np.array([(n, 0, 8, 3 / n, 0.5, 0.1, PERIOD * n, 8 / PERIOD)], STEPS))
    writer.append("evals", np.array([(9, 0, 30, 0.4, 0.913, 200.0)], EVALS))
    writer.append("metrics", np.array([(5, b"own:f1", 0.75), (9, b"own:f1", 0.8125), (9, b"top3", 0.987)], METRICS))
    writer.append("trace", pipeline(9))
    for text in events:
        writer.event(4.5 * PERIOD, 4, text)
    writer.event(200.0, 9, "done & dusted")
    writer.close()
    return tmp_path / "log.h5"


def test_bubble_and_bytes() -> None:
    trace = rows(
        (0.0, 4.0, 0, "F"), (4.5, 6.0, 0, "B"), (5.0, 8.0, 1, "F"), (1.0, 4.5, 1, "B"),
        (4.0, 5.0, 0, "send", 0, 0, 1, 0, 1000), (3.5, 4.0, 0, "encode", 0, 0, 1, 0), (6.0, 6.2, 0, "decode", 0, 1, 1, 0),
    )  # fmt: skip
    first, second = rank_use(trace, 0.0, 10.0)
    assert (first.coding, second.coding) == (pytest.approx(0.7), 0)
    assert (first.busy, first.bubble) == (5.5, pytest.approx(0.45))
    assert (second.busy, second.bytes_raw, first.bytes_raw, first.bytes_wire) == (6.5, (0, 0), (1000, 0), (500, 0))
    assert busy_seconds(trace, 0.0, 5.0) == 5.0
    assert busy_seconds(trace[:2], 3.0, 5.0) == 1.5


def test_the_window_avoids_evaluations() -> None:
    trace = pipeline(9)  # a step takes 20.1
    assert steady_window(trace) == (pytest.approx(PERIOD * 4), pytest.approx(PERIOD * 6 + 20.1))
    evaluated = np.concatenate([trace, rows((PERIOD * 5 - 0.5, PERIOD * 5 - 0.1, 0, "E"))])
    start, end = steady_window(evaluated)
    assert not start < PERIOD * 5 - 0.3 < end
    assert steady_window(trace[:0]) == (0.0, 0.0)
    start, end = steady_window(trace[~np.isin(trace["step"], [4, 5, 6])])  # of a long run: steps that lie side by side
    assert end - start < 3 * PERIOD


def test_chrome_trace(log: Path, tmp_path: Path) -> None:
    assert main(["trace", str(log), str(tmp_path / "out.json")]) == 0
    events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    boxes = [e for e in events if e["ph"] == "X"]
    assert len(boxes) == len(pipeline(9))
    assert {e["pid"] for e in boxes} == {0, 1, 2}
    begins, ends = ({e["id"] for e in events if e["ph"] == ph} for ph in "sf")
    assert begins == ends
    assert len(begins) == 9 * COUNT * 2 * 2
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == [f"rank {r} · stage {r} · edge{r}" for r in range(3)]


def test_a_trace_does_not_replace_its_log(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = log.read_bytes()
    for words in ([log, log], [log.parent, log]):
        assert main(["trace", *map(str, words)]) == 2
        assert "it is the log itself" in capsys.readouterr().err
    assert log.read_bytes() == before


def test_a_runs_directory_stands_for_its_log(log: Path, tmp_path: Path) -> None:
    assert main(["trace", str(tmp_path), str(tmp_path / "out.json")]) == 0
    assert main(["report", str(tmp_path)]) == 0
    assert (tmp_path / "report.html").exists()


def test_ranks_that_have_not_told_yet_are_not_idle(tmp_path: Path) -> None:
    """Ranks tell what they did in batches; one that is silent for long is not waited for."""
    for late, busy in ((PERIOD, True), (5 * PERIOD, False)):
        folder = tmp_path / str(late)
        folder.mkdir()
        path = write_log(folder)
        with h5py.File(path, "r+") as file:
            trace = pipeline(9)
            kept = trace[(trace["rank"] != 1) | (trace["start"] < 10 * PERIOD - late)]
            file["trace"].resize((len(kept),))
            file["trace"][:] = kept
        live = Live(path)
        state = live.state()
        live.close()
        assert bool(state["ranks"][1]["busy"]) == busy
        assert state["ranks"][0]["busy"]


def test_a_full_link_carries_no_more_than_it_can(tmp_path: Path) -> None:
    """Messages that were only partly in the time that is shown counted whole: 2.5 Mbit/s on a link of 2.1."""
    path = write_log(tmp_path)
    busy = [(float(t), t + 1.0, s, "F", -1, -1, 1 + t // 8, t) for t in range(40) for s in (0, 1)]
    sent = [(t + 0.5, t + 4.5, 0, "send", 0, 0, 1 + t // 8, t, 2 << 20) for t in range(0, 40, 4)]  # half of it on the wire
    with h5py.File(path, "r+") as file:
        trace = rows(*busy, *sent)
        file["trace"].resize((len(trace),))
        file["trace"][:] = trace
    live = Live(path)
    (link,) = live.state()["links"]
    live.close()
    assert link["mbit"] == pytest.approx(8e-6 * (1 << 20) / 4)
    assert link["share"] == 0.5


def test_the_terminal_goes_on_while_a_log_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_log(tmp_path)
    real, looks = Live.state, iter([FileNotFoundError("no such file"), UserError("no such log"), None])

    def state(live: Live) -> dict:
        if error := next(looks):
            raise error
        return real(live)

    monkeypatch.setattr(Live, "state", state)
    monkeypatch.setattr(watch, "_EVERY", 0.0)
    monkeypatch.setattr(watch.sys.stdout, "isatty", lambda: True, raising=False)
    assert watch.on_terminal(path) == 0
    assert next(looks, "all") == "all"


@pytest.mark.parametrize(
    ("columns", "host", "colours", "timeline"),
    [
        (40, "pi", None, ""),
        (90, "raspberrypi-in-the-attic.lan", None, "FB·"),
        (80, "pi", None, "FB·"),
        (80, "pi", "standard", "█·"),
    ],
)
def test_terminals_of_all_widths_with_and_without_colours(
    log: Path, columns: int, host: str, colours: Any, timeline: str
) -> None:
    """Stages and layers were dots on narrow terminals, and beside long names of hosts; F and B the same block without
    colours, as in a pipe."""
    live = Live(log)
    state = live.state() | {"gone": False}
    live.close()
    for rank in state["ranks"]:
        rank["host"] = host
    out = io.TextIOWrapper(io.BytesIO(), "utf-8")
    console = Console(width=columns, file=out, color_system=colours, force_terminal=bool(colours), legacy_windows=False)
    console.print(watch._shown(state, console))
    out.seek(0)
    lines = re.sub(r"\x1b\[[\d;]*m", "", out.read()).split("\n")
    assert max(map(len, lines)) <= columns
    found = [line for line in lines if re.match(rf" +\d  {host} \(rank \d\)  \d\.\.\d", line)]
    assert len(found) == STAGES
    assert {*"".join(line.rpartition("%  ")[2] for line in found if "%  " in line)} == {*timeline}


@pytest.mark.parametrize(("steps", "sign", "most"), [(9, 1, 100), (90, -1, 30)])
def test_the_loss_curve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, steps: int, sign: int, most: int) -> None:
    """Negative losses are seen, the mean tells of all the steps that it spans, and nothing lies over the curves."""
    monkeypatch.setattr(figures, "_MOST_POINTS", most)
    monkeypatch.setattr(figures, "_MANY", 20)
    seen: dict = {}
    plt = figures.pyplot()
    monkeypatch.setattr(plt, "close", lambda figure: seen.update(axes=figure.axes[0]))
    curve = np.array([(n, 0, 8, sign * 3 / n, 0.5, 0.1, n, 8.0) for n in range(1, steps + 1)], STEPS)
    figures.draw_loss(tmp_path / "loss.png", curve, np.empty(0, EVALS))
    low, high = seen["axes"].get_ylim()
    assert low <= curve["loss"].min() * 0.5 if sign < 0 else low == 0
    assert high >= 0
    (legend,) = seen["axes"].figure.legends
    assert not legend.get_window_extent().overlaps(seen["axes"].get_window_extent())  # it lay over the curves
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels == (["training loss, mean over 15 steps"] if steps > 20 else ["training loss"])


def test_a_report_of_one_step(tmp_path: Path) -> None:
    log = write_log(tmp_path)
    with h5py.File(log, "r+") as file:
        trace = pipeline(1)
        file["trace"].resize((len(trace),))
        file["trace"][:] = trace
    write_report(log)
    assert "1 step in the middle of the run" in (tmp_path / "report.html").read_text()


def test_tensorboard(log: Path, tmp_path: Path) -> None:
    """Times are those of the day, and a second export replaces the first."""
    pytest.importorskip("tensorboardX")
    with h5py.File(log) as file:
        created = datetime.fromisoformat(file.attrs["created"]).timestamp() - 7.5
    (tmp_path / "board").mkdir()
    (tmp_path / "board" / "events.out.tfevents.1.another").touch()
    for _ in range(2):
        assert main(["tensorboard", str(log), str(tmp_path / "board")]) == 0
        others, found = sorted((tmp_path / "board").iterdir(), key=lambda path: path.stat().st_size)
        assert others.name.endswith("another")
        data, at = found.read_bytes(), []
        while data:  # length (8 bytes) and its checksum (4), an Event whose first field is its time, its checksum (4)
            size = int.from_bytes(data[:8], "little")
            at.append(struct.unpack("<d", data[13:21])[0])
            data = data[12 + size + 4 :]
        assert at[-1] == pytest.approx(created + 200.0, rel=0, abs=0.01)
        assert at.count(at[1]) == 4
    assert len(at) == 1 + 4 * 9 + 2 + 3


FULL = """
import resource, sys
from accept_mpi.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (100, -1))
sys.exit(main(["tensorboard", *sys.argv[1:]]))
"""


def test_no_room_for_tensorboard(log: Path, tmp_path: Path) -> None:
    """It hung. What was exported before stays."""
    pytest.importorskip("tensorboardX")
    (tmp_path / "board").mkdir()
    (tmp_path / "board" / "events.out.tfevents.1.host.accept-mpi").touch()
    command = [sys.executable, "-c", FULL, str(log), str(tmp_path / "board")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (2, f"accept_mpi: {tmp_path / 'board'}: cannot write: File too large\n")
    assert [path.name for path in (tmp_path / "board").iterdir()] == ["events.out.tfevents.1.host.accept-mpi"]


def test_messages_under_way_at_once_have_lanes_of_their_own(tmp_path: Path) -> None:
    """Slices of a lane that overlap without being nested are dropped by the viewers."""
    job = json.dumps({"model": {"name": "cnn"}, "data": {"name": "digits"}, "pipeline": {"schedule": "1f1b"}})
    writer = LogWriter(tmp_path / "log.h5", job, make_plan(6, [2, 4]).to_json(), {"hosts": [{"rank": 0, "host": "a"}]})
    sends = [(0.0, 3.0), (1.0, 4.0), (2.0, 5.0), (3.0, 6.0), (10.0, 11.0)]
    writer.append("trace", rows(*((start, end, 0, "send", 0, 0, 1, k, 9) for k, (start, end) in enumerate(sends))))
    writer.close()
    assert main(["trace", str(tmp_path / "log.h5"), str(tmp_path / "out.json")]) == 0
    events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    lanes = [e["tid"] for e in events if e["ph"] == "X"]
    assert lanes == [2, 3, 4, 2, 2]
    named = [(e["tid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"]
    assert (4, "send forward") in named
    assert len(named) == len(set(named))


def test_stages_of_the_time_that_is_shown(tmp_path: Path) -> None:
    """Layers had moved before the three steps in the middle."""
    log = write_log(tmp_path)
    with h5py.File(log, "r+") as file:
        file["plans"].resize((6,))
        moved = plan_rows(make_plan(6, [1, 5], ranks=[1, 0, 2]), 2.5 * PERIOD, 2)
        file["plans"][:] = np.concatenate([plan_rows(make_plan(6, [2, 4])), moved])
    write_report(log)
    page = (tmp_path / "report.html").read_text()
    assert "<td>0</td><td>1</td><td>0..0 (a .. a)" in page
    assert "<td>1</td><td>0</td><td>1..4 (b .. e)" in page
    assert main(["trace", str(log), str(tmp_path / "out.json")]) == 0
    assert (
        "rank 0 · stage 0 · stage 1 · edge0"
        in json.loads((tmp_path / "out.json").read_text())["traceEvents"][0]["args"]["name"]
    )


def test_a_timeline_of_many_boxes_is_shorter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not one without the rows that came last: those would look like bubbles."""
    shown = {}
    monkeypatch.setattr(figures, "_MOST_BOXES", 40)
    monkeypatch.setattr(
        figures, "_legend", lambda plt, figure, rows: shown.update(rows=rows, to=figure.axes[0].get_xlim()[1])
    )
    trace = pipeline(9)
    by_rank = trace[np.argsort(trace["rank"], kind="stable")]
    figures.draw_timeline(tmp_path / "a.png", by_rank, {}, PERIOD, 4 * PERIOD)
    drawn = trace[(trace["end"] > PERIOD) & (trace["start"] < shown["to"]) & (trace["kind"] != KINDS.index("decode"))]
    assert len(shown["rows"]) == len(drawn) <= 41
    assert set(shown["rows"]["rank"].tolist()) == {0, 1, 2}


METRICS_SHOWN = ("<dt>test f1</dt><dd>0.8125</dd>", "<dt>test top3</dt><dd>0.987</dd>")


def test_report(log: Path, tmp_path: Path) -> None:
    assert main(["report", str(log), "--out", str(tmp_path / "page")]) == 0
    names = {path.name: path for path in (tmp_path / "page").iterdir()}
    assert set(names) == {"timeline.png", "loss.png", "report.html"}
    assert all(path.stat().st_size > 10_000 for path in names.values())
    page = names["report.html"].read_text()
    assert "&lt;b&gt;cnn&lt;/b&gt; on digits" in page
    assert "<b>cnn" not in page
    for fact in ("12,345", "91.3 %", "edge2", "done &amp; dusted", "2..3 (c .. d)", "data:image/png;base64", *METRICS_SHOWN):
        assert fact in page, fact


def test_a_report_where_a_file_is(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").write_text("mine")
    assert main(["report", str(log), "--out", str(tmp_path / "out")]) == 2
    assert "out: cannot write the report: it is not a directory\n" in capsys.readouterr().err


def test_a_report_where_nothing_can_be(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(log), "--out", str(tmp_path / ("n" * 300) / "out")]) == 2
    assert "out: cannot write the report: File name too long\n" in capsys.readouterr().err


def test_report_of_a_run_that_lost_a_rank(tmp_path: Path) -> None:
    log = write_log(tmp_path, "lost rank 2 on host edge2 (stage 2, layers 4..5) in step 4; 2 ranks regrouped in 17 ms")
    assert main(["report", str(log), "--out", str(tmp_path / "page")]) == 0
    assert {path.name for path in (tmp_path / "page").iterdir()} == {
        "timeline.png", "loss.png", "course.png", "report.html"
    }  # fmt: skip
    page = (tmp_path / "page" / "report.html").read_text()
    assert "The whole run" in page
    assert page.count("data:image/png;base64") == 3


def test_the_window_avoids_steps_that_were_made_twice() -> None:
    """After a loss: the first attempt and the second are one step of that number, a long one."""
    trace = pipeline(9)
    twice = trace.copy()
    again = (twice["step"] >= 4) & (twice["step"] <= 5)
    twice["start"][again] += 100 * PERIOD
    twice["end"][again] += 100 * PERIOD
    start, end = steady_window(np.concatenate([trace, twice[again]]))
    assert end - start < 4 * PERIOD


def test_report_of_a_run_that_ended_at_once(tmp_path: Path) -> None:
    job = {"model": {"name": "cnn"}, "data": {"name": "digits"}, "pipeline": {"schedule": "1f1b"}}
    LogWriter(tmp_path / "log.h5", json.dumps(job), make_plan(6, [2, 4]).to_json(), {"versions": {}}).close()
    pictures = ("timeline.png", "course.png", "loss.png")
    for folder in (tmp_path, tmp_path / "mine"):
        folder.mkdir(exist_ok=True)
        for name in pictures:  # of an earlier run in this directory, whose loss of a rank seemed to be this one's
            (folder / name).write_text("earlier")
    assert main(["report", str(tmp_path / "log.h5")]) == 0
    assert "No step was finished" in (tmp_path / "report.html").read_text()
    assert not any((tmp_path / name).exists() for name in pictures)
    assert main(["report", str(tmp_path / "log.h5"), "--out", str(tmp_path / "mine")]) == 0
    assert all((tmp_path / "mine" / name).exists() for name in pictures)


def test_mistakes(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "missing.h5")]) == 2
    assert main(["trace", str(log), str(tmp_path / "no" / "out.json")]) == 2
    assert "cannot write" in capsys.readouterr().err
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    from accept_mpi.logs.figures import pyplot

    with pytest.raises(UserError, match=r"pip install matplotlib$"):
        pyplot()

"""What a run is doing just now, from its log, finished or growing: for ``accept_mpi watch``."""

import json
import math
import os
import threading
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from accept_mpi.direction import Direction
from accept_mpi.files.hdf5 import text_in
from accept_mpi.logs.format import KINDS, TABLES, Rows, lanes_in, rows_of
from accept_mpi.logs.reader import open_log
from accept_mpi.logs.timeline import COMPUTE, of_kind, plans_of, rank_use, samples_per_second, timed, window

_WINDOW = 10.0  # seconds of the run that the timeline shows, at most
_SILENT = 60.0  # seconds after which a rank is no longer waited for
_STEPS_SHOWN = 3
_MOST_BARS = 3000
_MOST_POINTS = 400
_MOST_EVENTS = 100
_TAIL = 20_000  # newest rows of a trace that are looked at


class Live:
    """A log that is looked at again and again. Thread-safe."""

    def __init__(self, path: Path) -> None:
        """Raises UserError if there is no such log."""
        self.path = path
        self._lock = threading.Lock()
        self._file = open_log(path)
        self._inode = os.stat(path).st_ino

    def state(self) -> dict[str, Any]:
        """What a page or a terminal shows: plain values. Raises UserError if the log is gone."""
        with self._lock:
            if os.stat(self.path).st_ino != self._inode:  # another run has begun under the same name
                self._file.close()
                self._file, self._inode = open_log(self.path), os.stat(self.path).st_ino
            return _state(self._file)

    def close(self) -> None:
        with self._lock:
            self._file.close()


def _state(file: h5py.File) -> dict[str, Any]:
    for name in TABLES:
        if name in file:
            file[name].refresh()
    job, facts = json.loads(text_in(file, "job")), json.loads(text_in(file, "facts"))
    steps, evals = rows_of(file, "steps"), rows_of(file, "evals")
    trace = timed(file["trace"][max(0, len(file["trace"]) - _TAIL) :])
    events = file["events"][max(0, len(file["events"]) - _MOST_EVENTS) :]
    last_step = int(facts.get("last_step") or 0)
    made = int(steps["step"][-1]) if len(steps) else int(facts.get("first_step") or 0)
    recent = steps[-20:]
    span = float(np.median(np.diff(recent["end"]))) if len(recent) > 1 else math.nan
    texts = [row["text"].decode(errors="replace") for row in events]
    over = any(text.startswith("done") for text in texts)
    return {
        "title": f"{job['model']['name']} on {job['data']['name']}",
        "schedule": job["pipeline"]["schedule"],
        "created": text_in(file, "created"),
        "step": made,
        "steps": last_step,
        "over": over,
        "left": _number(span * (last_step - made)) if not over else 0.0,
        "rate": _number(samples_per_second(recent)),
        "loss": _points(steps, "loss"),
        "test": [[int(row["step"]), _number(row["loss"]), _number(row["accuracy"])] for row in evals],
        "metrics": _metrics(file),
        **_now(trace, steps, plans_of(file), facts),
        "events": [
            [_number(row["time"]), int(row["step"]), text] for row, text in zip(events, texts, strict=True)
        ][::-1],
    }  # fmt: skip


def _points(steps: Rows, column: str) -> list[list[Any]]:
    """A curve of at most ``_MOST_POINTS`` points: means of neighbouring steps."""
    parts = np.array_split(steps, min(len(steps), _MOST_POINTS)) if len(steps) else []
    return [[int(part["step"][-1]), _number(part[column].mean())] for part in parts]


def _metrics(file: h5py.File) -> dict[str, list[list[Any]]]:
    found: dict[str, list[list[Any]]] = {}
    for step, name, value in rows_of(file, "metrics"):
        found.setdefault(name.decode(errors="replace"), []).append([int(step), _number(value)])
    return found


def _now(trace: Rows, steps: Rows, plans: Rows, facts: dict[str, Any]) -> dict[str, Any]:
    """The newest steps on a timeline, and what each rank and link does in them."""
    hosts = {host["rank"]: host.get("host", "") for host in facts.get("hosts", [])}
    names = facts.get("layers", [])
    newest = plans[plans["time"] == plans["time"].max()] if len(plans) else plans
    actions = of_kind(trace, *COMPUTE)
    end = _complete_until(actions, newest)
    ends = steps["end"][steps["end"] <= end] if len(steps) else np.empty(0)
    begin = float(ends[-_STEPS_SHOWN - 1]) if len(ends) > _STEPS_SHOWN else end - _WINDOW
    begin = max(0.0, begin, end - _WINDOW)
    use = {(one.stage, one.rank): one for one in rank_use(trace, begin, end)} if end > begin else {}
    ranks = []
    for row in newest:
        stage, rank = int(row["stage"]), int(row["rank"])
        known = use.get((stage, rank))
        first, last = int(row["start"]), int(row["stop"]) - 1
        layers = f"{names[first]} .. {names[last]}" if last < len(names) else ""
        ranks.append({
            "rank": rank, "stage": stage, "host": hosts.get(rank, ""), "first": first, "last": last, "layers": layers,
            "busy": _number(known.busy / (end - begin)) if known else None,
        })  # fmt: skip
    shown = window(trace, begin, end)
    bars = of_kind(shown, *COMPUTE, "send")[-_MOST_BARS:]
    lanes = lanes_in(bars)
    return {
        "ranks": ranks,
        "window": [begin, end],
        "bars": [
            [int(row["rank"]), KINDS[row["kind"]], *(round(float(row[at]) - begin, 5) for at in ("start", "end")),
             int(row["micro_batch"]), int(lane)]
            for row, lane in zip(bars, lanes, strict=True)
        ],
        "links": _links(of_kind(shown, "send"), begin, end),
    }  # fmt: skip


def _complete_until(actions: Rows, plan: Rows) -> float:
    """The second up to which all ranks of the plan have told what they did: they do so in batches, at different times. Ranks
    that have been silent for long do not count."""
    if not len(actions):
        return 0.0
    ends = [actions["end"][actions["rank"] == rank] for rank in np.unique(plan["rank"])]
    newest = [float(mine.max()) for mine in ends if len(mine)] or [float(actions["end"].max())]
    return min(end for end in newest if end >= max(newest) - _SILENT)


def _links(sent: Rows, begin: float, end: float) -> list[dict[str, Any]]:
    """What each link carries between ``begin`` and ``end``; of a message that is under way at either, its part."""
    found = []
    took = np.maximum(sent["end"] - sent["start"], 1e-9)
    parts = np.clip((np.minimum(sent["end"], end) - np.maximum(sent["start"], begin)) / took, 0.0, 1.0)
    for boundary in np.unique(sent["boundary"]).tolist():
        for way in Direction:
            of_link = (sent["boundary"] == boundary) & (sent["direction"] == way)
            if of_link.any() and end > begin:
                wire, raw = (float((parts * sent[column])[of_link].sum()) for column in ("bytes_wire", "bytes_raw"))
                found.append({
                    "boundary": int(boundary), "way": way.name.lower(), "mbit": _number(8e-6 * wire / (end - begin)),
                    "share": _number(wire / raw) if raw else None,
                })  # fmt: skip
    return found


def _number(value: Any) -> float | None:
    """A number that JSON can hold; None if it is not finite."""
    value = float(value)
    return round(value, 6) if math.isfinite(value) else None

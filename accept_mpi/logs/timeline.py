"""Evaluates a trace: which stage computed when, how much of the time was bubble, what was sent, under which plans.

All functions take arrays of dtype ``logs.format.TRACE`` or ``logs.format.PLANS``.
"""

from dataclasses import dataclass

import h5py
import numpy as np

from accept_mpi.direction import Direction
from accept_mpi.logs.format import KINDS, PLANS, Rows, rows_of
from accept_mpi.plan import Plan

NUMBER = {kind: i for i, kind in enumerate(KINDS)}
COMPUTE = ("F", "B", "W", "U", "E")


def of_kind(trace: Rows, *kinds: str) -> Rows:
    """The rows of the given kinds."""
    return trace[np.isin(trace["kind"], [NUMBER[kind] for kind in kinds])]


def timed(trace: Rows) -> Rows:
    """The rows whose start and end are known."""
    return trace[np.isfinite(trace["start"]) & np.isfinite(trace["end"])]


def window(trace: Rows, start: float, end: float) -> Rows:
    """The rows that overlap the seconds ``start`` to ``end``."""
    return trace[(trace["end"] > start) & (trace["start"] < end)]


def steady_window(trace: Rows, steps: int = 3) -> tuple[float, float]:
    """Start and end of ``steps`` consecutive training steps near the middle of a run, in seconds; (0, 0) for an empty trace.

    Steps with an evaluation between them are avoided if there are others.
    """
    actions = of_kind(trace, "F", "B", "W", "U")
    if not len(actions):
        return 0.0, 0.0
    numbers, position = np.unique(actions["step"], return_inverse=True)
    begins, ends = np.full(len(numbers), np.inf), np.full(len(numbers), -np.inf)
    np.minimum.at(begins, position, actions["start"])
    np.maximum.at(ends, position, actions["end"])
    count = min(steps, len(numbers))
    middle = (len(numbers) - count) // 2
    candidates = sorted(range(len(numbers) - count + 1), key=lambda first: abs(first - middle))
    evaluations = of_kind(trace, "E")["start"]
    spans = ends - begins
    usual = 3 * np.median(spans)  # a step that was repeated after a loss spans both attempts
    candidates = [first for first in candidates if spans[first : first + count].max() <= usual] or candidates
    together = [first for first in candidates if numbers[first + count - 1] - numbers[first] < count]
    candidates = together or candidates  # a long run's trace lacks steps
    for first in candidates:
        start, end = float(begins[first]), float(ends[first + count - 1])
        if not ((evaluations >= start) & (evaluations <= end)).any():
            return start, end
    return float(begins[middle]), float(ends[middle + count - 1])


def between(trace: Rows, first: int, last: int) -> tuple[float, float]:
    """Seconds at which steps ``first`` and ``last`` ended, on the rank that took longest from one to the other.

    The slowest rank counts because those behind it seem faster than the pipeline is: for ten steps and more they work off
    the messages that queued up while it filled.
    """
    updates = of_kind(trace, "U")
    begins, ends = (
        {int(row["rank"]): float(row["end"]) for row in updates[updates["step"] == step]} for step in (first, last)
    )
    slowest = max(begins, key=lambda rank: ends[rank] - begins[rank])
    return begins[slowest], ends[slowest]


@dataclass(frozen=True)
class RankUse:
    """A rank's computing, bubble and bytes sent in a window of time."""

    rank: int
    stage: int
    busy: float
    """Seconds of computing."""
    coding: float
    """Seconds in which its data plane coded and decoded messages, beside computing or in turn with it."""
    bubble: float
    """Share of the window in which the rank does not compute."""
    bytes_raw: tuple[int, int]
    """Bytes sent, before coding: (activations forward, gradients backward)."""
    bytes_wire: tuple[int, int]
    """Bytes sent, after coding, headers included: (forward, backward)."""
    bytes_sum: int
    """Bytes received for the sum of a group's gradients."""


def rank_use(trace: Rows, start: float, end: float) -> list[RankUse]:
    """The use that each rank with a stage made of the seconds ``start`` to ``end``, by stage and rank."""
    rows = window(trace, start, end)
    span = max(end - start, 1e-12)
    result = []
    for stage, rank in np.unique(np.stack([rows["stage"], rows["rank"]], axis=1), axis=0).tolist():
        mine = rows[(rows["stage"] == stage) & (rows["rank"] == rank)]
        busy, coding = (busy_seconds(of_kind(mine, *kinds), start, end) for kinds in (COMPUTE, ("encode", "decode")))
        sent = of_kind(mine, "send")
        raw, wire = (
            tuple(int(sent[column][sent["direction"] == direction].sum()) for direction in Direction)
            for column in ("bytes_raw", "bytes_wire")
        )
        summed = int(of_kind(mine, "sum")["bytes_wire"].sum())
        result.append(RankUse(rank, stage, busy, coding, 1 - busy / span, (raw[0], raw[1]), (wire[0], wire[1]), summed))
    return result


def busy_seconds(rows: Rows, start: float, end: float) -> float:
    """Seconds between ``start`` and ``end`` that at least one of ``rows`` covers."""
    return _covered(_intervals(window(rows, start, end), start, end))


def _intervals(rows: Rows, start: float, end: float) -> Rows:
    return np.stack([np.clip(rows["start"], start, end), np.clip(rows["end"], start, end)], axis=1)


def _merge(intervals: Rows) -> Rows:
    """Overlapping intervals (n, 2) as disjoint ones, in order."""
    merged: list[list[float]] = []
    for begin, end in intervals[np.argsort(intervals[:, 0])]:
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    return np.array(merged).reshape(-1, 2)


def _covered(intervals: Rows) -> float:
    merged = _merge(intervals)
    return float((merged[:, 1] - merged[:, 0]).sum())


def plan_rows(plan: Plan, seconds: float = 0.0, step: int = 0) -> Rows:
    """A plan that begins at ``seconds`` after ``step`` steps, as rows of dtype PLANS."""
    stages = [(s, rank, stage.start, stage.stop) for s, stage in enumerate(plan.stages) for rank in stage.ranks]
    return np.array([(seconds, step, *row) for row in stages], PLANS)


def plans_of(file: h5py.File) -> Rows:
    """All plans of a run, as rows of dtype PLANS; only the first one in early logs, which do not list the others."""
    rows = rows_of(file, "plans")
    return rows if len(rows) else plan_rows(Plan.from_json(file.attrs["plan"]))


def samples_per_second(steps: Rows) -> float:
    """Mean speed over rows of dtype ``logs.format.STEPS``; NaN without any."""
    with np.errstate(all="ignore"):
        return float(steps["samples"].sum(dtype=float) / (steps["samples"] / steps["samples_per_s"]).sum())

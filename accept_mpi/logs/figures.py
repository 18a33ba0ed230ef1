"""Pictures of a log: the timeline of a few steps, the course of the whole run, and the loss curve."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np

from accept_mpi.direction import Direction
from accept_mpi.errors import UserError, one_line
from accept_mpi.logs.format import Rows, lanes_in
from accept_mpi.logs.timeline import of_kind, window

# Okabe and Ito's palette, which colour-blind readers can distinguish.
COLOURS = {
    "F": ("#56B4E9", "forward"),
    "B": ("#E69F00", "backward"),
    "W": ("#009E73", "weight gradient"),
    "U": ("#CC79A7", "update"),
    "E": ("#0072B2", "evaluation"),
    "checkpoint": ("#999999", "checkpoint"),
}
_SENDS = {
    Direction.FORWARD: ("#1B6E9C", "activations sent"),
    Direction.BACKWARD: ("#A85C00", "gradients sent"),
}
_SUMS = "#6A51A3", "gradients summed"
_MOST_BOXES = 4000  # a picture with more is unreadable
_MOST_RANKS, _MOST_LOSSES, _MOST_POINTS = 64, 100, 20_000
_MANY = 40  # steps above which a loss curve gets a running mean
_MOST = 1e30  # matplotlib's axes cannot show larger values
_LABEL = 60  # characters


def pyplot() -> Any:
    """Import matplotlib's pyplot with a backend that needs no screen. Raises UserError if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise UserError("reports need matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def draw_timeline(path: Path, trace: Rows, hosts: dict[int, str], start: float, end: float) -> None:
    """Draw the seconds ``start`` to ``end``: a row per rank, divided among its lanes, with computing as boxes, sends as thin
    bars below them and bubbles in light grey."""
    plt = pyplot()
    rows = window(of_kind(trace, *COLOURS, "send", "sum"), start, end)
    if len(rows) > _MOST_BOXES:
        end = float(np.sort(rows["start"])[_MOST_BOXES])
        rows = window(rows, start, end)
    ranks = np.unique(rows["rank"]).tolist()[:_MOST_RANKS]
    figure, axes = plt.subplots(figsize=(13, 1.4 + 0.75 * max(1, len(ranks))), layout="constrained")
    for y, rank in enumerate(ranks):
        mine = rows[rows["rank"] == rank]
        axes.broken_barh([(start, end - start)], (y - 0.30, 0.56), color="#EEEEEE", zorder=0)
        lanes = 1 + int(lanes_in(mine).max(initial=0))
        for (kind, (colour, _)), lane in itertools.product(COLOURS.items(), range(lanes)):
            boxes = of_kind(mine, kind)
            boxes = boxes[lanes_in(boxes) == lane]
            count = lanes if kind in "FBW" else 1  # all else is the whole rank's
            low, height = y - 0.30 + 0.56 * (lane if count > 1 else 0) / count, 0.56 / count
            spans = np.stack([boxes["start"], boxes["end"] - boxes["start"]], axis=1)
            axes.broken_barh(spans, (low, height), facecolor=colour, edgecolor="white", linewidth=0.4, zorder=2)
            if kind in "FBW" and len(boxes):
                _number(axes, boxes, low + height / 2, end - start)
        for direction, (colour, _) in _SENDS.items():
            sends = of_kind(mine, "send")
            sends = sends[sends["direction"] == direction]
            spans = np.stack([sends["start"], sends["end"] - sends["start"]], axis=1)
            axes.broken_barh(spans, (y + 0.28 + 0.07 * direction, 0.06), facecolor=colour, zorder=3)
        sums = of_kind(mine, "sum")
        spans = np.stack([sums["start"], sums["end"] - sums["start"]], axis=1)
        axes.broken_barh(spans, (y + 0.42, 0.06), facecolor=_SUMS[0], zorder=3)
    axes.set_ylim(len(ranks) - 0.4, -0.5)
    axes.set_xlim(start, end)
    axes.set_yticks(range(len(ranks)), [f"rank {rank}\n{_plain(hosts.get(rank, ''))}" for rank in ranks])
    axes.set_xlabel("seconds since the run began")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    _legend(plt, figure, rows)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_course(path: Path, trace: Rows, steps: Rows, losses: Rows, hosts: dict[int, str]) -> None:
    """Draw the whole run: samples/s above, each rank's stage over time below. ``losses``: the events that ended a plan."""
    plt = pyplot()
    steps, losses = _shown(steps), losses[np.isfinite(losses["time"])][:_MOST_LOSSES]
    actions = of_kind(trace, "F", "B", "W", "U")
    ranks = np.unique(actions["rank"]).tolist()[:_MOST_RANKS]
    figure, (above, below) = plt.subplots(
        2, 1, sharex=True, figsize=(13, 3.6 + 0.45 * len(ranks)), height_ratios=(2.2, 0.6 * max(2, len(ranks))),
        layout="constrained",
    )  # fmt: skip
    for begin, end in itertools.pairwise([-np.inf, *losses["time"].tolist(), np.inf]):
        term = steps[(steps["end"] >= begin) & (steps["end"] < end)]
        above.plot(term["end"], term["samples_per_s"], color="#0072B2", linewidth=1.2)
    above.set_ylabel("samples/s")
    above.set_ylim(0, _top(steps["samples_per_s"], 99))
    edges = [-np.inf, *losses["time"].tolist(), np.inf]
    palette = plt.get_cmap("tab10")
    for y, rank in enumerate(ranks):
        mine = actions[actions["rank"] == rank]
        for begin, end in itertools.pairwise(edges):
            term = mine[(mine["start"] >= begin) & (mine["start"] < end)]
            if not len(term):
                continue
            start, stage = term["start"].min(), int(term["stage"][0])
            length = term["end"].max() - start
            below.broken_barh([(start, length)], (y - 0.32, 0.64), color=palette(stage % 10), alpha=0.75)
            below.text(start + length / 2, y, f"stage {stage}", ha="center", va="center", fontsize=8, clip_on=True)
    for number, loss in enumerate(losses):
        for axes in (above, below):
            axes.axvline(loss["time"], color="#D55E00", linestyle="--", linewidth=1)
        text = _plain(loss["text"].decode(errors="replace").partition(";")[0].partition(" (")[0])
        above.annotate(text, (loss["time"], 1.0 - 0.12 * (number % 3)), xycoords=("data", "axes fraction"), fontsize=8,
                       xytext=(6, -10), textcoords="offset points", color="#A8480F",
                       bbox={"color": "white", "pad": 1})  # fmt: skip
    below.set_ylim(len(ranks) - 0.4, -0.6)
    below.set_yticks(range(len(ranks)), [f"rank {rank}  {_plain(hosts.get(rank, ''))}" for rank in ranks])
    below.set_xlabel("seconds since the run began")
    for axes in (above, below):
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    below.tick_params(axis="y", length=0)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _number(axes: Any, boxes: Rows, y: float, span: float) -> None:
    """Write micro-batch numbers into the boxes that are wide enough; ``span`` is the width of the picture in seconds."""
    for box in boxes[boxes["end"] - boxes["start"] > span / 110]:
        middle = (box["start"] + box["end"]) / 2
        axes.text(middle, y, str(box["micro_batch"]), ha="center", va="center", fontsize=7, clip_on=True, zorder=4)


def _legend(plt: Any, figure: Any, rows: Rows) -> None:
    patch = plt.matplotlib.patches.Patch
    used = [patch(color=colour, label=name) for kind, (colour, name) in COLOURS.items() if len(of_kind(rows, kind))]
    sends = of_kind(rows, "send")
    used += [patch(color=c, label=name) for way, (c, name) in _SENDS.items() if (sends["direction"] == way).any()]
    used += [patch(color=_SUMS[0], label=_SUMS[1])] if len(of_kind(rows, "sum")) else []
    used.append(patch(color="#EEEEEE", label="bubble"))
    figure.legend(handles=used, loc="outside upper center", ncols=len(used), frameon=False, fontsize=9)


def draw_loss(path: Path, steps: Rows, evaluations: Rows) -> None:
    """Draw the training loss by step, its running mean if there are many steps, and the evaluations' loss and accuracy."""
    plt = pyplot()
    every = _every(steps)
    steps, evaluations = _shown(steps), _shown(evaluations)
    figure, axes = plt.subplots(figsize=(9, 4.2), layout="constrained")
    many = len(steps) > _MANY
    axes.plot(steps["step"], steps["loss"], color="#0072B2", alpha=0.3 if many else 1.0, linewidth=1.2,
              label=None if many else "training loss")  # fmt: skip
    if many:
        width = max(5, len(steps) // 25)
        mean = np.convolve(steps["loss"], np.ones(width) / width, "valid")
        label = f"training loss, mean over {width * every} steps"
        axes.plot(steps["step"][width - 1 :], mean, color="#0072B2", linewidth=2, label=label)
    if len(evaluations):
        axes.plot(evaluations["step"], evaluations["loss"], "o-", color="#D55E00", markersize=4, label="test loss")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    losses = np.concatenate([steps["loss"], evaluations["loss"]])
    negative = (losses < 0).any()
    axes.set_ylim(-_top(-losses, 98) if negative else 0, _top(losses, 98))
    handles, labels = axes.get_legend_handles_labels()
    if len(evaluations) and np.isfinite(evaluations["accuracy"]).all():
        right = axes.twinx()
        right.plot(evaluations["step"], 100 * evaluations["accuracy"], "s--", color="#009E73", markersize=4)
        right.set_ylabel("test accuracy, %", color="#007A5A")
        right.set_ylim(0, 102)
        right.spines["top"].set_visible(False)
        handles.append(right.lines[0])
        labels.append("test accuracy")
    axes.spines["top"].set_visible(False)
    figure.legend(handles, labels, loc="outside upper center", ncols=len(handles), frameon=False)
    axes.grid(alpha=0.25)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _plain(text: str) -> str:
    """A text from a log as a one-line label, with dollar signs escaped: matplotlib would take them for formulas."""
    return one_line(text, _LABEL).replace("$", r"\$")


def _every(rows: Rows) -> int:
    """Distance of the rows that ``_shown`` takes."""
    return max(1, -(-len(rows) // _MOST_POINTS))


def _shown(rows: Rows) -> Rows:
    """At most ``_MOST_POINTS`` rows, evenly spaced, with values too large for an axis replaced by NaN."""
    rows = rows[:: _every(rows)].copy()
    for column in rows.dtype.names or ():
        if rows.dtype[column].kind == "f":
            rows[column][~(np.abs(rows[column]) < _MOST)] = np.nan
    return rows


def _top(values: Rows, percent: int) -> float:
    """Upper limit of an axis from 0 that shows ``percent`` % of the values."""
    values = values[np.isfinite(values)]
    return max(1.15 * float(np.percentile(values, percent)), 1e-12) if len(values) else 1.0

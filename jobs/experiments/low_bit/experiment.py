"""The cost of a slow link that codecs leave: steps at 20 Mbit/s with few bits against steps on an unlimited link, and rank
0's choice of codecs against the best codec that is the same everywhere. All cases have the same cuts and are measured in
turn, several times; the table has medians.

The speed of a shared machine changes from minute to minute. So every turn has another order of cases, and the table also has
the busiest stage's computing time per step: differences in it are not due to the link.
"""

import statistics
from pathlib import Path

import numpy as np

from accept_mpi.logs.figures import pyplot
from accept_mpi.logs.reader import open_log
from accept_mpi.logs.replay import mean_times
from harness.experiment import Experiment, run
from harness.store import table

SCHEDULES = ("1f1b", "1f1b-async")
# Mbit/s (0: unlimited), codec both ways
CASES = ((0, "none"), (20, "none"), (20, "uniform:8"), (20, "uniform:4"), (20, "uniform:2"), (20, "auto"))
_TURNS, _SECONDS = 4, 9.0
_FIXED = [case for case in CASES[1:] if case[1] != "auto"]
_COLOURS = ("#003f7d", "#6db4e8")


def main() -> None:
    experiment = Experiment(__file__)
    milliseconds: dict[tuple[str, int, str], list[float]] = {}
    computing: dict[tuple[str, int, str], list[float]] = {}
    with experiment.lab("fleet.toml"):
        experiment.ours(0, {}, seconds=2.0, turn="first")  # on cold hosts, so not counted
        for turn in range(_TURNS):
            for schedule in SCHEDULES:
                for link, codec in CASES[turn:] + CASES[:turn]:
                    settings = {"pipeline.schedule": schedule, "pipeline.forward": codec, "pipeline.backward": codec}
                    experiment.expect(settings, 30.0 if (link, codec) == (20, "none") else 80.0)
                    found = experiment.ours(link, settings, seconds=_SECONDS, turn=turn)
                    step = 1e3 * experiment.batch / float(found["samples_per_s"])
                    milliseconds.setdefault((schedule, link, codec), []).append(step)
                    computing.setdefault((schedule, link, codec), []).append(busiest(Path(found["log"])))
    median = {key: statistics.median(steps) for key, steps in milliseconds.items()}
    own = {key: statistics.median(np.divide(steps, computing[key])) for key, steps in milliseconds.items()}
    rows: list[list[object]] = []
    for schedule in SCHEDULES:
        for link, codec in CASES:
            key = schedule, link, codec
            where = f"{link} Mbit/s" if link else "unlimited"
            each = ", ".join(f"{step:.0f}" for step in milliseconds[key])
            share = f"{median[key] / median[schedule, 0, 'none']:.2f}"
            computed = f"{statistics.median(computing[key]):.0f}"
            rows.append([schedule, where, codec, f"{median[key]:.0f}", share, computed, f"{own[key]:.2f}", each])
    sentences = []
    for schedule in SCHEDULES:
        four, free, auto = (median[schedule, *case] for case in ((20, "uniform:4"), (0, "none"), (20, "auto")))
        best = min(median[schedule, *case] for case in _FIXED)
        by_own = [own[schedule, *case] for case in ((20, "uniform:4"), (0, "none"), (20, "auto"))]
        best_own = min(own[schedule, *case] for case in _FIXED)
        sentences.append(
            f"{schedule}: 4 bits at 20 Mbit/s take {four / free:.2f} x the unlimited link (asked 1.15); "
            f"auto {auto / best:.2f} x the best fixed codec (asked 1.05). Each step in units of what its busiest stage "
            f"computed: {by_own[0] / by_own[1]:.2f} and {by_own[2] / best_own:.2f}.\n"
        )
    draw(experiment, median)
    head = [
        "schedule",
        "link",
        "codec both ways",
        "ms a step, median",
        "x unlimited",
        "busiest stage computes, ms",
        "x that",
        "each",
    ]
    title = "# MobileNetV2 32 x 32, batch 64, four hosts of 0.4 core, the same cuts\n"
    experiment.finish("\n".join([title, table(head, rows), "", *sentences]))


def busiest(log: Path) -> float:
    """Milliseconds per step that the busiest stage computes, averaged over the run."""
    with open_log(log) as file:
        stages, micro = mean_times(file["trace"][:]).values(), int(file["trace"]["micro_batch"].max()) + 1
    return 1e3 * max(micro * (took["F"] + took["B"]) + took["U"] for took in stages)


def draw(experiment: Experiment, median: dict[tuple[str, int, str], float]) -> None:
    """Plot milliseconds per step: a bar per case, a colour per schedule."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    for number, (schedule, colour) in enumerate(zip(SCHEDULES, _COLOURS, strict=True)):
        drawn = axes.bar(
            np.arange(len(CASES)) + 0.38 * (number - 0.5), [median[schedule, *case] for case in CASES], 0.36,
            color=colour, label=schedule,
        )  # fmt: skip
        axes.bar_label(drawn, fmt="%.0f", fontsize=8)
    axes.set_xticks(range(len(CASES)), [f"{codec}\n{f'{link} Mbit/s' if link else 'unlimited'}" for link, codec in CASES])
    axes.set_ylabel("ms a step")
    axes.set_title("A step over codecs, MobileNetV2, four hosts of 0.4 core", fontsize=11)
    axes.legend(frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(experiment.out / "plot.png", dpi=110)


run(main)

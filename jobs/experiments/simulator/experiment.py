"""Compares the simulator with runs: a step simulated with the computing times in the run's trace, and the step that rank 0
predicted before the run, against the measured step.

Simulating with the measured time of every action tests whether schedules, links and codecs are modelled correctly; with each
stage's mean times, also the effect of unsteady computing. The prediction also depends on whether a device's speed, measured
for some seconds, is still the same a minute later (on a shared machine it is not).
"""

import msgspec
import numpy as np

from accept_mpi.logs.figures import pyplot
from accept_mpi.plan import Plan
from harness.experiment import Experiment, ranks_of, run
from harness.store import table

_ASYNC, _SYNC, _ZERO, _GPIPE = "1f1b-async", "1f1b", "zero-bubble", "gpipe"
# By fleet: (schedule, Mbit/s or None for the fleet's own links, codec both ways, sums of gradients or "" without groups).
CASES: dict[str, list[tuple[str, float | None, str, str]]] = {
    "four.toml": [
        (_ASYNC, 100, "none", ""), (_ASYNC, 20, "uniform:4", ""), (_ASYNC, 20, "none", ""), (_SYNC, 100, "uniform:4", ""),
        (_SYNC, 20, "uniform:2", ""), (_ZERO, 100, "uniform:4", ""), (_GPIPE, 100, "uniform:4", ""),
        (_ASYNC, 0, "none", "exact"), (_ASYNC, 20, "uniform:4", "bf16"), (_SYNC, 100, "uniform:4", "exact"),
    ],
    "two-fast.toml": [(_ASYNC, 100, "none", "exact"), (_SYNC, 100, "uniform:4", "bf16")],
    "personas.toml": [
        (_ASYNC, None, "uniform:4", ""), (_SYNC, None, "uniform:4", ""), (_ZERO, None, "uniform:2", ""),
        (_ASYNC, None, "uniform:4", "bf16"),
    ],
    "ten-ten-one.toml": [(_ASYNC, 100, "none", ""), (_ASYNC, 20, "uniform:4", ""), (_SYNC, 100, "uniform:4", "")],
}  # fmt: skip


def main() -> None:
    experiment = Experiment(__file__)
    rows: list[list[object]] = []
    points = []
    for fleet, cases in CASES.items():
        with experiment.lab(fleet):
            settings_of = [
                {
                    "pipeline.schedule": schedule, "pipeline.forward": codec, "pipeline.backward": codec,
                    "pipeline.groups": str(bool(sums)).lower(), "pipeline.gradients": sums or "exact",
                }
                for schedule, _, codec, sums in cases
            ]  # fmt: skip
            for n in experiment.by_cuts([(link, settings_of[n]) for n, (_, link, *_) in enumerate(cases)]):
                (schedule, link, codec, _), settings = cases[n], settings_of[n]
                experiment.expect(settings, 64.0)
                found = experiment.ours(link, settings, seconds=15.0)
                measured, *simulated = found["replayed"]
                simulated.append(float(found["forecast_s"]))
                points.append((*simulated, measured))
                where = "its own links" if link is None else f"{link:g} Mbit/s" if link else "free links"
                name = fleet.removesuffix(".toml")
                both = [f"{1e3 * seconds:.0f} ({100 * (seconds / measured - 1):+.1f} %)" for seconds in simulated]
                ranks = ranks_of(msgspec.json.decode(found["plan"], type=Plan))
                rows.append([name, schedule, where, codec, ranks, f"{1e3 * measured:.0f}", *both])
    found_points = np.array(points)
    head = [
        "fleet", "schedule", "link", "codec", "ranks", "measured, ms a step", "simulated", "with mean times", "foreseen"
    ]  # fmt: skip
    draw(experiment, found_points)
    off = 100 * np.abs(found_points[:, :-1] / found_points[:, -1:] - 1)
    sentences = [
        f"{what}: mean error {off[:, k].mean():.1f} %, worst {off[:, k].max():.1f} %."
        for k, what in enumerate(("Simulated with the run's own computing times", "with each stage's means", "Foreseen"))
    ]
    experiment.finish("\n".join([table(head, rows), "", *sentences, f"{len(rows)} combinations.", ""]))


def draw(experiment: Experiment, points: np.ndarray) -> None:
    """Plot simulated and predicted seconds over measured ones. ``points``: (n, 4) seconds: simulated, simulated with mean
    times, predicted, measured."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(5, 5), layout="constrained")
    ends = [0.8 * points.min(), 1.25 * points.max()]
    axes.fill_between(ends, [0.9 * e for e in ends], [1.1 * e for e in ends], color="#EEEEEE", label="within 10 %")
    axes.plot(ends, ends, color="#999999", linewidth=0.8)
    axes.plot(points[:, 3], points[:, 2], "o", color="#BBBBBB", label="foreseen before the run")
    axes.plot(points[:, 3], points[:, 0], "o", color="#1a6fb0", label="simulated with the run's computing times")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("measured, seconds a step")
    axes.set_ylabel("simulated, seconds a step")
    axes.legend(frameon=False, fontsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(experiment.out / "plot.png", dpi=110)


run(main)

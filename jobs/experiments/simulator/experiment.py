"""A step as rank 0 foresees it when it plans, against the step that the run then takes."""

import json
from pathlib import Path

import numpy as np

from accept_mpi.figures import pyplot
from accept_mpi.log import open_log
from harness.experiment import Experiment, run
from harness.store import table

_ASYNC, _SYNC, _ZERO, _GPIPE = "1f1b-async", "1f1b", "zero-bubble", "gpipe"
# Fleet -> (schedule, Mbit/s or None: as the fleet says, codec both ways).
CASES: dict[str, list[tuple[str, float | None, str]]] = {
    "four.toml": [
        (_ASYNC, 100, "none"), (_ASYNC, 20, "uniform:4"), (_ASYNC, 20, "none"), (_SYNC, 100, "uniform:4"),
        (_SYNC, 20, "uniform:2"), (_ZERO, 100, "uniform:4"), (_GPIPE, 100, "uniform:4"),
    ],
    "personas.toml": [(_ASYNC, None, "uniform:4"), (_SYNC, None, "uniform:4"), (_ZERO, None, "uniform:2")],
    "ten-ten-one.toml": [(_ASYNC, 100, "none"), (_ASYNC, 20, "uniform:4"), (_SYNC, 100, "uniform:4")],
}  # fmt: skip
_LEAD = 3  # steps that do not count


def main() -> None:
    experiment = Experiment(__file__)
    rows: list[list[object]] = []
    points = []
    for fleet, cases in CASES.items():
        with experiment.lab(fleet):
            for schedule, link, codec in cases:
                settings = {"pipeline.schedule": schedule, "pipeline.forward": codec, "pipeline.backward": codec}
                experiment.expect(settings, 64.0)
                found = experiment.ours(link, settings, seconds=15.0)
                with open_log(Path(found["log"])) as log:
                    ends, facts = log["steps"]["end"][:], json.loads(log.attrs["facts"])
                measured, foreseen = float(ends[-1] - ends[_LEAD]) / (len(ends) - 1 - _LEAD), float(facts["forecast_step_s"])
                error = measured / foreseen - 1
                points.append((foreseen, measured))
                where = "its own links" if link is None else f"{link:g} Mbit/s"
                name = fleet.removesuffix(".toml")
                rows.append(
                    [name, schedule, where, codec, f"{1e3 * foreseen:.0f}", f"{1e3 * measured:.0f}", f"{100 * error:+.1f}"]
                )
    errors = np.abs([measured / foreseen - 1 for foreseen, measured in points])
    head = ["fleet", "schedule", "link", "codec", "foreseen, ms a step", "measured, ms", "measured against foreseen, %"]
    draw(experiment, np.array(points))
    experiment.finish(
        f"{table(head, rows)}\n\nMean error {100 * errors.mean():.1f} %, worst {100 * errors.max():.1f} %, "
        f"{len(rows)} combinations.\n"
    )


def draw(experiment: Experiment, points: np.ndarray) -> None:
    """Measured over foreseen."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(5, 5), layout="constrained")
    ends = [0.8 * points.min(), 1.25 * points.max()]
    axes.fill_between(ends, [0.9 * e for e in ends], [1.1 * e for e in ends], color="#EEEEEE", label="within 10 %")
    axes.plot(ends, ends, color="#999999", linewidth=0.8)
    axes.plot(points[:, 0], points[:, 1], "o", color="#1a6fb0")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("foreseen, seconds a step")
    axes.set_ylabel("measured, seconds a step")
    axes.legend(frameon=False, fontsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(experiment.out / "plot.png", dpi=110)


run(main)

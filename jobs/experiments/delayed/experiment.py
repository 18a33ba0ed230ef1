"""The delayed schedule beside the asynchronous one, which computes with other weights on each stage: how fast both are, at
the same cuts and codecs, on links from unlimited to slow, with few and with enough micro-batches a step."""

import statistics
from typing import Any

from accept_mpi.logs.figures import pyplot
from harness.experiment import Experiment, run
from harness.store import table

_MODELS: dict[str, tuple[str, int, list[int], tuple[int, ...]]] = {
    "MobileNetV2": ("../accept/job.toml", 64, [9, 21, 39], (4, 8, 11)),
    "GPT": ("../language/job.toml", 16, [5, 9, 13], (4, 8, 16)),
}
"""Job file, batch size, cuts, and numbers of micro-batches: four stages want 10 of them in flight."""
_LINKS = {0: "free", 100: "100 Mbit/s", 20: "20 Mbit/s", 5: "5 Mbit/s"}
_SCHEDULES = ("1f1b-async", "1f1b-delayed")
_TURNS, _SECONDS = 2, 5.0


def main() -> None:
    experiment = Experiment(__file__)
    rates: dict[tuple[str, int, int, str], list[float]] = {}
    with experiment.lab("../accept/fleet.toml"):
        for model, (job, batch, cuts, counts) in _MODELS.items():
            experiment.job_file, experiment.batch = job, batch
            for count in counts:
                for link in _LINKS:
                    for turn in range(_TURNS):
                        for schedule in _SCHEDULES:
                            keys: dict[str, Any] = {
                                "pipeline.schedule": schedule, "pipeline.cuts": cuts, "train.micro_batches": count,
                                "pipeline.forward": "uniform:4", "pipeline.backward": "uniform:4",
                            }  # fmt: skip
                            found = experiment.ours(link, keys, _SECONDS, turn, model=job)
                            rates.setdefault((model, count, link, schedule), []).append(found["samples_per_s"])
    ratios = {
        key[:3]: [late / free for late, free in zip(some, rates[*key[:3], _SCHEDULES[0]], strict=True)]
        for key, some in rates.items()
        if key[3] == _SCHEDULES[1]
    }
    rows = [
        [
            model, count, _LINKS[link], *(f"{statistics.median(rates[model, count, link, s]):.1f}" for s in _SCHEDULES),
            f"{statistics.median(some):.2f} ({min(some):.2f}-{max(some):.2f})",
        ]
        for (model, count, link), some in ratios.items()
    ]  # fmt: skip
    draw(experiment, ratios)
    head = ["model", "micro-batches", "link", *(f"{schedule}, samples/s" for schedule in _SCHEDULES), "delayed / async"]
    experiment.finish(f"{_TURNS} turns, uniform:4 both ways, four hosts of 0.4 core.\n\n{table(head, rows)}")


def draw(experiment: Experiment, ratios: dict[tuple[str, int, int], list[float]]) -> None:
    """Plot the delayed schedule's speed, relative to the asynchronous one's, over the links."""
    figure, panels = pyplot().subplots(1, len(_MODELS), figsize=(9, 3.6), sharey=True, layout="constrained")
    for axes, model in zip(panels, _MODELS, strict=True):
        for count, colour in zip(_MODELS[model][-1], ("#D55E00", "#0072B2", "#009E73"), strict=True):
            middle = [statistics.median(ratios[model, count, link]) for link in _LINKS]
            axes.plot(list(_LINKS.values()), middle, "o-", color=colour, label=f"{count} micro-batches a step")
        axes.axhline(1.0, color="#777777", linewidth=1)
        axes.set_title(model)
        axes.set_ylabel("samples/s, relative to 1f1b-async")
        axes.label_outer()
        axes.legend(frameon=False)
    figure.savefig(experiment.out / "plot.png", dpi=120)


run(main)

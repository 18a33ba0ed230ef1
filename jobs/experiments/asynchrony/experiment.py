"""Seconds to a loss: how fast schedules and peers make the steps of jobs/quality's models on slow links, and how many steps
each needs (``bash jobs/quality/asynchrony.sh``, which must have been run: steps and losses come from its logs).

Plain DDP computes what synchronous schedules compute, so it needs as many steps. PowerSGD's losses are those of
``jobs/quality/powersgd.py``, if that has been run; else it is taken to need as many, too.
"""

import statistics
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from accept_mpi.errors import UserError
from accept_mpi.logs.figures import pyplot
from accept_mpi.logs.reader import open_log
from harness.experiment import Experiment, run
from harness.side_by_side import PEERS
from harness.store import table

_RUNS = Path("runs/quality")
_MODELS = {"gpt": ("gpt-muon", 32), "mobilenetv2": ("mobilenetv2", 64)}
"""Models of jobs/quality, the jobs whose steps are timed, and their batch sizes. AdamW's steps are a few percent shorter
than Muon's, which is left out of account."""
_LINKS = (100, 20)
_SCHEDULES = ("1f1b", "zero-bubble", "1f1b-async", "1f1b-delayed")
_SWEEPS = {"asynchrony": "", "clipped": "adamw, clipped", "muon": "muon, clipped"}
"""Sweeps of jobs/quality, and what their runs have in common."""
_LIKE = {"zero-bubble": "1f1b", "torch DDP": "1f1b", "torch DDP, PowerSGD": "1f1b"}
"""Whose steps are taken."""
_ASYNCHRONOUS = 16  # micro-batches a step with which the older weights' runs were made; what 1f1b computes has none
_SMOOTHED = 40  # steps over which losses are averaged
_TARGET = 0.95  # of the steps of synchronous training with the best optimizer: its loss by then is the aim
_TURNS, _SECONDS = 2, 6.0
_COLOURS = {"1f1b": "#777777", "1f1b-async": "#D55E00", "1f1b-delayed": "#0072B2", "torch DDP, PowerSGD": "#009E73"}


def main() -> None:
    experiment = Experiment(__file__)
    text = []
    for model, (job, batch) in _MODELS.items():
        curves = {way: mean_curve(paths) for way, paths in runs(model)}
        if not curves:
            continue
        with experiment.lab("../accept/fleet.toml"):
            rates = {link: measure(experiment, model, job, batch, link) for link in _LINKS}
        text.append(report(experiment, model, batch, curves, rates))
    if not text:
        raise UserError(f"{_RUNS}: no runs; make them first: bash jobs/quality/asynchrony.sh")
    experiment.finish("\n".join(text))


def runs(model: str) -> Iterator[tuple[tuple[str, str], list[Path]]]:
    """Schedule and optimizer, and the logs of their runs."""
    found: dict[tuple[str, str], list[Path]] = {}
    if (powersgd := _RUNS / f"{_MODELS[model][0]}-powersgd" / "1.npy").exists():
        found["torch DDP, PowerSGD", _SWEEPS["muon"]] = [powersgd]
    for sweep in _SWEEPS:
        for log in sorted((_RUNS / f"{model}-{sweep}").glob("*/log.h5")):
            name = log.parent.name.rpartition("-")[0]  # without the seed
            schedule = max((one for one in _SCHEDULES if f"{name}-".startswith(f"{one}-")), key=len)
            optimizer = name.removeprefix(schedule).strip("-").replace("-", " ")
            found.setdefault((schedule, ", ".join(filter(None, (_SWEEPS[sweep], optimizer)))), []).append(log)
    yield from found.items()


def mean_curve(paths: list[Path]) -> np.ndarray:
    """Training loss by step, smoothed, mean of several runs."""
    curves = []
    for path in paths:
        for loss in losses(path):
            curves.append(np.convolve(loss, np.full(_SMOOTHED, 1 / _SMOOTHED), "valid"))
    shortest = min(map(len, curves))
    return np.mean([curve[:shortest] for curve in curves], axis=0)


def losses(path: Path) -> Iterator[np.ndarray]:
    """Training losses by step, of a log or of an array with a row a seed."""
    if path.suffix == ".npy":
        yield from np.load(path)
        return
    with open_log(path) as log:
        yield log["steps"]["loss"][:]


def measure(experiment: Experiment, model: str, job: str, batch: int, link: float) -> dict[str, float]:
    """samples/s of our schedules, with the plans that they find, and of the peers: medians of turns."""
    experiment.job_file, experiment.batch = str(Path("../../quality") / f"{job}.toml"), batch
    found: dict[str, list[float]] = {}
    for turn in range(_TURNS):
        for schedule in _SCHEDULES:
            keys: dict[str, Any] = {
                "pipeline.schedule": schedule, "pipeline.cuts": "auto",
                "train.micro_batches": _ASYNCHRONOUS if schedule.startswith("1f1b-") else "auto",
                "pipeline.forward": "auto", "pipeline.backward": "auto", "pipeline.min_bits": 6,
                "pipeline.gradients": "auto",
            }  # fmt: skip
            rate = experiment.ours(link, keys, _SECONDS, turn, model=model)["samples_per_s"]
            found.setdefault(schedule, []).append(rate)
        for name in _LIKE.keys() & PEERS.keys():
            program, more = PEERS[name]
            asked = {"job": experiment.job(), "tuned": True, "steps": 4, "warm": 1} | more
            result = experiment.measure(program, {"system": name, "turn": turn, "model": model}, asked, link)
            found.setdefault(name, []).append(result["samples_per_s"])
    return {name: statistics.median(each) for name, each in found.items()}


def report(
    experiment: Experiment,
    model: str,
    batch: int,
    curves: dict[tuple[str, str], np.ndarray],
    rates: dict[float, dict[str, float]],
) -> str:
    """Seconds until the smoothed loss is that of the best synchronous runs near their end."""
    best = min((curve for (schedule, _), curve in curves.items() if schedule == "1f1b"), key=lambda curve: float(curve[-1]))
    aim = float(best[int(_TARGET * len(best)) - 1])
    rows: list[list[object]] = []
    measured = {schedule for schedule, _ in curves}
    for name in rates[_LINKS[0]]:
        like = name if name in measured else _LIKE.get(name, name)
        for (schedule, optimizer), curve in curves.items():
            if schedule != like:
                continue
            below = np.flatnonzero(curve <= aim)
            steps = int(below[0]) + _SMOOTHED if len(below) else None
            seconds = [steps * batch / rates[link][name] if steps else None for link in _LINKS]
            rows.append([name, optimizer, steps, *(f"{one:.0f}" if one else None for one in seconds)])
    draw(experiment.out / f"{model}.png", curves, best, aim)
    head = ["system", "optimizer", "steps", *(f"seconds at {link} Mbit/s" for link in _LINKS)]
    speeds = "; ".join(
        f"{link} Mbit/s: " + ", ".join(f"{name} {rate:.0f}" for name, rate in rates[link].items()) for link in _LINKS
    )
    return f"# {model}: until a training loss of {aim:.4f}\n\nsamples/s: {speeds}\n\n{table(head, rows)}"


def draw(path: Path, curves: dict[tuple[str, str], np.ndarray], best: np.ndarray, aim: float) -> None:
    """Plot the losses over steps, a panel per optimizer. ``best``: the curve of the best synchronous runs, for panels that
    have none of their own."""
    optimizers = list(dict.fromkeys(optimizer for _, optimizer in curves))
    figure, panels = pyplot().subplots(
        1, len(optimizers), figsize=(2.6 * len(optimizers), 3.4), sharey=True, layout="constrained", squeeze=False
    )
    for axes, optimizer in zip(panels[0], optimizers, strict=True):
        for schedule, colour in _COLOURS.items():
            curve = curves.get((schedule, optimizer), best if schedule == "1f1b" else None)
            if curve is not None:
                axes.plot(np.arange(len(curve)) + _SMOOTHED, curve, color=colour, label=schedule, linewidth=1.2)
        axes.axhline(aim, color="#bbbbbb", linewidth=0.8, zorder=0)
        axes.set_title(textwrap.fill(optimizer, 26), fontsize=9)
        axes.set_xlabel("step")
    panels[0][0].set_ylabel("training loss")
    panels[0][0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)


run(main)

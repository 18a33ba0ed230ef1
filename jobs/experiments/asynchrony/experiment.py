"""Seconds to a loss: how fast schedules and peers make the steps of jobs/quality's models on slow links, and how many steps
each needs (``bash jobs/quality/asynchrony.sh``, which must have been run: steps and losses come from its logs).

Plain DDP computes what synchronous schedules compute, so it needs as many steps. PowerSGD's losses are those of
``jobs/quality/powersgd.py``, if that has been run; else it is taken to need as many, too.
"""

import statistics
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from accept_mpi.data.calendar import micro_batches_of
from accept_mpi.errors import UserError
from accept_mpi.job import Job, flows
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
_SYNCHRONOUS = ("1f1b", "zero-bubble")
_SWEEPS = ("asynchrony", "clipped", "muon", "slack")
"""Sweeps of jobs/quality."""
_LIKE = {"zero-bubble": "1f1b", "torch DDP": "1f1b", "torch DDP, PowerSGD": "1f1b"}
"""Whose steps are taken."""
_SMOOTHED = 40  # steps over which losses are averaged
_TARGET = 0.95  # of the steps of synchronous training with the best optimizer: its loss by then is the aim
_TURNS, _SECONDS = 2, 6.0
_COLOURS = {"1f1b": "#777777", "1f1b-async": "#D55E00", "1f1b-delayed": "#0072B2", "torch DDP, PowerSGD": "#009E73"}


class Timed(NamedTuple):
    """What decides how fast steps are made: a schedule or a peer, and what the age of weights depends on. Synchronous
    schedules have none, and choose the number of micro-batches by themselves."""

    system: str
    micro_batches: int | None = None
    slack: int | None = None

    def __str__(self) -> str:
        if self.micro_batches is None:
            return self.system
        return f"{self.system}, {self.micro_batches} micro-batches, slack {self.slack}"


class Way(NamedTuple):
    """A way to train."""

    timed: Timed
    optimizer: str


Curves = dict[Way, np.ndarray]


def main() -> None:
    experiment = Experiment(__file__)
    text = []
    for model, (job, batch) in _MODELS.items():
        curves = {way: mean_curve(paths) for way, paths in runs(model).items()}
        if not curves:
            continue
        best = min((curve for way, curve in curves.items() if way.timed == Timed("1f1b")), key=lambda curve: curve[-1])
        aim = float(best[int(_TARGET * len(best)) - 1])
        flowing = {way.timed: None for way, curve in curves.items() if way.timed.slack is not None and curve.min() <= aim}
        with experiment.lab("../accept/fleet.toml"):
            rates = {link: measure(experiment, model, job, batch, link, list(flowing)) for link in _LINKS}
        draw(experiment.out / f"{model}.png", curves, best, aim)
        text.append(report(model, batch, curves, aim, rates))
    if not text:
        raise UserError(f"{_RUNS}: no runs; make them first: bash jobs/quality/asynchrony.sh")
    experiment.finish("\n".join(text))


def runs(model: str) -> dict[Way, list[Path]]:
    """The logs of all ways to train, of runs that are done."""
    found: dict[Way, list[Path]] = {}
    for sweep in _SWEEPS:
        for path in sorted((_RUNS / f"{model}-{sweep}").glob("*/log.h5")):
            with open_log(path) as log:
                job = Job.from_json(log.attrs["job"])
                done = any(text.startswith(b"done") for text in log["events"]["text"])
            if not done:  # as many steps would be left of the others
                continue
            found.setdefault(way_of(job), []).append(path)
    if (powersgd := _RUNS / f"{_MODELS[model][0]}-powersgd" / "1.npy").exists():
        found[Way(Timed("torch DDP, PowerSGD"), "muon, clipped")] = [powersgd]
    return found


def way_of(job: Job) -> Way:
    """How a job trains."""
    given, pipeline = job.train.optimizer, job.pipeline
    words = [given.name if given.betas[0] in (0.9, 0.95) else f"{given.name} {given.betas[0]:g}"]
    words += ["clipped"] * (job.train.clip_norm is not None) + ["corrected"] * (given.correction != "none")
    older = (micro_batches_of(job), pipeline.slack) if flows(pipeline.schedule) else ()
    return Way(Timed(pipeline.schedule, *older), ", ".join(words))


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


def measure(
    experiment: Experiment, model: str, job: str, batch: int, link: float, flowing: list[Timed]
) -> dict[Timed, float]:
    """samples/s of our schedules, with the plans that they find, and of the peers: medians of turns."""
    experiment.job_file, experiment.batch = str(Path("../../quality") / f"{job}.toml"), batch
    found: dict[Timed, list[float]] = {}
    for turn in range(_TURNS):
        for timed in (*map(Timed, _SYNCHRONOUS), *flowing):
            keys: dict[str, Any] = {
                "pipeline.schedule": timed.system, "pipeline.cuts": "auto",
                "train.micro_batches": timed.micro_batches or "auto",
                "pipeline.forward": "auto", "pipeline.backward": "auto", "pipeline.min_bits": 6,
                "pipeline.gradients": "auto",
            }  # fmt: skip
            if timed.slack is not None:
                keys["pipeline.transfer_slack"] = timed.slack
            rate = experiment.ours(link, keys, _SECONDS, turn, model=model)["samples_per_s"]
            found.setdefault(timed, []).append(rate)
        for name in _LIKE.keys() & PEERS.keys():
            program, more = PEERS[name]
            asked = {"job": experiment.job(), "tuned": True, "steps": 4, "warm": 1} | more
            result = experiment.measure(program, {"system": name, "turn": turn, "model": model}, asked, link)
            found.setdefault(Timed(name), []).append(result["samples_per_s"])
    return {timed: statistics.median(each) for timed, each in found.items()}


def report(model: str, batch: int, curves: Curves, aim: float, rates: dict[float, dict[Timed, float]]) -> str:
    """Seconds until the smoothed loss is that of the best synchronous runs near their end."""
    rows: list[list[object]] = []
    learned = {way.timed for way in curves}
    for timed in dict.fromkeys([*rates[_LINKS[0]], *(way.timed for way in curves)]):
        like = timed if timed in learned else Timed(_LIKE.get(timed.system, timed.system))
        for way, curve in curves.items():
            if way.timed != like:
                continue
            below = np.flatnonzero(curve <= aim)
            steps = int(below[0]) + _SMOOTHED if len(below) else None
            seconds = [steps * batch / rates[link][timed] if steps else None for link in _LINKS]
            rows.append([str(timed), way.optimizer, steps, *(f"{one:.0f}" if one else None for one in seconds)])
    head = ["system", "optimizer", "steps", *(f"seconds at {link} Mbit/s" for link in _LINKS)]
    speeds = "\n".join(
        f"* {link} Mbit/s: " + "; ".join(f"{timed} {rate:.0f}" for timed, rate in rates[link].items()) for link in _LINKS
    )
    return f"# {model}: until a training loss of {aim:.4f}\n\nsamples/s:\n\n{speeds}\n\n{table(head, rows)}"


def draw(path: Path, curves: Curves, best: np.ndarray, aim: float) -> None:
    """Plot the losses over steps, a panel per optimizer and age of weights. ``best``: the curve of the best synchronous
    runs, for panels whose optimizer has none."""
    wanted = list(dict.fromkeys((way.optimizer, *way.timed[1:]) for way in curves if way.timed.slack is not None))
    figure, panels = pyplot().subplots(
        1, len(wanted), figsize=(2.6 * len(wanted), 3.4), sharey=True, layout="constrained", squeeze=False
    )
    for axes, (optimizer, *age) in zip(panels[0], wanted, strict=True):
        for system, colour in _COLOURS.items():
            curve = curves.get(Way(Timed(system, *age), optimizer), curves.get(Way(Timed(system), optimizer)))
            curve = best if curve is None and system == "1f1b" else curve
            if curve is not None:
                axes.plot(np.arange(len(curve)) + _SMOOTHED, curve, color=colour, label=system, linewidth=1.2)
        axes.axhline(aim, color="#bbbbbb", linewidth=0.8, zorder=0)
        axes.set_title(textwrap.fill(f"{optimizer}, {age[0]} micro-batches, slack {age[1]}", 26), fontsize=9)
        axes.set_xlabel("step")
    panels[0][0].set_ylabel("training loss")
    panels[0][0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)


run(main)

"""Lanes: forward beside backward (ICPADS 2022), and several micro-batches side by side, against one action after another.

First the closed form against grid search and simulator (``analysis``). Then measured: a host with two cores, and a pipeline
of two; turns, F beside B, two lanes, what "auto" chooses, and two ranks side by side in the place of two lanes.
"""

import statistics
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from analysis import compared, draw, gains, others

from accept_mpi.direction import Direction
from accept_mpi.logs.format import KINDS
from accept_mpi.logs.reader import open_log
from accept_mpi.logs.replay import rerun
from accept_mpi.plan import Plan
from accept_mpi.planning.lane_model import exponent_of
from harness.experiment import Experiment, run
from harness.store import Result, table

_MODELS = {"MobileNetV2": ("mobilenetv2.toml", (4, 16, 32)), "CNN": ("cnn.toml", (4, 16)), "GPT": ("gpt.toml", (1, 4))}
"""Job files, and samples per micro-batch."""
_MICRO_BATCHES = 8
_WAYS: dict[str, dict[str, Any]] = {
    "in turn": {"pipeline.lanes": "off"},
    "F beside B": {"pipeline.lanes": "F+B"},
    "2 lanes": {"pipeline.lanes": 2},
    "auto": {"pipeline.lanes": "auto"},
}
_TURNS, _SECONDS = 2, 4.0
_APART = "2 ranks"


def main() -> None:
    experiment = Experiment(__file__)
    draw(experiment.out / "plot.png")
    rates: dict[tuple[str, str, int], list[dict[str, Result]]] = {}
    for fleet in ("lone", "pair"):
        with experiment.lab(f"{fleet}.toml"):
            for model, samples, job in points(fleet):
                rates[fleet, model, samples] = [measure(experiment, fleet, job, samples, turn) for turn in range(_TURNS)]
    with experiment.lab("apart.toml"):
        for model, samples, job in points("lone"):
            for turn, found in enumerate(rates["lone", model, samples]):
                experiment.job_file, experiment.batch = job, samples * _MICRO_BATCHES
                keys = {"pipeline.cuts": [], "pipeline.ranks": [[0, 1]], "pipeline.gradients": "none"}
                found[_APART] = experiment.ours(0, keys | size(samples), _SECONDS, turn, model=job)
    text = ["# Closed form\n", compared(), gains(), others()]
    for fleet, title in (("lone", "One host with two cores"), ("pair", "A pipeline of two hosts with two cores")):
        text += [f"# {title}\n", report(fleet, {key[1:]: turns for key, turns in rates.items() if key[0] == fleet})]
    experiment.finish("\n".join(text))


def points(fleet: str) -> list[tuple[str, int, str]]:
    """Model, samples per micro-batch, job file."""
    return [
        (model, samples, job)
        for model, (job, sizes) in _MODELS.items()
        for samples in (sizes if fleet == "lone" else sizes[:2])
    ]


def size(samples: int) -> dict[str, Any]:
    return {"train.batch_size": samples * _MICRO_BATCHES, "train.micro_batches": _MICRO_BATCHES}


def measure(experiment: Experiment, fleet: str, job: str, samples: int, turn: int) -> dict[str, Result]:
    """All ways, one after another."""
    experiment.job_file, experiment.batch = job, samples * _MICRO_BATCHES
    cuts = "even" if fleet == "pair" else []
    found = {}
    for name, keys in _WAYS.items():
        auto = {"pipeline.cuts": "auto", "pipeline.forward": "auto", "pipeline.backward": "auto"}
        given = {"pipeline.cuts": cuts, "pipeline.forward": "bf16", "pipeline.backward": "bf16"}
        wanted = keys | (auto if name == "auto" else given) | size(samples)
        found[name] = experiment.ours(None, wanted, _SECONDS, turn, model=job)
    return found


def report(fleet: str, rates: dict[tuple[str, int], list[dict[str, Result]]]) -> str:
    """Speeds against turns, g (by which two lanes gain 2^(1-g)), what auto chose, and how well the simulator repeats each
    run with its own times."""
    names = [name for name in (*_WAYS, _APART) if name in next(iter(rates.values()))[0]]
    rows, errors = [], []
    for (model, samples), turns in rates.items():
        row: list[object] = [model, samples, f"{statistics.median(one['in turn']['samples_per_s'] for one in turns):.1f}"]
        for name in names[1:]:
            ratios = [one[name]["samples_per_s"] / one["in turn"]["samples_per_s"] for one in turns]
            row.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})")
        behind = [
            one["auto"]["samples_per_s"] / max(one[name]["samples_per_s"] for name in _WAYS if name != "auto")
            for one in turns
        ]
        plan = msgspec.json.decode(turns[0]["auto"]["plan"], type=Plan)
        chosen = " / ".join(str(stage.lanes_of(rank)) for stage in plan.stages for rank in stage.ranks)
        gain = statistics.median(one["2 lanes"]["samples_per_s"] / one["in turn"]["samples_per_s"] for one in turns)
        rows.append([*row, f"{exponent_of(2, 1 / gain):.2f}", f"{statistics.median(behind):.2f}", chosen])
        errors += [error for one in turns for name in names if (error := replay_error(one[name])) is not None]
    head = ["model", "samples a micro-batch", "in turn, samples/s", *(f"{name} / in turn" for name in names[1:])]
    text = table([*head, "g", "auto / best", "lanes of auto"], rows)
    if errors:
        text += (
            f"\nThe simulator, with each run's own times of computing: mean error {100 * statistics.fmean(errors):.1f} %, "
            f"worst {100 * max(errors):.1f} % of {len(errors)} runs.\n"
        )
    return text


def replay_error(found: Result) -> float | None:
    """Relative error of a run's step, simulated with the run's own times of computing and the medians of its transfers; None
    if its trace is too short."""
    with open_log(Path(found["log"])) as log:
        trace = log["trace"][:]
    sends = trace[trace["kind"] == KINDS.index("send")]
    took = {
        way: float(np.median(rows["end"] - rows["start"]))
        for way in Direction
        if len(rows := sends[sends["direction"] == way])
    }
    again = rerun(trace, lambda source, target: took[Direction(source > target)])  # of two ranks at most, each a stage
    return abs(again.seconds / again.took - 1) if again else None


run(main)

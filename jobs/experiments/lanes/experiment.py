"""Lanes: forward beside backward (ICPADS 2022), and several micro-batches side by side, against one action after another.

First the closed form against grid search and simulator (``analysis``). Then measured: a host with two cores, and a pipeline
of two; turns, F beside B, two lanes, what "auto" chooses, and on one host two ranks side by side in the place of two lanes.
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
}
_AUTO = {"pipeline.lanes": "auto", "pipeline.cuts": "auto", "pipeline.forward": "auto", "pipeline.backward": "auto"}
_TWO_RANKS = {"pipeline.cuts": [], "pipeline.ranks": [[1, 2]], "pipeline.gradients": "none"}
"""Of ``beside.toml``, in which rank 0 is the host with two cores."""
_CHOSEN = {1: "in turn", "F+B": "F beside B", 2: "2 lanes"}
_TURNS, _SECONDS = 3, 4.0

Turns = dict[tuple[str, int], list[dict[str, Result]]]
"""Of each model and number of samples: in each turn, the result of each way."""


def main() -> None:
    experiment = Experiment(__file__)
    draw(experiment.out / "plot.png")
    with experiment.lab("lone.toml"):
        chosen = {}
        for model, samples, job in points("lone"):
            experiment.job_file = job
            found = experiment.planned(None, _AUTO | size(samples), model=job)
            chosen[model, samples] = _CHOSEN[msgspec.json.decode(found["plan"], type=Plan).stages[0].lanes_of(0)]
    with experiment.lab("beside.toml"):
        given = {"pipeline.cuts": [], "pipeline.ranks": [0]}
        lone = measured(experiment, "lone", {name: keys | given for name, keys in _WAYS.items()} | {"2 ranks": _TWO_RANKS})
    for key, turns in lone.items():
        for found in turns:
            found["auto"] = found[chosen[key]]
    with experiment.lab("pair.toml"):
        given = {"pipeline.cuts": "even", "pipeline.forward": "bf16", "pipeline.backward": "bf16"}
        pair = measured(experiment, "pair", {name: keys | given for name, keys in _WAYS.items()} | {"auto": _AUTO})
    text = ["# Closed form\n", compared(), gains(), others()]
    text += ["# One host with two cores\n", report(lone), "# A pipeline of two hosts with two cores\n", report(pair)]
    experiment.finish("\n".join(text))


def measured(experiment: Experiment, fleet: str, ways: dict[str, dict[str, Any]]) -> Turns:
    """All ways at all points, one after another in each turn."""
    rates: Turns = {}
    for model, samples, job in points(fleet):
        experiment.job_file, experiment.batch = job, samples * _MICRO_BATCHES
        rates[model, samples] = [
            {name: experiment.ours(None, keys | size(samples), _SECONDS, turn, model=job) for name, keys in ways.items()}
            for turn in range(_TURNS)
        ]
    return rates


def points(fleet: str) -> list[tuple[str, int, str]]:
    """Model, samples per micro-batch, job file."""
    return [
        (model, samples, job)
        for model, (job, sizes) in _MODELS.items()
        for samples in (sizes if fleet == "lone" else sizes[:2])
    ]


def size(samples: int) -> dict[str, Any]:
    return {"train.batch_size": samples * _MICRO_BATCHES, "train.micro_batches": _MICRO_BATCHES}


def report(rates: Turns) -> str:
    """Speeds against turns, g (by which two lanes gain 2^(1-g)), what auto chose, the way that it is farthest behind (in the
    median of all turns), and how well the simulator repeats each run with its own times."""
    names = list(next(iter(rates.values()))[0])
    rows, errors = [], []
    for (model, samples), turns in rates.items():

        def ratios(name: str, to: str, turns: list[dict[str, Result]] = turns) -> list[float]:
            return [one[name]["samples_per_s"] / one[to]["samples_per_s"] for one in turns]

        row: list[object] = [model, samples, f"{statistics.median(one['in turn']['samples_per_s'] for one in turns):.1f}"]
        for name in names[1:]:
            found = ratios(name, "in turn")
            row.append(f"{statistics.median(found):.2f} ({min(found):.2f}-{max(found):.2f})")
        gain = statistics.median(ratios("2 lanes", "in turn"))
        behind, best = min((statistics.median(ratios("auto", name)), name) for name in names if name != "auto")
        plan = msgspec.json.decode(turns[0]["auto"]["plan"], type=Plan)
        chosen = " / ".join(str(stage.lanes_of(rank)) for stage in plan.stages for rank in stage.ranks)
        rows.append([*row, f"{exponent_of(2, 1 / gain):.2f}", f"{behind:.2f} ({best})", chosen])
        runs = {one[name]["log"]: one[name] for one in turns for name in names}
        errors += [error for run in runs.values() if (error := replay_error(run)) is not None]
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

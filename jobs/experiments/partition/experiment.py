"""The cost of planning with predicted instead of measured times, on random fleets of devices unknown to the predictor.

Each fleet is planned by predicted times (from ten probes per device, without times of single layers) and by exhaustive
search over cuts and orders on measured times; both plans are priced with the measured times. Some fleets are then created in
the lab, where both plans train several times in turn.

Since only the prediction is in question, transfers are assumed hidden and memory ample. (Rank 0 does consider transfers, and
prefers to keep the devices' order.) If one stage alone determines the price, several plans may be equal; then the one whose
other stages are the most even counts, for measured and predicted times alike.
"""

import itertools
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from accept_mpi.logs.figures import pyplot
from accept_mpi.planning.balance import balance
from accept_mpi.planning.problem import Problem, cost
from accept_mpi.planning.search import solve
from accept_mpi.prediction.predictor import Predictor
from accept_mpi.prediction.samples import F64
from harness.devices import FORMATS, ISAS, MODELS, SHARES, Gathered, device_of, gathered, host_of
from harness.experiment import Experiment, run
from harness.store import table

FOLDS = 4  # groups of devices; each is predicted by networks that know only the others
FLEETS = 60
IN_LAB = 5
TURNS = 3
MICRO_BATCHES = 8
EQUAL = 1 + 1e-9


class Fleet(NamedTuple):
    """Devices for one model, with their times."""

    model: str
    devices: list[str]
    measured: F64
    """(devices, layers) seconds per micro-batch, forward plus backward."""
    predicted: F64
    samples: int
    """Samples per micro-batch."""


def main() -> None:
    torch.set_num_threads(1)
    experiment = Experiment(__file__)
    data = gathered(experiment)
    fleets = drawn(data)
    rows: list[list[object]] = []
    ratios = []
    for fleet in fleets:
        found, best = price(fleet.measured, *planned(fleet.predicted)), price(fleet.measured, *exhaustive(fleet.measured))
        ratios.append(found / best)
        more = f"{100 * (found / best - 1):+.1f}"
        rows.append([fleet.model, ", ".join(fleet.devices), f"{1e3 * best:.2f}", f"{1e3 * found:.2f}", more])
    off = 100 * (np.array(ratios) - 1)
    draw(experiment, off)
    head = ["model", "devices", "best of all cuts and orders, ms a micro-batch", "by predicted times", "cost, %"]
    shares = f"{off.mean():.2f} % in the mean, {np.median(off):.2f} % median, {off.max():.1f} % worst"
    lab_head = ["fleet", "best plan by measured times", "samples/s", "by predicted times", "samples/s", "ratio", "foreseen"]
    text = f"{len(ratios)} random fleets: {shares}.\n\nTrained in the lab:\n\n"
    experiment.finish(f"{text}{table(lab_head, in_lab(experiment, data))}\n\n{table(head, rows)}\n")


def drawn(data: list[Gathered]) -> list[Fleet]:
    """Random fleets of three or four devices, predicted by networks that know only devices of other groups."""
    rng = np.random.default_rng(3)
    devices = sorted({one.known.device for one in data})
    fleets = []
    for group in np.array_split(rng.permutation(devices), FOLDS):
        predictor = Predictor.train([one.known for one in data if one.known.device not in group])
        for _ in range(FLEETS // FOLDS):
            chosen = sorted(rng.choice(group, int(rng.integers(3, 5)), replace=False).tolist())
            fleets.append(fleet_of(data, str(rng.choice(list(MODELS))), chosen, predictor))
    return fleets


def fleet_of(data: list[Gathered], model: str, devices: list[str], predictor: Predictor) -> Fleet:
    """A fleet of these devices, with measured and predicted times."""
    known = [one.known for device in devices for one in data if (one.model, one.known.device) == (model, device)]
    measured = np.array([one.own.sum(axis=1) for one in known])
    predicted = np.array([predictor.layers(replace(one, layer_times=None))[0].sum(axis=1) for one in known])
    return Fleet(model, devices, measured, predicted, known[0].outline.samples)


def in_lab(experiment: Experiment, data: list[Gathered]) -> list[list[object]]:
    """Train fleets in the lab with the best plans by measured and by predicted times; returns rows of the table.

    A fleet has a host for each share of a core, with random instruction sets.
    """
    rng = np.random.default_rng(5)
    rows: list[list[object]] = []
    for number in range(IN_LAB):
        model, kind = list(MODELS)[number % len(MODELS)], FORMATS[number % len(FORMATS)]
        isas = [str(rng.choice(ISAS)) for _ in SHARES]
        hosts = [host_of(share, isa) for share, isa in zip(SHARES, isas, strict=True)]
        devices = [device_of(isa, host, kind) for isa, host in zip(isas, hosts, strict=True)]
        predictor = Predictor.train([one.known for one in data if one.known.device not in devices])
        fleet = fleet_of(data, model, devices, predictor)
        settings: dict[str, Any] = {"train.micro_batches": MICRO_BATCHES, "train.memory_format": kind}
        settings |= dict(setting.split("=", 1) for setting in MODELS[model])
        settings["train.batch_size"] = experiment.batch = MICRO_BATCHES * fleet.samples
        row: list[object] = [f"{model}: {', '.join(devices)}"]
        best, found = exhaustive(fleet.measured), planned(fleet.predicted)
        rates = np.zeros((TURNS if best != found else 1, 2))
        with experiment.fleet(f"fleet{number}", hosts):
            for turn, which in np.ndindex(rates.shape):
                order, edges = (best, found)[which]
                plan = {"pipeline.cuts": list(edges[1:-1]), "pipeline.ranks": list(order)}
                made = experiment.ours(0, settings | plan, seconds=8.0, turn=turn or None)
                rates[turn, which] = made["samples_per_s"]
        for (order, edges), rate in zip((best, found), np.median(rates, axis=0), strict=True):
            row += [f"ranks {list(order)}, cuts {list(edges[1:-1])}", f"{rate:.1f}"]
        foreseen = price(fleet.measured, *best) / price(fleet.measured, *found)
        rows.append([*row, f"{np.median(rates[:, 1] / rates[:, 0]):.3f}", f"{foreseen:.3f}"])
    return rows


def planned(seconds: F64) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The partitioner's plan for (devices, layers) seconds, the most even of equal ones: devices in order, and edges."""
    devices, layers = seconds.shape
    free = np.full((devices, devices), 1e15)
    problem = Problem(
        layer_seconds=seconds, values=np.zeros(layers + 1), other=np.zeros(layers + 1), rate=free, host_link=free[0],
        state=np.zeros(layers), saved_bytes=np.zeros(layers), capacity=np.ones(devices), in_flight=np.zeros(devices),
        state_copies=np.zeros(devices),
    )  # fmt: skip
    found = [solve(problem, ordered) for ordered in (True, False)]
    found += [balance(problem, plan) for plan in found]
    costs = [cost(problem, plan) for plan in found]
    least = min(reached.bottleneck for reached in costs)
    equal = [
        (uneven(np.array(reached.stages)), number)
        for number, reached in enumerate(costs)
        if reached.bottleneck <= least * EQUAL
    ]
    best = found[min(equal)[1]]
    return best.devices, best.edges


def uneven(stages: F64) -> F64:
    """Measure of unevenness: the sum of the eighth powers of the stages' times (first axis), as in ``balance``."""
    return np.asarray((stages**8).sum(axis=0))


def price(seconds: F64, devices: tuple[int, ...], edges: tuple[int, ...]) -> float:
    """Seconds per micro-batch of the slowest stage; ``seconds``: (devices, layers)."""
    return max(float(seconds[n, a:b].sum()) for n, (a, b) in zip(devices, itertools.pairwise(edges), strict=True))


def exhaustive(seconds: F64) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The plan of the lowest price over all subsets, orders and cuts, the most even of equal ones: devices in order, and
    edges."""
    devices, layers = seconds.shape
    sums = np.concatenate([np.zeros((devices, 1)), seconds.cumsum(axis=1)], axis=1)
    best: tuple[float, float, tuple[int, ...], tuple[int, ...]] = (np.inf, np.inf, (), ())
    for count in range(1, devices + 1):
        chosen = list(itertools.combinations(range(1, layers), count - 1))
        cuts = np.array(chosen, int).reshape(len(chosen), count - 1)
        edges = np.concatenate([np.zeros((len(cuts), 1), int), cuts, np.full((len(cuts), 1), layers)], axis=1)
        for order in itertools.permutations(range(devices), count):
            stages = np.array([sums[n, edges[:, s + 1]] - sums[n, edges[:, s]] for s, n in enumerate(order)])
            times, norms = stages.max(axis=0), uneven(stages)
            at = int(np.where(times <= times.min() * EQUAL, norms, np.inf).argmin())
            if times[at] * EQUAL < best[0] or (times[at] <= best[0] * EQUAL and norms[at] < best[1]):
                best = (float(times[at]), float(norms[at]), order, tuple(edges[at].tolist()))
    return best[2:]


def draw(experiment: Experiment, off: F64) -> None:
    """Plot the cumulative share of fleets over the cost of prediction (``off``, %)."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    axes.plot(np.sort(off), (np.arange(len(off)) + 1) / len(off), color="#1a6fb0")
    axes.axvline(2, color="#999999", linewidth=0.8, linestyle=":")
    axes.set_xlabel("step longer than the best plan's, %")
    axes.set_ylabel("share of random fleets")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(experiment.out / "plot.png", dpi=110)


run(main)

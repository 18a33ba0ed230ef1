"""What it costs to cut by predicted times: random fleets of devices that the predictor has never seen, each cut and ordered
by what it says, and by trying every cut and order on measured times; both priced with the measured ones.

Transfers are taken as hidden and memory as ample: what is asked here is what prediction costs.
"""

import itertools

import numpy as np
import numpy.typing as npt
import torch

from accept_mpi.figures import pyplot
from accept_mpi.partition import Problem, solve
from accept_mpi.predictor import Known, Predictor
from harness.devices import gathered
from harness.experiment import Experiment, run
from harness.store import table

FOLDS = 4  # of devices; each is predicted by networks that know the others only
FLEETS = 60

Floats = npt.NDArray[np.float64]


def main() -> None:
    torch.set_num_threads(1)
    experiment = Experiment(__file__)
    data = gathered(experiment)
    devices = sorted({known.device for _, known, _ in data})
    rng = np.random.default_rng(3)
    groups = np.array_split(rng.permutation(devices), FOLDS)
    rows: list[list[object]] = []
    ratios = []
    for group in groups:
        unseen = set(group.tolist())
        predictor = Predictor.train([known for _, known, _ in data if known.device not in unseen])
        for _ in range(FLEETS // FOLDS):
            name = str(rng.choice(sorted({name for name, _, _ in data})))
            chosen = rng.choice(sorted(unseen), int(rng.integers(3, 5)), replace=False).tolist()
            fleet = [
                (known, layers) for device in chosen for n, known, layers in data if (n, known.device) == (name, device)
            ]
            if len({known.layers for known, _ in fleet}) != 1:
                continue
            measured = np.array([layers.sum(axis=1) for _, layers in fleet])
            predicted = np.array([_layers(predictor, known) for known, _ in fleet])
            found = price(measured, *planned(predicted))
            best = exhaustive(measured)
            ratios.append(found / best)
            rows.append(
                [name, ", ".join(chosen), f"{1e3 * best:.2f}", f"{1e3 * found:.2f}", f"{100 * (found / best - 1):+.1f}"]
            )
    off = 100 * (np.array(ratios) - 1)
    draw(experiment, off)
    head = ["model", "devices", "best of all cuts and orders, ms a micro-batch", "by predicted times", "cost, %"]
    shares = f"{off.mean():.2f} % in the mean, {np.median(off):.2f} % median, {off.max():.1f} % worst"
    text = f"{len(ratios)} random fleets: {shares}"
    experiment.finish(f"{text}.\n\n{table(head, rows)}\n")


def _layers(predictor: Predictor, known: Known) -> Floats:
    """(layers,) seconds of each, forward and backward together."""
    each = np.array([[n, n + 1] for n in range(known.layers)])
    return predictor.predict(known, each)[0].sum(axis=1)


def planned(seconds: Floats) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Devices in order and edges of the partitioner's plan."""
    devices, layers = seconds.shape
    free = np.full((devices, devices), 1e15)
    problem = Problem(
        layer_seconds=seconds, values=np.zeros(layers + 1), other=np.zeros(layers + 1), rate=free, nic=free[0],
        state=np.zeros(layers), held=np.zeros(layers), capacity=np.ones(devices), kept=np.zeros(devices),
        copies=np.zeros(devices),
    )  # fmt: skip
    found = solve(problem)
    return found.devices, found.edges


def price(seconds: Floats, devices: tuple[int, ...], edges: tuple[int, ...]) -> float:
    """Seconds a micro-batch of the slowest stage."""
    return max(float(seconds[n, a:b].sum()) for n, (a, b) in zip(devices, itertools.pairwise(edges), strict=True))


def exhaustive(seconds: Floats) -> float:
    """The least price over every order, subset and cut, by trying all."""
    devices, layers = seconds.shape
    sums = np.concatenate([np.zeros((devices, 1)), seconds.cumsum(axis=1)], axis=1)
    best = np.inf
    for count in range(1, devices + 1):
        cuts = np.array(list(itertools.combinations(range(1, layers), count - 1)), int).reshape(-1, count - 1)
        edges = np.concatenate([np.zeros((len(cuts), 1), int), cuts, np.full((len(cuts), 1), layers)], axis=1)
        for order in itertools.permutations(range(devices), count):
            times = [sums[n, edges[:, s + 1]] - sums[n, edges[:, s]] for s, n in enumerate(order)]
            best = min(best, float(np.max(times, axis=0).min()))
    return best


def draw(experiment: Experiment, off: Floats) -> None:
    """Share of fleets over what prediction costs."""
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

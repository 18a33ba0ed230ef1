"""The paper's kind of figures: a step's seconds over the share of forwards, the number of workers, and their links; closed
form, grid search and simulator beside each other."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from accept_mpi.logs.figures import pyplot
from accept_mpi.pipeline.beside import beside
from accept_mpi.pipeline.schedule import Action, actions
from accept_mpi.pipeline.simulator import simulate
from accept_mpi.planning.lane_model import (
    Pipeline,
    beside_gain,
    beside_seconds,
    best_share,
    in_turn_seconds,
    lanes_gain,
    partition,
    unlike_units,
)
from harness.store import table

_GRID = np.linspace(0.002, 0.998, 499)
_CASES = [
    Pipeline(1.0, backward, stages, micro_batches, transfer)
    for backward, stages, micro_batches, transfer in itertools.product(
        (1.0, 2.0, 3.0), (1, 2, 4, 6), (4, 16, 64), (0.0, 0.3)
    )
]


def simulated(of: Pipeline, share: float, exponent: float = 1.0, speeds: Sequence[float] = ()) -> float:
    """Seconds of a step with F beside B, by the simulator; ``speeds``: of unequal workers."""
    wide = [of.micro_batches] * of.stages  # nothing bounds what is in flight
    walks = [actions("1f1b", s, of.stages, [of.micro_batches], widths=wide) for s in range(of.stages)]
    apart, speed = beside(walks), list(speeds) or [1.0] * of.stages
    took = {"F": of.forward * share**-exponent, "B": of.backward * (1 - share) ** -exponent, "U": 0.0}

    def duration(device: int, action: Action) -> float:
        return took[action.kind] / speed[device // 2]

    run = simulate(apart.walks, duration, lambda *_: of.transfer, stages=apart.stages, needs=apart.needs)
    return run.makespan


def in_turn(of: Pipeline, speeds: Sequence[float] = ()) -> float:
    """Seconds of a step with passes in turn on the whole device (1F1B with enough slack), by the simulator."""
    speed = list(speeds) or [1.0] * of.stages
    walks = [actions("1f1b", s, of.stages, [of.micro_batches], slack=2) for s in range(of.stages)]
    took = {"F": of.forward, "B": of.backward, "U": 0.0}
    return simulate(walks, lambda d, a: took[a.kind] / speed[d], lambda *_: of.transfer).makespan


def compared() -> str:
    """How far closed form, grid search and simulator are apart."""
    worst: dict[str, tuple[float, str]] = {}
    for of in _CASES:
        share = best_share(of)
        least = min(beside_seconds(of, float(r)) for r in _GRID)
        closed, ran = beside_seconds(of, share), simulated(of, share)
        for name, error in (("grid search", abs(closed / least - 1)), ("simulator", abs(ran / closed - 1))):
            where = f"b = {of.backward:g} f, {of.stages} stages, {of.micro_batches} micro-batches, c = {of.transfer:g} f"
            worst[name] = max(worst.get(name, (0.0, where)), (error, where))
    rows = [[f"closed form against {name}", f"{100 * error:.2f} %", where] for name, (error, where) in worst.items()]
    return table([f"{len(_CASES)} homogeneous pipelines", "largest difference", "where"], rows)


def gains() -> str:
    """What F beside B and equal lanes give over turns, by g."""
    rows = [
        [f"{g:g}", f"{beside_gain(1, 2, g):.2f}", *(f"{lanes_gain(k, g):.2f}" for k in (2, 4))] for g in (1, 0.9, 0.8, 0.7)
    ]
    return table(["g", "F beside B, at the best share", "2 lanes", "4 lanes"], rows)


def others() -> str:
    """Layers cut with lanes on unequal workers, and units of unlike kinds."""
    rng = np.random.default_rng(0)
    layers, rows = rng.uniform(0.5, 1.5, 24), []
    for name, units in (("2, 2, 2 cores", (2, 2, 2)), ("4, 2, 2 cores", (4, 2, 2)), ("3, 3, 6 cores", (3, 3, 6))):
        most = max(units) + 1
        for g in (1.0, 0.8):
            times = np.full((2, len(units), most, len(layers)), np.inf)
            for n, cores in enumerate(units):
                for u in range(1, cores + 1):
                    times[:, n, u] = np.outer((1.0, 2.0), layers) * u**-g
            found = partition(*times, np.zeros(len(layers)))
            turns = _pipeline_of(layers, [cores**g for cores in units])
            split = ", ".join(f"{u} + {cores - u}" for u, cores in zip(found.units, units, strict=True))
            rows.append([name, f"{g:g}", split, list(found.edges[1:-1]), f"{turns / found.bottleneck:.2f}"])
    text = table(["workers", "g", "cores of F + B", "cuts", "speed-up over turns"], rows)
    rows = []
    kinds = (
        ("CPU and an NPU as fast, for F and B alike", (1.0, 1.0), (2.0, 2.0)),
        ("CPU and an NPU 4 x as fast forward, half as fast backward", (1.0, 0.25), (2.0, 4.0)),
        ("CPU and an NPU 8 x as fast forward, not made for backward", (1.0, 0.125), (2.0, 1e6)),
    )
    for name, forward, backward in kinds:
        units = unlike_units(forward, backward)
        turns = 1 / sum(1 / x for x in forward) + 1 / sum(1 / x for x in backward)
        use = f"F on unit {', '.join(map(str, units.forwards))}, B on the others" if units.forwards else "both for each pass"
        rows.append([name, use, f"{turns / units.seconds:.2f}"])
    return text + "\n" + table(["units", "best use", "speed-up over turns of all"], rows)


def _pipeline_of(layers: np.ndarray, speeds: Sequence[float]) -> float:
    """Least bottleneck of layers (seconds of F; B takes twice as long) on workers in turn."""
    sums = 3 * np.concatenate([[0.0], layers.cumsum()])
    return min(
        max(
            (sums[b] - sums[a]) / speed
            for (a, b), speed in zip(itertools.pairwise((0, *cuts, len(layers))), speeds, strict=True)
        )
        for cuts in itertools.combinations(range(1, len(layers)), len(speeds) - 1)
    )


def draw(path: Path) -> None:
    """Four panels: over the share, the workers, the links, and unequal workers."""
    plt = pyplot()
    figure, panels = plt.subplots(2, 2, figsize=(11, 7.5), layout="constrained")
    over_share, over_workers, over_links, unequal = panels.flat
    base = Pipeline(1.0, 2.0, 4, 16)
    shares = np.linspace(0.12, 0.7, 80)
    for g, colour in ((1.0, "#0072B2"), (0.8, "#D55E00"), (0.7, "#009E73")):
        over_share.plot(shares, [beside_seconds(base, r, g) for r in shares], color=colour, label=f"g = {g:g}")
        some = shares[::8]
        over_share.plot(some, [simulated(base, float(r), g) for r in some], "o", color=colour, markersize=4)
    over_share.axhline(in_turn_seconds(base), color="#666666", linestyle="--", linewidth=1, label="in turn")
    over_share.axvline(best_share(base), color="#999999", linewidth=0.8)
    over_share.set(xlabel="share of a device that computes forwards", title="4 workers, 16 micro-batches, b = 2 f")
    stages = range(1, 9)
    ranges = (
        (over_workers, stages, "workers", [base._replace(stages=p) for p in stages]),
        (over_links, links := np.linspace(0, 3, 13), "seconds of a transfer, in those of a forward",
         [base._replace(transfer=c) for c in links]),
    )  # fmt: skip
    for axes, values, label, pipelines in ranges:
        axes.plot(values, [in_turn(of) for of in pipelines], "s--", color="#666666", markersize=4, label="in turn")
        for g, colour in ((1.0, "#0072B2"), (0.8, "#D55E00")):
            each = [min((beside_seconds(of, float(r), g), float(r)) for r in _GRID) for of in pipelines]
            axes.plot(values, [seconds for seconds, _ in each], color=colour, label=f"F beside B, g = {g:g}")
            ran = [simulated(of, r, g) for of, (_, r) in zip(pipelines, each, strict=True)]
            axes.plot(values, ran, "o", color=colour, markersize=4)
        axes.set(xlabel=label)
    over_workers.set(title="links free")
    over_links.set(title="4 workers; transfers that nothing hides")
    slowest = np.linspace(0.25, 1, 7)
    speeds = [[1.0, 1.0, 1.0, float(slow)] for slow in slowest]
    unequal.plot(slowest, [in_turn(base, each) for each in speeds], "s--", color="#666666", markersize=4, label="in turn")
    for g, colour in ((1.0, "#0072B2"), (0.8, "#D55E00")):
        times = [min(simulated(base, float(r), g, each) for r in np.linspace(0.2, 0.5, 13)) for each in speeds]
        unequal.plot(slowest, times, "o-", color=colour, markersize=4, label=f"F beside B, g = {g:g}")
    unequal.set(xlabel="speed of the last worker, the others 1", title="unequal workers, equal stages")
    for axes in panels.flat:
        axes.set_ylabel("step, in seconds of a forward")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8, frameon=False)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    over_share.set_ylim(40, 130)
    figure.suptitle("Lines: closed form; dots: simulator", fontsize=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)

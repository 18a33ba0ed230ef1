"""FTPipeHD's comparison: even and good cuts on unequal devices, and the limit that the sizes of the layers set.

Cuts and orders "by hand" come from every layer measured alone on every host: they minimize the slowest stage's time over all
cuts and orders, assuming hidden transfers. "auto" is rank 0's plan. The machine's speed drifts, so plans and all hosts alone
are measured several times in turn; the table has medians, those of ratios over ratios within a turn. Independent of drift is
the share of the time in which hosts compute (from each run's trace), weighted by their speeds alone.
"""

import itertools
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from accept_mpi.logs.figures import pyplot
from accept_mpi.plan import Plan, even_cuts
from harness.experiment import Experiment, run
from harness.store import table

FLEETS = {"ten-ten-one.toml": "3 hosts, 10:10:1", "personas.toml": "mini-pc, old-laptop, pi5, pi4"}
MICRO = 8  # samples per micro-batch
TURNS = 3
_PAPER = 6.8
_SHOWN = ("even", "by hand", "by hand, any order", "auto")

Seconds = npt.NDArray[np.float64]


def main() -> None:
    experiment = Experiment(__file__)
    rows: list[list[object]] = []
    bars: dict[str, dict[str, float]] = {}
    gains: dict[tuple[str, str], float] = {}
    for fleet, title in FLEETS.items():
        with experiment.lab(fleet) as lab:
            names = [host.name for host in lab.hosts]
            asked = {"job": experiment.job(), "seconds": 12.0, "tuned": True, "cuts": None}
            seconds = np.array(experiment.measure("alone", {"system": "layers"}, asked | {"layers": True})["layer_seconds"])
            alone = experiment.measure("alone", {"system": "alone"}, asked)
            speeds = np.array(alone["each"])
            limits = [float(alone["samples_per_s"])]
            places = tuple(range(len(names)))
            even = even_cuts(seconds.shape[1], len(names))
            same_order, reordered = best_plan(seconds, [places]), best_plan(seconds, list(itertools.permutations(places)))
            # A session makes its first run twice, so the slowest plan ("even") does not come first.
            plans: dict[str, tuple[Any, tuple[int, ...]]] = {
                "by hand": same_order, "even": (even, places), "by hand, any order": reordered, "auto": ("auto", places)
            }  # fmt: skip
            measured: dict[str, list[tuple[float, ...]]] = {name: [] for name in plans}
            chosen: dict[str, tuple[str, str]] = {}
            for turn in range(TURNS):
                if turn:
                    alone = experiment.measure("alone", {"system": "alone", "turn": turn}, asked)
                    limits.append(float(alone["samples_per_s"]))
                for name, (cuts, order) in plans.items():
                    settings: dict[str, Any] = {"pipeline.cuts": cuts}
                    if name != "auto":
                        settings["pipeline.ranks"] = list(order)
                    experiment.expect(settings, MICRO / slowest(seconds, *(reordered if name == "auto" else (cuts, order))))
                    run_ = experiment.ours(None, settings, seconds=10.0, turn=turn or None)
                    if name == "auto":
                        stages = msgspec.json.decode(run_["plan"], type=Plan).stages
                        cuts, order = [stage.start for stage in stages[1:]], tuple(stage.leader for stage in stages)
                    rate, allowed = float(run_["samples_per_s"]), MICRO / slowest(seconds, cuts, order)
                    computing = float(np.dot(run_["stages_busy"], speeds[list(order)]) / speeds.sum())
                    measured[name].append((rate, allowed, rate / limits[turn], computing))
                    chosen[name] = ", ".join(names[place] for place in order), str(cuts)
            each = {name: np.array(turns) for name, turns in measured.items()}
            usual = {name: np.median(turns, axis=0).tolist() for name, turns in each.items()}
            for name in _SHOWN:
                rate, allowed, share, computing = usual[name]
                gains[title, name] = float(np.median(each[name][:, 0] / each["even"][:, 0]))
                most = allowed / usual["even"][1]
                rows.append([title, name, *chosen[name], rate, gains[title, name], most, share, computing])
            limit = float(np.median(limits))
            bars[title] = {"every host alone, together": limit} | {name: usual[name][0] for name in _SHOWN}
    head = [
        "fleet", "plan", "hosts in order", "cuts", "samples/s", "x even cuts", "x even cuts, allowed by the layers",
        "of the sum of the hosts alone", "of the time hosts compute, by their speed",
    ]  # fmt: skip
    best = gains[FLEETS["ten-ten-one.toml"], "auto"]
    draw(experiment, bars)
    experiment.finish(f"{table(head, rows)}\n10:10:1, auto against even cuts: {best:.1f} x (FTPipeHD's paper: {_PAPER} x)\n")


def slowest(seconds: Seconds, cuts: list[int], order: tuple[int, ...]) -> float:
    """Seconds per micro-batch of the slowest stage; ``seconds``: (hosts, layers), ``order``: the stages' hosts."""
    edges = [0, *cuts, seconds.shape[1]]
    return max(float(seconds[place, a:b].sum()) for place, (a, b) in zip(order, itertools.pairwise(edges), strict=True))


def best_plan(seconds: Seconds, orders: list[tuple[int, ...]]) -> tuple[list[int], tuple[int, ...]]:
    """Cuts and order (one of ``orders``) whose slowest stage is the fastest, by exhaustive search."""
    layers, stages = seconds.shape[1], seconds.shape[0]
    sums = np.concatenate([np.zeros((stages, 1)), seconds.cumsum(axis=1)], axis=1)
    cuts = np.array(list(itertools.combinations(range(1, layers), stages - 1)))
    edges = np.concatenate([np.zeros((len(cuts), 1), int), cuts, np.full((len(cuts), 1), layers)], axis=1)
    found: list[tuple[float, list[int], tuple[int, ...]]] = []
    for order in orders:
        times = [sums[place, edges[:, s + 1]] - sums[place, edges[:, s]] for s, place in enumerate(order)]
        longest = np.max(times, axis=0)
        at = int(longest.argmin())
        found.append((float(longest[at]), cuts[at].tolist(), order))
    _, chosen, order = min(found)
    return chosen, order


def draw(experiment: Experiment, bars: dict[str, dict[str, float]]) -> None:
    """Plot samples/s as a group of bars per fleet."""
    plt = pyplot()
    colours: dict[str, Any] = dict(
        zip(next(iter(bars.values())), ["#999999", "#D55E00", "#9ad0f5", "#6db4e8", "#003f7d"], strict=True)
    )
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for group, values in enumerate(bars.values()):
        for number, (name, rate) in enumerate(values.items()):
            drawn = axes.bar(group + 0.17 * (number - 2), rate, 0.16, color=colours[name], label=None if group else name)
            axes.bar_label(drawn, fmt="%.1f", fontsize=8)
    axes.set_xticks(range(len(bars)), bars)
    axes.set_ylabel("samples/s")
    axes.set_title("MobileNetV2, batch 64, unequal hosts", fontsize=11)
    figure.legend(fontsize=8, frameon=False, ncols=4, loc="outside lower center")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(experiment.out / "plot.png", dpi=110)


run(main)

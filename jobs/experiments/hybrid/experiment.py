"""Stages held by groups of hosts, beside plans without groups and torch's data parallelism, on links from unlimited to slow.

Each system is measured several times in turn at each link; the table has medians of ratios within a turn.
"""

import statistics
from typing import Any

import msgspec

from accept_mpi.logs.figures import pyplot
from accept_mpi.plan import Plan
from harness.experiment import Experiment, run
from harness.side_by_side import PEERS
from harness.store import Result, table

LINKS = (0, 100, 50, 20, 5)
TURNS = 3
SECONDS = 6.0
OURS: dict[str, dict[str, Any]] = {
    "groups": {"pipeline.groups": "true", "pipeline.gradients": "none"},
    "groups, exact": {"pipeline.groups": "true", "pipeline.gradients": "exact"},
    "no groups": {"pipeline.groups": "false"},
}
_DDP = ("torch DDP", "torch DDP, PowerSGD")


def settings(name: str) -> dict[str, Any]:
    return {"pipeline.schedule": "1f1b-async", "pipeline.forward": "auto", "pipeline.backward": "auto"} | OURS[name]


def shape(found: Result) -> str:
    """A plan in short: cuts, and the number of hosts of each stage."""
    stages = msgspec.json.decode(found["plan"], type=Plan).stages
    return "+".join(str(len(stage.ranks)) for stage in stages) + f" at {[stage.start for stage in stages[1:]]}"


def main() -> None:
    experiment = Experiment(__file__)
    rates: dict[float, list[dict[str, float]]] = {}
    shapes: dict[float, dict[str, str]] = {}
    with experiment.lab("fleet.toml"):
        for link in LINKS:
            for name in OURS:
                experiment.planned(link, settings(name))
        guesses = dict.fromkeys(_DDP, 1.0)
        for link in LINKS:
            rates[link], shapes[link] = [], {}
            for turn in range(TURNS):
                found: dict[str, float] = {}
                for name in OURS:
                    result = experiment.ours(link, settings(name), SECONDS, turn)
                    found[name] = result["samples_per_s"]
                    shapes[link][name] = shape(result)
                for name in _DDP:
                    program, more = PEERS[name]
                    slow = name == "torch DDP" and 0 < link <= 20
                    if slow and turn:
                        found[name] = rates[link][0][name]
                        continue
                    steps = 1 if slow else max(2, round(SECONDS * guesses[name]))
                    asked = {"job": experiment.job(), "tuned": True, "steps": steps, "warm": 0 if slow else 1} | more
                    peer = experiment.measure(program, {"system": name, "turn": turn}, asked, link)
                    found[name] = peer["samples_per_s"]
                    guesses[name] = found[name] / experiment.batch
                asked = {"job": experiment.job(), "seconds": SECONDS, "tuned": True, "cuts": None}
                alone = experiment.measure("alone", {"system": "alone", "at": link, "turn": turn}, asked, 0)
                found["alone"] = alone["samples_per_s"]
                rates[link].append(found)
    experiment.finish(report(rates, shapes))
    draw(experiment, rates)


def over(turns: list[dict[str, float]], one: str, other: str) -> str:
    ratios = [turn[one] / turn[other] for turn in turns]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def report(rates: dict[float, list[dict[str, float]]], shapes: dict[float, dict[str, str]]) -> str:
    head = ["free" if link == 0 else f"{link:g} Mbit/s" for link in rates]
    names = [*OURS, *_DDP, "alone"]
    rows = [[name, *(statistics.median(turn[name] for turn in turns) for turns in rates.values())] for name in names]
    ratios = [
        [f"{one} / {other}", *(over(turns, one, other) for turns in rates.values())]
        for one, other in (
            ("groups", "alone"), ("groups, exact", "alone"), ("no groups", "alone"), ("groups", "no groups"),
            ("groups", "torch DDP"), ("groups", "torch DDP, PowerSGD"),
        )
    ]  # fmt: skip
    plans = [[name, *(shapes[link][name] for link in rates)] for name in OURS]
    return "\n".join(
        [
            "# MobileNetV2 32 x 32, batch 64, four hosts of 0.4 core: stages held by groups\n",
            table(["samples/s", *head], rows),
            table(["ratio (median of turns, least and most)", *head], ratios),
            table(["hosts of each stage, cuts", *head], plans),
        ]
    )


def draw(experiment: Experiment, rates: dict[float, list[dict[str, float]]]) -> None:
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for name in [*OURS, *_DDP]:
        shares = [statistics.median(turn[name] / turn["alone"] for turn in turns) for turns in rates.values()]
        axes.plot(range(len(shares)), shares, "s--" if name in _DDP else "o-", label=name)
    axes.axhline(1.0, color="#999999", linewidth=0.8, zorder=0)
    axes.set_xticks(range(len(rates)), ["free" if link == 0 else f"{link:g}" for link in rates])
    axes.set_xlabel("link of every host, Mbit/s")
    axes.set_ylabel("of what all hosts make alone, together")
    axes.set_ylim(bottom=0)
    figure.legend(fontsize=8, frameon=False, ncols=3, loc="outside lower center")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(experiment.out / "plot.png", dpi=110)
    plt.close(figure)


run(main)

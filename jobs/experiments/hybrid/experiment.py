"""Stages held by groups of hosts (Asteroid): found plans with and without groups, conventional parallelism, and the limit.

Four equal hosts on links from unlimited to slow, with MobileNetV2 and a GPT; then fleets of unequal hosts. The machine's
speed drifts by a fifth within a minute, so equal hosts compute alone before and after each system: its share of what all of
them made is what ratios are made of. Unequal ones do so once a turn. All systems are measured several times in turn; the
tables have medians.
"""

import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from little_memory import compare

from accept_mpi.device.fleet import read
from accept_mpi.job_file import parse
from accept_mpi.logs.figures import pyplot
from accept_mpi.logs.reader import open_log
from accept_mpi.plan import Plan
from accept_mpi.profiling.cluster_profile import ClusterProfile
from harness.experiment import Experiment, ranks_of, run
from harness.planners import PLANNERS
from harness.side_by_side import PEERS
from harness.store import Result, table

_FREE = {"pipeline.schedule": "1f1b-async", "pipeline.forward": "auto", "pipeline.backward": "auto"}
OURS: dict[str, dict[str, Any]] = {
    "groups, exact": _FREE | {"pipeline.gradients": "exact"},
    "groups, auto": _FREE | {"pipeline.gradients": "auto"},
    "groups, bf16": _FREE | {"pipeline.gradients": "bf16"},
    "no groups": _FREE | {"pipeline.groups": "false"},
    "even pipeline": {
        "pipeline.schedule": "1f1b", "pipeline.cuts": "even", "pipeline.forward": "none", "pipeline.backward": "none",
    },
}  # fmt: skip
_PLANNED = {f"{name}'s plan": planner for name, planner in PLANNERS.items()}
_DDP = ("torch DDP", "torch DDP, PowerSGD")
_NAMES = {0: "free"}
_ALONE, _ALONE_SECONDS = "alone", 4.0
_SLOWEST = "alone, all as slow as the slowest"
_FLEETS = {
    "two-fast": "two fast hosts and three slow ones, 100 Mbit/s",
    "personas": "mini-pc, old-laptop, pi5, pi4",
    "ten-ten-one": "speeds 10:10:1, 100 Mbit/s",
    "three-kinds": "six hosts of three kinds, 100 Mbit/s",
}

_ALSO_SLOWER = ("personas", "ten-ten-one")
"""Fleets that are also measured at 20 Mbit/s."""


@dataclass
class Case:
    """A model on a fleet, at some links (Mbit/s of every host; 0: unlimited; None: as the fleet says)."""

    title: str
    fleet: str
    job: str
    batch: int
    links: tuple[float | None, ...] = (None,)
    ours: tuple[str, ...] = ("groups, exact", "groups, auto", "no groups")
    turns: int = 2
    seconds: float = 6.0
    hopeless: float = 20.0
    """Mbit/s at or below which plain DDP makes one step, once."""
    planners: bool = False
    """True: also plans of published planners, in the same runtime."""
    rates: dict[float | None, list[dict[str, float]]] = field(default_factory=dict)
    """samples/s by link, turn and system."""
    shares: dict[float | None, list[dict[str, float]]] = field(default_factory=dict)
    """The same as a share of what all hosts made alone, directly before and after."""
    plans: dict[float | None, dict[str, str]] = field(default_factory=dict)
    guesses: dict[str, float] = field(default_factory=dict)
    """Steps per second of a peer where it was measured last."""


CASES = [
    Case("MobileNetV2, four equal hosts", "fleet.toml", "mobilenetv2.toml", 64, (0, 100, 50, 20, 5)),
    Case(
        "GPT, four equal hosts", "fleet.toml", "gpt.toml", 16, (100, 20), ("groups, exact", "groups, bf16", "no groups"),
        turns=3, seconds=7.0,
    ),
    *(
        Case(
            f"{model}, {_FLEETS[fleet]}", f"{fleet}.toml", job, batch, seconds=5.0,
            ours=("groups, exact", "groups, auto", "no groups", "even pipeline"), planners=True,
            links=(None, 20) if fleet in _ALSO_SLOWER else (None,),
        )
        for fleet, model, job, batch in (
            *((fleet, "MobileNetV2", "mobilenetv2-eight.toml", 64) for fleet in _FLEETS),
            ("two-fast", "GPT", "gpt-eight.toml", 16), ("three-kinds", "ResNet-18", "resnet18.toml", 32),
        )
    ),
]  # fmt: skip


def main() -> None:
    experiment = Experiment(__file__)
    for fleet in dict.fromkeys(case.fleet for case in CASES):
        with experiment.lab(fleet):
            for case in (case for case in CASES if case.fleet == fleet):
                measure(experiment, case)
    draw(experiment, CASES[0])
    hosts, job = read(experiment.folder / "little-memory.toml"), experiment.folder / "mobilenetv2.toml"
    memory = compare(hosts, job, experiment.out, OURS["groups, exact"])
    title = "# MobileNetV2, four hosts of 0.4 core, one of them with little memory\n\n"
    experiment.finish("\n".join([*map(report, CASES), title + memory]))


def measure(experiment: Experiment, case: Case) -> None:
    """Measure all systems of a case in turn."""
    experiment.job_file, experiment.batch = case.job, case.batch
    for link in case.links:
        settings: dict[str, dict[str, Any]] = {}
        for name in case.ours:
            settings[name] = OURS[name]
            found_plan = experiment.planned(link, OURS[name], model=case.job)
            if case.planners and name == case.ours[0]:
                settings |= published(experiment, found_plan)
        names = [*settings, *_DDP]
        case.rates[link], case.shares[link], case.plans[link] = [], [], {}
        for turn in range(case.turns):
            rates: dict[str, float] = {}
            shares: dict[str, float] = {}
            limits = [alone(experiment, case, link, turn, "before all")]
            for name in names:
                if name in _DDP:
                    rates[name] = peer(experiment, case, link, turn, name)
                else:
                    result = experiment.ours(link, settings[name], case.seconds, turn, model=case.job)
                    rates[name], case.plans[link][name] = result["samples_per_s"], shape(result)
                if not case.planners:  # the slowest of unequal hosts take minutes for it
                    limits.append(alone(experiment, case, link, turn, f"after {name}"))
                shares[name] = rates[name] / statistics.fmean(limit[0] for limit in limits[-2:])
            rates[_ALONE], rates[_SLOWEST] = map(statistics.fmean, zip(*limits, strict=True))
            case.rates[link].append(rates)
            case.shares[link].append(shares | {_ALONE: 1.0, _SLOWEST: rates[_SLOWEST] / rates[_ALONE]})


def alone(experiment: Experiment, case: Case, link: float | None, turn: int, when: str) -> tuple[float, float]:
    """samples/s of all hosts, each alone; and what they would make if all were as slow as the slowest."""
    asked = {"job": experiment.job(), "seconds": _ALONE_SECONDS, "tuned": True, "cuts": None}
    known = {"system": _ALONE, "at": link or 0, "turn": turn, "when": when, "model": case.job}
    found = experiment.measure("alone", known, asked, None if link is None else 0)
    return found["samples_per_s"], len(found["each"]) * min(found["each"])


def peer(experiment: Experiment, case: Case, link: float | None, turn: int, name: str) -> float:
    """samples/s of DDP. Where a step takes minutes it makes one, in the first turn."""
    program, more = PEERS[name]
    hopeless = name == "torch DDP" and 0 < (link or 100) <= case.hopeless
    if hopeless and turn:
        return case.rates[link][0][name]
    guess = case.guesses.get(name, 1.0)
    steps = 1 if hopeless else max(2, round(case.seconds * guess))
    asked = {"job": experiment.job(), "tuned": True, "steps": steps, "warm": 0 if hopeless else 1} | more
    rate = experiment.measure(program, {"system": name, "turn": turn, "model": case.job}, asked, link)["samples_per_s"]
    case.guesses[name] = rate / case.batch
    return float(rate)


def published(experiment: Experiment, found: Result) -> dict[str, dict[str, Any]]:
    """Keys of the job for the plans that published planners make of the same measurements."""
    with open_log(Path(found["log"])) as log:
        cluster = ClusterProfile.read(log["survey"])
    job = parse(Path(experiment.job()).read_text(), experiment.job(), [f"{k}={v}" for k, v in _FREE.items()])
    made = {}
    for name, planner in _PLANNED.items():
        if plan := planner(cluster, job):
            made[name] = _FREE | {
                "pipeline.gradients": "none",
                "pipeline.cuts": [stage.start for stage in plan.stages[1:]],
                "pipeline.ranks": [list(stage.ranks) for stage in plan.stages],
                "pipeline.speeds": [[float(f"{1 / pace:.4g}") for pace in stage.paces] or [1.0] for stage in plan.stages],
            }
    return made


def shape(found: Result) -> str:
    """A plan in short: the ranks of each stage, and the cuts."""
    plan = msgspec.json.decode(found["plan"], type=Plan)
    return f"{ranks_of(plan)} at {[stage.start for stage in plan.stages[1:]]}"


def over(turns: list[dict[str, float]], one: str, *others: str) -> str:
    """Median (least and most) of a system's share over the best of others, within a turn."""
    ratios = [turn[one] / max(turn[other] for other in others) for turn in turns]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def report(case: Case) -> str:
    head = ["as the fleet says" if link is None else _NAMES.get(int(link), f"{link:g} Mbit/s") for link in case.rates]
    mine = [*case.ours, *(name for name in _PLANNED if name in next(iter(case.rates.values()))[0])]
    names = [*mine, *_DDP, _ALONE, _SLOWEST]
    rows = [[name, *(statistics.median(turn[name] for turn in turns) for turns in case.rates.values())] for name in names]
    groups = [name for name in case.ours if name.startswith("groups")]
    pairs = [(name, _ALONE) for name in (*mine, *_DDP) if name not in groups]
    pairs += [(name, other) for name in groups for other in (_ALONE, _SLOWEST, "no groups", *mine[len(case.ours) :], *_DDP)]
    if "even pipeline" in case.ours:
        pairs += [(name, ("torch DDP", "even pipeline")) for name in groups]  # type: ignore[misc]
    ratios = []
    for one, other in pairs:
        others = (other,) if isinstance(other, str) else other
        text = " / ".join([one, "the better of " + " and ".join(others) if len(others) > 1 else other])
        ratios.append([text, *(over(turns, one, *others) for turns in case.shares.values())])
    plans = [[name, *(case.plans[link][name] for link in case.rates)] for name in mine]
    tables = table(["samples/s", *head], rows), table(["ratio", *head], ratios), table(["ranks, cuts", *head], plans)
    return "\n".join([f"# {case.title}\n", *tables])


def draw(experiment: Experiment, case: Case) -> None:
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for name in [*case.ours, *_DDP]:
        shares = [statistics.median(turn[name] for turn in turns) for turns in case.shares.values()]
        axes.plot(range(len(shares)), shares, "s--" if name in _DDP else "o-", label=name)
    axes.axhline(1.0, color="#999999", linewidth=0.8, zorder=0)
    axes.set_xticks(range(len(case.rates)), [_NAMES.get(int(link or 0), f"{link:g}") for link in case.rates])
    axes.set_xlabel("link of every host, Mbit/s")
    axes.set_ylabel("of what all hosts make alone, together")
    axes.set_ylim(bottom=0)
    axes.set_title(case.title, fontsize=11)
    figure.legend(fontsize=8, frameon=False, ncols=3, loc="outside lower center")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(experiment.out / "plot.png", dpi=110)
    plt.close(figure)


run(main)

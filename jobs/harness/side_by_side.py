"""Compares accept_mpi with its peers on one fleet at several links: measures them in turn, and makes a table and a plot."""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from accept_mpi.logs.figures import pyplot
from harness.experiment import Experiment
from harness.store import Result, table

_PIPELINING = "torch pipelining, 1F1B"
PEERS: dict[str, tuple[str, dict[str, Any]]] = {
    _PIPELINING: ("pipelining", {}),
    "torch DDP": ("ddp", {"powersgd": False}),
    "torch DDP, PowerSGD": ("ddp", {"powersgd": True}),
}
_SETTINGS = {False: "as users start it", True: "our memory settings"}
_ASYNC = "1f1b-async"
_NO_WARM_UP = 5.0  # seconds per step above which a peer gets no warm-up: the link takes that long
_BLUES = ("#9ad0f5", "#6db4e8", "#3c93d1", "#1a6fb0", "#003f7d")
_WARM = ("#D55E00", "#E69F00", "#009E73")


@dataclass
class Case:
    """The settings of a comparison."""

    title: str
    links: tuple[float, ...]
    """Mbit/s of every host, in falling order; 0: unlimited."""
    cuts: list[int]
    """Cuts set by hand, to compare with those that rank 0 finds."""
    untuned: tuple[float, ...]
    """Links at which peers also run as users start them."""
    ours: dict[str, tuple[str, ...]]
    """Codecs by schedule. With "auto" rank 0 also finds the cuts; else they are set by hand."""
    samples: int
    """Samples per step."""
    codec_links: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Links at which a codec runs in the asynchronous schedule; for codecs not listed, all."""
    slow_cuts: dict[float, list[int]] = field(default_factory=dict)
    """Other cuts set by hand, for links at which less must cross."""
    synchronous: dict[str, Any] = field(default_factory=dict)
    """Keys of the job for synchronous schedules."""
    synchronous_links: tuple[float, ...] = ()
    """Links at which synchronous schedules run; all, if empty."""
    pipelining: dict[str, Any] = field(default_factory=dict)
    """Further keys of torch's pipelining's points: ``set``, keys of the job; ``cuts``, if an even split would send more."""
    hopeless: float = 0
    """Mbit/s at or below which plain DDP, the slowest system, makes only one step."""
    seconds: float = 5.0
    turns: int = 3
    """Number of turns in which the decisive systems are measured at each link."""


class Rate(NamedTuple):
    """A measured rate, and the time of the measurement (``at``, seconds since the epoch; 0 if unknown)."""

    samples_per_s: float
    at: float
    busy: float = math.nan
    """Share of the time in which the busiest stage computed. It does not depend on the machine's speed."""
    used: float = math.nan
    """Mean of that share over all hosts. If hosts are equal, this is the rate relative to all of them computing alone at the
    same time and speed."""

    @staticmethod
    def of(found: Result, samples_per_s: float | None = None) -> "Rate":
        """The rate in a result, or ``samples_per_s`` instead of it. Results of older files have no time."""
        rate = found["samples_per_s"] if samples_per_s is None else samples_per_s
        more = (float(found.get(key, math.nan)) for key in ("busy", "used"))
        return Rate(float(rate), float(found.get("at", 0.0)), *more)


_NOTHING = Rate(math.nan, math.nan)


class Turn(NamedTuple):
    """Rates of the decisive systems at a link, measured one after another within about a minute."""

    alone: Rate
    by_hand: Rate
    """Rate with the best codec and cuts set by hand."""
    found: Rate
    """Rate with the codecs and cuts that rank 0 found."""
    peer: Rate
    """Rate of the best peer."""


def _each(turns: Sequence[Turn], one: str) -> list[Rate]:
    return [getattr(turn, one) for turn in turns]


def _over(turns: Sequence[Turn], one: str, other: str) -> list[float]:
    """Ratio of one system's rate to another's, in each turn."""
    pairs = zip(_each(turns, one), _each(turns, other), strict=True)
    return [rate.samples_per_s / beside.samples_per_s for rate, beside in pairs]


def _range(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def _two(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.2f}"


Setup = tuple[str, str, float]
"""Schedule, codec and link."""


class SideBySide:
    """All rates of a case, in samples/s; measured on construction.

    A shared machine is 50 % faster in some minutes than in others. So all settings and peers are measured once at each link;
    then the decisive ones (the best by hand, rank 0's, the best peer, all hosts computing alone) several times in turn, and
    the table gives medians of ratios within a turn. Other rates are compared with the hosts' rate alone at the same time,
    interpolated between the measurements before and after.
    """

    def __init__(self, experiment: Experiment, case: Case) -> None:
        self.experiment, self.case = experiment, case
        experiment.batch = case.samples
        self._alone_at: dict[str, list[Rate]] = {}
        self.ours: dict[Setup, Rate] = {}
        self.peers: dict[tuple[str, bool, float], Rate] = {}
        self.turns: dict[float, list[Turn]] = {}
        self._alone("before", "plain", "tuned", "stages")
        # First without our memory settings, since these stay in effect for the rest of a process.
        for name, link in itertools.product(PEERS, case.untuned):
            self._peer(name, False, link, self.alone("plain")[0] / case.samples)
        points = [
            (kind, codec, link) for kind in case.ours for codec in case.ours[kind] for link in self._links(kind, codec)
        ]
        for point in points:  # before any is measured: a process that has measured layers must warm up to cuts again
            experiment.planned(point[2], self._settings(*point))
        guesses = dict.fromkeys(PEERS, 1.0)
        for link in case.links:
            self._alone(f"at {link:g} Mbit/s", "tuned")
            self._ours([point for point in points if point[0] == _ASYNC and point[2] == link])
            for name, guess in guesses.items():
                guesses[name] = self._peer(name, True, link, guess).samples_per_s / case.samples
            self.turns[link] = [self._turn(link, number) for number in range(case.turns)]
        self._alone("after peers", "tuned")
        self._ours([point for point in points if point[0] != _ASYNC])
        self._alone("after", "tuned", "stages")

    def _ours(self, points: list[Setup]) -> None:
        for point in points:
            found = self.experiment.ours(point[2], self._settings(*point), seconds=self.case.seconds)
            self.ours[point] = Rate.of(found)

    def _turn(self, link: float, number: int) -> Turn:
        """Measure the decisive systems at a link once more."""
        points = [point for point in self.ours if point[0] == _ASYNC and point[2] == link]
        rates: list[Rate] = []
        for auto in (False, True):
            point = max((p for p in points if (p[1] == "auto") == auto), key=lambda p: self.ours[p].samples_per_s)
            settings, rate = self._settings(*point), self.ours[point].samples_per_s
            self.experiment.expect(settings, rate)
            rates.append(Rate.of(self.experiment.ours(link, settings, self.case.seconds, turn=number)))
        name = max(PEERS, key=lambda name: self.peers[name, True, link].samples_per_s)
        guess = self.peers[name, True, link].samples_per_s / self.case.samples
        peer = self._measured(name, True, link, guess, turn=number)
        self._alone(f"at {link:g} Mbit/s, turn {number}", "tuned")
        by_hand, found = rates
        return Turn(self._alone_at["tuned"][-1], by_hand, found, peer)

    def _links(self, schedule: str, codec: str) -> tuple[float, ...]:
        case = self.case
        return case.codec_links.get(codec, case.links) if schedule == _ASYNC else case.synchronous_links or case.links

    def _alone(self, when: str, *wanted: str) -> None:
        """Measure all hosts computing alone at the same time.

        ``wanted``: "plain" and "tuned", the whole model without and with our memory settings; "stages", each host its stage
        of our cuts, of which the slowest counts. "plain" must come first, since the settings of the others stay in effect.
        """
        for name, tuned, cuts in (("plain", False, None), ("tuned", True, None), ("stages", True, self.case.cuts)):
            if name not in wanted:
                continue
            asked = {"job": self.experiment.job(), "seconds": self.case.seconds, "tuned": tuned, "cuts": cuts}
            found = self.experiment.measure("alone", {"system": f"alone, {name}", "when": when}, asked, 0)
            self._alone_at.setdefault(name, []).append(Rate.of(found, min(found["each"]) if cuts else None))

    def alone(self, name: str) -> list[float]:
        """All rates measured of all hosts computing alone; ``name`` as in ``_alone``."""
        return [rate.samples_per_s for rate in self._alone_at[name]]

    def _of(self, name: str, rate: Rate) -> float:
        """A rate relative to that of all hosts computing alone at the same time, which is interpolated."""
        there = sorted(self._alone_at[name], key=lambda one: one.at)
        return rate.samples_per_s / float(
            np.interp(rate.at, [one.at for one in there], [one.samples_per_s for one in there])
        )

    def _settings(self, schedule: str, codec: str, link: float) -> dict[str, Any]:
        settings: dict[str, Any] = {"pipeline.schedule": schedule, "pipeline.forward": codec, "pipeline.backward": codec}
        if schedule != _ASYNC:
            settings |= self.case.synchronous
        if codec != "auto":
            settings |= {"pipeline.cuts": self.case.slow_cuts.get(link, self.case.cuts)}
        return settings

    def _peer(self, name: str, tuned: bool, link: float, guess: float) -> Rate:
        """Measure a peer's rate for the table. ``guess``: steps/s at the link before."""
        rate = self.peers[name, tuned, link] = self._measured(name, tuned, link, guess)
        return rate

    def _measured(self, name: str, tuned: bool, link: float, guess: float, **known: Any) -> Rate:
        program, more = PEERS[name]
        slow = name == "torch DDP" and 0 < link <= self.case.hopeless
        steps = 1 if slow else max(2, round(self.case.seconds * guess))
        warm = 0 if slow or guess < 1 / _NO_WARM_UP else 1
        asked = {"job": self.experiment.job(), "tuned": tuned, "steps": steps, "warm": warm} | more
        known |= {"system": name, "tuned": tuned}
        if program == "pipelining":
            asked, known = asked | self.case.pipelining, known | self.case.pipelining
        return Rate.of(self.experiment.measure(program, known, asked, link))

    # -- results -------------------------------------------------------------------------------------------------------

    def best(self, link: float, synchronous: bool = False, auto: bool | None = None) -> Rate:
        """Our highest rate over codecs and cuts: rank 0's (``auto`` True), those set by hand (False) or all (None); NaN if
        nothing was measured."""
        rates = [
            rate
            for (kind, codec, at), rate in self.ours.items()
            if at == link and (kind != _ASYNC) == synchronous and auto in (None, codec == "auto")
        ]
        return max(rates, default=_NOTHING)

    def _label(self, schedule: str, codec: str) -> str:
        words = ["codecs and cuts auto"] if codec == "auto" else [codec]
        if schedule != _ASYNC:
            words += [f"{key.rpartition('.')[2].replace('_', ' ')} {value}" for key, value in self.case.synchronous.items()]
        return ", ".join(words)

    def _synchronous(self) -> str:
        names = [
            f"{kind}, {self._label(kind, codec)}"
            for kind, codecs in self.case.ours.items()
            for codec in codecs
            if kind != _ASYNC
        ]
        return names[0] if len(names) == 1 else "synchronous, best"

    def best_peer(self, link: float, *names: str) -> Rate:
        """The rate of the fastest of these peers (default: all), with or without our memory settings.

        Rates are compared relative to all hosts alone at the same time, because the runs without our settings come first.
        """
        rates = [rate for (name, _, at), rate in self.peers.items() if at == link and name in (names or PEERS)]
        return max(rates, key=lambda rate: self._of("tuned", rate))

    def text(self) -> str:
        """The report in Markdown: the rates, and their ratios."""
        links = self.case.links
        head = ["free" if link == 0 else f"{link:g} Mbit/s" for link in links]
        names = [(schedule, codec) for schedule, codecs in self.case.ours.items() for codec in codecs]
        measured = {
            f"accept_mpi {kind}, {self._label(kind, codec)}": [self.ours.get((kind, codec, link)) for link in links]
            for kind, codec in names
        } | {
            f"{name} ({settings})": [self.peers.get((name, tuned, link)) for link in links]
            for name in PEERS
            for tuned, settings in _SETTINGS.items()
        }
        rows = [[name, *(rate and rate.samples_per_s for rate in rates)] for name, rates in measured.items()]
        turns = [self.turns[link] for link in links]
        # Cuts by hand or found by rank 0, whichever has the higher median over turns.
        best = [max((statistics.median(_over(at, one, "alone")), one) for one in ("by_hand", "found"))[1] for at in turns]
        found = ["found"] * len(links)

        def over(ones: Sequence[str], other: str) -> list[str]:
            return [_range(_over(at, one, other)) for at, one in zip(turns, ones, strict=True)]

        def of_time(ones: Sequence[str], what: str) -> list[str]:
            both = zip(turns, ones, strict=True)
            return [_two(statistics.median(getattr(rate, what) for rate in _each(at, one))) for at, one in both]

        def alone(rates: Sequence[Rate], name: str = "tuned") -> list[str]:
            return [_two(self._of(name, rate)) for rate in rates]

        synchronous, synchronous_found = ([self.best(link, True, auto=which) for link in links] for which in (None, True))
        pipelining = [
            _two(self._of("tuned", self.best(link)) / self._of("tuned", self.best_peer(link, _PIPELINING))) for link in links
        ]
        ratios: dict[str, list[str]] = {
            "async, best of all / sum of the hosts alone": over(best, "alone"),
            "async, best of all / slowest stage alone": alone([self.best(link) for link in links], "stages"),
            "async, best of all: the busiest stage computes": of_time(best, "busy"),
            "async, best of all: all hosts compute, in the mean": of_time(best, "used"),
            "async, all found by rank 0 / sum of the hosts alone": over(found, "alone"),
            "async, all found by rank 0: the busiest stage computes": of_time(found, "busy"),
            "async, all found by rank 0: all hosts compute, in the mean": of_time(found, "used"),
            "async, all found by rank 0 / best by hand": over(found, "by_hand"),
            "async, best of all / best peer": over(best, "peer"),
            "async, all found by rank 0 / best peer": over(found, "peer"),
            "async, best of all / torch pipelining": pipelining,
            "synchronous, best / sum of the hosts alone": alone(synchronous),
            "synchronous, best: the busiest stage computes": [_two(rate.busy) for rate in synchronous],
            "synchronous, best: all hosts compute, in the mean": [_two(rate.used) for rate in synchronous],
            "synchronous, found by rank 0 / sum of the hosts alone": alone(synchronous_found),
        }
        limits = {
            name: f"{min(rates):.1f} to {max(rates):.1f}, in the median {statistics.median(rates):.1f}"
            for name in ("tuned", "plain", "stages")
            if (rates := self.alone(name))
        }
        sentence = (
            f"All hosts computing alone at the same time, samples/s together: {limits['tuned']} with our memory settings, "
            f"{limits['plain']} without. The slowest stage of our cuts alone: {limits['stages']}. The best by hand, what "
            f"rank 0 found, the best peer and all hosts alone were measured {self.case.turns} times in turn at each link: "
            "ratios of them are medians of ratios within a turn, least and most in brackets. Others are shares of what all "
            "hosts made alone around that time. How much of the time stages compute is from each run's own trace: no drift "
            "is in it.\n"
        )
        lines = [[name, *values] for name, values in ratios.items()]
        title = f"# {self.case.title}\n"
        return "\n".join([title, table(["samples/s", *head], rows), sentence, table(["ratio", *head], lines)])

    def draw(self) -> None:
        """Plot rates relative to all hosts alone, which do not depend on the machine's speed, over the links."""
        plt, links = pyplot(), self.case.links
        figure, axes = plt.subplots(figsize=(8, 5.6), layout="constrained")
        places = range(len(links))
        for codec, colour in zip(self.case.ours[_ASYNC], _BLUES[-len(self.case.ours[_ASYNC]) :], strict=True):
            shares = np.array([self._of("tuned", self.ours.get((_ASYNC, codec, link), _NOTHING)) for link in links])
            if codec == "auto":
                shares = np.array([statistics.median(_over(self.turns[link], "found", "alone")) for link in links])
            measured = np.flatnonzero(np.isfinite(shares))
            axes.plot(measured, shares[measured], "o-", label=f"accept_mpi async, {codec}", color=colour)
        synchronous = np.array([self._of("tuned", self.best(link, True)) for link in links])
        measured = np.flatnonzero(np.isfinite(synchronous))
        axes.plot(measured, synchronous[measured], "o-", label=f"accept_mpi {self._synchronous()}", color="#CC79A7")
        for name, colour in zip(PEERS, _WARM, strict=True):
            peer = [self._of("tuned", self.best_peer(link, name)) for link in links]
            axes.plot(places, peer, "s--", label=name, color=colour)
        axes.axhline(1.0, color="#999999", linewidth=0.8, zorder=0)
        axes.set_xticks(places, ["free" if link == 0 else f"{link:g}" for link in links])
        axes.set_xlabel("link of every host, Mbit/s")
        axes.set_ylabel("of what all hosts make alone, together")
        axes.set_ylim(bottom=0)
        axes.set_title(self.case.title, fontsize=11)
        figure.legend(fontsize=8, frameon=False, ncols=2, loc="outside lower center")
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        figure.savefig(self.experiment.out / "plot.png", dpi=110)
        plt.close(figure)


def compare(file: str, case: Case) -> None:
    """Run an experiment that is one comparison; ``file`` is its script, in a folder with fleet.toml and job.toml."""
    experiment = Experiment(file)
    with experiment.lab("fleet.toml"):
        found = SideBySide(experiment, case)
    found.draw()
    experiment.finish(found.text())

"""Replays a trace in the simulator, to find how long the same computation takes on other links.

The trace gives the order of each stage's actions and the seconds that each computed; the simulator adds the messages between
them. Replayed on links that take no time, a step gets shorter by what its transfers cost: the part that no computing hid.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from accept_mpi.direction import Direction
from accept_mpi.logs.format import KINDS, Rows, lanes_in
from accept_mpi.logs.timeline import COMPUTE, busy_seconds, of_kind
from accept_mpi.pipeline.beside import Needs
from accept_mpi.pipeline.schedule import Action
from accept_mpi.pipeline.simulator import Between, Simulated, simulate

_MOST_STEPS = 100  # steps replayed, from the middle of a long run
_LEAD = 4  # the first 1/_LEAD of the steps is not counted: the pipeline fills, and a run's first steps are unlike the others


@dataclass(frozen=True)
class LinkCost:
    """The time that transfers cost in some steps of a run."""

    seconds: float
    """Seconds that the steps took."""
    exposed: float
    """Seconds that links without latency and with infinite bandwidth would have saved."""
    busiest: float
    """Seconds in which the busiest link (one direction of one boundary) had a message in flight."""

    @property
    def hidden(self) -> float:
        """Share of the busiest link's time that computing hid; NaN if nothing was sent."""
        return min(1.0, max(0.0, 1 - self.exposed / self.busiest)) if self.busiest else float("nan")


@dataclass(frozen=True)
class Rerun:
    """Some steps of a run, as measured and as simulated."""

    steps: int
    start: float
    end: float
    seconds: float
    """Simulated seconds of all the steps."""
    trace: Rows

    @property
    def took(self) -> float:
        """Measured seconds of all the steps."""
        return self.end - self.start


def rerun(
    trace: Rows,
    transfer: Between = lambda source, target: 0.0,
    sums: Callable[[int], float] = lambda stage: 0.0,
    plans: Rows | None = None,
    held: Between | None = None,
) -> Rerun | None:
    """Simulate the middle steps of a run with the measured length of every action.

    ``transfer`` gives the seconds of a message by sending and receiving device (the ranks in the order of their stages),
    ``held`` those for which it holds the link, as for ``simulate``, ``sums`` those of a stage's sum. The lanes of a rank are
    devices of their own here. ``plans``: the run's, of dtype PLANS. None if fewer than three steps have been finished under
    one plan. Raises RuntimeError if actions wait for others that the trace does not have.
    """
    steps = _finished(trace, plans)
    if len(steps) < 3:
        return None
    spare = max(0, (len(steps) - _MOST_STEPS) // 2)
    steps = steps[spare : len(steps) - spare]
    mine = trace[(trace["step"] >= steps[0]) & (trace["step"] <= steps[-1])]
    first, last = int(steps[len(steps) // _LEAD]), int(steps[-1])
    walks, durations, begins, stages, ranks, needs = recorded(mine)
    positions = {rank: n for n, rank in enumerate(dict.fromkeys(ranks))}

    def between(seconds: Between) -> Between:
        return lambda source, target: seconds(positions[ranks[source]], positions[ranks[target]])

    ways = between(transfer), between(held or transfer)
    run = simulate(walks, lambda device, action: durations[device][action], ways[0], begins, stages, sums, needs, ways[1])
    updates = of_kind(mine, "U")
    start, end = (float(updates["end"][updates["step"] == step].mean()) for step in (first, last))
    return Rerun(last - first, start, end, _between(walks, run, first, last), mine)


def link_cost(trace: Rows, plans: Rows | None = None) -> LinkCost:
    """The time that transfers cost in the middle steps of a run; zeros if fewer than three steps have been finished, or
    actions wait for others that the trace does not have."""
    try:
        run = rerun(trace, plans=plans)
    except RuntimeError:
        run = None
    if run is None:
        return LinkCost(0.0, 0.0, 0.0)
    return LinkCost(run.took, max(0.0, run.took - run.seconds), _busiest(run.trace, run.start, run.end))


def mean_times(trace: Rows) -> dict[int, dict[str, float]]:
    """Mean seconds per kind of action, for each rank, as ``recorded`` counts them, without the first quarter of the steps.

    B's mean excludes W's time even if some Bs computed the weight gradients themselves.
    """
    steps = _finished(trace)
    if not steps:
        return {}
    run = recorded(trace[(trace["step"] >= steps[0]) & (trace["step"] <= steps[-1])])
    found = {}
    for rank in dict.fromkeys(run.ranks):
        each: dict[str, list[float]] = {}
        for walk, took, of in zip(run.walks, run.durations, run.ranks, strict=True):
            for action in walk if of == rank else ():
                if steps[len(steps) // _LEAD] < action.step <= steps[-1]:
                    each.setdefault(action.kind, []).append(took[action])
        means = {k: float(np.mean(seconds)) for k, seconds in each.items()}
        if "W" in means:
            means["B"] = (sum(each["B"]) + sum(each["W"])) / len(each["B"]) - means["W"]
        found[rank] = means
    return found


class Recorded(NamedTuple):
    """What each rank did, by stage, rank and lane."""

    walks: list[list[Action]]
    """Actions in the order of execution."""
    durations: list[dict[Action, float]]
    """Seconds of each action."""
    begins: list[float]
    """Second at which the rank began."""
    stages: list[int]
    ranks: list[int]
    needs: Needs
    """What actions waited for in another lane, where a rank computed F beside B."""


def recorded(trace: Rows) -> Recorded:
    """What each rank did according to a trace.

    An action's seconds run from the end of the action before, or from the arrival of its input if that is later, so they
    include the stage's other work in between. With lanes they are those of computing alone.
    """
    walks: list[list[Action]] = []
    durations: list[dict[Action, float]] = []
    begins = []
    waits, actions = of_kind(trace, "wait"), of_kind(trace, *COMPUTE)
    lanes, updates = lanes_in(actions), actions["kind"] == KINDS.index("U")
    places = np.unique(np.stack([actions["stage"], actions["rank"], lanes], axis=1), axis=0).tolist()
    laned = {rank for _, rank, lane in places if lane}
    needs: dict[tuple[int, Action], tuple[int, Action]] = {}
    for device, (_, rank, lane) in enumerate(places):
        of_rank = actions["rank"] == rank
        beside = rank in laned and _is_beside(actions[of_rank])
        with_updates = not (beside and lane == 0)  # those wait for all lanes, but no forward waits for the next
        rows = actions[of_rank & np.where(updates, with_updates, lanes == lane)]
        rows = rows[np.argsort(rows["start"], kind="stable")]
        walks.append([_action(row) for row in rows])
        begins.append(float(rows["start"][0]))
        if rank in laned:
            durations.append(dict(zip(walks[-1], (rows["end"] - rows["start"]).tolist(), strict=True)))
        else:
            durations.append(_durations(walks[-1], rows, waits[waits["rank"] == rank]))
        if beside and lane:
            needs |= _needs(actions[of_rank], device - 1, device)
    stages, ranks = [s for s, _, _ in places], [rank for _, rank, _ in places]
    return Recorded(walks, durations, begins, stages, ranks, needs)


def _durations(walk: Sequence[Action], rows: Rows, waits: Rows) -> dict[Action, float]:
    """Seconds of each action of a rank (``rows``, in order), from when it could begin."""
    came: dict[tuple[int, int, int], list[float]] = defaultdict(list)
    for wait in np.sort(waits, order="end"):
        came[int(wait["direction"]), int(wait["step"]), int(wait["micro_batch"])].append(float(wait["end"]))
    before, found = float(rows["start"][0]), {}
    for action, end in zip(walk, rows["end"].tolist(), strict=True):
        direction = -1 if action.kind == "U" else Direction.of(action.kind)  # U waits for a group's sum
        # Several waits may match: F of a step and E after it wait under the same numbers, and a step may be repeated.
        ends = came[direction, action.step, action.micro_batch] if action.kind in "FEBU" else []
        found[action] = end - max([before, *(at for at in ends if at <= end)])
        before = end
    return found


def _action(row: Any) -> Action:
    return Action(KINDS[row["kind"]], int(row["step"]), int(row["micro_batch"]))


def _is_beside(rows: Rows) -> bool:
    """True if a rank computed F in lane 0 beside B and W in lane 1."""
    lanes, passes = lanes_in(rows), np.isin(rows["kind"], [KINDS.index(kind) for kind in "FBW"])
    return bool(np.array_equal(lanes[passes] == 0, rows["kind"][passes] == KINDS.index("F")))


def _needs(rows: Rows, forwards: int, others: int) -> dict[tuple[int, Action], tuple[int, Action]]:
    """What actions of a rank waited for in its other lane, where it computed F (device ``forwards``) beside all else
    (``others``): B for its F, F for what else was over when it began."""
    is_forward = rows["kind"] == KINDS.index("F")
    ahead, rest = rows[is_forward], np.sort(rows[~is_forward & (rows["kind"] != KINDS.index("E"))], order="end")
    by_key = {action[1:3]: action for action in map(_action, ahead)}
    found = {
        (others, action): (forwards, by_key[action[1:3]])
        for action in map(_action, rest)
        if action.kind == "B" and action[1:3] in by_key
    }
    over = np.searchsorted(rest["end"], ahead["start"], side="right")
    for row, count in zip(ahead, over.tolist(), strict=True):
        if count:
            found[forwards, _action(row)] = others, _action(rest[count - 1])
    return found


def _finished(trace: Rows, plans: Rows | None = None) -> list[int]:
    """The longest run of consecutive steps under one plan, each of which every rank of it updated once. ``plans``: those of
    the run; a loss or a new plan ends such a run of steps."""
    updates = of_kind(trace, "U")
    best: list[int] = []
    mine: list[int] = []
    before = np.empty((0, 2))
    updates = updates[np.argsort(updates["step"], kind="stable")]
    numbers, begins = np.unique(updates["step"], return_index=True)
    anew = set() if plans is None else {int(step) + 1 for step in plans["step"]}
    for step, of_step in zip(numbers.tolist(), np.split(updates, begins[1:]), strict=bool(len(numbers))):
        places = np.unique(np.stack([of_step["stage"], of_step["rank"]], axis=1), axis=0)
        stages, ranks = np.unique(places[:, 0]), np.unique(places[:, 1])
        whole = np.array_equal(stages, np.arange(len(stages))) and len(ranks) == len(of_step)
        same = np.array_equal(places, before) and step not in anew
        if not (whole and mine and step == mine[-1] + 1 and same):
            mine = []
        if whole:
            mine.append(step)
            before = places
        best = max(best, mine, key=len)
    return best


def _between(walks: list[list[Action]], run: Simulated, first: int, last: int) -> float:
    """Simulated seconds from the updates of step ``first`` to those of step ``last``, averaged over ranks."""
    spans = []
    for walk, times in zip(walks, run.spans, strict=True):
        ends = {action.step: end for action, (_, end) in zip(walk, times, strict=True) if action.kind == "U"}
        if ends:  # not in a lane of forwards
            spans.append(ends[last] - ends[first])
    return float(np.mean(spans))


def _busiest(trace: Rows, start: float, end: float) -> float:
    """Seconds in which the busiest direction of any boundary has a message in flight."""
    sends = of_kind(trace, "send")
    ways = np.unique(np.stack([sends["boundary"], sends["direction"]], axis=1), axis=0)
    chosen = [sends[(sends["boundary"] == boundary) & (sends["direction"] == way)] for boundary, way in ways]
    return max((busy_seconds(rows, start, end) for rows in chosen), default=0.0)

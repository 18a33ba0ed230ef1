"""A trace run again by the simulator: what the same computing takes on other links.

The trace gives each stage's actions in their order and how long each computed; the messages between them are the
simulator's. With links that take no time, what a step is shorter is what its transfers cost: the part that no computing hid.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from accept_mpi.logs.format import BACKWARD, FORWARD, KINDS, Rows
from accept_mpi.logs.timeline import COMPUTE, busy_seconds, of_kind
from accept_mpi.pipeline.schedule import Action
from accept_mpi.pipeline.simulator import Simulated, simulate

_MOST_STEPS = 100  # of a long run, those in the middle
_LEAD = 4  # a quarter of the steps comes first: the pipeline fills, and a run's first steps are not like the others


@dataclass(frozen=True)
class LinkCost:
    """What transfers cost in some steps of a run."""

    seconds: float
    """Those steps took."""
    exposed: float
    """Seconds of them that links of no latency and endless bandwidth would have saved."""
    busiest: float
    """Seconds in which the busiest link (one direction of one boundary) had something under way."""

    @property
    def hidden(self) -> float:
        """Share of the busiest link's time that computing hid; NaN where nothing was sent."""
        return min(1.0, max(0.0, 1 - self.exposed / self.busiest)) if self.busiest else float("nan")


@dataclass(frozen=True)
class Rerun:
    """Steps of a run, as they were and as the simulator does them."""

    steps: int
    start: float
    end: float
    seconds: float
    """Of all of them, simulated."""
    trace: Rows

    @property
    def took(self) -> float:
        """Seconds of all of them, measured."""
        return self.end - self.start


def rerun(trace: Rows, transfer: Callable[[int, str], float] = lambda boundary, way: 0.0) -> Rerun | None:
    """The middle steps of a run, every action as long as it was, on links of these times (boundary, "F" or "B" -> seconds).
    None where fewer than three steps have been finished."""
    steps = _finished(trace)
    if len(steps) < 3:
        return None
    spare = max(0, (len(steps) - _MOST_STEPS) // 2)
    steps = steps[spare : len(steps) - spare]
    mine = trace[(trace["step"] >= steps[0]) & (trace["step"] <= steps[-1])]
    first, last = int(steps[len(steps) // _LEAD]), int(steps[-1])
    walks, durations, begins = recorded(mine)
    run = simulate(walks, lambda s, action: durations[s][action], transfer, begins)
    updates = of_kind(mine, "U")
    start, end = (float(updates["end"][updates["step"] == step].mean()) for step in (first, last))
    return Rerun(last - first, start, end, _between(walks, run, first, last), mine)


def link_cost(trace: Rows) -> LinkCost:
    """What transfers cost in the middle steps of a run; zeros where fewer than three steps have been finished, or the trace
    has actions that wait for others which are not in it."""
    try:
        run = rerun(trace)
    except RuntimeError:
        run = None
    if run is None:
        return LinkCost(0.0, 0.0, 0.0)
    return LinkCost(run.took, max(0.0, run.took - run.seconds), _busiest(run.trace, run.start, run.end))


def mean_times(trace: Rows) -> list[dict[str, float]]:
    """Mean seconds of each kind of action of each stage, as ``recorded`` counts them, without the first quarter of the
    steps. What W takes is not in B's, also where some B left nothing to W."""
    steps = _finished(trace)
    if not steps:
        return []
    walks, durations, _ = recorded(trace[(trace["step"] >= steps[0]) & (trace["step"] <= steps[-1])])
    found = []
    for walk, took in zip(walks, durations, strict=True):
        mine = [action for action in walk if steps[len(steps) // _LEAD] < action.step <= steps[-1]]
        kinds = {action.kind for action in mine}
        each = {k: [took[action] for action in mine if action.kind == k] for k in kinds}
        means = {k: float(np.mean(seconds)) for k, seconds in each.items()}
        if "W" in means:
            means["B"] = (sum(each["B"]) + sum(each["W"])) / len(each["B"]) - means["W"]
        found.append(means)
    return found


def recorded(trace: Rows) -> tuple[list[list[Action]], list[dict[Action, float]], list[float]]:
    """Each stage's actions as they were done, the seconds that each took once its input was there (whatever the stage did
    before it and after the last one counts to it), and when each stage began."""
    walks: list[list[Action]] = []
    durations: list[dict[Action, float]] = []
    begins = []
    waits = of_kind(trace, "wait")
    for stage in np.unique(of_kind(trace, *COMPUTE)["stage"]):
        rows = of_kind(trace[trace["stage"] == stage], *COMPUTE)
        rows = rows[np.argsort(rows["start"], kind="stable")]
        came: dict[tuple[int, int, int], list[float]] = defaultdict(list)
        for wait in np.sort(waits[waits["stage"] == stage], order="end"):
            came[int(wait["direction"]), int(wait["step"]), int(wait["micro_batch"])].append(float(wait["end"]))
        walks.append([Action(KINDS[row["kind"]], int(row["step"]), int(row["micro_batch"])) for row in rows])
        before, durations_here = float(rows["start"][0]), {}
        begins.append(before)
        for action, end in zip(walks[-1], rows["end"].tolist(), strict=True):
            direction = BACKWARD if action.kind == "B" else FORWARD
            # F of a step and E after it wait under the same name, and a step may be made once more.
            ends = came[direction, action.step, action.micro_batch] if action.kind in "FEB" else []
            durations_here[action] = end - max([before, *(at for at in ends if at <= end)])
            before = end
        durations.append(durations_here)
    return walks, durations, begins


def _finished(trace: Rows) -> list[int]:
    """The most steps in a row whose update as many stages have made, each once: a loss and a new plan end them."""
    updates = of_kind(trace, "U")
    best: list[int] = []
    mine: list[int] = []
    before = 0
    updates = updates[np.argsort(updates["step"], kind="stable")]
    numbers, begins = np.unique(updates["step"], return_index=True)
    for step, of_step in zip(numbers.tolist(), np.split(updates["stage"], begins[1:]), strict=bool(len(numbers))):
        stages = np.sort(of_step)
        whole = np.array_equal(stages, np.arange(len(stages)))
        if not (whole and mine and step == mine[-1] + 1 and len(stages) == before):
            mine = []
        if whole:
            mine.append(step)
            before = len(stages)
        best = max(best, mine, key=len)
    return best


def _between(walks: list[list[Action]], run: Simulated, first: int, last: int) -> float:
    """Seconds from the updates of step ``first`` to those of ``last``, mean over stages."""
    spans = []
    for walk, times in zip(walks, run.spans, strict=True):
        ends = {action.step: end for action, (_, end) in zip(walk, times, strict=True) if action.kind == "U"}
        spans.append(ends[last] - ends[first])
    return float(np.mean(spans))


def _busiest(trace: Rows, start: float, end: float) -> float:
    """Seconds in which the busiest direction of a boundary has something under way."""
    sends = of_kind(trace, "send")
    ways = np.unique(np.stack([sends["boundary"], sends["direction"]], axis=1), axis=0)
    chosen = [sends[(sends["boundary"] == boundary) & (sends["direction"] == way)] for boundary, way in ways]
    return max((busy_seconds(rows, start, end) for rows in chosen), default=0.0)

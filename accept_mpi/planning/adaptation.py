"""When devices turn out faster or slower than they were: whether a new plan pays back what moving to it costs.

Rank 0 compares what each stage computes, as the trace has it, with what the survey says of its device, and scales the device
by the quotient (FTPipeHD, section III-D: a device's capacity). Devices that the plan leaves idle, or little to do, time a
fixed piece of arithmetic instead (``pulse``). The partitioner says what the best plan would be then. It is asked for where
it saves at least ``_WORTH`` of a step and all steps that are left save more than ``_MARGIN`` times what moving takes, and
when the old plan has lost as much as moving takes. (Nobody knows how long a device stays as it is. Who waits so long loses
twice as much as who knew, at most, and noise does not move layers to and fro.) Where a device is twice as slow or fast in
each of the newest steps, those count, from the second on, and a whole window of them is enough whatever it lost; otherwise
windows in a row count, two at least. With a fixed period (``pipeline.adapt = N``, as FTPipeHD has it) it is asked for every
N steps, from one window.
"""

import math
from collections.abc import Callable

import msgspec
import numpy as np

from accept_mpi.errors import UserError
from accept_mpi.job import Job
from accept_mpi.logs.format import KINDS, Rows
from accept_mpi.logs.observers import Observer
from accept_mpi.plan import Plan
from accept_mpi.planning.estimate import estimate, with_codecs
from accept_mpi.planning.planner import moving, plan_for
from accept_mpi.profiling.cluster_profile import ClusterProfile

WINDOW = 5
"""Steps that are looked at together, at least."""
_NEWEST = 3
_MUCH = math.log(2)
"""A change by so much in each of the newest steps is sudden: no noise."""
_FEWEST = 2
"""Steps that show a sudden change: the first may have begun before it."""
_SETTLED = math.log(1.6)
"""Two windows, or pulses, that differ by more are of before and after a change."""
_NOISE = math.log(1.15)
"""Of a stage's time: what it takes in training beside messages, and what it took when it was probed alone."""
_LIGHT = 0.5
"""Share of the time below which a stage that computes does not say how fast it would be with more to do."""
_STEEPEST = 2.0
"""Power by which a stage's time grows with its device's pulse, at most."""
_WORTH, _MARGIN = 0.15, 2.0
_BUILD_STEPS, _BUILD_SECONDS = 5.0, 2.0
"""Of its own steps, what a new plan costs besides moving: the pipeline drains and fills, caches are cold; and what planning
and building its stages takes."""


class Proposal(msgspec.Struct, frozen=True):
    """A plan that pays back its cost."""

    plan: Plan
    cluster: ClusterProfile
    """With the devices' speeds of now."""
    saves: float
    """Seconds a step."""
    cost: float
    """Seconds that moving takes."""
    text: str
    """For people."""


class Adapter(Observer):
    """Watches one deployment on rank 0: sets ``proposal``, and calls ``ask``, when another plan pays."""

    def __init__(self, job: Job, last_step: int, plan: Plan, cluster: ClusterProfile, ask: Callable[[], None]) -> None:
        """``cluster`` has its devices in the order of the deployment's ranks."""
        self._job, self._last_step = job, last_step
        self._plan, self._cluster, self._ask = plan, cluster, ask
        self.proposal: Proposal | None = None
        self._rows: list[Rows] = []
        self._after = self._first = self._looked = -1
        self._refused = 0
        self._sudden_until = 0
        """The step until which a sudden change must last to have lost what moving costs."""
        self._from: int | None = None
        self._before: dict[int, float] | None = None
        self._lost = 0.0
        """Seconds that windows in a row have lost by this plan."""
        self._seen: set[int] = set()
        """Ranks with enough to do to show how fast they are."""
        self._beats: dict[int, list[float]] = {rank: [] for rank in range(len(cluster.devices))}

    def speed(self, rank: int, factor: float) -> None:
        """A device that is idle, or mostly waits, takes this many times as long for the same as when it was measured."""
        self._beats[rank].append(factor)

    def trace(self, rows: Rows) -> None:
        """A rank's trace, up to an update: is there a whole window, or has something become much slower or faster?"""
        wanted = np.isin(rows["kind"], [KINDS.index(kind) for kind in "FBW"])
        self._rows.append(rows[wanted])
        if self.proposal:
            return
        rows = np.concatenate(self._rows)
        self._rows = [rows]
        back = rows[rows["kind"] == KINDS.index("B")]
        last = min(int(back["step"][back["stage"] == s].max(initial=-1)) for s in range(len(self._plan.stages)))
        if last <= self._looked:
            return
        self._looked = last
        if self._after < 0:
            self._after = self._first = int(rows["step"].min()) + 1  # the first steps of a plan are slow
        if isinstance(self._job.pipeline.adapt, bool):
            self.proposal = self._from_newest(rows, last)
        if not self.proposal and (count := last - self._after) >= WINDOW:  # more, where steps are shorter than traces
            factors = self.factors(_between(rows, self._after, count))
            self._after = last
            self._rows = [rows[rows["step"] > last - 2 * WINDOW]]
            self.proposal = self._from_window(factors, last, count)
            self._before = factors
        if self.proposal:
            self._ask()

    def _from_newest(self, rows: Rows, last: int) -> Proposal | None:
        """After a sudden change."""
        if last - self._first < WINDOW or last <= self._refused + WINDOW:
            return None
        each = [self.factors(_between(rows, last - k, 1)) for k in range(1, WINDOW + 1)]
        steps = max(_in_a_row(each, rank) for rank in self._beats)
        if steps < _FEWEST:
            self._sudden_until = 0
            return None
        if steps < WINDOW and last < self._sudden_until:
            return None
        # Of the newest steps alone: the first may have begun before the change, and the pipeline was still full.
        newest = min(steps - 1, _NEWEST)
        found = self.propose(self.factors(_between(rows, last - newest, newest)), self._last_step - last)
        if steps == WINDOW:
            self._refused = last
        elif not found or steps * found.saves < found.cost:
            self._sudden_until = last + (math.ceil(found.cost / found.saves) - steps if found else WINDOW)
            return None
        return found

    def _from_window(self, factors: dict[int, float], step: int, count: int) -> Proposal | None:
        every, left = self._job.pipeline.adapt, self._last_step - step
        if isinstance(every, bool):
            both = _agreed(self._before, factors) if self._before else None
            found = self.propose(both, left) if both else None
            self._lost = self._lost + count * found.saves if found else 0.0
            return found if found and self._lost > found.cost else None
        if self._from is None:
            self._from = self._first - 2  # steps that were made before this plan
        if step - self._from < every:  # a fixed period
            return None
        self._from = step
        return self.propose(factors, left)

    def factors(self, window: Rows) -> dict[int, float]:
        """How many times as long as the survey says each rank computes, in the median step; an idle one says it itself."""
        found = {rank: self._change(rank) for rank in self._beats}
        for s, stage in enumerate(self._plan.stages):
            rank = stage.leader
            device, mine = self._cluster.devices[rank], slice(stage.start, stage.stop)
            expected = float(sum(device.forward[mine]) + sum(device.backward[mine]))
            rows = window[window["stage"] == s]
            beat, found[rank] = found[rank], 1.0
            if not len(rows) or expected <= 0:
                continue
            steps, where = np.unique(rows["step"], return_inverse=True)
            took = np.bincount(where, rows["end"] - rows["start"], len(steps))
            batches = np.bincount(where, rows["kind"] == KINDS.index("F"), len(steps))
            factor = float(np.median(took / np.maximum(batches, 1))) / expected or 1.0
            span = float(window["end"].max() - window["start"].min())
            if took.sum() > _LIGHT * span:
                self._seen.add(rank)
            elif factor < 1:
                # With more to do it may not be that fast. What it says itself is about a change; believed by half otherwise.
                factor = math.sqrt(factor) if device.assumed else beat
            found[rank] = factor
        return found

    def _change(self, rank: int) -> float:
        """By its pulse, how many times as long a device takes as when the term began."""
        beats, whole = self._beats[rank], math.log(self._cluster.devices[rank].factor)
        if not beats:
            return 1.0
        newest = [math.log(beat / beats[0]) for beat in beats[-2:]]
        if max(newest) - min(newest) > _SETTLED:  # of before and after a change, or in the midst of one
            return 1.0
        first, change = math.log(beats[0]), sum(newest) / len(newest)
        # A stage may have taken 16 x where a pulse says 10 x: when the pulse is back at 1, so is the device.
        if min(abs(first), abs(whole)) > _NOISE and first * whole > 0:
            change *= min(_STEEPEST, max(1 / _STEEPEST, whole / first))
        return math.exp(change)

    def propose(self, factors: dict[int, float], steps: int) -> Proposal | None:
        """The plan for devices that take ``factors`` as long, where it pays within so many steps."""
        cluster = self._scaled(factors)
        now = estimate(cluster, self._job, self._plan)
        held = [self._plan.layers_of(rank) for rank in range(len(cluster.devices))]
        try:
            best = plan_for(cluster, self._job, held)
        except UserError:
            return None
        if best.step > (1 - _WORTH) * now.step:
            return None
        cost = moving(cluster, best.plan, held)[0] + _BUILD_STEPS * best.step + _BUILD_SECONDS
        saves = now.step - best.step
        if saves * steps < _MARGIN * cost:
            return None
        slow = max(factors, key=lambda rank: abs(math.log(factors[rank])))
        text = (
            f"rank {slow} takes {factors[slow]:.2g} x what it took: "
            f"a step of {1e3 * now.step:.0f} ms should become {1e3 * best.step:.0f} ms, moving takes about {cost:.1f} s"
        )
        return Proposal(with_codecs(best), cluster, saves, cost, text)

    def _scaled(self, factors: dict[int, float]) -> ClusterProfile:
        """The survey with devices that take ``factors`` as long. What is within the noise of what all have in common, or of
        what a device measured at first, is taken to be that: otherwise plans would wander."""
        devices, common = list(self._cluster.devices), float(np.median(list(factors.values())))
        for rank, found in factors.items():
            device = devices[rank]
            factor = common if abs(math.log(found / common)) < _NOISE else found
            if abs(math.log(device.factor * factor)) < _NOISE:
                factor = 1 / device.factor
            assumed = device.assumed and rank not in self._seen
            devices[rank] = msgspec.structs.replace(device.slowed(factor), assumed=assumed)
        return msgspec.structs.replace(self._cluster, devices=devices)


def _between(rows: Rows, after: int, count: int) -> Rows:
    """Of ``count`` steps after one."""
    return rows[(rows["step"] > after) & (rows["step"] <= after + count)]


def _in_a_row(each: list[dict[int, float]], rank: int) -> int:
    """How many of the newest steps, from the last back, a rank is much slower or faster in."""
    sudden = [abs(math.log(one[rank])) > _MUCH for one in each]
    return next((k for k, much in enumerate(sudden) if not much), len(sudden))


def _agreed(before: dict[int, float], now: dict[int, float]) -> dict[int, float] | None:
    """What two windows agree on: the smaller change, device by device; nothing where they are of different times."""
    if any(abs(math.log(now[rank] / before[rank])) > _SETTLED for rank in now):
        return None
    return {rank: min(now[rank], before[rank], key=lambda factor: abs(math.log(factor))) for rank in now}

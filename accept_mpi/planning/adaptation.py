"""Proposes a new plan when devices become faster or slower, if the plan pays back the cost of changing to it.

Rank 0 divides the time that each stage computes, according to the trace, by the time in the cluster profile, and scales the
device by the quotient (FTPipeHD, section III-D: a device's capacity). Devices that the plan leaves idle or with little to do
time a fixed piece of arithmetic instead (``device.speed_check``). The planner then finds the best plan for the scaled
devices. It is proposed if it saves at least ``_MIN_SAVING`` of a step, the remaining steps save at least ``_MARGIN`` times
the cost of the change, and the old plan has already lost as much as the change costs. Nobody knows how long a device stays
as it is: waiting that long costs at most twice as much as knowing would, and noise does not move layers to and fro.

If a device is more than twice as slow or fast in each of the newest steps, those steps are the evidence: two of them
suffice, and a whole window is enough whatever it lost. Otherwise consecutive windows are, at least two. With a fixed period
(``pipeline.adapt = N``, as in FTPipeHD) one window is enough, every N steps, whatever it lost.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

from accept_mpi.errors import UserError
from accept_mpi.job import Job
from accept_mpi.logs.format import KINDS, Rows, number_of
from accept_mpi.logs.observers import Observer
from accept_mpi.plan import Plan
from accept_mpi.planning.estimate import estimate, fits, with_codecs
from accept_mpi.planning.planner import moving, plan_for
from accept_mpi.profiling.cluster_profile import ClusterProfile

WINDOW = 5
"""Fewest steps that are judged together."""
_NEWEST = 3
"""Most steps of a sudden change from which the new speeds are taken."""
_MUCH = math.log(2)
"""Logarithm of a factor: a larger change in each of the newest steps is sudden, not noise."""
_FEWEST = 2
"""Fewest steps that show a sudden change, since the first of them may have begun before it."""
_SAME_STATE = math.log(1.6)
"""Logarithm of a factor: two windows, or two speed checks, that differ by more lie before and after a change."""
_NOISE = math.log(1.15)
"""Logarithm of a factor: smaller changes are noise, such as that of a stage timed alone and then training with messages."""
_STILL = math.log(1.05)
"""Logarithm of a factor: a search that has found nothing is not made again until a device has changed by more since."""
_LIGHT = 0.5
"""A stage that computes for a smaller share of the time does not show how fast it would be with more to do."""
_STEEPEST = 2.0
"""Largest exponent with which a stage's time grows with the time of its device's speed check."""
_MIN_SAVING, _MARGIN = 0.15, 2.0
"""A new plan must save this share of a step, and in all remaining steps this multiple of its cost."""
_NEARLY = 1.05
"""A new deal of the same groups is preferred if it is at most this factor slower than the best plan."""
_BUILD_STEPS, _BUILD_SECONDS = 5.0, 2.0
"""Cost of a new plan in addition to moving: so many of its own steps, since the pipeline drains and fills and caches are
cold, and the seconds that planning and building its stages take."""


class Proposal(msgspec.Struct, frozen=True):
    """A plan that pays back its cost."""

    plan: Plan
    cluster: ClusterProfile
    """The cluster profile with the present speeds of the devices."""
    saves: float
    """Seconds per step."""
    cost: float
    """Seconds that changing to it takes."""
    text: str
    """The reason, for the log and the terminal."""


class Adapter(Observer):
    """Watches one deployment on rank 0; when another plan pays, sets ``proposal`` and calls ``ask``, once."""

    def __init__(
        self,
        job: Job,
        last_step: int,
        plan: Plan,
        cluster: ClusterProfile,
        ask: Callable[[], None],
        names: Sequence[int] | None = None,
    ) -> None:
        """``cluster``: its devices are in the order of the deployment's ranks. ``last_step``: the last step of the run.
        ``names``: the numbers of ranks 0, 1, ... in the trace, if they differ."""
        self._names = names
        self._job, self._last_step = job, last_step
        self._plan, self._cluster, self._ask = plan, cluster, ask
        self.proposal: Proposal | None = None
        self._rows: list[Rows] = []
        self._after = self._first = self._looked = -1
        self._refused = 0
        self._sudden_until = 0
        """Step until which a sudden change must last before it has lost as much as a new plan costs."""
        self._from: int | None = None
        self._before: dict[int, float] | None = None
        self._in_vain: ClusterProfile | None = None
        """Present speeds with which no plan paid."""
        self._lost = 0.0
        """Seconds that the present plan has lost in consecutive windows."""
        self._seen: set[int] = set()
        """Ranks that had enough to do to show how fast they are."""
        self._beats: dict[int, list[float]] = {rank: [] for rank in range(len(cluster.devices))}

    def speed(self, rank: int, factor: float) -> None:
        """Take the speed check of a rank that is idle or mostly waits: the factor by which its device has become slower."""
        self._beats[rank].append(factor)

    def trace(self, rows: Rows) -> None:
        """Take a rank's trace rows. Looks for a better plan when all stages have completed a window, or when a device is
        suddenly much slower or faster."""
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
        if not self.proposal and (count := last - self._after) >= WINDOW:  # more if a trace holds several steps
            factors = self.factors(_between(rows, self._after, count))
            self._after = last
            self._rows = [rows[rows["step"] > last - 2 * WINDOW]]
            self.proposal = self._from_window(factors, last, count)
            self._before = factors
        if self.proposal:
            self._ask()

    def _from_newest(self, rows: Rows, last: int) -> Proposal | None:
        """A proposal after a sudden change, from the newest steps; None if no plan pays yet."""
        if last - self._first < WINDOW or last <= self._refused + WINDOW:
            return None
        each = [self.factors(_between(rows, last - k, 1)) for k in range(1, WINDOW + 1)]
        steps = max(_in_a_row(each, rank) for rank in self._beats)
        if steps < _FEWEST:
            self._sudden_until = 0
            return None
        if steps < WINDOW and last < self._sudden_until:
            return None
        # Without the first of these steps: it may have begun before the change, and the pipeline was still full.
        newest = min(steps - 1, _NEWEST)
        found = self.propose(self.factors(_between(rows, last - newest, newest)), self._last_step - last)
        if steps == WINDOW:
            self._refused = last
        elif not found or steps * found.saves < found.cost:
            self._sudden_until = last + (math.ceil(found.cost / found.saves) - steps if found else WINDOW)
            return None
        return found

    def _from_window(self, factors: dict[int, float], step: int, count: int) -> Proposal | None:
        """A proposal from the factors of a window of ``count`` steps that ends with ``step``; None if no plan pays yet."""
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
        """For each rank, the factor by which it is slower than in the cluster profile, in the median step of ``window``. If
        it computes nothing, its speed checks say it."""
        found = {rank: self._change(rank) for rank in self._beats}
        for s, rank in self._plan.holders:
            stage = self._plan.stages[s]
            device = self._cluster.devices[rank]
            expected = sum(device.passes(stage, rank))
            rows = window[window["stage"] == s]
            if len(stage.ranks) > 1:
                rows = rows[rows["rank"] == number_of(rank, self._names)]
            if not len(rows) or expected <= 0:  # a far slower member of a group may get no micro-batches
                continue
            steps, where = np.unique(rows["step"], return_inverse=True)
            took = np.bincount(where, rows["end"] - rows["start"], len(steps))
            batches = np.bincount(where, rows["kind"] == KINDS.index("F"), len(steps))
            factor = float(np.median(took / np.maximum(batches, 1))) / expected or 1.0
            span = float(window["end"].max() - window["start"].min())
            if took.sum() > _LIGHT * span:
                self._seen.add(rank)
            elif factor < 1:
                # With more to do it may not be that fast. Speed checks show only changes since the measurement; for a device
                # without one, half of the gain (of its logarithm) is believed.
                factor = math.sqrt(factor) if device.assumed else found[rank]
            found[rank] = factor
        return found

    def _change(self, rank: int) -> float:
        """Factor by which a device is slower than when the deployment began, from its speed checks; 1 if they disagree."""
        beats, whole = self._beats[rank], math.log(self._cluster.devices[rank].factor)
        if not beats:
            return 1.0
        newest = [math.log(beat / beats[0]) for beat in beats[-2:]]
        if max(newest) - min(newest) > _SAME_STATE:  # a change lies between or within them
            return 1.0
        first, change = math.log(beats[0]), sum(newest) / len(newest)
        # A stage may have become 16 x slower where the check says 10 x. When the check is back at 1, so is the device.
        if min(abs(first), abs(whole)) > _NOISE and first * whole > 0:
            change *= min(_STEEPEST, max(1 / _STEEPEST, whole / first))
        return math.exp(change)

    def propose(self, factors: dict[int, float], steps: int) -> Proposal | None:
        """The best plan for devices that take ``factors`` times as long, if it pays within ``steps`` steps; else None."""
        cluster = self._scaled(factors)
        if self._in_vain is not None and _alike(cluster, self._in_vain):
            return None  # fewer steps are left than then; a search takes this thread seconds for many devices
        found = self._searched(cluster, factors, steps)
        self._in_vain = None if found else cluster
        return found

    def _searched(self, cluster: ClusterProfile, factors: dict[int, float], steps: int) -> Proposal | None:
        now = estimate(cluster, self._job, self._plan)
        held = [self._plan.layers_of(rank) for rank in range(len(cluster.devices))]
        try:
            best = plan_for(cluster, self._job, held)
        except UserError:
            return None
        # Another deal of the same groups moves nothing, but one to unlike members has more micro-batches in flight.
        dealt = estimate(cluster, self._job, redealt(self._plan, factors)) if self._plan.hybrid else None
        if dealt and fits(cluster, dealt) and dealt.expected <= _NEARLY * best.expected:
            best = dealt
        if best.step > (1 - _MIN_SAVING) * now.step:
            return None
        cost = moving(cluster, best.plan, held)[0] + _BUILD_STEPS * best.step + _BUILD_SECONDS
        saves = now.step - best.step
        if saves * steps < _MARGIN * cost:
            return None
        slow = max(factors, key=lambda rank: abs(math.log(factors[rank])))
        text = (
            f"rank {number_of(slow, self._names)} takes {factors[slow]:.2g} x what it took: "
            f"a step of {1e3 * now.step:.0f} ms should become {1e3 * best.step:.0f} ms, moving takes about {cost:.1f} s"
        )
        return Proposal(with_codecs(best), cluster, saves, cost, text)

    def _scaled(self, factors: dict[int, float]) -> ClusterProfile:
        """The cluster profile with devices that take ``factors`` times as long. A factor within the noise of the median of
        all, or of what the device first measured, is replaced by that; otherwise plans would wander."""
        devices, common = list(self._cluster.devices), float(np.median(list(factors.values())))
        for rank, found in factors.items():
            device = devices[rank]
            factor = common if abs(math.log(found / common)) < _NOISE else found
            if abs(math.log(device.factor * factor)) < _NOISE:
                factor = 1 / device.factor
            assumed = device.assumed and rank not in self._seen
            devices[rank] = msgspec.structs.replace(device.slowed(factor), assumed=assumed)
        return msgspec.structs.replace(self._cluster, devices=devices)


def _alike(one: ClusterProfile, other: ClusterProfile) -> bool:
    """True if a search in vain with one profile is in vain with the other, too."""
    pairs = [*zip(one.devices, other.devices, strict=True)]
    return all(a.assumed == b.assumed and abs(math.log(a.factor / b.factor)) <= _STILL for a, b in pairs)


def redealt(plan: Plan, factors: Mapping[int, float]) -> Plan:
    """The same plan for ranks that take ``factors`` times as long: only the deals of its groups change."""
    stages = [
        msgspec.structs.replace(
            stage,
            paces=tuple(
                pace * factors[rank]
                for rank, pace in zip(stage.ranks, stage.paces or (1.0,) * len(stage.ranks), strict=True)
            ),
        )
        if len(stage.ranks) > 1
        else stage
        for stage in plan.stages
    ]
    return msgspec.structs.replace(plan, stages=tuple(stages))


def _between(rows: Rows, after: int, count: int) -> Rows:
    """The rows of the ``count`` steps after step ``after``."""
    return rows[(rows["step"] > after) & (rows["step"] <= after + count)]


def _in_a_row(each: list[dict[int, float]], rank: int) -> int:
    """Number of newest steps in a row in which a rank is much slower or faster. ``each``: factors by step, newest first."""
    sudden = [abs(math.log(one[rank])) > _MUCH for one in each]
    return next((k for k, much in enumerate(sudden) if not much), len(sudden))


def _agreed(before: dict[int, float], now: dict[int, float]) -> dict[int, float] | None:
    """The smaller change of two windows for each rank; None if something changed between the windows."""
    if any(abs(math.log(now[rank] / before[rank])) > _SAME_STATE for rank in now):
        return None
    return {rank: min(now[rank], before[rank], key=lambda factor: abs(math.log(factor))) for rank in now}

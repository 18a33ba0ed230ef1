"""Finds where to cut a model, on which devices and in which order: dynamic programming over (layers placed, devices used).

The cost of a plan is FTPipeHD's recursion, reversed and extended by us. In the steady state a micro-batch takes as long as
the slowest stage (coding included), the slowest boundary or the busiest device's own link, since all of them overlap. A
synchronous schedule also fills and drains, which adds a share of every other stage's time and of every transfer. A device's
memory is a hard limit; a device may stay idle.

The search decides for a cap whether any plan stays below it (``kernels.search``), and bisects the cap. It is exact for all
orders and subsets of up to ``MOST_EXACT`` devices, and for a given order of up to ``MOST_ORDERED``; for more devices it
follows a beam.
"""

from collections.abc import Callable
from dataclasses import replace
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from accept_mpi.kernels.cache import compiled
from accept_mpi.planning.problem import F64, NoPlan, Problem, Solution, clipped, cost, lower_bound, prefix_sums

MOST_EXACT, MOST_ORDERED = 10, 32
MOST_FEW = 6  # up to this many devices the exact search is so fast that a beam saves no time
BEAM = 24  # points that a beam keeps per number of stages
_ROOM = 160  # points that a table has room for at first, per set of devices
_NOTHING = 1e-12  # seconds below which no bisection goes
CLOSE = 1e-3  # relative distance of the bounds at which the bisection ends
_GUESSES = (1.05, 1.1, 1.2, 1.35, 1.6, 2, 3, 5)  # first caps, as multiples of the lower bound
_NEXT = 1e-9  # relative distance to the next bottleneck that is tried after one
_SWEEPS = 60  # most caps tried for a synchronous schedule
_SWEEPS_IF_SHORT = 20  # most of them where plans are refined afterwards: the rest gain 0.2 %
_LONG = 1e6  # (devices x layers)^2 x codecs, above which a synchronous schedule's step is found to ``CLOSE``

_Below = Callable[[float], "Solution | None"]
"""A search for a solution whose bottleneck is at most a cap."""


def _floors(problem: Problem, ordered: bool) -> F64:
    """``lower_bound`` for layers 0..i-1 on the devices that are not used yet: (sets of used devices, L+1), or, with
    ``ordered``, (first used device, L+1), where only the devices before that one are left."""
    n, seconds = problem.devices, problem.layer_seconds
    speed = 1 / np.maximum(clipped(seconds).sum(axis=1), 1e-300)
    weighted = speed[:, None] * seconds
    if ordered:
        least = np.concatenate([np.full((1, problem.layers), np.inf), np.minimum.accumulate(weighted[:-1], axis=0)])
        total = np.concatenate([[0.0], speed[:-1].cumsum()])
    else:  # by set of devices that are left, and then turned round
        least, total = np.full((1, problem.layers), np.inf), np.zeros(1)
        for device in range(n):
            least = np.concatenate([least, np.minimum(least, weighted[device])])
            total = np.concatenate([total, total + speed[device]])
        least, total = least[::-1], total[::-1]
    floors = prefix_sums(least) / np.maximum(total, 1e-300)[:, None]
    return floors * (1 - 1e-12)


def solve(problem: Problem, ordered: bool = False) -> Solution:
    """The solution with the shortest step. ``ordered``: devices keep their order (some may stay idle).

    For synchronous schedules, order and subset of the devices are those of the least bottleneck; cuts and codecs (of up to
    ``MOST_ORDERED`` stages) are those of the shortest step in that order.

    Raises NoPlan if memory does not suffice, ValueError if a time is not finite, since the search would not end.
    """
    if not np.isfinite(problem.layer_seconds).all():
        raise ValueError("layer_seconds: a time is missing or infinite")
    exact = problem.devices <= (MOST_ORDERED if ordered else MOST_EXACT)
    few = exact and problem.devices <= MOST_FEW
    find = _Exact(problem, ordered) if exact else None
    beam = None if few else _Beam(problem, ordered)
    searches = [search.below for search in (beam, find) if search is not None]
    best = _least_bottleneck(problem, searches[0], searches[-1], exact)
    order = tuple(range(problem.devices)) if ordered else best.devices
    if problem.fill and len(order) <= MOST_ORDERED:
        low = cost(problem, best).bottleneck * (1 - _NEXT) if exact else lower_bound(problem)
        best = _synchronous(problem, order, best, low)
    return best


def improve(problem: Problem, most: float, close: float = CLOSE) -> Solution | None:
    """The solution with the least bottleneck for few devices in any order (``MOST_EXACT``), or one within ``close`` of it;
    None if it is above ``most``."""
    find = _Exact(problem, False) if problem.devices <= MOST_EXACT else _Beam(problem, False)
    first = find.below(most)
    exact = problem.devices <= MOST_EXACT and close <= CLOSE
    return None if first is None else _bisected(problem, find.below, first, exact, close)


def _least_bottleneck(problem: Problem, guess: _Below, below: _Below, exact: bool) -> Solution:
    """The solution with the least bottleneck, by bisection. ``guess`` may miss solutions that exist; so may ``below`` unless
    ``exact``. Raises NoPlan if there is none."""
    low = max(lower_bound(problem), _NOTHING)
    guesses = (guess(low * ratio) for ratio in _GUESSES)
    best = next((plan for plan in guesses if plan is not None), None) or below(np.inf)
    if best is None:
        raise NoPlan(_why(problem))
    return _bisected(problem, below, best, exact)


def _bisected(problem: Problem, below: _Below, best: Solution, exact: bool, close: float = CLOSE) -> Solution:
    """The solution with the least bottleneck, by bisection from ``best`` down; unless ``exact``, one within ``close`` of
    it."""
    low = max(lower_bound(problem), _NOTHING)
    high = cost(problem, best).bottleneck
    while high > max(low * (1 + close), 2 * _NOTHING):
        middle = float(np.sqrt(low * high)) if high > 4 * low else (low + high) / 2
        found = below(middle)
        if found is None:
            low = middle
        else:
            best, high = found, min(middle, cost(problem, found).bottleneck)
    # Bottlenecks are discrete: the few that are left below the best one are soon tried.
    while exact and (found := below(high * (1 - _NEXT))) is not None:
        reached = cost(problem, found).bottleneck
        if reached >= high:  # the kernel's prefix sums and the sums in ``cost`` differ in their last digits
            break
        best, high = found, reached
    return best


def _synchronous(problem: Problem, order: tuple[int, ...], best: Solution, low: float) -> Solution:
    """The solution with the shortest step for devices in this order, for a long search within ``CLOSE`` of it: of those
    that fill and drain fastest below caps on the bottleneck, which halve the range that could hold a better one. ``best``:
    a solution that is known; ``low``: no solution has a bottleneck below it."""
    mine, least = problem.take(order), cost(problem, best).step
    find, many = _Exact(mine, True), max(problem.micro_batches - problem.fill, 1e-12)
    closer = CLOSE if (mine.devices * mine.layers) ** 2 * len(mine.bytes_per_value) > _LONG else _NEXT
    filling = problem.fill * float(mine.layer_seconds.min(axis=0).sum())
    # Ranges of bottlenecks: the step of any plan in it is at least the first; low; high; filling takes at least the last.
    ranges = [(0.0, low, np.inf, filling)]
    for _ in range(_SWEEPS_IF_SHORT if problem.is_short else _SWEEPS):
        if not ranges:
            break
        _, low, high, filling = heappop(ranges)
        # Filling takes at least ``filling``, so that only with a bottleneck below the next a step is shorter.
        most = min(high, (least * (1 - closer) - filling) / many)
        if most < low:
            break
        cap = (low + most) / 2 if low * (1 + CLOSE) < most and high < np.inf else most
        if cap < most:
            heappush(ranges, (many * cap + filling, cap, most, filling))
        # With what fills for longer no step in this range is shorter.
        if (plan := find.below(cap, problem.fill, least * (1 - closer) - many * low)) is not None:
            reached = cost(mine, plan)
            if reached.step < least:
                least, best = reached.step, replace(plan, devices=tuple(order[n] for n in plan.devices))
            filling = reached.step - many * reached.bottleneck
            heappush(ranges, (many * low + filling, low, reached.bottleneck * (1 - _NEXT), filling))
    return best


def _why(problem: Problem) -> str:
    """Explain in a sentence what does not fit, and what would help."""
    whole, held = float((problem.state + problem.fixed_bytes).sum()), float(problem.saved_bytes.sum())
    room = float(problem.capacity.sum())
    training = problem.state_copies[0] * problem.state + problem.alive[0] * problem.saved_bytes + problem.fixed_bytes
    alone = np.maximum(training, problem.least_bytes)
    layer = int(np.argmax(alone))
    needs = float(alone[layer])
    most = float(problem.capacity.max())
    if needs > most:
        return (
            f"layer {layer} alone needs {needs / 2**20:.1f} MiB and the largest device has {most / 2**20:.1f} MiB; "
            "smaller micro-batches or another device would help"
        )
    together = " (layers that share what is trained stay together)" if problem.uncuttable else ""
    return (
        f"no cuts fit{together}: the model takes {whole / 2**20:.1f} MiB of weights, gradients and optimizer state and "
        f"{held / 2**20:.1f} MiB of activations per micro-batch, times those in flight, and all devices have "
        f"{room / 2**20:.1f} MiB together; smaller micro-batches or another device would help"
    )


class _Kernel:
    """A problem in the form that the kernels take."""

    def __init__(self, problem: Problem, ordered: bool) -> None:
        self.problem, self.ordered = problem, ordered
        n = problem.devices
        extra = problem.extra_seconds if problem.extra_seconds is not None else np.zeros((n, 1, 1))
        messages = problem.messages
        if messages is None:
            messages = np.zeros((n, problem.layers + 1, len(problem.bytes_per_value)))
        other = problem.other.copy()
        other[list(problem.uncuttable)] = np.inf
        shared = (
            prefix_sums(problem.layer_seconds), extra, problem.values, other, problem.rate, problem.host_link,
            problem.bytes_per_value, messages, prefix_sums(problem.state), prefix_sums(problem.saved_bytes),
            problem.capacity, problem.in_flight, problem.alive, problem.state_copies, prefix_sums(problem.fixed_bytes),
            prefix_sums(problem.least_bytes),
        )  # fmt: skip
        self.shared = tuple(np.ascontiguousarray(array, np.float64) for array in shared)


class _Exact(_Kernel):
    """Exact search, which keeps every point that could lead to the best solution."""

    def __init__(self, problem: Problem, ordered: bool) -> None:
        super().__init__(problem, ordered)
        n = problem.devices
        self._keys = n * (n + 1) + n + 1 if ordered else (1 << n) * n
        self._room = 4 * _ROOM if ordered else _ROOM
        self._floor = _floors(problem, ordered)
        # (N, N): the best rate from one device to another by way of a third
        around = np.minimum(problem.rate[:, :, None], problem.rate[None, :, :]).max(axis=1)
        self._relays = bool((around > problem.rate * (1 + 1e-9)).any())

    def below(self, cap: float, fill: float = 0.0, most: float = np.inf) -> Solution | None:
        """A solution whose bottleneck is at most ``cap``, None if there is none; with ``fill``, the one that fills and
        drains fastest, in less than ``most`` seconds."""
        rest = self._rest(cap, fill) if fill and self.ordered else np.zeros((1, 1))
        while True:
            table = np.empty((self._keys, self._room, 4), np.int32)
            sums, counts = np.empty((self._keys, self._room)), np.empty(self._keys, np.int32)
            end = np.zeros(3, np.int32)
            found = compiled("search").reach(
                *self.shared, cap, fill, most, self.ordered, self._relays, self._floor, rest, table, sums, counts, end
            )
            if found >= 0:
                break
            self._room *= 4
        return self._follow(table, end) if found else None

    def _rest(self, cap: float, fill: float) -> F64:
        """Lower bound of the seconds in which layers 0..i-1 fill and drain on the devices before each one (N, L+1), if none
        of these takes longer than ``cap`` for a micro-batch: the fastest take as much as they can."""
        seconds = self.problem.layer_seconds
        each = np.maximum(clipped(seconds).mean(axis=0), 1e-300)
        paces = np.maximum((seconds / each).min(axis=1), 1e-300)  # least seconds of a device for each second of that
        cap *= 1 + _NEXT  # sums differ in their last digits
        rest = np.full((len(seconds), len(each) + 1), np.inf)
        rest[:, 0] = 0.0
        for first in range(1, len(rest)):
            done = np.concatenate([[0.0], (cap / np.sort(paces[:first])).cumsum()])
            rest[first] = np.interp(prefix_sums(each), done, cap * np.arange(first + 1.0), right=np.inf)
        return fill * rest * (1 - 2 * _NEXT)

    def _follow(self, table: npt.NDArray[np.int32], end: npt.NDArray[np.int32]) -> Solution:
        """The solution that ends at the point ``end`` (its key, its place and its device), read back from the table."""
        key, point, device = (int(x) for x in end[:3])
        n = self.problem.devices
        devices, edges, codecs = [device], [0], []
        while key >= 0:
            layer, codec, key_before, point_before = (int(x) for x in table[key, point])
            devices.append(key // (n + 1) if self.ordered else key % n)
            edges.append(layer)
            codecs.append(codec)
            key, point = key_before, point_before
        return Solution(tuple(devices), (*edges, self.problem.layers), tuple(codecs))


class _Beam(_Kernel):
    """Beam search, which follows only the most promising points."""

    def __init__(self, problem: Problem, ordered: bool) -> None:
        super().__init__(problem, ordered)
        seconds = clipped(problem.layer_seconds)
        self._work = np.ascontiguousarray(prefix_sums(seconds.mean(axis=0)))
        self._speed = self._work[-1] / seconds.sum(axis=1)

    def below(self, cap: float) -> Solution | None:
        """A solution whose bottleneck is at most ``cap``, None if the beam meets none."""
        n = self.problem.devices
        used = np.zeros((n + 1, BEAM, -(-n // 64)), np.uint64)
        table, scores = np.empty((n + 1, BEAM, 4), np.int32), np.empty((n + 1, BEAM))
        end = np.zeros(3, np.int32)
        find = compiled("beam").beam
        if not find(*self.shared, cap, self.ordered, self._work, self._speed, used, table, scores, end):
            return None
        level, point, device = (int(x) for x in end)
        devices, edges, codecs = [device], [0], []
        while level > 0:
            layer, codec, first, before = (int(x) for x in table[level, point])
            devices.append(first)
            edges.append(layer)
            codecs.append(codec)
            level, point = level - 1, before
        return Solution(tuple(devices), (*edges, self.problem.layers), tuple(codecs))

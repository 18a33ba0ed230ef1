"""Where to cut a model, on which devices, in which order: dynamic programming over (layers placed, devices used).

The cost of a plan (FTPipeHD's recursion, turned around and made wider; ours): in the steady state a micro-batch takes what
the slowest stage computes (coding included), or the slowest boundary carries, or the busiest device's own link does: all
of them overlap. A synchronous schedule also fills and drains, which adds a share of every other stage's time and of every
transfer. A device's memory is a hard limit; a device may stay idle.

The search decides for a cap whether any plan stays below it (``kernels.search``), and bisects the cap. Exact for all orders
and subsets of up to ``MOST_EXACT`` devices and for a given order of up to ``MOST_ORDERED``; a beam for more.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from accept_mpi.kernels.options import compiled
from accept_mpi.planning.problem import F64, NoPlan, Problem, Solution, clipped, cost, lower_bound, prefix_sums

MOST_EXACT, MOST_ORDERED = 10, 32
MOST_FEW = 6  # devices for which a beam saves nothing
BEAM = 24
_ROOM = 160  # points kept of a set of devices
_NOTHING = 1e-12  # seconds that no bisection goes below
_CLOSE = 1e-3  # where the bisection ends, as a ratio
_GUESSES = (1.05, 1.1, 1.2, 1.35, 1.6, 2, 3, 5)  # times the lower bound, for the beam to begin with
_SWEEPS = 60  # caps tried for a synchronous schedule

_Below = Callable[[float], "Solution | None"]


def _floors(problem: Problem, ordered: bool) -> F64:
    """``lower_bound`` of layers 0..i-1 on the devices that are left when those of a set are used (or, in order, all from one
    on): (sets or devices, L+1)."""
    n, seconds = problem.devices, problem.layer_seconds
    speed = 1 / np.maximum(clipped(seconds).sum(axis=1), 1e-300)
    weighted = speed[:, None] * seconds
    floors = np.full((n if ordered else 1 << n, problem.layers + 1), np.inf)
    floors[:, 0] = 0.0
    for used in range(len(floors)):
        left = np.arange(n) < used if ordered else (used >> np.arange(n)) & 1 == 0
        if left.any():
            floors[used] = prefix_sums(weighted[left].min(axis=0)) / speed[left].sum()
    return floors * (1 - 1e-12)


def solve(problem: Problem, ordered: bool = False) -> Solution:
    """The plan with the shortest step. ``ordered``: devices keep their order (some may stay idle).

    For synchronous schedules order and subset are those of the least bottleneck, and cuts and codecs (of up to
    ``MOST_ORDERED`` stages) those of the shortest step in that order.

    Raises NoPlan where memory does not suffice, ValueError where a time is not a number (no search would end).
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
        best = min((best, _synchronous(problem, order)), key=lambda plan: cost(problem, plan).step)
    return best


def _least_bottleneck(problem: Problem, guess: _Below, below: _Below, exact: bool) -> Solution:
    """``guess`` may miss plans that there are, ``below`` not if ``exact``."""
    low = max(lower_bound(problem), _NOTHING)
    guesses = (guess(low * ratio) for ratio in _GUESSES)
    best = next((plan for plan in guesses if plan is not None), None) or below(np.inf)
    if best is None:
        raise NoPlan(_why(problem))
    high = cost(problem, best).bottleneck
    while high > max(low * (1 + _CLOSE), 2 * _NOTHING):
        middle = float(np.sqrt(low * high)) if high > 4 * low else (low + high) / 2
        found = below(middle)
        if found is None:
            low = middle
        else:
            best, high = found, min(middle, cost(problem, found).bottleneck)
    # Plans differ by steps: what is left below the best is soon tried.
    while exact and (found := below(high * (1 - 1e-9))) is not None:
        reached = cost(problem, found).bottleneck
        if reached >= high:  # the kernel's sums of prefixes and these sums differ in the last digits
            break
        best, high = found, reached
    return best


def _synchronous(problem: Problem, order: tuple[int, ...]) -> Solution:
    """The least step over cuts and codecs with devices in this order: for lower and lower caps on the bottleneck, the plan
    that fills and drains fastest."""
    mine = problem.take(order)
    find, cap, plans = _Exact(mine, True), np.inf, []
    floor = lower_bound(mine)
    for _ in range(_SWEEPS):
        plan = find.below(cap, problem.fill)
        if plan is None:
            break
        plans.append(plan)
        reached = cost(mine, plan).bottleneck
        best = min(cost(mine, p).step for p in plans)
        step = cost(mine, plan).step
        if step - (problem.micro_batches - problem.fill) * (reached - floor) >= best:
            break  # the sum only grows from here, and the bottleneck cannot fall further
        cap = reached * (1 - 1e-9) if len(plans) < _SWEEPS // 2 else reached * 0.98
    best_plan = min(plans, key=lambda plan: cost(mine, plan).step)
    return replace(best_plan, devices=tuple(order[n] for n in best_plan.devices))


def _why(problem: Problem) -> str:
    """What does not fit, and what would."""
    whole, held = float(problem.state.sum()), float(problem.saved_bytes.sum())
    room = float(problem.capacity.sum())
    alone = problem.state_copies[0] * problem.state + problem.in_flight[0] * problem.saved_bytes
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
        f"{held / 2**20:.1f} MiB of activations a micro-batch, times those in flight, and all devices have "
        f"{room / 2**20:.1f} MiB together; smaller micro-batches or another device would help"
    )


class _Kernel:
    """A problem as the kernels take it."""

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
            problem.capacity, problem.in_flight, problem.state_copies,
        )  # fmt: skip
        self.shared = tuple(np.ascontiguousarray(array, np.float64) for array in shared)


class _Exact(_Kernel):
    """All points that are worth keeping."""

    def __init__(self, problem: Problem, ordered: bool) -> None:
        super().__init__(problem, ordered)
        n = problem.devices
        self._keys = n * (n + 1) + n + 1 if ordered else (1 << n) * n
        self._room = 4 * _ROOM if ordered else _ROOM
        self._floor = _floors(problem, ordered)
        # from a to b by way of c, for all a, c, b
        around = np.minimum(problem.rate[:, :, None], problem.rate[None, :, :]).max(axis=1)
        self._relays = bool((around > problem.rate * (1 + 1e-9)).any())

    def below(self, cap: float, fill: float = 0.0) -> Solution | None:
        """A plan whose bottleneck is at most ``cap``; with ``fill`` the one that fills and drains fastest."""
        while True:
            table = np.empty((self._keys, self._room, 4), np.int32)
            sums, counts = np.empty((self._keys, self._room)), np.empty(self._keys, np.int32)
            end = np.zeros(3, np.int32)
            found = compiled("accept_mpi.kernels.search").reach(
                *self.shared, cap, fill, self.ordered, self._relays, self._floor, table, sums, counts, end
            )
            if found >= 0:
                break
            self._room *= 4
        return self._follow(table, end) if found else None

    def _follow(self, table: npt.NDArray[np.int32], end: npt.NDArray[np.int32]) -> Solution:
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
    """The most promising points only."""

    def __init__(self, problem: Problem, ordered: bool) -> None:
        super().__init__(problem, ordered)
        seconds = clipped(problem.layer_seconds)
        self._work = np.ascontiguousarray(prefix_sums(seconds.mean(axis=0)))
        self._speed = self._work[-1] / seconds.sum(axis=1)

    def below(self, cap: float) -> Solution | None:
        """A plan whose bottleneck is at most ``cap``, if the beam meets one."""
        n = self.problem.devices
        used = np.zeros((n + 1, BEAM, -(-n // 64)), np.uint64)
        table, scores = np.empty((n + 1, BEAM, 4), np.int32), np.empty((n + 1, BEAM))
        end = np.zeros(3, np.int32)
        find = compiled("accept_mpi.kernels.beam").beam
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

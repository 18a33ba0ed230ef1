"""Evens out the stages of a plan that are not at its bottleneck."""

import itertools
from collections.abc import Sequence

import numpy as np

from accept_mpi.planning.problem import Cost, Problem, Solution, cost

_MOST_RUNS = 10_000_000  # runs of layers on devices that are listed
_POWER = 8  # exponent of the norm that is minimized
_HARDLY = 1.02  # balancing may lengthen the bottleneck and the step by this factor
_HELP = 0.97  # idle devices are used only if the norm falls below this share


def balance(problem: Problem, plan: Solution) -> Solution:
    """A plan whose bottleneck and step are at most 2 % longer, and whose other stages are as short as possible (our method).

    One stage or link often decides alone. The search stops there and leaves other stages as slow as that one although they
    need not be; then any of them that takes longer than foreseen delays all. Idle devices are used if that makes the norm of
    the stages' times (``_norm``) 3 % smaller.

    Devices keep their order; idle ones come last unless the order is the problem's own. Returns ``plan`` itself if none is
    better, or if there are too many runs of layers to list.
    """
    if problem.devices * (problem.layers + 1) ** 2 > _MOST_RUNS:
        return plan
    everyone = range(problem.devices)
    idle = sorted(set(everyone) - set(plan.devices))
    in_order = list(plan.devices) == sorted(plan.devices)
    whole = cost(problem, plan)
    if not whole.bottleneck:
        return plan  # nothing takes any time
    cap, longest = whole.bottleneck * _HARDLY * (1 + 1e-9), whole.step * _HARDLY * (1 + 1e-9)
    apart = problem.rate[~np.eye(problem.devices, dtype=bool)] if problem.devices > 1 else np.array([np.inf])
    rates = [min(float(of(apart)), float(of(problem.host_link))) for of in (np.median, np.min)]
    orders = (plan.devices, tuple(everyone) if in_order else (*plan.devices, *idle))
    for order, rate in itertools.product(orders, rates):
        found = _evenly(problem, order, cap, rate)
        if found is None:
            continue
        reached, worth = cost(problem, found), 1.0 if len(found.devices) <= len(plan.devices) else _HELP
        as_good = reached.fits and reached.bottleneck <= cap and reached.step <= longest
        if as_good and _norm(reached) < worth * _norm(cost(problem, plan)):
            plan = found
    return plan


def _norm(reached: Cost) -> float:
    """Norm of the stages' seconds: close to the longest stage's, and smaller the fewer stages are close to that."""
    return float((np.array(reached.stages) ** _POWER).sum() ** (1 / _POWER))


def _evenly(problem: Problem, order: Sequence[int], cap: float, rate: float) -> Solution | None:
    """The solution with the least norm whose bottleneck is below ``cap``, for devices in this order, any of which may stay
    idle; None if there is none. All links are assumed to carry ``rate`` bytes/s, so the caller must check the result."""
    n, layers = problem.devices, problem.layers
    seconds = problem.messages
    if seconds is None:
        seconds = np.zeros((n, layers + 1, len(problem.bytes_per_value)))
    # In front of each layer, take the codec that costs devices least and is fast enough. ``messages`` (L+1, C): bytes;
    # ``handling`` (L+1, C): seconds; ``size`` and ``possible`` (L+1,).
    messages = problem.values[:, None] * problem.bytes_per_value + problem.other[:, None]
    handling = np.where(messages <= cap * rate, seconds.mean(axis=0), np.inf)
    codecs = handling.argmin(axis=1)
    place = np.arange(layers + 1)
    size, possible = messages[place, codecs], np.isfinite(handling[place, codecs])
    possible[list(problem.uncuttable)] = False
    size[[0, -1]], possible[[0, -1]] = 0.0, True
    own = seconds[:, place, codecs]  # (N, L+1)
    own[:, [0, -1]] = 0.0
    done = np.concatenate([np.zeros((n, 1)), problem.layer_seconds.cumsum(axis=1)], axis=1)
    # ``least`` (L+1,): the least sum for the layers before each; ``before``: first layer of the device's stage in it.
    least, before = np.full(layers + 1, np.inf), np.full((len(order), layers + 1), -1)
    least[0] = 0.0
    for k, device in enumerate(order):
        took = done[device][None, :] - done[device][:, None] + own[device][None, :] + own[device][:, None]
        if problem.extra_seconds is not None:
            took = took + problem.extra_seconds[device]
        good = (
            (took <= cap)
            & (size[None, :] + size[:, None] <= cap * problem.host_link[device])
            & possible[None, :]
            & possible[:, None]
        )
        total = np.where(good & (place[:, None] < place[None, :]), least[:, None] + (took / cap) ** _POWER, np.inf)
        first = total.argmin(axis=0)
        better = total[first, place] < least
        before[k, better] = first[better]
        least = np.where(better, total[first, place], least)
    devices: list[int] = []
    edges = [layers]
    for k in range(len(order) - 1, -1, -1):  # the last device that improved a point holds the stage before it
        if edges[0] and before[k, edges[0]] >= 0:
            devices.insert(0, order[k])
            edges.insert(0, int(before[k, edges[0]]))
    return None if edges[0] else Solution(tuple(devices), tuple(edges), tuple(int(codecs[i]) for i in edges[1:-1]))

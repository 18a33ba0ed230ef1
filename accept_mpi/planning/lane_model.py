"""What forward and backward side by side on one device can give, in closed form (after Duan and Wu, ICPADS 2022).

The paper's equations are not public; these are our reconstruction, checked by grid search and by the
simulator (``jobs/experiments/lanes``). P equal stages train M micro-batches, each stage on a resource of which a share r
computes forwards and 1 - r backwards, at the same time. f, b: seconds of a pass on the whole resource; c: seconds of a
transfer that nothing hides; g: a pass on a share x of the resource takes x^-g of the time (1: linearly separable).
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]


class Pipeline(NamedTuple):
    """A homogeneous pipeline."""

    forward: float
    """Seconds of a micro-batch's forward on a stage's whole resource."""
    backward: float
    stages: int
    micro_batches: int
    transfer: float = 0.0
    """Seconds from one stage to the next."""


def beside_seconds(of: Pipeline, share: float, exponent: float = 1.0) -> float:
    """Seconds of a step with forwards on ``share`` of each resource beside backwards on the rest."""
    f, b = of.forward * share**-exponent, of.backward * (1 - share) ** -exponent
    return of.stages * (f + b) + (of.micro_batches - 1) * max(f, b) + 2 * (of.stages - 1) * of.transfer


def in_turn_seconds(of: Pipeline) -> float:
    """Seconds of a step whose stages compute one pass after another on the whole resource, with transfers hidden but for
    those that fill and drain the pipeline."""
    each = of.forward + of.backward
    return (of.stages + of.micro_batches - 1) * each + 2 * (of.stages - 1) * of.transfer


def best_share(of: Pipeline) -> float:
    """The share of forwards for which ``beside_seconds`` is least, if resources are linearly separable.

    Where both sides take equally long (r0), or at the minimum of the branch where one is the bottleneck: with K = P + M - 1,
    r1 of K f / r + P b / (1 - r) below r0 (forwards are), r2 of P f / r + K b / (1 - r) above it (backwards are).
    """
    f, b, stages = of.forward, of.backward, of.stages
    many = stages + of.micro_batches - 1
    if not f + b:
        return 0.5
    r0 = f / (f + b)
    r1 = _root_share(many * f, stages * b)
    r2 = _root_share(stages * f, many * b)
    return r1 if r1 < r0 else r2 if r2 > r0 else r0


def _root_share(one: float, other: float) -> float:
    """The r in (0, 1) for which one / r + other / (1 - r) is least."""
    return math.sqrt(one) / (math.sqrt(one) + math.sqrt(other))


def beside_gain(forward: float, backward: float, exponent: float) -> float:
    """Speed-up of forwards beside backwards over turns, at the best share of a divisible resource, in the steady state. With
    an exponent of 0 or less a pass gains nothing from more of the resource, and the longer side is what is left."""
    short, long = sorted((forward, backward))
    if not long:
        return 1.0
    ratio = short / long  # which has no powers that are too small or too large for a float
    return float((1 + ratio) / (1 + ratio ** (1 / exponent)) ** exponent) if exponent > 0 else 1 + ratio


def lanes_gain(lanes: int, exponent: float) -> float:
    """Speed-up of equal lanes, each with whole micro-batches on its part of the resource, over turns on all of it."""
    return float(lanes ** (1 - exponent))


def exponent_of(lanes: int, factor: float) -> float:
    """g, from the time per micro-batch with so many lanes as a multiple of turns (``lane_timer.time_lanes``)."""
    return 1 + math.log(factor) / math.log(lanes)


class LanePartition(NamedTuple):
    """Stages on resources of several units each."""

    bottleneck: float
    """Seconds per micro-batch of the slowest stage, side or transfer."""
    edges: tuple[int, ...]
    """First layers of the stages, and the number of layers."""
    units: tuple[int, ...]
    """Units of each stage that compute forwards; the others compute backwards."""


def partition(forward: F64, backward: F64, transfer: F64) -> LanePartition:
    """Cut layers into stages on devices in their order, and each device's units between forwards and backwards, for the
    least bottleneck.

    ``forward``, ``backward`` (devices, units + 1, layers): seconds of each layer on u units of a device, infinite for
    u = 0 and for more units than it has; ``transfer`` (layers,): seconds in front of a layer. Every device gets a layer.
    A(j, n) = min over i, u of max(A(i, n - 1), c_i, F_n(i..j; u), B_n(i..j; U_n - u)).
    """
    devices, most, layers = forward.shape
    sums = [np.concatenate([np.zeros((devices, most, 1)), each.cumsum(axis=2)], axis=2) for each in (forward, backward)]
    units = [max(u for u in range(most) if np.isfinite(forward[n, u, 0])) for n in range(devices)]
    best = np.full((devices + 1, layers + 1), np.inf)
    best[0, 0] = 0.0
    choice: dict[tuple[int, int], tuple[int, int]] = {}
    for n, j in itertools.product(range(devices), range(1, layers + 1)):
        for i, u in itertools.product(range(j), range(1, units[n])):
            sides = sums[0][n, u, j] - sums[0][n, u, i], sums[1][n, units[n] - u, j] - sums[1][n, units[n] - u, i]
            longest = max(best[n, i], float(transfer[i]) if i else 0.0, *map(float, sides))
            if longest < best[n + 1, j]:
                best[n + 1, j], choice[n + 1, j] = longest, (i, u)
    edges, split, j = [layers], [], layers
    for n in range(devices, 0, -1):
        if (n, j) not in choice:
            raise ValueError("more devices than layers, or a device of a single unit")
        j, u = choice[n, j]
        edges.append(j)
        split.append(u)
    return LanePartition(float(best[devices, layers]), tuple(reversed(edges)), tuple(reversed(split)))


class Units(NamedTuple):
    """How a device's unlike units are used."""

    seconds: float
    """Per micro-batch, in the steady state."""
    forwards: tuple[int, ...]
    """Units that compute forwards, by index; the others compute backwards. Empty: all do both, in turn."""


def unlike_units(forward: Sequence[float], backward: Sequence[float]) -> Units:
    """The best use of units of which each takes ``forward`` and ``backward`` seconds for a pass by itself (a CPU beside an
    NPU), if a pass can be shared by units in proportion to their speeds: some for forwards and the others for backwards at
    the same time, or all for each pass in turn."""

    def together(seconds: Sequence[float], which: Sequence[int]) -> float:
        speed = sum(1 / seconds[n] for n in which)
        return 1 / speed if speed else math.inf

    every = range(len(forward))
    best = Units(together(forward, every) + together(backward, every), ())
    for size in range(1, len(forward)):
        for some in itertools.combinations(every, size):
            rest = [n for n in every if n not in some]
            longest = max(together(forward, some), together(backward, rest))
            if longest < best.seconds:
                best = Units(longest, some)
    return best

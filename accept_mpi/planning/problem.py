"""The partitioning problem, a solution and what it costs. Pure."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

_UNUSUAL = 2.0  # times a device's median layer
F64 = npt.NDArray[np.float64]


class NoPlan(Exception):
    """Nothing fits; the message says what does not."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A model of L layers on N devices with C codecs to choose from. Seconds and bytes are those of one micro-batch."""

    layer_seconds: F64
    """(N, L): forward and backward."""
    extra_seconds: F64 | None = None
    """(N, L+1, L+1): what layers i..j-1 together take beyond their sum, not below 0. Must not let a longer run take less."""
    values: F64
    """(L+1,): float values that cross in front of each layer, each way, and can be coded."""
    other: F64
    """(L+1,): bytes that cross besides."""
    rate: F64
    """(N, N): bytes/s from one device to another."""
    host_link: F64
    """(N,): bytes/s of a device's own link, each way; its two boundaries share it."""
    codecs: tuple[str, ...] = ("none",)
    bytes_per_value: F64 = field(default_factory=lambda: np.array([4.0]))
    """(C,): bytes per value."""
    messages: F64 | None = None
    """(N, L+1, C): seconds of a device for a boundary's two messages in front of each layer (``message_model``); 0 if
    None. Grows with ``values`` and ``other``."""
    state: F64
    """(L,): bytes of weights, gradients and optimizer."""
    saved_bytes: F64
    """(L,): bytes of activations that autograd keeps until the backward."""
    capacity: F64
    """(N,): bytes."""
    in_flight: F64
    """(N,): micro-batches in flight at a stage, by the number of stages behind it."""
    state_copies: F64
    """(N,): versions of ``state`` that a stage holds, by the number of stages behind it."""
    micro_batches: float = 1e9
    """Of a step; without an end for asynchronous schedules."""
    fill: float = 0.0
    """Share of a stage's time that filling and draining the pipeline adds: 0 asynchronous, 1 for 1F1B and GPipe."""
    uncuttable: frozenset[int] = frozenset()
    """Layers that the one before must stay with: no stage begins with one of them."""

    @property
    def devices(self) -> int:
        return len(self.layer_seconds)

    @property
    def layers(self) -> int:
        return self.layer_seconds.shape[1]

    def received(self, start: int) -> float:
        """Bytes that a stage which begins with layer ``start`` has received of each micro-batch in flight."""
        return float(4 * self.values[start] + self.other[start]) if start else 0.0

    def take(self, devices: Sequence[int]) -> "Problem":
        """The same with these devices in this order."""
        order = np.array(devices, int)
        changed: dict[str, Any] = {
            name: getattr(self, name)[order]
            for name in ("layer_seconds", "extra_seconds", "host_link", "messages", "capacity")
            if getattr(self, name) is not None
        }
        return replace(self, **changed, rate=self.rate[np.ix_(order, order)])


@dataclass(frozen=True)
class Solution:
    """Stage s holds layers ``edges[s]`` to ``edges[s+1]`` - 1 on ``devices[s]``; ``codecs[b]`` is boundary b's."""

    devices: tuple[int, ...]
    edges: tuple[int, ...]
    codecs: tuple[int, ...]


@dataclass(frozen=True)
class Cost:
    """Of one plan, in seconds."""

    stages: tuple[float, ...]
    """Computing a micro-batch, what messages take included."""
    links: tuple[float, ...]
    """Carrying a micro-batch across each boundary, the slower direction."""
    bottleneck: float
    """The slowest of all that overlaps."""
    step: float
    """A step; for an asynchronous schedule, a micro-batch."""
    fits: bool


def cost(problem: Problem, plan: Solution) -> Cost:
    """What a plan costs."""
    stages, host_links, fits = [], [], problem.uncuttable.isdisjoint(plan.edges)
    last = len(plan.devices) - 1
    sizes = [
        problem.values[i] * problem.bytes_per_value[c] + problem.other[i]
        for i, c in zip(plan.edges[1:-1], plan.codecs, strict=True)
    ]
    for s, device in enumerate(plan.devices):
        start, stop = plan.edges[s], plan.edges[s + 1]
        seconds = float(problem.layer_seconds[device, start:stop].sum())
        if problem.extra_seconds is not None:
            seconds += float(problem.extra_seconds[device, start, stop])
        beside = [b for b in (s - 1, s) if 0 <= b < last]
        if problem.messages is not None:
            seconds += sum(float(problem.messages[device, plan.edges[b + 1], plan.codecs[b]]) for b in beside)
        stages.append(seconds)
        host_links.append(sum(sizes[b] for b in beside) / problem.host_link[device])
        behind = last - s
        held = problem.saved_bytes[start:stop].sum() + problem.received(start)
        memory = problem.state_copies[behind] * problem.state[start:stop].sum() + problem.in_flight[behind] * held
        fits &= bool(memory <= problem.capacity[device] * (1 + 1e-12))
    pairs = list(itertools.pairwise(plan.devices))
    ways = [(m / problem.rate[a, b], m / problem.rate[b, a]) for m, (a, b) in zip(sizes, pairs, strict=True)]
    links = [max(way) for way in ways]
    bottleneck = float(max([*stages, *links, *host_links]))
    step = bottleneck
    if problem.fill:
        filling = problem.fill * sum(stages) + sum(map(sum, ways))
        step = (problem.micro_batches - problem.fill) * bottleneck + filling
    return Cost(tuple(stages), tuple(map(float, links)), bottleneck, float(step), fits)


def lower_bound(problem: Problem) -> float:
    """No plan's bottleneck is below this: all devices share every layer at will, for free (a weighted mean of their loads;
    weak duality)."""
    speed = 1 / np.maximum(clipped(problem.layer_seconds).sum(axis=1), 1e-300)
    shared = float(((speed / speed.sum())[:, None] * problem.layer_seconds).min(axis=0).sum())
    return max(shared, float(problem.layer_seconds.min(axis=0).max()))


def clipped(seconds: F64) -> F64:
    """Without what a device must not get (a layer that would take it for ever), to tell how fast devices are."""
    median = np.median(seconds, axis=1, keepdims=True)
    return np.where(median > 0, np.minimum(seconds, _UNUSUAL * median), seconds)


def prefix_sums(each: F64) -> F64:
    """Prefix sums along the last axis, from 0."""
    return np.concatenate([np.zeros((*each.shape[:-1], 1)), each.cumsum(axis=-1)], axis=-1)

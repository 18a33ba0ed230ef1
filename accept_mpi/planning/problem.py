"""The partitioning problem, its solutions and their costs. Pure."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

_UNUSUAL = 2.0  # longer layers count as this multiple of the device's median layer (``clipped``)
_ENOUGH = 3  # with this many micro-batches for each stage that there could be, the search needs no help
F64 = npt.NDArray[np.float64]


class NoPlan(Exception):
    """No plan fits; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A model of L layers on N devices with C codecs to choose from. Seconds and bytes are per micro-batch."""

    layer_seconds: F64
    """(N, L): seconds of forward, backward and the layer's share of the update."""
    extra_seconds: F64 | None = None
    """(N, L+1, L+1): seconds of layers i..j-1 together beyond their sum, at least 0; None: all 0. A longer run must not
    take less time than a part of it."""
    values: F64
    """(L+1,): values that cross in front of each layer, per direction, and can be coded."""
    other: F64
    """(L+1,): further bytes that cross, per direction."""
    rate: F64
    """(N, N): bytes/s from one device to another."""
    host_link: F64
    """(N,): bytes/s of a device's own link, per direction; the two boundaries of its stage share it."""
    codecs: tuple[str, ...] = ("none",)
    bytes_per_value: F64 = field(default_factory=lambda: np.array([4.0]))
    """(C,): bytes per value."""
    messages: F64 | None = None
    """(N, L+1, C): seconds of a device for the two messages of a boundary in front of each layer (``message_model``); None:
    all 0. They must grow with ``values`` and ``other``."""
    state: F64
    """(L,): bytes of trained weights, gradients and optimizer state."""
    fixed: F64 | None = None
    """(L,): bytes that a layer takes besides, however many stages are behind; None: none."""
    least: F64 | None = None
    """(L,): bytes that a layer takes at some moment when nothing is in flight; a stage needs these or those of its training,
    whichever is more. None: none."""
    saved_bytes: F64
    """(L,): bytes of activations that autograd keeps until the backward pass."""
    capacity: F64
    """(N,): bytes that a stage may take."""
    in_flight: F64
    """(N,): micro-batches in flight at a stage, by the number of stages behind it."""
    whole: F64 | None = None
    """(N,): those of them whose activations are kept, if stages compute forwards again; None: all."""
    state_copies: F64
    """(N,): versions of ``state`` that a stage holds, by the number of stages behind it."""
    micro_batches: float = 1e9
    """Micro-batches per step; a very large number for asynchronous schedules, which do not drain."""
    real_micro_batches: float = 1.0
    """Micro-batches per step, whatever the schedule."""
    fill: float = 0.0
    """Share of the stages' times that filling and draining adds to a step: 1 for 1F1B and GPipe, 1/3 for zero-bubble,
    0 for asynchronous schedules."""
    uncuttable: frozenset[int] = frozenset()
    """Layers that must stay with the one before them: no stage may begin with one of these."""

    @property
    def devices(self) -> int:
        """Number of devices (N)."""
        return len(self.layer_seconds)

    @property
    def is_short(self) -> bool:
        """True if a step has too few micro-batches to fill a pipeline of all devices for most of it, so that what the search
        finds is refined by simulation (``planning.refinement``)."""
        return self.devices > 1 and self.real_micro_batches < _ENOUGH * self.devices

    @property
    def layers(self) -> int:
        """Number of layers (L)."""
        return self.layer_seconds.shape[1]

    @property
    def alive(self) -> F64:
        """(N,): micro-batches in flight whose activations are kept."""
        return self.in_flight if self.whole is None else self.whole

    @property
    def fixed_bytes(self) -> F64:
        """``fixed``, or zeros."""
        return np.zeros(self.layers) if self.fixed is None else self.fixed

    @property
    def least_bytes(self) -> F64:
        """``least``, or zeros."""
        return np.zeros(self.layers) if self.least is None else self.least

    @property
    def is_roomy(self) -> bool:
        """True if each device has the memory for all layers, however many stages are behind."""
        whole = self.state_copies * self.state.sum() + self.alive * self.saved_bytes.sum() + self.fixed_bytes.sum()
        received = max((self.received(start) for start in range(self.layers)), default=0.0)
        most = max(float((whole + self.in_flight * received).max()), float(self.least_bytes.sum()))
        return most <= float(self.capacity.min())

    @cached_property
    def held_bytes(self) -> F64:
        """(4, L): ``state``, ``saved_bytes``, ``fixed`` and ``least``."""
        return np.array([self.state, self.saved_bytes, self.fixed_bytes, self.least_bytes])

    def received(self, start: int) -> float:
        """Bytes that a stage beginning with layer ``start`` has received, per micro-batch in flight."""
        return float(4 * self.values[start] + self.other[start]) if start else 0.0

    def take(self, devices: Sequence[int]) -> "Problem":
        """The same problem with only these devices, in this order."""
        order = np.array(devices, int)
        changed: dict[str, Any] = {
            name: getattr(self, name)[order]
            for name in ("layer_seconds", "extra_seconds", "host_link", "messages", "capacity")
            if getattr(self, name) is not None
        }
        return replace(self, **changed, rate=self.rate[np.ix_(order, order)])

    def with_useful_codecs(self) -> "Problem":
        """The same problem without codecs than which another one sends no more bytes, in no more time of any device."""
        size = self.bytes_per_value
        handling = np.zeros((1, len(size))) if self.messages is None else self.messages.reshape(-1, len(size))
        left: list[int] = []
        for c in np.argsort(size, kind="stable"):
            if not any((handling[:, other] <= handling[:, c]).all() for other in left):
                left.append(int(c))
        left.sort()
        messages = None if self.messages is None else self.messages[:, :, left]
        return replace(self, codecs=tuple(self.codecs[c] for c in left), bytes_per_value=size[left], messages=messages)

    def coarse(self, edges: Sequence[int]) -> "Problem":
        """The same problem in which layers are runs of these: layers ``edges[k]`` to ``edges[k+1]`` - 1 stay together."""
        at = np.array(edges)
        changed: dict[str, Any] = {
            name: np.add.reduceat(getattr(self, name), at[:-1], axis=-1)
            for name in ("layer_seconds", "state", "fixed", "least", "saved_bytes")
            if getattr(self, name) is not None
        }
        if self.extra_seconds is not None:
            changed["extra_seconds"] = self.extra_seconds[:, at[:, None], at]
        if self.messages is not None:
            changed["messages"] = self.messages[:, at]
        apart = frozenset(k for k, edge in enumerate(edges) if edge in self.uncuttable)
        return replace(self, **changed, values=self.values[at], other=self.other[at], uncuttable=apart)


@dataclass(frozen=True)
class Solution:
    """Stage s holds layers ``edges[s]`` to ``edges[s+1]`` - 1 on ``devices[s]``; ``codecs[b]`` is the index of boundary b's
    codec."""

    devices: tuple[int, ...]
    edges: tuple[int, ...]
    codecs: tuple[int, ...]


@dataclass(frozen=True)
class Cost:
    """Cost of one solution, in seconds."""

    stages: tuple[float, ...]
    """Seconds per micro-batch that each stage computes, its messages included."""
    links: tuple[float, ...]
    """Seconds per micro-batch on each boundary's link, in the slower direction."""
    bottleneck: float
    """The longest of all times that overlap: stages, boundaries and hosts' own links."""
    step: float
    """Seconds per step; for an asynchronous schedule, per micro-batch."""
    fits: bool
    """True if each device has enough memory and no layers are cut apart that must stay together."""


def cost(problem: Problem, plan: Solution) -> Cost:
    """Cost of a solution."""
    stages, host_links, fits = [], [], problem.uncuttable.isdisjoint(plan.edges)
    last = len(plan.devices) - 1
    sizes = [
        problem.values[i] * problem.bytes_per_value[c] + problem.other[i]
        for i, c in zip(plan.edges[1:-1], plan.codecs, strict=True)
    ]
    state, saved, fixed, least = np.add.reduceat(problem.held_bytes, plan.edges[:-1], axis=1)
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
        memory = problem.state_copies[behind] * state[s] + problem.alive[behind] * saved[s]
        memory += problem.in_flight[behind] * problem.received(start) + fixed[s]
        fits &= bool(max(memory, least[s]) <= problem.capacity[device] * (1 + 1e-12))
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
    """Lower bound in seconds for the bottleneck of any plan: what it would be if all devices shared every layer at no cost
    (a weighted mean of their loads, by weak duality), and at least the longest layer on its fastest device."""
    speed = 1 / np.maximum(clipped(problem.layer_seconds).sum(axis=1), 1e-300)
    shared = float(((speed / speed.sum())[:, None] * problem.layer_seconds).min(axis=0).sum())
    return max(shared, float(problem.layer_seconds.min(axis=0).max()))


def few_edges(problem: Problem, most: int) -> list[int]:
    """Edges of ``most`` runs of layers of about equal work, at most; where least crosses, and where cuts are allowed."""
    seconds = clipped(problem.layer_seconds)
    work = prefix_sums((seconds / np.maximum(seconds.sum(axis=1, keepdims=True), 1e-300)).mean(axis=0))
    crossing = 4 * problem.values + problem.other
    best: dict[int, int] = {}
    for edge in range(1, problem.layers):
        part = int((most - 1) * work[edge])
        if edge not in problem.uncuttable and crossing[edge] < (crossing[best[part]] if part in best else np.inf):
            best[part] = edge
    return [0, *sorted(best.values()), problem.layers]


def clipped(seconds: F64) -> F64:
    """Layer times (N, L) for comparing devices: layers that a device must not get count as twice its median layer."""
    median = np.median(seconds, axis=1, keepdims=True)
    return np.where(median > 0, np.minimum(seconds, _UNUSUAL * median), seconds)


def prefix_sums(each: F64) -> F64:
    """Sums of all prefixes along the last axis, beginning with 0 for the empty one."""
    return np.concatenate([np.zeros((*each.shape[:-1], 1)), each.cumsum(axis=-1)], axis=-1)

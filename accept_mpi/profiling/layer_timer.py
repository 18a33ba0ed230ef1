"""How long each layer takes on this device, found by training pieces of the model for a few seconds before the run.

A piece is a real ``Stage`` over some tenth of the model's work, in the threads and memory format that training will use, on
random activations; clocks between its layers split its time. Measured where they run, not alone: a layer's time depends on
what its neighbours leave in the caches. Pieces are built and thrown away one after another, so a device needs room for one.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from accept_mpi import tree
from accept_mpi.codecs.message import Tensors
from accept_mpi.data import Dataset, fetch
from accept_mpi.device.cpu import memory_taken, take_memory
from accept_mpi.job import Job
from accept_mpi.models import Chain
from accept_mpi.models.layers import build_layers
from accept_mpi.models.losses import Loss
from accept_mpi.pipeline.stage import Stage
from accept_mpi.profiling.outline import Outline
from accept_mpi.tree import Tree

PIECES = 10
_MOST_ROUNDS, _LEAST_PASSES = 40, 3
_WINDOW = 0.1  # seconds that a piece is measured at least: quotas of CPU are given out every 5 to 100 ms
_PRECISE = 0.005  # standard error of the mean at which a piece is known well enough
_MOST_FLIGHT, _CACHE_BYTES = 3, 32 << 20  # micro-batches in flight: as many as caches do not hold
_HEAP = 3  # times what a piece is known to hold: gradients, scratch and the allocator's gaps besides
_FEW = 32  # pages: a pass finds as much new wherever it looks
_COPIES = 6  # of weights, at most: a version and the optimizer's own, gradients, two of its moments, one on the way
_SECOND = 0.4  # of the budget, for a second look
_LOOKED_AT = 4  # micro-batches
_QUICK = 0.1  # share of the budget for a device that is known
_SAME = 0.12  # the logarithm of now / then up to which it is what it was


Run = tuple[int, int, float, float]
"""A sub-model: first layer, last + 1, seconds forward and backward."""


class LayerTimes(msgspec.Struct, frozen=True):
    """Seconds by layer, of one micro-batch (``update``: of one step). NaN where the budget ended before the layer's turn."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    """Of inputs and weights."""
    weights: tuple[float, ...]
    """What of ``backward`` the zero-bubble schedule can put off; 0 with other schedules."""
    update: tuple[float, ...]
    seconds: float
    """All of this took so long."""
    pieces: tuple[Run, ...]
    """(first layer, last + 1, forward, backward): whole sub-models, as AccEPT's predictor wants them."""
    stretch: float
    """Seconds of the clock for a second of CPU."""
    observed: tuple[Run, ...] = ()
    """Stages that earlier runs had on this device, as they took in training."""

    @property
    def measured(self) -> list[bool]:
        return [math.isfinite(value) for value in self.forward]


class Subject(NamedTuple):
    """What is measured: a job's model, trained on a micro-batch of real data."""

    chain: Chain
    outline: Outline
    job: Job
    loss: Loss
    inputs: Tensors
    target: Any
    """None: the device has no data, and the pieces that need it wait for a guess."""
    tree: Tree | None = None
    """What the inputs are the tensors of; None: a tensor alone, or a tuple of several."""
    samples: int | None = None


class MicroBatch(NamedTuple):
    """Inputs and targets of some micro-batch; nothing without data."""

    inputs: Tensors = ()
    target: Any = None
    tree: Tree | None = None
    samples: int | None = None


def nothing_measured(outline: Outline) -> LayerTimes:
    """Of a device that has not been asked."""
    unknown = (math.nan,) * len(outline.layers)
    return LayerTimes(unknown, unknown, unknown, unknown, 0.0, (), 1.0)


def pieces(outline: Outline, count: int = PIECES) -> list[tuple[int, int]]:
    """The model in ``count`` runs of layers (or one a layer) of about equal work, guessed from operations and memory."""
    work = np.array([guess(layer.operations, layer.held, layer.parameter_bytes) for layer in outline.layers])
    done = work.cumsum() / work.sum()
    edges = sorted({0, len(work), *(int(np.searchsorted(done, k / count)) + 1 for k in range(1, count))})
    return [(a, b) for a, b in itertools.pairwise(edges) if b > a]


def guess(operations: float, held: float, parameter_bytes: float) -> float:
    """Seconds of a layer's forward on a middling core, for want of anything better: 20 GFLOP/s, 4 GB/s."""
    return operations / 20e9 + (held + parameter_bytes) / 4e9 + 2e-5


def probe(
    subject: Subject,
    budget: float,
    known: LayerTimes | None = None,
    room: float = math.inf,
    order: Sequence[int] = (),
    crowded: bool = False,
) -> LayerTimes:
    """Measure every layer, for about ``budget`` seconds in all.

    ``known``: what this device took earlier. A tenth of the budget tells whether that still counts; the rest goes to what it
    has not measured yet.
    ``room``: bytes that a piece may take; larger ones are left to a guess.
    ``order``: in which ``pieces`` get their turn, should the budget not reach all; by default such that few tell most.
    ``crowded``: more threads than cores are measuring here, so that a short look tells nothing: what is known counts.
    """
    began = time.monotonic()

    def measure(chosen: list[tuple[int, int]], seconds: float, brief: bool = False) -> tuple[np.ndarray, list[Run], float]:
        return _measure(subject, chosen, seconds, room, brief)

    every = pieces(subject.outline)
    wanted = [every[k] for k in order or scattered(len(every))]
    old: LayerTimes | None = None
    if known is not None:
        there = [(a, b) for a, b in every if known.measured[a]]
        if crowded or _unchanged(measure(there[1::4] or there, _QUICK * budget, brief=True)[1], known):
            old, wanted = known, [run for run in wanted if run not in there]
    found, runs, stretch = measure(wanted, budget - (time.monotonic() - began)) if wanted else (None, [], 1.0)
    seconds = time.monotonic() - began
    if old is None:
        assert found is not None
        return of_layers(found, seconds, tuple(sorted(runs)), stretch)
    if found is None or not runs:
        return msgspec.structs.replace(old, seconds=seconds)
    both = np.where(np.isfinite(found), found, [old.forward, old.backward, old.weights, old.update])
    whole = of_layers(both, seconds, tuple(sorted({*old.pieces, *runs})), stretch)
    return msgspec.structs.replace(whole, observed=old.observed)


def look(subject: Subject, chosen: Sequence[tuple[int, int]], room: float = math.inf) -> list[Run]:
    """What these pieces take now, measured for some of a job's ``probe_seconds``; without those that take more than ``room``
    bytes or need data that there is none of."""
    budget = _SECOND * subject.job.pipeline.probe_seconds
    return _measure(subject, list(chosen), budget, room, brief=True)[1]


def of_layers(found: np.ndarray, seconds: float, runs: tuple[Run, ...], stretch: float) -> LayerTimes:
    """Of (4, layers) seconds."""
    forward, backward, weights, update = (tuple(map(float, row)) for row in found)
    return LayerTimes(forward, backward, weights, update, seconds, runs, stretch)


def _measure(
    subject: Subject, chosen: list[tuple[int, int]], budget: float, room: float, brief: bool = False
) -> tuple[np.ndarray, list[Run], float]:
    """(4, layers) seconds, NaN outside the pieces that the budget allows; whole pieces; and the stretch."""
    chain, outline, job, loss, inputs, target, of, samples = subject
    began = time.monotonic()
    count = len(outline.layers)
    found = np.full((4, count), np.nan)
    measured: list[tuple[int, int]] = []
    wall = cpu = 0.0
    needs = {run: _bytes(outline, *run) for run in chosen}
    chosen = [run for run in chosen if needs[run] <= room]
    # What comes from the kernel while a piece is measured would count as its time.
    take_memory(int(min(room, _HEAP * max((needs[run] for run in chosen), default=0))))
    work = [sum(guess(x.operations, x.held, x.parameter_bytes) for x in outline.layers[a:b]) for a, b in chosen]
    for number, (start, stop) in enumerate(chosen):
        remaining = budget - (time.monotonic() - began)
        if number and remaining <= 0:
            break
        given = inputs if start == 0 else random_inputs(outline, start)
        if not given or (stop == count and target is None):
            continue
        piece = Piece(chain, outline, job, start, stop, loss if stop == count else None)
        seconds = remaining * work[number] / sum(work[number:])
        timed = piece.measure(given, target, seconds, brief, of if start == 0 else outline.layers[start].tree, samples)
        found[:, start:stop] = timed.layers
        wall, cpu = wall + timed.wall, cpu + timed.cpu
        measured.append((start, stop))
        piece.close()
    # One stretch for all: what a quota does to a piece depends on when its period began.
    stretch = stretch_of(wall, cpu)
    found *= stretch
    runs = [(a, b, float(found[0, a:b].sum()), float(found[1, a:b].sum())) for a, b in measured]
    return found, runs, stretch


def _bytes(outline: Outline, start: int, stop: int) -> int:
    """What a piece takes while it is measured."""
    layers = outline.layers[start:stop]
    trained = sum(layer.parameter_bytes - layer.frozen_bytes for layer in layers)
    held = sum(layer.held for layer in layers)
    return _COPIES * trained + sum(layer.frozen_bytes for layer in layers) + (1 + _in_flight(held)) * held


def _in_flight(held: float) -> int:
    """Micro-batches between F and B while a piece is measured, each holding so many bytes."""
    return min(_MOST_FLIGHT, 1 + int(_CACHE_BYTES / max(1.0, held)))


def stretch_of(wall: float, cpu: float) -> float:
    """Seconds of the clock for a second of CPU."""
    return max(1.0, wall / max(cpu, 1e-9))


def micro_batch(train: Dataset | None, job: Job) -> MicroBatch:
    """The largest of the first few micro-batches: samples may be of different lengths."""
    if train is None:
        return MicroBatch()
    size = -(-job.train.batch_size // job.train.micro_batches)
    found: list[MicroBatch] = []
    for begin in range(0, min(len(train), _LOOKED_AT * size), size):
        sample = np.arange(begin, begin + size) % len(train)
        samples = fetch(train, sample, 0, inputs=True, targets=True)
        inputs, of = tree.flatten(samples.inputs)
        found.append(MicroBatch(tuple(inputs), samples.targets, of, size))
    return max(found, key=lambda one: sum(x.numel() for x in one.inputs if x is not None))


def scattered(count: int) -> list[int]:
    """0 to ``count`` - 1, such that the first few of them are spread over all (bits in reverse)."""
    bits = max(1, (count - 1).bit_length())
    return sorted(range(count), key=lambda k: f"{k:0{bits}b}"[::-1])


def _unchanged(runs: list[Run], known: LayerTimes) -> bool:
    """Whether pieces take now what they were known to."""
    now = sum(forward + backward for _, _, forward, backward in runs)
    then = sum(sum(known.forward[a:b]) + sum(known.backward[a:b]) for a, b, _, _ in runs)
    return now > 0 and then > 0 and abs(math.log(now / then)) < _SAME


def random_inputs(outline: Outline, layer: int) -> Tensors:
    """Activations in front of a layer."""
    values = []
    for spec in outline.layers[layer].inputs:
        value = spec.zeros()
        if value is not None and value.is_floating_point():
            with torch.no_grad():
                torch.as_strided(value, spec.sent_shape, spec.stride).normal_()
        values.append(value)
    return tuple(values)


class Timed(NamedTuple):
    """What a piece took."""

    layers: np.ndarray
    """Seconds of CPU, by layer: rows forward, backward and, of all of its rounds, weights and update."""
    wall: float
    """Seconds of the clock for all of it."""
    cpu: float
    """Seconds of CPU."""


def _usual(passes: list[tuple[int, np.ndarray]]) -> np.ndarray:
    """The lower median of all but the first, which warms up, and of these only those in which least memory came from the
    kernel (pages, with what each pass took): training keeps its memory."""
    _, *rest = passes
    most = 1.1 * min(pages for pages, _ in rest) + _FEW
    rows = np.array([row for pages, row in rest if pages <= most])
    return np.sort(rows, axis=0)[(len(rows) - 1) // 2]


class Piece:
    """Layers ``start`` to ``stop`` - 1 as a stage, with clocks in between."""

    def __init__(self, chain: Chain, outline: Outline, job: Job, start: int, stop: int, loss: Loss | None) -> None:
        self.start, self.stop = start, stop
        layers = build_layers(chain, start, stop, job.train.seed)
        self._asynchronous = job.pipeline.schedule == "1f1b-async"
        self._deferred = job.pipeline.schedule == "zero-bubble"
        self.stage = Stage(layers, job, loss, outline.channels_last)
        self._operations = np.array([layer.operations for layer in outline.layers[start:stop]])
        self._held = float(sum(layer.held for layer in outline.layers[start:stop]))
        self._forward: list[float] = []
        self._backward: dict[int, float] = {}
        self._forwards: list[tuple[int, np.ndarray]] = []
        """Pages that came from the kernel and (layers,) seconds of CPU, of each forward."""
        self._backwards: list[tuple[int, np.ndarray]] = []
        """The same of each backward: (2, layers), all of it and what of it the zero-bubble schedule can put off."""
        self._gradients: dict[int, Tensors] = {}
        self._hooks = [layer.register_forward_hook(self._stamp(n)) for n, layer in enumerate(self.stage.layers)]

    def close(self) -> None:
        """Give the memory back at once: hooks know this object, so the next one would find it when the collector runs."""
        for hook in self._hooks:
            hook.remove()
        self._gradients.clear()
        self.stage.close()

    def _stamp(self, position: int) -> Callable[..., None]:
        def ready(_: torch.Tensor) -> None:
            self._backward.setdefault(position, time.thread_time())

        def after(module: Any, inputs: Any, output: Any) -> None:
            for value in tree.leaves(output):
                if value.requires_grad:
                    value.register_hook(ready)
            self._forward.append(time.thread_time())

        return after

    def measure(
        self,
        inputs: Tensors,
        target: Any,
        seconds: float,
        brief: bool = False,
        of: Tree | None = None,
        samples: int | None = None,
    ) -> Timed:
        """Train it for so many seconds, some rounds in any case. ``brief``: without the optimizer's steps."""
        began, cpu = time.monotonic(), time.thread_time()
        self.begin(inputs, target, of, samples)
        rounds: list[float] = []
        while len(rounds) < _MOST_ROUNDS:
            rounds.append(self.round())
            if len(rounds) + self._next - self._first < _LEAST_PASSES:
                continue
            if time.monotonic() > began + seconds:
                break
            if len(rounds) > 1 and sum(rounds) > _WINDOW:
                spread = statistics.stdev(rounds) / math.sqrt(len(rounds)) / statistics.fmean(rounds)
                if spread < _PRECISE:
                    break
        while self._first < self._next:  # what is in flight counts, too: a slow device has time for little more
            self._back()
        forward, (backward, weights) = _usual(self._forwards), _usual(self._backwards)
        update = np.zeros(len(forward)) if brief else self._updates()
        return Timed(np.stack([forward, backward, weights, update]), time.monotonic() - began, time.thread_time() - cpu)

    def begin(self, inputs: Tensors, target: Any, of: Tree | None = None, samples: int | None = None) -> None:
        """Take micro-batches in flight: a backward does not find its activations in the cache, as in training."""
        self._given = inputs, target, of, samples
        self._first = self._next = 0
        self._forwards, self._backwards = [], []
        for _ in range(_in_flight(self._held)):
            self._forth()

    def round(self) -> float:
        """One micro-batch forward and the oldest back: seconds of the clock."""
        began = time.monotonic()
        self._forth()
        self._back()
        return time.monotonic() - began

    def lap(self) -> Timed:
        """One round: of CPU (2, layers), forward of one micro-batch and backward of the oldest."""
        began, cpu = time.monotonic(), time.thread_time()
        self.round()
        layers = np.stack([self._forwards[-1][1], self._backwards[-1][1][0]])
        return Timed(layers, time.monotonic() - began, time.thread_time() - cpu)

    def _forth(self) -> None:
        """A micro-batch forward."""
        k, self._next = self._next, self._next + 1
        inputs, target, of, samples = self._given
        self._forward = []
        # Its own copy, since a layer may work in place.
        given = tuple(x.detach().clone().requires_grad_(x.requires_grad) if x is not None else None for x in inputs)
        pages, began = memory_taken(), time.thread_time()
        out = self.stage.forward(0, k, given, 0, target, of=of, samples=samples)
        if out.result:  # the loss belongs to the last layer
            self._forward[-1] = time.thread_time()
        taken = memory_taken() - pages
        wanting = [value for value in out.outputs if value is not None and value.requires_grad]
        self._gradients[k] = tuple(torch.full_like(value, 1e-3) for value in wanting)
        self._forwards.append((taken, np.diff([began, *self._forward])))

    def _back(self) -> None:
        """The oldest micro-batch back."""
        k, self._first = self._first, self._first + 1
        self._backward = {}
        count = self.stop - self.start
        pages, began = memory_taken(), time.thread_time()
        self.stage.backward(0, k, self._gradients.pop(k))
        ended = time.thread_time()
        weights = np.zeros(count)
        if self._deferred:
            self.stage.weight_gradient(0, k)
            weights = (time.thread_time() - ended) * self._operations / max(1.0, self._operations.sum())
        # A layer's backward begins when its output's gradient is there, and ends where the one before begins.
        begins = np.array([began, *(self._backward.get(position, np.nan) for position in range(count - 2, -1, -1)), ended])
        begins = np.maximum.accumulate(np.where(np.isnan(begins), -np.inf, begins))
        self._backwards.append((memory_taken() - pages, np.stack([np.diff(begins)[::-1] + weights, weights])))

    def _updates(self) -> np.ndarray:
        """CPU seconds of the optimizer's step, shared among layers by their parameters."""
        self.stage.update(0.0, 0)  # makes the optimizer's state
        for parameter in self.stage.parameters:
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        began = time.thread_time()
        self.stage.update(0.0, 1 if self._asynchronous else 0)
        took = time.thread_time() - began
        parameters = np.array([sum(p.numel() for p in layer.parameters()) for layer in self.stage.layers], float)
        return took * parameters / max(1.0, parameters.sum())

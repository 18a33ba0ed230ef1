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
from typing import Any

import msgspec
import numpy as np
import torch

from accept_mpi import config
from accept_mpi.codec import Tensors
from accept_mpi.data import Dataset
from accept_mpi.models import Chain
from accept_mpi.models.layers import Layers, build_layer
from accept_mpi.outline import Outline
from accept_mpi.stage import Loss, Stage

PIECES = 10
_MOST_ROUNDS, _LEAST_ROUNDS = 40, 3
_WINDOW = 0.1  # seconds that a piece is measured at least: quotas of CPU are given out every 5 to 100 ms
_PRECISE = 0.005  # standard error of the mean at which a piece is known well enough
_MOST_FLIGHT, _CACHE_BYTES = 4, 64 << 20  # micro-batches in flight: as many as caches do not hold
_UPDATES = 2
_COPIES = 6  # of weights, at most: a version and the optimizer's own, gradients, two of its moments, one on the way
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

    @property
    def measured(self) -> list[bool]:
        return [math.isfinite(value) for value in self.forward]


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
    chain: Chain,
    outline: Outline,
    job: config.Job,
    loss: Loss,
    inputs: Tensors,
    target: torch.Tensor | None,
    budget: float,
    known: LayerTimes | None = None,
    room: float = math.inf,
) -> LayerTimes:
    """Measure every layer, for about ``budget`` seconds in all. ``inputs`` and ``target`` are a micro-batch's of real data
    (None: the device has none, and the piece that needs them waits for a guess).

    ``known``: what this device took earlier. A tenth of the budget tells whether it is as fast as it was; then that counts.
    ``room``: bytes that a piece may take; larger ones are left to a guess.
    """
    began = time.monotonic()

    def measure(chosen: list[tuple[int, int]], seconds: float) -> tuple[np.ndarray, list[Run], list[float]]:
        return _measure(chain, outline, job, loss, inputs, target, chosen, seconds, room)

    if known is not None:
        some, _, _ = measure(pieces(outline)[1::4], _QUICK * budget)
        if abs(math.log(_ratio(some, known))) < _SAME:
            return msgspec.structs.replace(known, seconds=time.monotonic() - began)
    found, runs, stretches = measure(pieces(outline), budget)
    forward, backward, weights, update = (tuple(map(float, row)) for row in found)
    stretch = statistics.fmean(stretches) if stretches else 1.0
    return LayerTimes(forward, backward, weights, update, time.monotonic() - began, tuple(runs), stretch)


def _measure(
    chain: Chain, outline: Outline, job: config.Job, loss: Loss, inputs: Tensors, target: torch.Tensor | None,
    chosen: list[tuple[int, int]], budget: float, room: float,
) -> tuple[np.ndarray, list[Run], list[float]]:  # fmt: skip
    """(4, layers) seconds, NaN outside the pieces that the budget allows; whole pieces; and the stretch of each."""
    began = time.monotonic()
    count = len(outline.layers)
    found = np.full((4, count), np.nan)
    runs: list[Run] = []
    stretches = []
    work = [sum(guess(x.operations, x.held, x.parameter_bytes) for x in outline.layers[a:b]) for a, b in chosen]
    for number, (start, stop) in enumerate(chosen):
        remaining = budget - (time.monotonic() - began)
        if number and remaining <= 0:
            break
        layers = outline.layers[start:stop]
        if sum(_COPIES * layer.parameter_bytes + (1 + _MOST_FLIGHT) * layer.held for layer in layers) > room:
            continue
        given = inputs if start == 0 else random_inputs(outline, start)
        if not given or (stop == count and target is None):
            continue
        piece = Piece(chain, outline, job, start, stop, loss if stop == count else None)
        seconds = remaining * work[number] / sum(work[number:])
        found[:, start:stop], stretch, whole = piece.measure(given, target, seconds)
        stretches.append(stretch)
        runs.append((start, stop, *whole))
        del piece
    return found, runs, stretches


def micro_batch(train: Dataset | None, job: config.Job) -> tuple[Tensors, torch.Tensor | None]:
    """Inputs and targets of some micro-batch; nothing without data."""
    if train is None:
        return (), None
    sample = np.arange(-(-job.train.batch_size // job.train.micro_batches)) % len(train)
    inputs: Any = train.inputs(sample)
    return tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), train.targets(sample)


def _ratio(found: np.ndarray, known: LayerTimes) -> float:
    """How much longer layers take now than they were known to; infinite where that cannot be told."""
    measured = np.isfinite(found[0])
    now, then = (
        float(np.sum(rows)) for rows in (found[:2, measured], np.array([known.forward, known.backward])[:, measured])
    )
    return now / then if now > 0 and then > 0 else math.inf


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


class Piece:
    """Layers ``start`` to ``stop`` - 1 as a stage, with clocks in between."""

    def __init__(self, chain: Chain, outline: Outline, job: config.Job, start: int, stop: int, loss: Loss | None) -> None:
        self.start, self.stop = start, stop
        modules = [build_layer(chain, index, job.train.seed, fresh=True) for index in range(start, stop)]
        layers = Layers(start, list(outline.names[start:stop]), modules)
        self._asynchronous = job.pipeline.schedule == "1f1b-async"
        self._deferred = job.pipeline.schedule == "zero-bubble"
        self.stage = Stage(layers, job, loss, outline.channels_last)
        self._operations = np.array([layer.operations for layer in outline.layers[start:stop]])
        self._held = float(sum(layer.held for layer in outline.layers[start:stop]))
        self._forward: list[float] = []
        self._backward: dict[int, float] = {}
        self._gradients: dict[int, Tensors] = {}
        for position, layer in enumerate(self.stage.layers):
            layer.register_forward_hook(self._stamp(position))

    def _stamp(self, position: int) -> Callable[..., None]:
        def ready(_: torch.Tensor) -> None:
            self._backward.setdefault(position, time.thread_time())

        def after(module: Any, inputs: Any, output: Any) -> None:
            for value in output if isinstance(output, tuple | list) else (output,):
                if value.requires_grad:
                    value.register_hook(ready)
            self._forward.append(time.thread_time())

        return after

    def measure(
        self, inputs: Tensors, target: torch.Tensor | None, seconds: float
    ) -> tuple[np.ndarray, float, tuple[float, float]]:
        """(4, layers): forward, backward, weights, update; the stretch; and forward and backward of the whole piece.

        Some micro-batches are in flight, as in training: a backward does not find its activations in the cache.
        """
        until = time.monotonic() + seconds
        in_flight = min(_MOST_FLIGHT, 1 + int(_CACHE_BYTES / max(1.0, self._held)))
        for k in range(in_flight):
            self._forth(k, 0, inputs, target)
        rounds: list[np.ndarray] = []
        wall: list[float] = []
        cpu = 0.0
        while len(rounds) < _MOST_ROUNDS:
            began = time.monotonic(), time.thread_time()
            k = len(rounds)
            forward = self._forth(k + in_flight, 0, inputs, target)
            rounds.append(np.stack([forward, *self._back(k)]))
            ended = time.monotonic(), time.thread_time()
            if k:  # the first warms up
                cpu += ended[1] - began[1]
                wall.append(ended[0] - began[0])
            if len(wall) < _LEAST_ROUNDS - 1:
                continue
            spread = statistics.stdev(wall) / math.sqrt(len(wall)) / statistics.fmean(wall)
            if ended[0] > until or (spread < _PRECISE and sum(wall) > _WINDOW):
                break
        for k in range(len(rounds), len(rounds) + in_flight):
            self._back(k)
        stretch = max(1.0, sum(wall) / max(cpu, 1e-9))
        forward, backward, weights = np.median(np.array(rounds[1:]), axis=0) * stretch
        update = self._updates(len(rounds) + in_flight, inputs, target) * stretch
        return np.stack([forward, backward, weights, update]), stretch, (float(forward.sum()), float(backward.sum()))

    def _forth(self, k: int, version: int, inputs: Tensors, target: torch.Tensor | None) -> np.ndarray:
        """A micro-batch forward: (layers,) CPU seconds."""
        self._forward = []
        # Its own copy, since a layer may work in place.
        given = tuple(x.detach().clone().requires_grad_(x.requires_grad) if x is not None else None for x in inputs)
        began = time.thread_time()
        out = self.stage.forward(0, k, given, version, target)
        if out.result:  # the loss belongs to the last layer
            self._forward[-1] = time.thread_time()
        wanting = [value for value in out.outputs if value is not None and value.requires_grad]
        self._gradients[k] = tuple(torch.full_like(value, 1e-3) for value in wanting)
        return np.diff([began, *self._forward])

    def _back(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        """A micro-batch back: (layers,) CPU seconds, and what of them the zero-bubble schedule can put off."""
        self._backward = {}
        count = self.stop - self.start
        began = time.thread_time()
        self.stage.backward(0, k, self._gradients.pop(k))
        ended = time.thread_time()
        weights = np.zeros(count)
        if self._deferred:
            self.stage.weight_gradient(0, k)
            weights = (time.thread_time() - ended) * self._operations / max(1.0, self._operations.sum())
        # A layer's backward begins when its output's gradient is there, and ends where the one before begins.
        begins = np.array([began, *(self._backward.get(position, np.nan) for position in range(count - 2, -1, -1)), ended])
        begins = np.maximum.accumulate(np.where(np.isnan(begins), -np.inf, begins))
        return np.diff(begins)[::-1] + weights, weights

    def _updates(self, k: int, inputs: Tensors, target: torch.Tensor | None) -> np.ndarray:
        """CPU seconds of the optimizer's step, shared among layers by their parameters."""
        took = []
        for number in range(_UPDATES + 1):
            version = number if self._asynchronous else 0
            self._forth(k + number, version, inputs, target)
            self._back(k + number)
            began = time.thread_time()
            self.stage.update(0.0, version)
            took.append(time.thread_time() - began)
        parameters = np.array([sum(p.numel() for p in layer.parameters()) for layer in self.stage.layers], float)
        return statistics.median(took[1:]) * parameters / max(1.0, parameters.sum())


def fill(times: Sequence[LayerTimes], outline: Outline) -> np.ndarray:
    """(4, devices, layers): forward, backward, weights, update, with a guess where a device has not measured: what others
    take, in proportion to what both have measured (FTPipeHD's capacity); where nobody has, operations and memory."""
    rows = np.array([[t.forward, t.backward, t.weights, t.update] for t in times]).transpose(1, 0, 2)
    known = np.isfinite(rows[0])
    total = np.where(known, rows[0] + rows[1], 0.0)
    filled = rows.copy()
    for n in range(len(times)):
        gaps = ~known[n]
        others = [m for m in range(len(times)) if m != n and (known[m] & known[n]).any() and (known[m] & gaps).any()]
        if not gaps.any() or not others:
            continue
        ratios = [total[n][known[m]].sum() / total[m][known[n]].sum() for m in others]
        scaled = np.array([ratio * rows[:, m] for ratio, m in zip(ratios, others, strict=True)])
        have = gaps & known[others].any(axis=0)
        filled[:, n, have] = np.nanmedian(scaled[:, :, have], axis=0)
    guessed = np.array([guess(x.operations, x.held, x.parameter_bytes) for x in outline.layers])
    forward = np.nansum(rows[0], axis=1)
    scales = [forward[n] / guessed[known[n]].sum() for n in range(len(times)) if known[n].any()]
    for n in range(len(times)):
        gaps = ~np.isfinite(filled[0, n])
        scale = forward[n] / guessed[known[n]].sum() if known[n].any() else np.median(scales or [1.0])
        filled[:, n, gaps] = np.outer((1.0, 2.0, 0.0, 0.0), scale * guessed[gaps])
    return filled

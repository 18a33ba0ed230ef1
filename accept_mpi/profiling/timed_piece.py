"""A run of layers as a real stage, with clocks between its layers."""

import math
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from accept_mpi import tree
from accept_mpi.codecs.tensors import Tensors
from accept_mpi.device.allocator import memory_taken
from accept_mpi.job import Job
from accept_mpi.models import Chain
from accept_mpi.models.layers import build_layers
from accept_mpi.models.losses import Loss
from accept_mpi.pipeline.stage import Stage
from accept_mpi.profiling.outline import Outline
from accept_mpi.tree import Tree

_MOST_ROUNDS, _LEAST_PASSES = 40, 3
_WINDOW = 0.1  # seconds that a piece is measured at least: quotas of CPU are given out every 5 to 100 ms
_PRECISE = 0.005  # standard error of the mean at which a piece is known well enough
_MOST_FLIGHT, _CACHE_BYTES = 3, 32 << 20  # micro-batches in flight: as many as caches do not hold
_FEW = 32  # pages: a pass finds as much new wherever it looks


def micro_batches_in_flight(held: float) -> int:
    """Micro-batches between F and B while a piece is measured, each holding so many bytes."""
    return min(_MOST_FLIGHT, 1 + int(_CACHE_BYTES / max(1.0, held)))


def stretch_of(wall: float, cpu: float) -> float:
    """Seconds of the clock for a second of CPU."""
    return max(1.0, wall / max(cpu, 1e-9))


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


class TimedPiece:
    """Layers ``start`` to ``stop`` - 1 as a stage, with clocks in between."""

    def __init__(self, chain: Chain, outline: Outline, job: Job, start: int, stop: int, loss: Loss | None) -> None:
        self.start, self.stop = start, stop
        layers = build_layers(chain, start, stop, job.train.seed)
        self._asynchronous = job.pipeline.schedule == "1f1b-async"
        self._deferred = job.pipeline.schedule == "zero-bubble"
        self.stage = Stage(layers, job, loss, outline.channels_last)
        self._operations = np.array([layer.operations for layer in outline.layers[start:stop]])
        self._held = float(sum(layer.saved_bytes for layer in outline.layers[start:stop]))
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
        for _ in range(micro_batches_in_flight(self._held)):
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

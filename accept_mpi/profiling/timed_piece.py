"""Times a range of layers as a real stage, with clocks between its layers."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import torch

from accept_mpi import tree
from accept_mpi.codecs.tensors import Tensors
from accept_mpi.device.allocator import memory_taken
from accept_mpi.device.compute import here
from accept_mpi.job import Job, flows
from accept_mpi.models import Chain
from accept_mpi.models.layers import build_layers
from accept_mpi.models.losses import Loss
from accept_mpi.models.untouched import untouched
from accept_mpi.pipeline.sparse_gradients import check_sparse, find_sparse
from accept_mpi.pipeline.stage import Stage
from accept_mpi.pipeline.trials import writes_of
from accept_mpi.profiling.outline import Outline
from accept_mpi.tree import Tree

_MOST_ROUNDS, _LEAST_PASSES = 40, 3
_ENOUGH = 5  # rounds from which their spread can be told
_WINDOW = 0.1  # seconds for which a piece is measured at least: CPU quotas are refilled every 5 to 100 ms
_SHORT = 0.3  # the same, unless it is known well before: first rounds take up to half as long again
_PRECISE = 0.04  # relative standard error of a round's seconds at which measuring stops: machines drift by more
_MOST_FLIGHT, _CACHE_BYTES = 3, 32 << 20  # micro-batches in flight: enough to exceed the caches
_FEW = 32  # page faults below this number are noise


def micro_batches_in_flight(held: float) -> int:
    """Number of micro-batches between F and B while a piece is measured; each holds ``held`` bytes of activations."""
    return min(_MOST_FLIGHT, 1 + int(_CACHE_BYTES / max(1.0, held)))


def stretch_of(wall: float, cpu: float) -> float:
    """Wall-clock seconds per CPU second, at least 1."""
    return max(1.0, wall / max(cpu, 1e-9))


class Timed(NamedTuple):
    """Times of a piece."""

    layers: np.ndarray
    """(4, layers) CPU seconds per pass: forward, backward, the backward's weight gradients, update; ``lap``: (2, layers)."""
    wall: float
    """Wall-clock seconds of the whole measurement."""
    cpu: float
    """CPU seconds of the whole measurement."""


def _usual(passes: list[tuple[int, np.ndarray]]) -> np.ndarray:
    """Lower median of the passes (page faults, CPU seconds per layer), without the first, which warms up.

    Passes that took more memory from the kernel than others do not count: in training a stage keeps its memory.
    """
    _, *rest = passes
    most = 1.1 * min(pages for pages, _ in rest) + _FEW
    rows = np.array([row for pages, row in rest if pages <= most])
    return np.sort(rows, axis=0)[(len(rows) - 1) // 2]


def _precise(rounds: Sequence[float]) -> bool:
    """True if the mean of these seconds, but for the first round's, is known well enough."""
    _, *rest = rounds
    if len(rounds) < _ENOUGH:
        return False
    return statistics.stdev(rest) / math.sqrt(len(rest)) < _PRECISE * statistics.fmean(rest)


class TimedPiece:
    """Layers ``start`` to ``stop`` - 1 as a stage, with clocks between them. The model's last layer needs ``loss``."""

    def __init__(self, chain: Chain, outline: Outline, job: Job, start: int, stop: int, loss: Loss | None) -> None:
        self.start, self.stop = start, stop
        layers = build_layers(chain, start, stop, job.train.seed)
        self._flows = flows(job.pipeline.schedule)
        self._deferred = job.pipeline.schedule == "zero-bubble"
        self.stage = Stage(layers, job, loss and loss.apart(), outline.channels_last)
        self._untouched = ExitStack()
        self._untouched.enter_context(untouched(layers.modules, loss and loss.function))
        self._seconds = here().seconds
        self._operations = np.array([layer.operations for layer in outline.layers[start:stop]])
        self._held = float(sum(layer.saved_bytes for layer in outline.layers[start:stop]))
        self._forward: list[float] = []
        self._backward: dict[int, float] = {}
        self._forwards: list[tuple[int, np.ndarray]] = []
        """Page faults and (layers,) CPU seconds of each forward."""
        self._backwards: list[tuple[int, np.ndarray]] = []
        """Page faults and (2, layers) CPU seconds of each backward: all of it, and what zero-bubble can put off."""
        self._gradients: dict[int, Tensors] = {}
        self._depth = 0
        self._hooks = [layer.register_forward_pre_hook(self._enter) for layer in self.stage.layers]
        self._hooks += [layer.register_forward_hook(self._stamp(n)) for n, layer in enumerate(self.stage.layers)]

    def close(self) -> None:
        """Free the memory now: hooks reference this object, so otherwise it would live until the garbage collector runs."""
        for hook in self._hooks:
            hook.remove()
        self._gradients.clear()
        self.stage.close()
        self._untouched.close()

    def _enter(self, module: Any, inputs: Any) -> None:
        self._depth += 1

    def _stamp(self, position: int) -> Callable[..., None]:
        def ready(_: torch.Tensor) -> None:
            self._backward.setdefault(position, self._seconds())

        def after(module: Any, inputs: Any, output: Any) -> None:
            self._depth -= 1
            if self._depth:  # a layer may call itself
                return
            for value in tree.leaves(output):
                if value.requires_grad:
                    value.register_hook(ready)
            self._forward.append(self._seconds())

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
        """Train the piece for about ``seconds``, at least a few rounds. ``brief``: leave out the optimizer's step.

        ``inputs``, ``target``: of a micro-batch of ``samples``; ``of``: the tree whose tensors the inputs are.
        """
        began, cpu = time.monotonic(), self._seconds()
        self.begin(inputs, target, of, samples)
        rounds: list[float] = []
        while len(rounds) < _MOST_ROUNDS:
            rounds.append(self.round())
            if len(rounds) + self._next - self._first < _LEAST_PASSES:
                continue
            took = time.monotonic() - began
            if took > max(seconds, _SHORT) or (took > _WINDOW and _precise(rounds)):
                break
        while self._first < self._next:  # micro-batches in flight count, too: a slow device has time for little more
            self._back()
        forward, (backward, weights) = _usual(self._forwards), _usual(self._backwards)
        update = np.zeros(len(forward)) if brief else self._updates()
        return Timed(np.stack([forward, backward, weights, update]), time.monotonic() - began, self._seconds() - cpu)

    def begin(self, inputs: Tensors, target: Any, of: Tree | None = None, samples: int | None = None) -> None:
        """Bring micro-batches into flight, so that, as in training, a backward's activations have left the caches."""
        self._given = inputs, target, of, samples
        self._first = self._next = 0
        self._forwards, self._backwards = [], []
        there, writes = self.stage.may_be_written(), writes_of(self.stage)
        self._forth()
        written = writes.found()
        if any(there.get(name) is not one for name, one in self.stage.may_be_written().items()):
            # What it has made the next one may write to.
            self._back()
            writes = writes_of(self.stage)
            self._forth()
            written |= writes.found()
        if written:  # as a trial finds for a stage that trains
            self._back()
            self.stage.found.written |= written
            self.stage.keep_apart()
            self._forth()
        for _ in range(micro_batches_in_flight(self._held) - 1):
            self._forth()

    def round(self) -> float:
        """Run one micro-batch forward and the oldest backward; returns the seconds that computing took: a CPU quota makes
        some rounds far longer, by the wall clock, than others."""
        began = self._seconds()
        self._forth()
        self._back()
        return self._seconds() - began

    def lap(self) -> Timed:
        """Run one round; ``Timed.layers`` is (2, layers), a micro-batch's forward and the oldest one's backward."""
        began, cpu = time.monotonic(), self._seconds()
        self.round()
        layers = np.stack([self._forwards[-1][1], self._backwards[-1][1][0]])
        return Timed(layers, time.monotonic() - began, self._seconds() - cpu)

    def _forth(self) -> None:
        """Run the next micro-batch forward."""
        k, self._next = self._next, self._next + 1
        inputs, target, of, samples = self._given
        self._forward = []
        # A copy, since a layer may work in place.
        given = tuple(x.detach().clone().requires_grad_(x.requires_grad) if x is not None else None for x in inputs)
        pages, began = memory_taken(), self._seconds()
        out = self.stage.forward(0, k, given, 0, target, of=of, samples=samples)
        if out.result:  # the loss belongs to the last layer
            self._forward[-1] = self._seconds()
        taken = memory_taken() - pages
        wanting = [value for value in out.outputs if value is not None and value.requires_grad]
        self._gradients[k] = tuple(torch.full_like(value, 1e-3) for value in wanting)
        self._forwards.append((taken, np.diff([began, *self._forward])))

    def _back(self) -> None:
        """Run the oldest micro-batch backward."""
        k, self._first = self._first, self._first + 1
        self._backward = {}
        count = self.stop - self.start
        pages, began = memory_taken(), self._seconds()
        self.stage.backward(0, k, self._gradients.pop(k))
        ended = self._seconds()
        weights = np.zeros(count)
        if self._deferred:
            self.stage.weight_gradient(0, k)
            weights = (self._seconds() - ended) * self._operations / max(1.0, self._operations.sum())
        # A layer's backward begins when its output's gradient is ready, and ends when that of the layer before begins.
        begins = np.array([began, *(self._backward.get(position, np.nan) for position in range(count - 2, -1, -1)), ended])
        begins = np.maximum.accumulate(np.where(np.isnan(begins), -np.inf, begins))
        self._backwards.append((memory_taken() - pages, np.stack([np.diff(begins)[::-1] + weights, weights])))

    def _updates(self) -> np.ndarray:
        """(layers,) CPU seconds of the optimizer's step, divided among layers in proportion to their parameters."""
        find_sparse(self.stage)
        check_sparse(self.stage)
        self.stage.update(0.0, 0)  # the first step creates the optimizer's state
        for parameter in self.stage.parameters:
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        began = self._seconds()
        self.stage.update(0.0, 1 if self._flows else 0)
        took = self._seconds() - began
        parameters = np.array([sum(p.numel() for p in layer.parameters()) for layer in self.stage.layers], float)
        return took * parameters / max(1.0, parameters.sum())

"""Measures how long each layer takes on this device, by training pieces of the model for a few seconds before the run.

A piece is a real ``Stage`` over about a tenth of the model's work, on random activations, with the threads and memory format
that training will use; clocks between its layers split its time. Layers are not measured alone, because a layer's time
depends on what its neighbours leave in the caches. Pieces are built and discarded one by one, so memory must hold only one.
"""

import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from accept_mpi import tree
from accept_mpi.codecs.tensors import Tensors
from accept_mpi.data import Dataset, fetch
from accept_mpi.data.calendar import micro_batch_size
from accept_mpi.device.compute import here
from accept_mpi.job import Job
from accept_mpi.models import Chain
from accept_mpi.models.losses import Loss
from accept_mpi.profiling.layer_times import LayerTimes, TimedRange, bit_reversed_order, guess, of_layers, pieces
from accept_mpi.profiling.outline import Outline
from accept_mpi.profiling.timed_piece import TimedPiece, micro_batches_in_flight, stretch_of
from accept_mpi.tree import Tree
from accept_mpi.users_code import taken_apart

_HEAP = 3  # memory that a piece takes over what it is known to hold: gradients, scratch and the allocator's gaps
_COPIES = 6  # of the weights at most exist at once: two versions, gradients, two optimizer moments, one temporary
_SECOND = 0.4  # share of the budget for retiming
_SMALL = 2e-3  # seconds of forward, as guessed, below which a model's pieces are measured together
_LOOKED_AT = 4  # micro-batches of which the largest is measured
_QUICK = 0.2  # share of the budget for checking a known device: some pieces, since one may vary by a tenth
_SAME = 0.12  # |log(CPU seconds now / then)| below which a device counts as unchanged
_SAME_STRETCH = 0.25  # the same for wall-clock seconds per CPU second: a check has few of the periods of a CPU quota


class Subject(NamedTuple):
    """The subject of a measurement: a job's model, and a micro-batch of real data to train it on."""

    chain: Chain
    outline: Outline
    job: Job
    loss: Loss
    inputs: Tensors
    target: Any
    """None if the device has no data; the pieces that need it are not measured then."""
    tree: Tree | None = None
    """Structure whose tensors the inputs are; None for a lone tensor or a tuple of several."""
    samples: int | None = None


class MicroBatch(NamedTuple):
    """Inputs and targets of a micro-batch; empty on a device without data."""

    inputs: Tensors = ()
    target: Any = None
    tree: Tree | None = None
    samples: int | None = None

    @property
    def value(self) -> Any:
        """What the data set gives for the micro-batch."""
        return tree.unflatten(self.tree or tree.packed(len(self.inputs)), self.inputs)


def time_layers(
    subject: Subject,
    budget: float,
    known: LayerTimes | None = None,
    room: float = math.inf,
    order: Sequence[int] = (),
    crowded: bool = False,
) -> LayerTimes:
    """Measure all layers, for about ``budget`` seconds in total. Layers that it did not reach have NaN.

    ``known``: this device's times from an earlier run. A fifth of the budget checks that they still hold; if they do, the
    rest goes to layers that they lack.
    ``room``: bytes that a piece may take; larger pieces are not measured.
    ``order``: the order in which to time ``pieces``, in case the budget ends early; by default spread over the model.
    ``crowded``: more threads than cores measure here, so a short check would be unreliable and ``known`` is trusted as is.
    """
    began = time.monotonic()

    def measure(
        chosen: list[tuple[int, int]], seconds: float, brief: bool = False
    ) -> tuple[np.ndarray, list[TimedRange], float]:
        return _measure(subject, chosen, seconds, room, brief)

    every = pieces(subject.outline)
    wanted = [every[k] for k in order or bit_reversed_order(len(every))]
    old: LayerTimes | None = None
    if known is not None:
        there = [(a, b) for a, b in every if known.measured[a]]
        some = there if len(_joined(subject, there, room)) == 1 else there[1::4] or there
        if crowded or _unchanged(known, *measure(some, _QUICK * budget, brief=True)[1:]):
            old, wanted = known, [run for run in wanted if run not in there]
    found, runs, stretch = measure(wanted, budget - (time.monotonic() - began)) if wanted else (None, [], 1.0)
    seconds = time.monotonic() - began
    if old is None:
        assert found is not None
        return of_layers(found, seconds, tuple(sorted(runs)), stretch)
    if found is None or not runs:
        return msgspec.structs.replace(old, seconds=seconds)
    both = np.where(np.isfinite(found), found, [old.forward, old.backward, old.weight_gradient, old.update])
    whole = of_layers(both, seconds, tuple(sorted({*old.pieces, *runs})), stretch)
    return msgspec.structs.replace(whole, observed=old.observed, lanes=old.lanes)


def retime(subject: Subject, chosen: Sequence[tuple[int, int]], room: float = math.inf) -> list[TimedRange]:
    """Measure these pieces (first layer, last + 1) again, for ``_SECOND`` of the job's ``probe_seconds``. Skips those that
    take more than ``room`` bytes, or need data that this device lacks."""
    budget = _SECOND * subject.job.pipeline.probe_seconds
    return _measure(subject, list(chosen), budget, room, brief=True)[1]


def _measure(
    subject: Subject, chosen: list[tuple[int, int]], budget: float, room: float, brief: bool = False
) -> tuple[np.ndarray, list[TimedRange], float]:
    """(4, layers) seconds, NaN outside the pieces that the budget reached; these pieces' times; and the stretch."""
    outline = subject.outline
    began = time.monotonic()
    count = len(outline.layers)
    found = np.full((4, count), np.nan)
    measured: list[tuple[int, int]] = []
    wall = cpu = 0.0
    needs = {run: bytes_of(outline, *run) for run in chosen}
    chosen = [run for run in chosen if needs[run] <= room]
    # Take memory from the kernel beforehand: page faults during the measurement would count as the piece's time.
    here().reserve(int(min(room, _HEAP * max((needs[run] for run in chosen), default=0))))
    together = _joined(subject, chosen, room)
    work = [_work(outline, *run) for run in together]
    for number, (start, stop) in enumerate(together):
        remaining = budget - (time.monotonic() - began)
        if number and remaining <= 0:
            break
        given = given_to(subject, start, stop)
        if given is None:
            continue
        piece = piece_of(subject, start, stop)
        seconds = remaining * work[number] / sum(work[number:])
        timed = piece.measure(given.inputs, given.target, seconds, brief, given.tree, given.samples)
        found[:, start:stop] = timed.layers
        wall, cpu = wall + timed.wall, cpu + timed.cpu
        measured += [(a, b) for a, b in chosen if start <= a and b <= stop]
        piece.close()
    # One stretch for all pieces: how much a CPU quota delays a single piece depends on when the quota's period began.
    stretch = stretch_of(wall, cpu)
    found *= stretch
    runs = [(a, b, float(found[0, a:b].sum()), float(found[1, a:b].sum())) for a, b in measured]
    return found, runs, stretch


def _joined(subject: Subject, chosen: list[tuple[int, int]], room: float) -> list[tuple[int, int]]:
    """Pieces to measure: those of a small model all together, since what a stage costs by itself would count in each."""
    if not chosen:
        return []
    start, stop = min(chosen)[0], max(chosen)[1]
    without_gaps = sum(b - a for a, b in chosen) == stop - start
    small = _work(subject.outline, start, stop) < _SMALL and bytes_of(subject.outline, start, stop) <= room
    return [(start, stop)] if without_gaps and small and given_to(subject, start, stop) is not None else chosen


def _work(outline: Outline, start: int, stop: int) -> float:
    """A guess at the seconds of these layers' forwards."""
    return sum(guess(x.operations, x.saved_bytes, x.parameter_bytes) for x in outline.layers[start:stop])


def piece_of(subject: Subject, start: int, stop: int) -> TimedPiece:
    """The piece of layers ``start`` to ``stop`` - 1."""
    loss = subject.loss if stop == len(subject.outline.layers) else None
    return TimedPiece(subject.chain, subject.outline, subject.job, start, stop, loss)


def given_to(subject: Subject, start: int, stop: int) -> MicroBatch | None:
    """A micro-batch for a piece: of the data in front of the first layer, else random activations. None if the piece needs
    data that this device lacks."""
    inputs = random_inputs(subject.outline, start) if start else subject.inputs
    if not inputs or (stop == len(subject.outline.layers) and subject.target is None):
        return None
    of = subject.outline.layers[start].tree if start else subject.tree
    return MicroBatch(inputs, subject.target, of, subject.samples)


def bytes_of(outline: Outline, start: int, stop: int) -> int:
    """Bytes that the piece of layers ``start`` to ``stop`` - 1 takes while it is measured."""
    layers = outline.layers[start:stop]
    trained = sum(layer.trained_bytes for layer in layers)
    held = sum(layer.saved_bytes for layer in layers)
    return _COPIES * trained + sum(layer.frozen_bytes for layer in layers) + (1 + micro_batches_in_flight(held)) * held


def micro_batch(train: Dataset | None, job: Job) -> MicroBatch:
    """The largest of the data set's first few micro-batches, since samples may differ in length; empty without data."""
    if train is None:
        return MicroBatch()
    size = micro_batch_size(job)
    found: list[MicroBatch] = []
    for begin in range(0, min(len(train), _LOOKED_AT * size), size):
        sample = np.arange(begin, begin + size) % len(train)
        samples = fetch(train, sample, 0, inputs=True, targets=True)
        inputs, of = taken_apart(-1, "", samples.inputs)
        found.append(MicroBatch(tuple(inputs), samples.targets, of, size))
    return max(found, key=lambda one: sum(x.numel() for x in one.inputs if x is not None))


def _unchanged(known: LayerTimes, runs: list[TimedRange], stretch: float) -> bool:
    """True if the pieces measured now take about as long in total as the known times say, and are stretched as much."""
    now = sum(forward + backward for _, _, forward, backward in runs) / stretch
    then = sum(sum(known.forward[a:b]) + sum(known.backward[a:b]) for a, b, _, _ in runs) / known.stretch
    if not (now > 0 and then > 0):
        return False
    return abs(math.log(now / then)) < _SAME and abs(math.log(stretch / known.stretch)) < _SAME_STRETCH


def random_inputs(outline: Outline, layer: int) -> Tensors:
    """Random activations of the shapes that ``layer`` takes as inputs."""
    values = []
    for spec in outline.layers[layer].inputs:
        value = spec.zeros()
        if value is not None and value.is_floating_point():
            with torch.no_grad():
                torch.as_strided(value, spec.sent_shape, spec.stride).normal_()
        values.append(value)
    return tuple(values)

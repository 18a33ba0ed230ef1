"""What each layer took, and how a model is divided into pieces for timing. Pure."""

import itertools
import math

import msgspec
import numpy as np

from accept_mpi.profiling.outline import Outline

PIECES = 10
TimedRange = tuple[int, int, float, float]
"""A sub-model: first layer, last + 1, seconds forward and backward."""


class LayerTimes(msgspec.Struct, frozen=True):
    """Seconds by layer, of one micro-batch (``update``: of one step). NaN where the budget ended before the layer's turn."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    """Of inputs and weights."""
    weight_gradient: tuple[float, ...]
    """What of ``backward`` the zero-bubble schedule can put off; 0 with other schedules."""
    update: tuple[float, ...]
    seconds: float
    """All of this took so long."""
    pieces: tuple[TimedRange, ...]
    """(first layer, last + 1, forward, backward): whole sub-models, as AccEPT's predictor wants them."""
    stretch: float
    """Seconds of the clock for a second of CPU."""
    observed: tuple[TimedRange, ...] = ()
    """Stages that earlier runs had on this device, as they took in training."""

    @property
    def measured(self) -> list[bool]:
        return [math.isfinite(value) for value in self.forward]


def nothing_measured(outline: Outline) -> LayerTimes:
    """Of a device that has not been asked."""
    unknown = (math.nan,) * len(outline.layers)
    return LayerTimes(unknown, unknown, unknown, unknown, 0.0, (), 1.0)


def pieces(outline: Outline, count: int = PIECES) -> list[tuple[int, int]]:
    """The model in ``count`` runs of layers (or one a layer) of about equal work, guessed from operations and memory."""
    work = np.array([guess(layer.operations, layer.saved_bytes, layer.parameter_bytes) for layer in outline.layers])
    done = work.cumsum() / work.sum()
    edges = sorted({0, len(work), *(int(np.searchsorted(done, k / count)) + 1 for k in range(1, count))})
    return [(a, b) for a, b in itertools.pairwise(edges) if b > a]


def guess(operations: float, held: float, parameter_bytes: float) -> float:
    """Seconds of a layer's forward on a middling core, for want of anything better: 20 GFLOP/s, 4 GB/s."""
    return operations / 20e9 + (held + parameter_bytes) / 4e9 + 2e-5


def of_layers(found: np.ndarray, seconds: float, runs: tuple[TimedRange, ...], stretch: float) -> LayerTimes:
    """Of (4, layers) seconds."""
    forward, backward, weights, update = (tuple(map(float, row)) for row in found)
    return LayerTimes(forward, backward, weights, update, seconds, runs, stretch)


def bit_reversed_order(count: int) -> list[int]:
    """0 to ``count`` - 1, such that the first few of them are spread over all (bits in reverse)."""
    bits = max(1, (count - 1).bit_length())
    return sorted(range(count), key=lambda k: f"{k:0{bits}b}"[::-1])

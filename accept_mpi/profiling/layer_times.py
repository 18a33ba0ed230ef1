"""Layer times of a device, and the division of a model into pieces for timing. Pure."""

import itertools
import math

import msgspec
import numpy as np

from accept_mpi.profiling.outline import Outline

PIECES = 10
TimedRange = tuple[int, int, float, float]
"""A timed range of layers: first layer, last + 1, seconds forward, seconds backward."""


class LayerTimes(msgspec.Struct, frozen=True):
    """Seconds per micro-batch (``update``: per step) for each layer of one device; NaN for layers not measured."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    """Seconds of the gradients of inputs and weights."""
    weight_gradient: tuple[float, ...]
    """Part of ``backward`` that the zero-bubble schedule can put off; 0 with other schedules."""
    update: tuple[float, ...]
    seconds: float
    """Seconds that the measurement took."""
    pieces: tuple[TimedRange, ...]
    """Timed pieces of the model, the sub-models from which AccEPT's predictor learns."""
    stretch: float
    """Wall-clock seconds per CPU second."""
    observed: tuple[TimedRange, ...] = ()
    """Stages that earlier runs had on this device, with their times in training."""
    lanes: dict[int, float] = {}
    """What lanes gain on this device (``lane_timer.time_lanes``)."""

    @property
    def measured(self) -> list[bool]:
        """True for each layer that was measured."""
        return [math.isfinite(value) for value in self.forward]


def nothing_measured(outline: Outline) -> LayerTimes:
    """The times of a device that has not measured anything: NaN for every layer."""
    unknown = (math.nan,) * len(outline.layers)
    return LayerTimes(unknown, unknown, unknown, unknown, 0.0, (), 1.0)


def pieces(outline: Outline, count: int = PIECES) -> list[tuple[int, int]]:
    """Divide the model into ``count`` ranges of layers (fewer if it has fewer layers) of about equal work, as ``guess``
    estimates it. Each is (first layer, last + 1)."""
    work = np.array([guess(layer.operations, layer.saved_bytes, layer.parameter_bytes) for layer in outline.layers])
    done = work.cumsum() / work.sum()
    edges = sorted({0, len(work), *(int(np.searchsorted(done, k / count)) + 1 for k in range(1, count))})
    return [(a, b) for a, b in itertools.pairwise(edges) if b > a]


def guess(operations: float, held: float, parameter_bytes: float) -> float:
    """Seconds of a layer's forward on an average core (20 GFLOP/s, 4 GB/s), for layers that nobody has measured."""
    return operations / 20e9 + (held + parameter_bytes) / 4e9 + 2e-5


def of_layers(found: np.ndarray, seconds: float, runs: tuple[TimedRange, ...], stretch: float) -> LayerTimes:
    """``LayerTimes`` from (4, layers) seconds of forward, backward, weight gradients and update."""
    forward, backward, weights, update = (tuple(map(float, row)) for row in found)
    return LayerTimes(forward, backward, weights, update, seconds, runs, stretch)


def bit_reversed_order(count: int) -> list[int]:
    """The numbers 0 to ``count`` - 1 ordered by their reversed bits, so that the first few are spread over the range."""
    bits = max(1, (count - 1).bit_length())
    return sorted(range(count), key=lambda k: f"{k:0{bits}b}"[::-1])

"""Sub-models, devices and measured times in the form that predictors take.

A sub-model is a range of layers, represented by a binary vector over the model's layers (AccEPT). A device is represented by
its times of some sub-models.
"""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from accept_mpi.profiling.layer_times import LayerTimes, guess
from accept_mpi.profiling.outline import Outline

PROBES = 10

F64 = npt.NDArray[np.float64]
Intervals = npt.NDArray[np.int64]
"""(k, 2): first layer, last + 1 of each interval."""

_LEAST = 1e-6  # seconds, a lower bound on the time of an interval, whose logarithm is learned


@dataclass(frozen=True)
class DeviceSamples:
    """Measurements of one model on one device. Times are (k, 2): seconds forward and backward."""

    outline: Outline
    device: str
    probes: Intervals
    """Intervals in order, at least one; together they cover the model, or the part that time and memory allowed."""
    probe_times: F64
    intervals: Intervals = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    """Other measured sub-models."""
    times: F64 = field(default_factory=lambda: np.zeros((0, 2)))
    layer_times: F64 | None = None
    """(layers, 2): each layer's time within the probe that it was in, NaN if in none. None if not kept."""

    @property
    def layers(self) -> int:
        """Number of the model's layers."""
        return len(self.outline.layers)

    @cached_property
    def model(self) -> str:
        """The outline's key."""
        return self.outline.key

    @cached_property
    def own(self) -> F64:
        """(layers, 2): ``layer_times``, or NaN if they were not kept."""
        return np.full((self.layers, 2), np.nan) if self.layer_times is None else self.layer_times

    def only(self, probes: npt.ArrayLike) -> "DeviceSamples":
        """A copy with only the probes of these indices, and the layer times inside them."""
        some = np.sort(np.asarray(probes))
        inside = membership(self.probes[some], self.layers).sum(axis=0) > 0
        own = np.where(inside[:, None], self.own, np.nan)
        return replace(self, probes=self.probes[some], probe_times=self.probe_times[some], layer_times=own)


def features(outline: Outline) -> F64:
    """(layers, 8): features of each layer that do not depend on the device, scaled to about -1 to 1."""
    rows = []
    for index, layer in enumerate(outline.layers):
        ahead = outline.crossing(index + 1).values if index + 1 < len(outline.layers) else 0
        values = outline.crossing(index).values
        work = guess(layer.operations, layer.saved_bytes, layer.parameter_bytes)
        rows.append([
            math.log(work), math.log1p(layer.operations), math.log1p(layer.saved_bytes), math.log1p(layer.parameter_bytes),
            math.log1p(values), math.log1p(ahead),
            math.log1p(layer.operations / (1 + layer.saved_bytes + layer.parameter_bytes)),
            float(layer.operations > 0),
        ])  # fmt: skip
    return (np.array(rows) - np.array([-9, 13, 12, 8, 10, 10, 3, 0.5])) / np.array([2, 8, 4, 6, 4, 4, 2, 0.5])


def guesses(outline: Outline) -> F64:
    """(layers, 2): seconds forward and backward on an average core, from operations and memory."""
    forward = np.array([guess(x.operations, x.saved_bytes, x.parameter_bytes) for x in outline.layers])
    return np.stack([forward, 2 * forward], axis=1)


def interval_features(outline: Outline, intervals: Intervals) -> F64:
    """(k, 8): features of each interval as a whole: size (how much of it caches may hold) and position in the model."""
    inside = membership(intervals, len(outline.layers))
    work = guesses(outline)[:, 0]
    sums = [
        np.array([getattr(layer, name) for layer in outline.layers], float) for name in ("saved_bytes", "parameter_bytes")
    ]
    held, parameters = (np.log1p(inside @ one) for one in sums)
    share = inside @ work / work.sum()
    ends = [(intervals[:, 0] == 0).astype(float), (intervals[:, 1] == len(outline.layers)).astype(float)]
    middle = intervals.mean(axis=1) / len(outline.layers)
    rows = [(held - 15) / 3, (parameters - 12) / 5, np.log(share + 1e-4) / 2 + 1, np.log(inside.sum(axis=1)) / 2 - 1]
    return np.stack([*rows, *ends, middle, (np.log(inside @ work) + 6) / 2], axis=1)


def device_vector(known: DeviceSamples) -> F64:
    """(2 x PROBES,): logarithms of probe times relative to the guess for the same layers, resampled at PROBES points spaced
    evenly over the model's work."""
    work = guesses(known.outline)
    ratios = np.log([times / work[a:b].sum(axis=0) for (a, b), times in zip(known.probes, known.probe_times, strict=True)])
    done = np.concatenate([[0.0], work[:, 0].cumsum()]) / work[:, 0].sum()
    middle = done[known.probes].mean(axis=1)
    at = (np.arange(PROBES) + 0.5) / PROBES
    return np.concatenate([np.interp(at, middle, ratios[:, way]) for way in (0, 1)])


def membership(intervals: Intervals, layers: int) -> F64:
    """(k, layers): a binary vector per interval, 1 for its layers."""
    place = np.arange(layers)
    return ((place >= intervals[:, :1]) & (place < intervals[:, 1:])).astype(float)


def known_of(outline: Outline, device: str, times: LayerTimes) -> DeviceSamples:
    """A device's times in the form that the predictor takes: its probes, the intervals whose layers were all measured (of
    power-of-two lengths), and observed stages."""
    probes, observed = (np.array(runs).reshape(-1, 4) for runs in (times.pieces, times.observed))
    rows = np.array([times.forward, times.backward]).T
    lengths = [2**k for k in range(1, len(rows).bit_length())]
    inside = np.array([(a, a + n) for n in lengths for a in range(0, len(rows) - n + 1, n)], np.int64).reshape(-1, 2)
    sums = np.array([rows[a:b].sum(axis=0) for a, b in inside]).reshape(-1, 2)
    measured = np.isfinite(sums).all(axis=1)
    return DeviceSamples(
        outline=outline,
        device=device,
        probes=probes[:, :2].astype(np.int64),
        probe_times=np.maximum(probes[:, 2:], _LEAST),
        intervals=np.concatenate([inside[measured], observed[:, :2].astype(np.int64)]),
        times=np.maximum(np.concatenate([sums[measured], observed[:, 2:]]), _LEAST),
        layer_times=rows,
    )

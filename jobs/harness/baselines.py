"""Simpler predictors of sub-models' times, for the predictor's table. All return (k, 2) seconds forward and backward."""

from collections.abc import Sequence

import numpy as np

from accept_mpi.prediction.samples import F64, DeviceSamples, Intervals, membership


def by_operations(known: DeviceSamples, intervals: Intervals) -> F64:
    """FLOPs-linear: operations times one rate per device, from all its probes."""
    operations = np.array([layer.operations for layer in known.outline.layers])
    seconds = known.probe_times.sum(axis=0) / operations.sum()
    return membership(intervals, known.layers) @ operations[:, None] * seconds


def by_capacity(known: DeviceSamples, reference: DeviceSamples, intervals: Intervals) -> F64:
    """FTPipeHD: a reference device's layer times, scaled by one capacity ratio."""
    ratio = known.probe_times.sum() / reference.probe_times.sum()
    return ratio * (membership(intervals, known.layers) @ reference.own)


def by_layers(known: DeviceSamples, intervals: Intervals) -> F64:
    """PipeDream: the sum of the device's own measured layer times."""
    return membership(intervals, known.layers) @ known.own


def by_nearest(known: DeviceSamples, others: Sequence[DeviceSamples], intervals: Intervals) -> F64:
    """The layer times, scaled, of the known device whose probes' times have the most similar proportions."""
    mine = np.log(known.probe_times)

    def distance(other: DeviceSamples) -> float:
        difference = mine - np.log(other.probe_times)
        return float((difference - difference.mean()).std())

    return by_capacity(known, min(others, key=distance), intervals)

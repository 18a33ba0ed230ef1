"""Fills in the times of layers that a device has not measured, because its budget ended or they did not fit its memory.

They come from the latency predictor if it has learned from any device, else from other devices' times scaled by FTPipeHD's
capacity ratio, else, if no device has measured the layer, from operations and memory at an average core's rates.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from accept_mpi.prediction.database import keep_predictor, library, recall_predictor
from accept_mpi.prediction.predictor import Predictor
from accept_mpi.prediction.samples import DeviceSamples, known_of
from accept_mpi.profiling.layer_times import LayerTimes, guess, pieces
from accept_mpi.profiling.outline import Outline

_STEPS, _SECONDS = 150, 4.0  # limits on training a predictor while a run waits for its plan


def learned(data: Sequence[DeviceSamples], stored: Predictor | None) -> Predictor | None:
    """A predictor that has learned from all of ``data``: ``stored``, adapted to samples that are new to it, or a newly
    trained one if ``stored`` lacks a model. None without data."""
    if not data:
        return None
    if stored is None or not {known.model for known in data} <= stored.models:
        return Predictor.train(data, steps=_STEPS, seconds=_SECONDS)
    seen = {(known.model, known.device): known for known in stored.memory}
    fresh = [known for known in data if not _same(seen.get((known.model, known.device)), known)]
    if fresh:
        stored = stored.adapt(*fresh, seconds=_SECONDS)
    return stored


def _same(one: DeviceSamples | None, other: DeviceSamples) -> bool:
    if one is None:
        return False
    pairs = zip((one.probe_times, one.intervals, one.times), (other.probe_times, other.intervals, other.times), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


def impute(times: Sequence[LayerTimes], outline: Outline, predictor: Predictor | None = None) -> np.ndarray:
    """(4, devices, layers) seconds of forward, backward, the backward's weight gradients and update, without gaps.

    A gap is filled with other devices' times, scaled by what both have measured (FTPipeHD's capacity), or, if no device
    measured the layer, by ``guess``. With a predictor, forward and backward are its prediction from the device's pieces.
    """
    rows = np.array([[t.forward, t.backward, t.weight_gradient, t.update] for t in times]).transpose(1, 0, 2)
    known = np.isfinite(rows[0])
    total = np.where(known, rows[0] + rows[1], 0.0)
    filled = rows.copy()
    for n in range(len(times)):
        gaps = ~known[n]
        nothing = not known[n].any()  # then the device is assumed to be as fast as the others
        others = [
            m for m in range(len(times)) if m != n and (nothing or (known[m] & known[n]).any()) and (known[m] & gaps).any()
        ]
        if not gaps.any() or not others:
            continue
        ratios = [1.0 if nothing else total[n][known[m]].sum() / total[m][known[n]].sum() for m in others]
        scaled = np.array([ratio * rows[:, m] for ratio, m in zip(ratios, others, strict=True)])
        have = gaps & known[others].any(axis=0)
        filled[:, n, have] = np.nanmedian(scaled[:, :, have], axis=0)
    guessed = np.array([guess(x.operations, x.saved_bytes, x.parameter_bytes) for x in outline.layers])
    forward = np.nansum(rows[0], axis=1)
    scales = [forward[n] / guessed[known[n]].sum() for n in range(len(times)) if known[n].any()]
    for n in range(len(times)):
        gaps = ~np.isfinite(filled[0, n])
        scale = forward[n] / guessed[known[n]].sum() if known[n].any() else np.median(scales or [1.0])
        filled[:, n, gaps] = np.outer((1.0, 2.0, 0.0, 0.0), scale * guessed[gaps])
        if predictor is not None and times[n].pieces and not known[n].all():
            predicted, _ = predictor.layers(known_of(outline, "", times[n]))
            gaps = ~known[n]
            filled[2, n, gaps] *= predicted[gaps, 1] / np.maximum(filled[1, n, gaps], 1e-12)
            filled[:2, n, gaps] = predicted[gaps].T
    return filled


def predictor_for(path: Path | None, model: Outline, times: dict[str, LayerTimes]) -> Predictor | None:
    """A predictor for layers that devices have not measured; None without data to learn from.

    With a database at ``path`` it learns from all of that and is stored there, else only from this run's ``times`` (by
    device key).
    """
    known = library(path) if path else [known_of(model, key, one) for key, one in times.items() if one.pieces]
    stored = recall_predictor(path) if path else None
    predictor = learned(known, stored)
    if path and predictor and predictor is not stored:
        keep_predictor(path, predictor)
    return predictor


def pieces_to_time(path: Path, model: Outline) -> list[int]:
    """The order in which unknown devices should time the model's pieces, most informative first, according to the stored
    predictor; empty without one."""
    predictor = recall_predictor(path)
    return predictor.order(model, np.array(pieces(model))) if predictor else []

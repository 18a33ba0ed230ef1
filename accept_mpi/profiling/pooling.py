"""Pools the measurements of devices of one kind. Pure.

A device that measures itself for a few seconds is off by 10 or 20 %; the median of several is more precise. Devices are of
one kind if processor and settings are equal; their shares of the processor may differ, so CPU seconds are compared.
"""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from accept_mpi.profiling.layer_times import LayerTimes, TimedRange, of_layers
from accept_mpi.profiling.message_costs import MessageCosts

_APART = 1.25  # devices of one kind whose times are within this factor of the median count as equal
_ASKED = 3  # pieces that are timed again


class DeviceKind(NamedTuple):
    """The facts that determine how long a device takes."""

    processor: str
    """Key of the processor and all settings."""
    share: str
    """Share of the processor that the device has."""


def probing_order(order: Sequence[int], place: int, mates: int) -> list[int]:
    """The order of pieces for device number ``place`` of ``mates`` devices of a kind.

    All begin with the same piece, so that they can be compared, and continue from different places, so that their budgets
    leave out different pieces.
    """
    rest = order[1:]
    begin = place * len(rest) // mates
    return [*order[:1], *rest[begin:], *rest[:begin]]


def merged(same: Sequence[LayerTimes]) -> LayerTimes:
    """Merge the times of equal devices into one: medians over those that measured a layer or piece.

    Medians, because a piece that was still cold when its turn ended may seem to take twice as long on one rank.
    """
    rows = np.array([[one.forward, one.backward, one.weight_gradient, one.update] for one in same])
    usual = np.full(rows.shape[1:], np.nan)
    there = np.isfinite(rows).any(axis=0)
    usual[there] = np.nanmedian(rows[:, there], axis=0)
    by_place: dict[tuple[int, int], list[TimedRange]] = {}
    for one in same:
        for run in one.pieces:
            by_place.setdefault(run[:2], []).append(run)
    probes: list[TimedRange] = []
    for (start, stop), runs in sorted(by_place.items()):
        forward, backward = (statistics.median(run[way] for run in runs) for way in (2, 3))
        probes.append((start, stop, forward, backward))
    seconds, stretch = max(one.seconds for one in same), statistics.fmean(one.stretch for one in same)
    counts = {k for one in same for k in one.lanes}
    lanes = {k: statistics.median(one.lanes[k] for one in same if k in one.lanes) for k in sorted(counts)}
    found = of_layers(usual, seconds, tuple(probes), stretch)
    return msgspec.structs.replace(found, observed=same[0].observed, lanes=lanes)


def pool(
    times: Sequence[LayerTimes], kinds: Sequence[DeviceKind], again: Sequence[Sequence[TimedRange]] = ()
) -> list[LayerTimes]:
    """Give devices of one kind that measured about the same the median of their times.

    Each keeps the stretch of its share of the processor and its observed stages. A device further from its kind's median
    keeps its own times, unless retiming (``again``: each device's times of the pieces that ``doubted`` named) found it like
    the others: then something else on its machine had taken the time.
    """
    found = list(times)
    stretches = _stretches(times, kinds)
    bare = [_scaled(one, 1 / stretch) for one, stretch in zip(times, stretches, strict=True)]
    for group in _groups(times, kinds):
        at_once = _alike_at_once(bare, group)
        looked = _looked([again[n] for n in group]) / [stretches[n] for n in group] if again else np.array([])
        same = {*at_once, *_near(group, looked)}
        if same:
            one = merged([bare[n] for n in at_once or sorted(same)])
            for n in same:
                own = msgspec.structs.replace(one, seconds=times[n].seconds, observed=times[n].observed)
                found[n] = msgspec.structs.replace(_scaled(own, stretches[n]), stretch=stretches[n])
    return found


def pool_message_costs(
    costs: Sequence[MessageCosts], kinds: Sequence[DeviceKind], same: Sequence[bool]
) -> list[MessageCosts]:
    """Give devices of one kind that were pooled (``same``) the medians of their message costs."""
    found = list(costs)
    for processor in {kind.processor for kind in kinds}:
        group = [n for n, kind in enumerate(kinds) if same[n] and kind.processor == processor]
        those = [costs[n] for n in group]
        if len(those) > 1:
            usual = MessageCosts(
                {name: (_usual(those, name, 0), _usual(those, name, 1)) for name in those[0].codecs},
                statistics.median(one.seconds_per_byte for one in those),
                statistics.median(one.seconds_per_message for one in those),
            )
            found = [usual if n in group else one for n, one in enumerate(found)]
    return found


def _usual(those: Sequence[MessageCosts], codec: str, way: int) -> float:
    return statistics.median(one.codecs[codec][way] for one in those)


def doubted(times: Sequence[LayerTimes], kinds: Sequence[DeviceKind]) -> list[list[tuple[int, int]]]:
    """For each device the pieces (first layer, last + 1) that should be timed again.

    If one device of a kind measured other times than the rest, all of that kind time the same pieces again, simultaneously;
    the lists of other devices are empty.
    """
    asked: list[list[tuple[int, int]]] = [[] for _ in times]
    bare = [_scaled(one, 1 / stretch) for one, stretch in zip(times, _stretches(times, kinds), strict=True)]
    for group in _groups(times, kinds):
        if _alike_at_once(bare, group) == group:
            continue
        shared = sorted(set.intersection(*({run[:2] for run in times[n].pieces} for n in group)))
        for n in group:
            asked[n] = shared[:: max(1, len(shared) // _ASKED)][:_ASKED]
    return asked


def _stretches(times: Sequence[LayerTimes], kinds: Sequence[DeviceKind]) -> list[float]:
    """Wall-clock seconds per CPU second for each device: the median over those with the same share of the same processor,
    since one on which something else was running measured too long."""
    by_kind: dict[DeviceKind, list[float]] = {}
    for one, kind in zip(times, kinds, strict=True):
        by_kind.setdefault(kind, []).append(one.stretch)
    return [statistics.median(by_kind[kind]) for kind in kinds]


def _scaled(one: LayerTimes, factor: float) -> LayerTimes:
    """A copy in which everything takes ``factor`` times as long."""
    rows = factor * np.array([one.forward, one.backward, one.weight_gradient, one.update])
    runs = tuple((start, stop, factor * forward, factor * backward) for start, stop, forward, backward in one.pieces)
    found = of_layers(rows, one.seconds, runs, one.stretch)
    return msgspec.structs.replace(found, observed=one.observed, lanes=one.lanes)


def _groups(times: Sequence[LayerTimes], kinds: Sequence[DeviceKind]) -> list[list[int]]:
    """Groups of two or more devices of one kind that measured something."""
    there = [n for n, one in enumerate(times) if any(one.measured)]
    processors = sorted({kind.processor for kind in kinds})
    groups = [[n for n in there if kinds[n].processor == processor] for processor in processors]
    return [group for group in groups if len(group) > 1]


def _alike_at_once(times: Sequence[LayerTimes], group: Sequence[int]) -> list[int]:
    """The devices of a group that measured about the same at the first attempt."""
    return _near(group, _compared(np.array([np.add(times[n].forward, times[n].backward) for n in group])))


def _near(group: Sequence[int], took: np.ndarray) -> list[int]:
    """The devices of a group whose time ``took`` is within ``_APART`` of the median."""
    if not np.isfinite(took).any():
        return []
    return [n for n, ratio in zip(group, took / np.nanmedian(took), strict=True) if 1 / _APART < ratio < _APART]


def _looked(again: Sequence[Sequence[TimedRange]]) -> np.ndarray:
    """Seconds of each device for the pieces that all have timed again; NaN if there are none."""
    shared = set.intersection(*({run[:2] for run in runs} for runs in again))
    return np.array([sum(run[2] + run[3] for run in runs if run[:2] in shared) if shared else math.nan for runs in again])


def _compared(rows: np.ndarray) -> np.ndarray:
    """Time of each device relative to the median device, over the layers that it shares with others; NaN if there are none.

    ``rows``: (devices, layers) seconds, NaN where not measured.
    """
    shared = np.isfinite(rows).sum(axis=0) > 1
    rows = rows[:, shared]
    usual = np.where(np.isfinite(rows), np.nanmedian(rows, axis=0), 0.0)
    total = usual.sum(axis=1)
    return np.divide(np.nansum(rows, axis=1), total, out=np.full(len(rows), np.nan), where=total > 0)

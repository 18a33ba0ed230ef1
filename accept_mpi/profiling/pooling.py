"""Devices of one kind plan as one: what each measures of itself in a few seconds is off by a tenth or two, the median of
several by less. Of one kind are those with the same processor and settings, whatever share of it they have: what they take
is compared as seconds of CPU. Pure.
"""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from accept_mpi.profiling.layer_times import LayerTimes, TimedRange, of_layers
from accept_mpi.profiling.message_costs import MessageCosts

_APART = 1.25  # are devices of one kind at most, to be taken for the same
_ASKED = 3  # pieces, of a second look


class DeviceKind(NamedTuple):
    """What makes a device take the time that it takes."""

    processor: str
    """The processor, and all settings."""
    share: str
    """How much of it the device has."""


def probing_order(order: Sequence[int], place: int, mates: int) -> list[int]:
    """The order for one of ``mates`` devices of a kind: the first of all, that they may be compared, then each begins
    elsewhere. What their budgets do not reach is another for each."""
    rest = order[1:]
    begin = place * len(rest) // mates
    return [*order[:1], *rest[begin:], *rest[:begin]]


def merged(same: Sequence[LayerTimes]) -> LayerTimes:
    """What ranks that share a host and all settings have measured, as one: medians of what they have. (Of a piece that was
    still cold when its turn ended, one device may say twice what the others do.)"""
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
    return msgspec.structs.replace(of_layers(usual, seconds, tuple(probes), stretch), observed=same[0].observed)


def pool(
    times: Sequence[LayerTimes], kinds: Sequence[DeviceKind], again: Sequence[Sequence[TimedRange]] = ()
) -> list[LayerTimes]:
    """Devices of one kind that measured much the same, taken to be the same, the median of them. (Each keeps its share's
    stretch, and the stages that it was observed with.) One that is further than
    that from its kind's median stays what it is, unless a second look (``again``: what each measured then, as ``doubted``
    says) found it like the others: it was something else on its machine that took the time.
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
    """Devices of one kind that plan as one (``same``) handle messages alike, too: medians of what they measured."""
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
    """For each device the pieces (first layer, last + 1) that a second look should time: of all of a kind, at the same time,
    where one of them measured itself otherwise than the others; nothing elsewhere."""
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
    """By which seconds of CPU become those of the clock, on all that have the same share of the same processor: one of them
    on which something else is running has measured longer than they."""
    by_kind: dict[DeviceKind, list[float]] = {}
    for one, kind in zip(times, kinds, strict=True):
        by_kind.setdefault(kind, []).append(one.stretch)
    return [statistics.median(by_kind[kind]) for kind in kinds]


def _scaled(one: LayerTimes, factor: float) -> LayerTimes:
    """The same, when all takes ``factor`` times as long."""
    rows = factor * np.array([one.forward, one.backward, one.weight_gradient, one.update])
    runs = tuple((start, stop, factor * forward, factor * backward) for start, stop, forward, backward in one.pieces)
    return msgspec.structs.replace(of_layers(rows, one.seconds, runs, one.stretch), observed=one.observed)


def _groups(times: Sequence[LayerTimes], kinds: Sequence[DeviceKind]) -> list[list[int]]:
    """Devices that have mates and measured something."""
    there = [n for n, one in enumerate(times) if any(one.measured)]
    processors = sorted({kind.processor for kind in kinds})
    groups = [[n for n in there if kinds[n].processor == processor] for processor in processors]
    return [group for group in groups if len(group) > 1]


def _alike_at_once(times: Sequence[LayerTimes], group: Sequence[int]) -> list[int]:
    """Those that measured much the same, without a second look."""
    return _near(group, _compared(np.array([np.add(times[n].forward, times[n].backward) for n in group])))


def _near(group: Sequence[int], took: np.ndarray) -> list[int]:
    """Those near the median."""
    if not np.isfinite(took).any():
        return []
    return [n for n, ratio in zip(group, took / np.nanmedian(took), strict=True) if 1 / _APART < ratio < _APART]


def _looked(again: Sequence[Sequence[TimedRange]]) -> np.ndarray:
    """Seconds of what all have timed in a second look; NaN without such."""
    shared = set.intersection(*({run[:2] for run in runs} for runs in again))
    return np.array([sum(run[2] + run[3] for run in runs if run[:2] in shared) if shared else math.nan for runs in again])


def _compared(rows: np.ndarray) -> np.ndarray:
    """What devices take (rows; columns: layers, NaN where not measured) for a second of the usual one, by the layers that
    others have measured, too; NaN without such."""
    shared = np.isfinite(rows).sum(axis=0) > 1
    rows = rows[:, shared]
    usual = np.where(np.isfinite(rows), np.nanmedian(rows, axis=0), 0.0)
    total = usual.sum(axis=1)
    return np.divide(np.nansum(rows, axis=1), total, out=np.full(len(rows), np.nan), where=total > 0)

"""Ways to divide devices into groups; those that differ only in devices of one kind count once."""

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from accept_mpi.planning.formulation import NEVER
from accept_mpi.planning.problem import Problem
from accept_mpi.profiling.cluster_profile import ClusterProfile

_MOST_DIVISIONS = 400
_FEW = 6  # up to this many devices, or two kinds, all divisions are tried
_ALIKE = 0.08  # relative difference of times up to which two devices count as of one kind

Group = tuple[int, ...]
Division = tuple[Group, ...]


def divisions_of(cluster: ClusterProfile, problem: Problem) -> Iterator[Division]:
    """Yield divisions of the devices into groups, at least one of several; those that differ only in devices of one kind
    count once. Of many unlike devices, only those into neighbours in speed, and those with one group."""
    kinds = kinds_of(cluster, problem)
    order = sorted(range(problem.devices), key=lambda n: (float(np.minimum(problem.layer_seconds[n], NEVER).sum()), n))
    some = itertools.chain(_runs(order), _with_one_group(order))
    every = partitions(order, kinds) if problem.devices <= _FEW or len(set(kinds)) <= 2 else some
    seen: set[tuple[tuple[int, ...], ...]] = set()
    for division in every:
        looks = tuple(sorted(tuple(sorted(kinds[n] for n in group)) for group in division))
        if looks in seen or all(len(group) == 1 for group in division):
            continue
        seen.add(looks)
        yield division
        if len(seen) == _MOST_DIVISIONS:
            return


def partitions(devices: Sequence[int], kinds: Sequence[int] = ()) -> Iterator[Division]:
    """Yield all ways to divide devices into groups. ``kinds``: a number for each device; of ways that differ only in devices
    of one kind most are left out, since of twelve there are four million."""
    if not devices:
        yield ()
        return
    first, rest = devices[0], devices[1:]
    for size in range(len(rest) + 1):
        seen: set[tuple[int, ...]] = set()
        for others in itertools.combinations(rest, size):
            looks = tuple(sorted(kinds[n] if kinds else n for n in others))
            if looks in seen:
                continue
            seen.add(looks)
            left = [n for n in rest if n not in others]
            for division in partitions(left, kinds):
                yield ((first, *others), *division)


def _runs(devices: Sequence[int]) -> Iterator[Division]:
    """Yield all ways to divide devices into groups of neighbours."""
    for cuts in itertools.product((False, True), repeat=len(devices) - 1):
        edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), len(devices)]
        yield tuple(tuple(devices[a:b]) for a, b in itertools.pairwise(edges))


def _with_one_group(devices: Sequence[int]) -> Iterator[Division]:
    """Yield all divisions into one group and devices alone."""
    for size in range(2, len(devices)):
        for group in itertools.combinations(devices, size):
            yield (group, *((n,) for n in devices if n not in group))


def kinds_of(cluster: ClusterProfile, problem: Problem) -> list[int]:
    """A number for each device, the same for those that can stand for each other."""
    firsts: list[int] = []
    found = []
    for n, device in enumerate(cluster.devices):
        for kind, first in enumerate(firsts):
            other = cluster.devices[first]
            both = (
                (float(problem.layer_seconds[n].sum()), float(problem.layer_seconds[first].sum())),
                (float(problem.host_link[n]), float(problem.host_link[first])),
                (device.memory, other.memory),
            )
            same = (device.data, device.alone) == (other.data, other.alone)
            if same and all(math.isclose(a, b, rel_tol=_ALIKE) for a, b in both):
                found.append(kind)
                break
        else:
            found.append(len(firsts))
            firsts.append(n)
    return found

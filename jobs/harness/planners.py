"""Published planners for stages held by groups, as plans for the same runtime: PipeDream's, DAPPLE's and Asteroid's.

Each decides by its own model of time from the same cluster profile; what it leaves out, it leaves out here too. All cut the
devices, in an order of their own, into groups of neighbours. Codecs are the job's.

* PipeDream (Narayanan et al. 2019, section 3.1): dynamic programming over (layers, workers) for the least slowest stage; all
  workers count as equal (here: as the mean), a replicated stage takes its share plus the exchange of its weights.
* DAPPLE (Fan et al. 2021, section 4): a synchronous step of fill, M - 1 times the longest block, drain and the exchange of
  weights that backwards do not hide; devices in the order given ("append").
* Asteroid (Ye et al. 2024; its equations reconstructed): devices by memory, largest first; rounds dominated by one step,
  stages or transfers; shares in proportion to speed; memory of K_p = 2 (P - p) - 1 micro-batches.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from accept_mpi.data.calendar import micro_batches_of
from accept_mpi.job import Job
from accept_mpi.plan import BoundaryCodecs, Plan, make_plan
from accept_mpi.profiling.cluster_profile import ClusterProfile

_OPTIMIZER = 3  # copies of the weights: the weight, its gradient, the momentum


@dataclass(frozen=True)
class Block:
    """A stage, or a transfer between two, in a published model: seconds per micro-batch, and of the exchange of weights."""

    forward: float
    backward: float
    exchange: float = 0.0

    @property
    def both(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class _Cut:
    """Stages of the last layers on the last devices of an order."""

    latency: float
    blocks: tuple[Block, ...]
    """Stages and the transfers between them, in turn."""
    edges: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]


class _Model:
    """What the planners know of a cluster."""

    def __init__(self, cluster: ClusterProfile, job: Job, equal: bool) -> None:
        self.cluster, self.micro_batches = cluster, micro_batches_of(job)
        forward, backward = (np.array([getattr(d, name) for d in cluster.devices]) for name in ("forward", "backward"))
        if equal:
            forward, backward = (np.broadcast_to(times.mean(axis=0), times.shape) for times in (forward, backward))
        zero = np.zeros((len(forward), 1))
        self._forward, self._backward = (np.hstack([zero, times.cumsum(axis=1)]) for times in (forward, backward))
        self._weights = np.concatenate([[0], np.cumsum([layer.parameter_bytes for layer in cluster.outline.layers])])
        self._held = np.concatenate([[0], np.cumsum([layer.saved_bytes for layer in cluster.outline.layers])])

    def stage(self, group: Sequence[int], start: int, stop: int) -> Block:
        """A stage of layers ``start`` to ``stop`` - 1, shared by speed."""
        each = np.array([self._forward[n, stop] - self._forward[n, start] for n in group])
        back = np.array([self._backward[n, stop] - self._backward[n, start] for n in group])
        share = 1 / float((1 / np.maximum(each + back, 1e-12)).sum())
        part = float(each.sum() / max(float((each + back).sum()), 1e-12))
        exchange = 0.0
        if len(group) > 1:
            rate = min(self.cluster.rate[a][b] for a, b in itertools.permutations(group, 2))
            exchange = 2 * (len(group) - 1) / len(group) * float(self._weights[stop] - self._weights[start]) / rate
        return Block(share * part, share * (1 - part), exchange)

    def transfer(self, group: Sequence[int], other: Sequence[int], layer: int) -> Block:
        """The messages of a boundary in front of ``layer``."""
        rate = min(self.cluster.rate[a][b] for a in group for b in other)
        sizes = self.cluster.outline.crossing(layer), self.cluster.outline.returning(layer)
        return Block(*((size.uncoded + size.other) / rate for size in sizes))

    def fits(self, group: Sequence[int], start: int, stop: int, in_flight: int) -> bool:
        """True if each device of a group has the memory."""
        need = _OPTIMIZER * (self._weights[stop] - self._weights[start]) + in_flight * (self._held[stop] - self._held[start])
        return all(need <= self.cluster.devices[n].memory for n in group)


def _search(
    model: _Model, order: Sequence[int], latency: Callable[[Sequence[Block]], float], in_flight: Callable[[int], int]
) -> _Cut | None:
    """The best cut of all layers over all devices of an order, by putting stages in front of the best cuts of fewer layers
    on fewer devices, for each number of stages. Exact only if ``latency`` grows with each of its parts."""
    layers, devices = len(model.cluster.outline.layers), len(order)
    best: dict[tuple[int, int, int], _Cut] = {}
    for count in range(1, devices + 1):
        for used in range(count, devices + 1):
            for start in range(layers):
                if count == 1:
                    group = tuple(order[devices - used :])
                    if model.fits(group, start, layers, in_flight(1)):
                        blocks: tuple[Block, ...] = (model.stage(group, start, layers),)
                        best[start, used, 1] = _Cut(latency(blocks), blocks, (start,), (group,))
                    continue
                for more, stop in itertools.product(range(1, used - count + 2), range(start + 1, layers)):
                    behind = best.get((stop, used - more, count - 1))
                    group = tuple(order[devices - used : devices - used + more])
                    if behind is None or not model.fits(group, start, stop, in_flight(count)):
                        continue
                    transfer = model.transfer(group, behind.groups[0], stop)
                    blocks = (model.stage(group, start, stop), transfer, *behind.blocks)
                    found = _Cut(latency(blocks), blocks, (start, *behind.edges), (group, *behind.groups))
                    known = best.get((start, used, count))
                    if known is None or found.latency < known.latency:
                        best[start, used, count] = found
    whole = [cut for (start, used, _), cut in best.items() if start == 0 and used == devices]
    return min(whole, key=lambda cut: cut.latency, default=None)


def pipedream(cluster: ClusterProfile, job: Job) -> Plan | None:
    model = _Model(cluster, job, equal=True)

    def slowest(blocks: Sequence[Block]) -> float:
        stages = (max(block.both, block.exchange / model.micro_batches) for block in blocks[::2])
        return max([*stages, *(max(block.forward, block.backward) for block in blocks[1::2])])

    return _plan(model, job, _search(model, range(len(cluster.devices)), slowest, lambda behind: behind))


def dapple(cluster: ClusterProfile, job: Job) -> Plan | None:
    model = _Model(cluster, job, equal=False)

    def latency(blocks: Sequence[Block]) -> float:
        longest = max(block.both for block in blocks)
        fill, drain = (sum(times) for times in zip(*((block.forward, block.backward) for block in blocks), strict=True))
        exposed = max(block.exchange - sum(before.backward for before in blocks[:i]) for i, block in enumerate(blocks))
        return fill + (model.micro_batches - 1) * longest + drain + max(0.0, exposed)

    return _plan(model, job, _search(model, range(len(cluster.devices)), latency, lambda behind: behind))


def asteroid(cluster: ClusterProfile, job: Job) -> Plan | None:
    model = _Model(cluster, job, equal=False)
    order = sorted(range(len(cluster.devices)), key=lambda n: (-cluster.devices[n].memory, n))

    def latency(blocks: Sequence[Block]) -> float:
        each = [block.both for block in blocks]
        before = np.concatenate([[0.0], np.cumsum(each)])
        dominant = int(np.argmax([model.micro_batches * time + before[i] for i, time in enumerate(each)]))
        waits = np.concatenate([[0.0], np.cumsum([block.forward for block in blocks])])
        rounds = []
        for s, block in enumerate(blocks):
            execution = model.micro_batches * each[dominant] + before[dominant] - before[s]
            rounds.append(waits[s] + execution + block.exchange)
        return float(max(rounds))

    return _plan(model, job, _search(model, order, latency, lambda behind: 2 * behind - 1))


PLANNERS = {"PipeDream": pipedream, "DAPPLE": dapple, "Asteroid": asteroid}


def _plan(model: _Model, job: Job, found: _Cut | None) -> Plan | None:
    """The plan of a cut; None if there is none."""
    if found is None:
        return None
    layers = len(model.cluster.outline.layers)
    edges = [*found.edges, layers]
    codec = BoundaryCodecs(forward=str(job.pipeline.forward), backward=str(job.pipeline.backward))
    paces = [
        [model.stage((n,), start, stop).both for n in group]
        for group, (start, stop) in zip(found.groups, itertools.pairwise(edges), strict=True)
    ]
    return make_plan(layers, edges[1:-1], [codec] * (len(edges) - 2), found.groups, paces, job.pipeline.slack)

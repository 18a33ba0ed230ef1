"""Where a record can be cut, and what crosses there.

What crosses in front of a node are the values made before it and used from it on (liveness). Values that follow from the
model's inputs alone, such as masks, positions and rotary tables, do not cross: each layer makes those that it uses.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from accept_mpi.models.recording.refusals import Unrecordable
from accept_mpi.models.recording.structure import parts_of
from accept_mpi.models.recording.tape import State, Tape, Value

_LEAST_SHARE = 0.003
"""Least share of the model's operations that a layer has, as long as there is another to merge it with."""
_MOST_LAYERS = 150
_PER_VALUE = 10.0
"""Operations that making one value counts as, apart from products and convolutions."""
_DERIVED_OPERATIONS = 0.01
"""Most operations, as a share of the model's, of a node that layers repeat instead of sending its result."""
_DERIVED_ROOM = 1 << 16
"""Bytes by which what a value is made from may exceed it."""
_NEVER = 1 << 60


@dataclass
class Flow:
    """What flows through a tape."""

    tape: Tape
    changing: frozenset[str]
    """Names of the model's tensors that the forward writes to, in this mode or another."""

    @cached_property
    def derived(self) -> dict[int, tuple[tuple[int, ...], frozenset[int]]]:
        """Values that layers make themselves: the nodes that make one, in order, and the inputs that it is made from."""
        tape, found = self.tape, dict[int, tuple[tuple[int, ...], frozenset[int]]]()
        written = tape.written
        most = _DERIVED_OPERATIONS * sum(node.operations for node in tape.nodes)
        inputs = set(tape.inputs)
        wanting = {slot for node in tape.nodes if node.function is torch.Tensor.requires_grad_ for slot in node.gives}
        for n, node in enumerate(tape.nodes):
            if node.parameters or node.writes or node.draws or (node.stays and not node.module) or node.operations > most:
                continue
            if node.fixed is not None:  # a block: for some values it may write, or draw
                continue
            if not all(slot in inputs or slot in found for slot in node.takes) or not node.gives:
                continue
            specs = [tape.specs[slot] for slot in (*node.gives, *node.takes)]
            changes = any(spec.memory in written for spec in specs) or not self.changing.isdisjoint(node.states)
            if changes or any(tape.specs[slot].grad or slot in wanting for slot in node.gives):
                continue
            sources = frozenset(node.takes) & inputs
            nodes: tuple[int, ...] = (n,)
            for slot in set(node.takes) - inputs:
                nodes, sources = nodes + found[slot][0], sources | found[slot][1]
            size = sum(tape.specs[slot].nbytes for slot in sources)
            if size <= sum(tape.specs[slot].nbytes for slot in node.gives) + _DERIVED_ROOM:
                for slot in node.gives:
                    if slot not in inputs:
                        found.setdefault(slot, (tuple(sorted(set(nodes))), sources))
        return found

    @cached_property
    def kept(self) -> list[bool]:
        """For each node, whether it is computed where it stands."""
        tape = self.tape
        needed = set(tape.results)
        found = [False] * len(tape.nodes)
        for n in reversed(range(len(tape.nodes))):
            node = tape.nodes[n]
            wanted = any(slot in needed for slot in node.gives)
            if node.gives and all(slot in self.derived for slot in node.gives):
                if wanted:
                    needed.update(node.takes)
                continue
            if wanted or node.stays or node.writes or node.draws:
                found[n] = True
                needed.update(node.takes)
        return found

    @cached_property
    def spans(self) -> dict[int, tuple[int, int]]:
        """For each value that may cross, where it can be cut through: in front of the nodes ``first <= n <= last``."""
        tape, nodes = self.tape, self.tape.nodes
        made = dict.fromkeys(tape.inputs, 0)
        used: dict[int, int] = {}
        for n, node in enumerate(nodes):
            if not self.kept[n]:
                continue
            for slot in self._sources(node.takes):
                used[slot] = n
            for slot in node.gives:
                made.setdefault(slot, n + 1)
        for slot in self._sources(tape.results):
            used[slot] = len(nodes)
        return {slot: (first, used[slot]) for slot, first in made.items() if used.get(slot, -1) >= first}

    def _sources(self, slots: Sequence[int]) -> set[int]:
        found: set[int] = set()
        for slot in slots:
            found |= self.derived[slot][1] if slot in self.derived else {slot}
        return found

    @cached_property
    def weight(self) -> np.ndarray:
        """Bytes that cross in front of each node; ``_NEVER`` where the record cannot be cut."""
        tape, count = self.tape, len(self.tape.nodes) + 1
        change = np.zeros(count + 1, dtype=np.int64)
        for slot, (first, last) in self.spans.items():
            change[first] += tape.specs[slot].nbytes
            change[last + 1] -= tape.specs[slot].nbytes
        found = np.cumsum(change)[:count]
        owned, seen = set(tape.memory_of.values()), {tape.specs[slot].memory for slot in self.spans}
        writes: dict[int, int] = {}
        for n, node in enumerate(tape.nodes):
            writes |= dict.fromkeys(node.writes & seen, n)  # what modules write to has no views, mostly
        for memory, last_write in writes.items():
            views = np.zeros(count + 1, dtype=np.int64)
            for slot, (first, last) in self.spans.items():
                if tape.specs[slot].memory == memory:
                    views[first] += 1
                    views[last + 1] -= 1
            most = 0 if memory in owned else 1
            blocked = np.cumsum(views)[:count] > most
            blocked[last_write + 1 :] = False
            found[blocked] = _NEVER
        for first, last in (*self._casts(), *self._derivatives(), *self._hooked()):
            found[first + 1 : last + 1] = _NEVER
        return found

    def _casts(self) -> Iterable[tuple[int, int]]:
        """The first and the last node that use one of the model's tensors in products within one ``torch.autocast`` of the
        forward: they share its cast, whose gradients are added up in lower precision."""
        found: dict[tuple[int, int], list[int]] = {}
        for n, node in enumerate(self.tape.nodes):
            for name in node.states if node.autocast and node.operations else ():
                found.setdefault((id(node.autocast[0]), self.tape.memory_of[name]), []).append(n)
        return [(nodes[0], nodes[-1]) for nodes in found.values()]

    def _derivatives(self) -> Iterable[tuple[int, int]]:
        """The first and the last node between which a derivative is taken: the graph from what it is taken by to the call
        (``torch.autograd.grad``) must be in one layer."""
        nodes = self.tape.nodes
        for n, node in enumerate(nodes):
            if node.function is torch.autograd.grad:
                by = node.kwargs.get("inputs", node.args[1:2])
                slots, names = ({place[0] for place in parts_of(by, (kind,))} for kind in (Value, State))
                begun = (
                    m for m in range(n) if not slots.isdisjoint(nodes[m].gives) or not names.isdisjoint(nodes[m].states)
                )
                yield next(begun, n), n

    def _hooked(self) -> Iterable[tuple[int, int]]:
        """The first node that uses a value, and one later that puts a hook on it: what the hook gets is the sum of the
        gradients from all uses, so it must be in their layer."""
        nodes = self.tape.nodes
        for n, node in enumerate(nodes):
            if node.function is torch.Tensor.register_hook:
                yield next((m for m in range(n) if not set(node.takes).isdisjoint(nodes[m].takes)), n), n

    def crossing(self, position: int) -> list[int]:
        """Slots of the values that cross in front of a node, in order."""
        return sorted(slot for slot, (first, last) in self.spans.items() if first <= position <= last)

    def best(self, first: int, last: int) -> int | None:
        """The position among ``first <= n <= last`` where the fewest bytes cross, the last of several; None if none is
        possible."""
        part = self.weight[first : last + 1]
        if not len(part) or part.min() >= _NEVER:
            return None
        return int(first + len(part) - 1 - np.argmin(part[::-1]))

    def steps(self, start: int, stop: int, results: Sequence[int]) -> list[int]:
        """Nodes, in order, that a layer of the nodes ``start <= n < stop`` computes, if ``results`` leave it."""
        own = [n for n in range(start, stop) if self.kept[n]]
        wanted = {slot for n in own for slot in self.tape.nodes[n].takes} | set(results)
        made = {n for slot in wanted if slot in self.derived for n in self.derived[slot][0]}
        return sorted(made) + own


def cut(flow: Flow) -> list[int]:
    """Positions of the cuts: between any two nodes with parameters where the fewest bytes cross, and then without those
    that would make layers too small or too many."""
    tape = flow.tape
    anchors = [n for n, node in enumerate(tape.nodes) if flow.kept[n] and node.parameters]
    cuts = [0]
    for one, other in itertools.pairwise(anchors):
        position = flow.best(one + 1, other)
        if position is not None and position > cuts[-1]:
            cuts.append(position)
    made = [sum(tape.specs[slot].nbytes / 4 for slot in node.gives) for node in tape.nodes]
    each = [node.operations + _PER_VALUE * count for node, count in zip(tape.nodes, made, strict=True)]
    sums = np.concatenate([[0.0], np.cumsum(np.where(flow.kept, each, 0.0))])
    cuts.append(len(tape.nodes))
    while len(cuts) > 2:
        sizes = np.diff(sums[cuts])
        least = int(np.argmin(sizes))
        if sizes[least] >= _LEAST_SHARE * sums[-1] and len(cuts) - 1 <= _MOST_LAYERS:
            break
        ends = [n for n in (least, least + 1) if 0 < n < len(cuts) - 1]
        del cuts[max(ends, key=lambda n: int(flow.weight[cuts[n]]))]
    return cuts[1:-1]


def cut_alike(flow: Flow, of: Flow, cuts: Sequence[int], parameters: set[str]) -> list[int]:
    """Positions in another record of the same model at which its parameters are divided as ``cuts`` divide those of ``of``.
    Raises Unrecordable if there are none."""
    found, failed = _alike(flow, of, cuts, parameters)
    if failed is not None:
        raise Unrecordable(
            "model.name: the forward uses its parameters in another order for inputs of another shape, so it cannot be cut "
            "in both alike"
        )
    return found


def cuts_in_both(flow: Flow, of: Flow, cuts: Sequence[int], parameters: set[str]) -> list[int]:
    """Those of ``cuts`` at which another record can be cut alike."""
    while (failed := _alike(flow, of, cuts, parameters)[1]) is not None:
        cuts = [*cuts[:failed], *cuts[failed + 1 :]]
    return list(cuts)


def _alike(flow: Flow, of: Flow, cuts: Sequence[int], parameters: set[str]) -> tuple[list[int], int | None]:
    """Positions in another record, and the first of ``cuts`` that has none."""
    nodes, others = flow.tape.nodes, of.tape.nodes
    same = len(nodes) == len(others) and all(a.does() == b.does() for a, b in zip(nodes, others, strict=True))
    if same and all(flow.weight[cut] < _NEVER for cut in cuts):
        return list(cuts), None
    owners: dict[str, list[int]] = {}  # layers that use a parameter, in order: tied ones are used in several
    for n, node in enumerate(others):
        for name in node.states if of.kept[n] else ():
            if name in parameters:
                owners.setdefault(name, []).append(int(np.searchsorted(cuts, n, side="right")))
    first = [len(nodes)] * (len(cuts) + 1)  # nodes with parameters of each layer or a later one
    last = [-1] * (len(cuts) + 1)
    for n, node in enumerate(nodes):
        for name in node.states if flow.kept[n] else ():
            if layers := owners.get(name):
                layer = layers.pop(0) if len(layers) > 1 else layers[0]
                first[layer] = min(first[layer], n)
                last[layer] = max(last[layer], n)
    found: list[int] = []
    for layer in range(len(cuts)):
        before, after = max(last[: layer + 1]), min(first[layer + 1 :])
        position = flow.best(max([before + 1, *found[-1:]]), after)
        if position is None:
            return found, layer
        found.append(position)
    return found, None

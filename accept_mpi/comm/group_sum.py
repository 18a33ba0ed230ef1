"""Sums the gradients of a group's members, on the data-plane thread, while the computing threads go on.

A step's gradients are made of contributions: in exact mode one per micro-batch, otherwise one per member, its own sum. The
gradients are cut into chunks, each of which one member owns. Every member sends its contributions to a chunk to the chunk's
owner; the owner adds all of them in a fixed order, that of micro-batches or of members, and sends the sum back. So all
members get the same bits, in every run; in exact mode they are those of one process, which adds its micro-batches in order.

What members must know of each other's micro-batches (``share_statistics``) goes to all of them in messages of its own.

Source: reduce-scatter and all-gather as in Asteroid's group synchronization (section III); the fixed order is ours.
"""

import queue
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch

from accept_mpi.codecs.coding import NONE, Coding
from accept_mpi.codecs.gradient_chunks import Gradients, Layout
from accept_mpi.codecs.message import Decoded
from accept_mpi.codecs.tensors import Specs, TensorSpec
from accept_mpi.comm.channels import Channel, wait_for
from accept_mpi.comm.data_plane import DataPlane
from accept_mpi.comm.ends import Receiver, Sender
from accept_mpi.comm.left_out import LeftOut
from accept_mpi.direction import Direction

_T = TypeVar("_T")
_PARTS, _SUMS, _STATISTICS = range(3)


class Group(NamedTuple):
    """The members of a group, and how a step's micro-batches are dealt to them."""

    ranks: Sequence[int]
    me: int
    """Index of this rank among them."""
    number: int
    """A number that no other group of the plan has."""
    tables: Sequence[Sequence[int]]
    """Member that takes each micro-batch, for the longest step; several such tables if several stages contribute to each
    micro-batch's gradients, in the order in which they go backward."""
    exact: bool
    """True if every micro-batch's gradients are added in order; False if every member's sum is."""
    own: int = 0
    """Index of the table that this rank's stage has."""


class _Contribution(NamedTuple):
    """Chunks of a member's contribution to a step."""

    step: int
    key: int
    """Its place among all of the step (``GroupSum.keys``)."""
    scale: float
    chunks: dict[int, torch.Tensor]
    last: bool
    """True if it has no others."""


@dataclass
class _Sum:
    """Sum of a chunk in one step, on its owner."""

    value: torch.Tensor | None = None
    part: torch.Tensor | None = None
    """Sum of the contributions to one micro-batch."""
    added: int = 0
    """Number of contributions in it."""


class GroupSum:
    """One member's part in the sums of its group. Without parameters there is nothing to sum."""

    def __init__(
        self,
        plane: DataPlane,
        group: Group,
        parameters: Sequence[torch.Tensor],
        statistics: int,
        count_of: Callable[[int], int],
        coding: Coding = NONE,
        layers: Sequence[int] = (),
    ) -> None:
        """``parameters``: those that are trained; ``statistics``: values per micro-batch that ``share_statistics`` takes;
        ``count_of(step)``: number of micro-batches of a step; ``coding``: of the gradients, whose error is carried over to
        the next step; ``layers``: the first layer that has each parameter, for ``contribute_early``. Creates the channels,
        before the plane starts."""
        self._coding = coding
        self._left_out = LeftOut(coding)
        self._plane, self._group, self._count_of = plane, group, count_of
        self.layout = Layout(parameters, len(group.ranks), layers) if parameters else None
        self._owner = self.layout.owners(len(group.ranks)) if self.layout else []
        self._ours: deque[_Contribution] = deque()
        """Contributions that wait for the data plane to pass them on."""
        self._waiting: dict[tuple[int, int, int], tuple[torch.Tensor, float]] = {}
        """Contributions whose turn has not come, and the scales that came with them, by (step, chunk, contribution)."""
        self._sums: dict[tuple[int, int], _Sum] = {}
        self._results: dict[int, dict[int, torch.Tensor]] = {}
        """Sums of a step's chunks that are done."""
        self._scales: dict[int, float] = {}
        self._done: queue.SimpleQueue[tuple[int, list[torch.Tensor], float] | None] = queue.SimpleQueue()
        self._early: dict[int, tuple[list[torch.Tensor], float]] = {}
        """Sums and scales that have come, by step: one that not all members take part in may come before an earlier one."""
        self._open: set[int] = set()
        """Steps of which this member has given all, and whose sum is not there yet."""
        self._statistics: dict[tuple[int, int], torch.Tensor] = {}
        self._heard: queue.SimpleQueue[tuple[int, int, torch.Tensor] | None] = queue.SimpleQueue()
        self._to: dict[tuple[int, int], Sender] = {}
        self._of: dict[tuple[int, int], Receiver] = {}
        for peer, rank in enumerate(group.ranks):
            if peer == group.me:
                continue
            mine, its = ([c for c, owner in enumerate(self._owner) if owner == m] for m in (group.me, peer))
            self._connect(peer, rank, _PARTS, self._specs(its), self._specs(mine))
            self._connect(peer, rank, _SUMS, self._specs(mine), self._specs(its))
            if statistics:
                specs: dict[int, Specs] = {1: (TensorSpec.of(torch.empty(statistics)),)}
                self._connect(peer, rank, _STATISTICS, specs, specs)
        plane.add_group(self)

    def _specs(self, chunks: Sequence[int]) -> dict[int, Specs]:
        """Specs of the messages of these chunks, by their number from 1."""
        return {c + 1: (self.layout.spec(c),) for c in chunks if self.layout}

    def _connect(
        self,
        peer: int,
        rank: int,
        what: int,
        out: dict[int, Specs],
        into: dict[int, Specs],
    ) -> None:
        coding = NONE if what == _STATISTICS else self._coding
        limit = 1 << 20  # the owner waits for contributions in a fixed order, and buffers the others
        number = 3 * self._group.number + what
        if out:
            channel = Channel(rank, number, Direction.BACKWARD, out, limit, coding, in_group=True)
            self._to[peer, what] = self._plane.outgoing(channel)
        if into:
            channel = Channel(rank, number, Direction.BACKWARD, into, limit, coding, in_group=True)
            self._of[peer, what] = self._plane.incoming(channel)

    @property
    def exact(self) -> bool:
        """True if every micro-batch is a contribution of its own."""
        return self._group.exact

    @property
    def me(self) -> int:
        """Index of this rank in the group."""
        return self._group.me

    def last_of_mine(self, step: int) -> int:
        """The last micro-batch of a step that this member takes; -1 if it takes none."""
        mine = [k for k in range(self._count_of(step)) if self._table[k] == self._group.me]
        return max(mine, default=-1)

    @property
    def _table(self) -> Sequence[int]:
        """The table in which this member is."""
        return self._group.tables[self._group.own]

    # -- computing thread ----------------------------------------------------------------------------------------------

    def contribute(self, step: int, k: int, gradients: Gradients, scale: float, without: Collection[int] = ()) -> None:
        """Give this member's contribution to a step: to micro-batch ``k`` in exact mode, else to all that it takes.
        ``scale``: factor for the step's gradients, as far as this member knows it; ``without``: chunks given before."""
        if self.layout:
            self._give(step, k, scale, self.layout.pack(gradients, without), True)

    def contribute_early(self, step: int, k: int, gradients: Gradients, scale: float, chunks: Sequence[int]) -> None:
        """Give some chunks of this member's contribution before ``contribute``: of gradients that are there already."""
        assert self.layout
        self._give(step, k, scale, self.layout.pack_some(gradients, chunks), False)

    def _give(self, step: int, k: int, scale: float, chunks: dict[int, torch.Tensor], last: bool) -> None:
        key = k * len(self._group.tables) + self._group.own if self._group.exact else self._group.me
        self._ours.append(_Contribution(step, key, scale, chunks, last))
        self._plane.wake()

    def keys(self, step: int) -> list[int]:
        """The contributions to a step, in the order in which they are added."""
        count, tables = self._count_of(step), self._group.tables
        if self._group.exact:
            return list(range(count * len(tables)))
        return sorted({member for table in tables for member in table[:count]})

    def take(self, step: int, deadline: float) -> tuple[Gradients, float]:
        """The sum of a step's gradients, and their scale; waits at most ``deadline`` seconds. Raises DeadlineError."""
        if not self.layout:
            return [], 1.0
        while step not in self._early:
            what = f"the gradients of step {step + 1} from the other ranks of its stage"
            of, chunks, scale = self._wait(self._done, deadline, what)
            self._early[of] = chunks, scale
        chunks, scale = self._early.pop(step)
        return self.layout.unpack(chunks), scale

    def share_statistics(self, step: int, k: int, values: torch.Tensor) -> None:
        """Give a float32 vector about micro-batch ``k`` to all members."""
        self._statistics[step, k] = values
        for peer in range(len(self._group.ranks)):
            if peer != self._group.me:
                self._to[peer, _STATISTICS].send(step, k, 1, (values,))

    def statistics(self, step: int, deadline: float) -> list[torch.Tensor]:
        """The vectors of all micro-batches of a step, in order; waits at most ``deadline`` seconds. Raises DeadlineError."""
        wanted = [(step, k) for k in range(self._count_of(step))]
        while not all(key in self._statistics for key in wanted):
            of, k, values = self._wait(self._heard, deadline, f"BatchNorm's statistics of step {step + 1}")
            self._statistics[of, k] = values
        return [self._statistics.pop(key) for key in wanted]

    def _wait(self, box: "queue.SimpleQueue[_T | None]", deadline: float, what: str) -> _T:
        found = wait_for(self._plane, box, deadline, what)
        self._plane.check()
        assert found is not None
        return found

    # -- data-plane thread ---------------------------------------------------------------------------------------------

    def move(self) -> bool:
        """Pass on this member's contributions, and add up what has arrived; returns True if there was anything."""
        moved = False
        for (_, what), receiver in self._of.items():
            while (message := receiver.poll()) is not None:
                moved = True
                self._take(what, message)
        # What coding leaves out of a step goes into the next one, in every run: so that waits until the first is settled.
        while self._ours and not (self._open and self._coding.kind != "none"):
            moved = True
            step, key, scale, chunks, last = self._ours.popleft()
            if last and (not self._group.exact or key // len(self._group.tables) == self.last_of_mine(step)):
                self._open.add(step)
            for c, values in chunks.items():
                self._pass_on(step, c, key, scale, values)
        return moved

    @property
    def pending(self) -> bool:
        """True if this member will soon wait for a sum."""
        return bool(self._open)

    def fail(self) -> None:
        """Wake the computing thread, since the data plane ends with an error."""
        self._done.put(None)
        self._heard.put(None)

    def _pass_on(self, step: int, c: int, key: int, scale: float, values: torch.Tensor) -> None:
        """Take or send this member's contribution to chunk ``c``."""
        owner = self._owner[c]
        if owner == self._group.me:
            self._add(step, c, key, scale, values)
        else:
            whole = values if self._coding.kind == "none" else self._left_out.added(step, c, scale, values)[0]
            self._to[owner, _PARTS].send(step, key, c + 1, (whole,), scale=scale)

    def _take(self, what: int, message: Decoded) -> None:
        header, (values,) = message.header, message.tensors
        assert values is not None
        if what == _STATISTICS:
            self._heard.put((header.step, header.micro_batch, values))
        elif what == _PARTS:
            self._add(header.step, header.samples - 1, header.micro_batch, header.scale, values)
        else:
            self._result(header.step, header.samples - 1, header.scale, values)

    def _add(self, step: int, c: int, key: int, scale: float, values: torch.Tensor) -> None:
        """Take a contribution to a chunk that this member owns, and add all whose turn has come."""
        self._waiting[step, c, key] = values, scale
        keys, total = self.keys(step), self._sums.setdefault((step, c), _Sum())
        while total.added < len(keys) and (next_one := (step, c, keys[total.added])) in self._waiting:
            part, part_scale = self._waiting.pop(next_one)
            if self._knows_scale(step, keys[total.added]):
                self._scales[step] = part_scale
            total.added += 1
            total.part = _plus(total.part, part)
            if not self._group.exact or total.added % len(self._group.tables) == 0:
                total.value, total.part = _plus(total.value, total.part), None
        if total.added == len(keys):
            del self._sums[step, c]
            assert total.value is not None
            found = self._scales[step]
            if self._coding.kind == "none":
                whole, as_received = total.value, total.value.clone()  # the optimizer may change it before it has been sent
            else:
                whole, as_received = self._left_out.added(step, c, found, total.value)
            for peer in range(len(self._group.ranks)):
                if peer != self._group.me:
                    self._to[peer, _SUMS].send(step, 0, c + 1, (whole,), scale=found)
            self._result(step, c, found, as_received)

    def _knows_scale(self, step: int, key: int) -> bool:
        """True if a contribution came with the scale of the whole step: it holds the last micro-batch."""
        last, tables = self._count_of(step) - 1, self._group.tables
        return key // len(tables) == last if self._group.exact else key in {table[last] for table in tables}

    def _result(self, step: int, c: int, scale: float, values: torch.Tensor) -> None:
        """Take the sum of a chunk; a step is done with its last one."""
        self._left_out.settle(step, c, scale)
        results = self._results.setdefault(step, {})
        results[c] = values
        if len(results) == len(self._owner):
            self._scales.pop(step, None)
            self._open.discard(step)
            del self._results[step]
            if self._coding.kind != "none":
                self._put_back(results, scale)
            self._done.put((step, [results[c] for c in range(len(results))], scale))

    def _put_back(self, results: dict[int, torch.Tensor], scale: float) -> None:
        """Keep what a sum says of parameters that have no gradient in its step: it was left out of earlier ones."""
        assert self.layout
        there = results[0].tolist()
        for c, pieces in enumerate(self.layout.chunks):
            if c and self._owner[c] == self._group.me and not all(there[piece.parameter] for piece in pieces):
                values = results[c].clone()
                for piece, part in zip(pieces, values.split([one.size for one in pieces]), strict=True):
                    part.mul_(not there[piece.parameter])
                self._left_out.put_back(c, scale, values)


def _plus(one: torch.Tensor | None, two: torch.Tensor) -> torch.Tensor:
    """The sum of two chunks, in the memory of the first, which belongs to nobody else any more."""
    if one is None:
        return two
    return torch.maximum(one, two) if two.dtype == torch.uint8 else one.add_(two)

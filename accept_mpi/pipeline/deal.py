"""Which member of a group takes which micro-batches of a step, and in which of its lanes.

Micro-batches are dealt whole, so that BatchNorm, dropout and shapes are those of one process (Asteroid splits each one by
rows). The next micro-batch goes to the member, or the lane of a member, that would end it first, so the table for a shorter
step is the beginning of that for a longer one: one rule covers every number of micro-batches that a step can have, and
everybody can work it out.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from accept_mpi.job import ScheduleKind
from accept_mpi.pipeline.schedule import Action, waits_for_sum
from accept_mpi.plan import Lanes, StagePlan, at_once, slots_in


def early_worth(shares_core: bool) -> float:
    """Part of a step that waits for the sum of a group's gradients from which members had better pass gradients on while B
    goes on. ``shares_core``: sums and B have one core, so most of that time is the sum's, and B takes longer meanwhile."""
    return 0.3 if shares_core else 0.05


def early_sums(kind: ScheduleKind, last: bool) -> bool:
    """True if the sum of a group's gradients may begin in a step's last backward: where that leaves nothing to W, and where
    the update waits for it (``waits_for_sum``; else there is time enough)."""
    return kind != "zero-bubble" and waits_for_sum(kind, last)


class Slot(NamedTuple):
    """A place where micro-batches are computed one after another: a member of a group, or a lane of one."""

    member: int
    lane: int


@dataclass(frozen=True)
class Deal:
    """The rule by which the micro-batches of a step are dealt to the members of a group."""

    paces: tuple[float, ...]
    """Each member's seconds per micro-batch, all its lanes together, or anything in proportion."""
    lanes: tuple[Lanes, ...] = ()
    """Each member's lanes; empty: one each."""

    @staticmethod
    def of(stage: StagePlan) -> "Deal":
        """The deal of a stage's group."""
        return Deal(stage.paces or (1.0,) * len(stage.ranks), stage.lanes)

    def table(self, count: int) -> list[int]:
        """The member that takes each of a step's ``count`` micro-batches."""
        return [slot.member for slot in self.slots_of(count)]

    def slots_of(self, count: int) -> list[Slot]:
        """The slot that takes each of a step's ``count`` micro-batches."""
        slots = self.slots
        return [slots[place] for place in self.places(count)]

    def places(self, count: int) -> list[int]:
        """The same as positions in ``slots``."""
        return list(itertools.islice(self._places(), count))

    @property
    def slots(self) -> list[Slot]:
        """All slots, by member and lane. A member that computes F beside B has one: it takes all its micro-batches in
        order."""
        return [Slot(member, lane) for member, lanes in enumerate(self._lanes) for lane in range(slots_in(lanes))]

    def _places(self) -> Iterator[int]:
        """Yield the slot of one micro-batch after another: the one that would end it first, the first of several."""
        each = [self.paces[slot.member] * slots_in(self._lanes[slot.member]) for slot in self.slots]
        ends = [0.0] * len(each)
        while True:
            place = min(range(len(ends)), key=lambda n: ends[n] + each[n])
            ends[place] += each[place]
            yield place

    @property
    def width(self) -> int:
        """Number of micro-batches among which every slot has one: 1 for a single member, R for R equal ones. F beside B
        counts as two, since it works on two micro-batches at a time."""
        slowest = max(pace * at_once(lanes) for pace, lanes in zip(self.paces, self._lanes, strict=True))
        return math.ceil(slowest * sum(1 / pace for pace in self.paces) * (1 - 1e-9))

    @property
    def _lanes(self) -> Sequence[Lanes]:
        """Each member's."""
        return self.lanes or (1,) * len(self.paces)


def widths(stages: Iterable[StagePlan]) -> list[int]:
    """Each stage's ``Deal.width``, as ``schedule.walk`` takes them."""
    return [Deal.of(stage).width for stage in stages]


def of_member(walk: Iterable[Action], table: Sequence[int], member: int) -> Iterator[Action]:
    """Yield a member's part of its stage's actions: those of its own micro-batches (by ``table``, for the longest step), and
    every update."""
    return (action for action in walk if action.kind == "U" or table[action.micro_batch] == member)

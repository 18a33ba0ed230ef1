"""Which member of a group takes which micro-batches of a step.

Micro-batches are dealt whole, so that BatchNorm, dropout and shapes are those of one process (Asteroid splits each one by
rows). The next micro-batch goes to the member that would end it first, so the table for a shorter step is the beginning of
that for a longer one: one rule covers every number of micro-batches that a step can have, and everybody can work it out.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from accept_mpi.pipeline.schedule import Action
from accept_mpi.plan import StagePlan


@dataclass(frozen=True)
class Deal:
    """The rule by which the micro-batches of a step are dealt to the members of a group."""

    paces: tuple[float, ...]
    """Each member's seconds per micro-batch, or anything in proportion."""

    @staticmethod
    def of(stage: StagePlan) -> "Deal":
        """The deal of a stage's group."""
        return Deal(stage.paces or (1.0,) * len(stage.ranks))

    def table(self, count: int) -> list[int]:
        """The member that takes each of a step's ``count`` micro-batches."""
        return list(itertools.islice(self._members(), count))

    def _members(self) -> Iterator[int]:
        """Yield the member of one micro-batch after another: the one that would end it first, the first of several."""
        ends = [0.0] * len(self.paces)
        while True:
            member = min(range(len(ends)), key=lambda m: ends[m] + self.paces[m])
            ends[member] += self.paces[member]
            yield member

    @property
    def width(self) -> int:
        """Number of micro-batches among which every member has one: 1 for a single member, R for R equal ones."""
        return math.ceil(max(self.paces) * sum(1 / pace for pace in self.paces) * (1 - 1e-9))


def widths(stages: Iterable[StagePlan]) -> list[int]:
    """Each stage's ``Deal.width``, as ``schedule.walk`` takes them."""
    return [Deal.of(stage).width for stage in stages]


def of_member(walk: Iterable[Action], table: Sequence[int], member: int) -> Iterator[Action]:
    """Yield a member's part of its stage's actions: those of its own micro-batches (by ``table``, for the longest step), and
    every update."""
    return (action for action in walk if action.kind == "U" or table[action.micro_batch] == member)

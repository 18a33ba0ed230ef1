"""Action lists of a few steps of a pipeline, for the simulator. They depend on no times: many plans have the same."""

import functools
from collections.abc import Iterator
from typing import NamedTuple

from accept_mpi.job import ScheduleKind
from accept_mpi.pipeline.deal import of_member
from accept_mpi.pipeline.schedule import Action, actions
from accept_mpi.pipeline.simulator import PackedSchedule

_REMEMBERED = 16  # lists: a search compares plans with few different numbers of stages


class ActionLists(NamedTuple):
    """What the actions of each device depend on. Devices are numbered by stage, then by place in their group."""

    kind: ScheduleKind
    counts: tuple[int, ...]
    """Micro-batches of each step."""
    slack: int
    widths: tuple[int, ...]
    """``Deal.width`` of each stage."""
    tables: tuple[tuple[int, ...], ...]
    """For each stage, the place in its group of the device that takes each micro-batch."""
    stages: tuple[int, ...]
    """Stage of each device."""

    def actions(self) -> Iterator[list[Action]]:
        """Yield the actions of one device after another."""
        for stage, table in enumerate(self.tables):
            every = actions(self.kind, stage, len(self.tables), self.counts, self.slack, widths=self.widths)
            members = self.stages.count(stage)
            for member in range(members):
                yield list(of_member(every, table, member)) if members > 1 else every


@functools.lru_cache(maxsize=_REMEMBERED)
def packed(lists: ActionLists) -> PackedSchedule:
    """The same for ``simulate_packed``."""
    return PackedSchedule(lists.actions(), lists.counts, lists.stages)

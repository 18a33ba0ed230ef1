"""Learns the bases in which a stage's activations are sent on (``codecs.basis``).

In some steps each backward sees activations and what came back for them. Who holds the stage adds that up as gradients are:
in the order of the micro-batches, over all members of a group. So bases are the same on all of them, and in every plan that
cuts the model there.
"""

import threading
from collections.abc import Callable, Sequence

import torch

from accept_mpi.codecs.basis import basis_of, learns
from accept_mpi.comm.data_plane import DataPlane
from accept_mpi.comm.group_sum import Group, GroupSum
from accept_mpi.pipeline.kept_bases import KeptBases, Seen
from accept_mpi.plan import Place, Plan
from accept_mpi.training.gradient_sums import Part, PartSums

_LATER = 4  # steps after which bases are used, in all schedules whose updates are not later


class BasisLearning:
    """One rank's part in it."""

    def __init__(
        self,
        plane: DataPlane,
        bases: KeptBases,
        plan: Plan,
        place: Place,
        tables: Sequence[Sequence[int]],
        count_of: Callable[[int], int],
        late: int,
    ) -> None:
        """``tables``: the member of each stage's group that takes each micro-batch; ``count_of(step)``: number of its
        micro-batches; ``late``: most steps by which updates are late. Creates channels, before the plane starts."""
        self._bases, self._later, self._lock = bases, max(_LATER, late), threading.Lock()
        sums: GroupSum | None = None
        if place.members > 1 and bases.widths:
            # Numbers beyond those of the stages' groups.
            group = Group(
                plan.stages[place.stage].ranks, place.member, 2 * place.stages + place.stage, [tables[place.stage]], True
            )
            like = [torch.empty(2 * width + 2, width, dtype=torch.float64) for width in bases.widths.values()]
            sums = GroupSum(plane, group, like, 0, count_of)
        # A rank alone takes all micro-batches; a group adds them in order, whoever takes them.
        self._sums = PartSums(Part(range(len(bases.widths)), sums), lambda step: range(count_of(step)))
        bases.tell = self._take

    def _take(self, step: int, k: int, found: Seen) -> None:
        """Take what a micro-batch says, in any order and in any thread."""
        with self._lock:
            self._sums.add(step, k, found, 1.0)

    def __call__(self, step: int, deadline: float) -> None:
        """Learn of a step, before its update. Raises DeadlineError."""
        if not self._bases.widths or not learns(step):
            return
        total, _ = self._sums.take(step, deadline)
        told = zip(self._bases.widths, total, strict=True)
        if found := {n: basis for n, sums in told if sums is not None and (basis := basis_of(sums.cpu())) is not None}:
            self._bases.add(step + self._later, found, step)

"""Chain replication in the background: a snapshot's copy of each stage goes to the rank of the stage after it.

A barrier tells all stages after which step (``recovery.barriers``). What has arrived whole at the next rank is reported
to rank 0; when that holds for all stages, the snapshot is committed and older ones are forgotten. A snapshot begins when the
one before is committed, never earlier.

Where one stage's state takes its link longer than the job allows, there are extra snapshots in between: every stage keeps
its own copy, and only stages whose copy before has left send it on. So a loss costs as many steps as the lost stage's own
copy is behind, not the largest stage's.
"""

from collections.abc import Callable
from typing import NamedTuple

from accept_mpi.comm.messages import Committed, Control, ReplicaChunks, Replicated
from accept_mpi.failpoints import failpoint
from accept_mpi.pipeline.stage import Stage
from accept_mpi.recovery.barriers import SNAPSHOT, Barriers, Post
from accept_mpi.recovery.layer_state import Arriving, chunked, states
from accept_mpi.recovery.replicas import Replicas

_CHUNK = 1 << 16  # bytes: 5 ms at 100 Mbit/s; `comm.background` decides how many are under way


class Route(NamedTuple):
    """The way of a rank's copies."""

    stage: int | None
    """The stage that this rank holds."""
    ranks: list[int]
    """Those that hold stages 0, 1, ..."""
    size: int
    """All ranks, idle ones too."""

    @property
    def next(self) -> int:
        """The rank that this stage's copy goes to: the next stage's; for the only stage, one that the plan leaves idle."""
        assert self.stage is not None
        if len(self.ranks) > 1:
            return self.ranks[(self.stage + 1) % len(self.ranks)]
        return (self.ranks[self.stage] + 1) % self.size


class Replication:
    """One rank's part in copying, as long as a plan holds."""

    def __init__(
        self, replicas: Replicas, route: Route, on: bool, barriers: Barriers, post: Post, sending: Callable[[], bool]
    ) -> None:
        """``on``: whether copies go to other ranks at all; ``sending``: whether a copy posted earlier is not sent yet."""
        self._replicas, self._route, self.on = replicas, route, on
        self._barriers, self._post, self._sending = barriers, post, sending
        self._arriving: dict[tuple[int, int], Arriving] = {}
        self._whole: dict[int, set[int]] = {}
        """Rank 0: stages whose copy after a step has arrived."""

    # -- main thread ---------------------------------------------------------------------------------------------------

    def restart(self, step: int, stage: Stage) -> None:
        """A plan begins after ``step`` steps: keep the state that the stage begins with."""
        self._barriers.begin_after(step)
        self._replicas.keep(step, states(stage))

    def begin(self, step: int, stage: Stage, flags: int) -> None:
        """Keep the stage's state after ``step`` steps, and send it on in the background."""
        failpoint("snapshot")
        blobs = states(stage)
        self._replicas.keep(step, blobs)
        if self.on and (flags & SNAPSHOT or not self._sending()):
            assert self._route.stage is not None
            for chunks in chunked(blobs, _CHUNK):
                self._post(self._route.next, ReplicaChunks(step, self._route.stage, len(blobs), chunks), True)

    # -- data-plane thread ---------------------------------------------------------------------------------------------

    def handle(self, control: Control) -> bool:
        """Take a message about copies; whether it was one."""
        if isinstance(control, ReplicaChunks):
            self._take(control)
        elif isinstance(control, Replicated):
            self._count(control)
        elif isinstance(control, Committed):
            self._replicas.commit(control.step)
            self._barriers.committed(control.step)
        else:
            return False
        return True

    def _take(self, copy: ReplicaChunks) -> None:
        key = copy.step, copy.stage
        arriving = self._arriving.setdefault(key, Arriving())
        arriving.add(copy.chunks)
        if len(arriving.whole) == copy.layers:
            del self._arriving[key]
            self._replicas.keep(copy.step, arriving.whole)
            self._post(0, Replicated(copy.step, copy.stage), False)

    def _count(self, arrived: Replicated) -> None:
        """Rank 0: commit a snapshot once every stage's copy has arrived."""
        whole = self._whole.setdefault(arrived.step, set())
        whole.add(arrived.stage)
        if len(whole) == len(self._route.ranks):
            self._whole = {step: stages for step, stages in self._whole.items() if step > arrived.step}
            for rank in range(self._route.size):
                self._post(rank, Committed(arrived.step), False)

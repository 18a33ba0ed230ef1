"""Chain replication in the background: each stage's copy of a snapshot goes to the rank of the next stage.

A barrier tells all stages after which step to copy (``recovery.barriers``). When a copy has arrived completely, its receiver
reports that to rank 0; when all copies have, the snapshot is committed and older ones are forgotten. Of a group two members
report their own. A snapshot never begins before the previous one is committed.

If sending one stage's state takes longer than the job allows between snapshots, there are extra ones in between: every stage
keeps its own copy, but only stages that have sent their previous copy send it on. So a loss costs as many steps as the lost
stage's own copy is behind, not as many as the largest stage's copy.

Of a stage's state only what has changed since its last copy is sent, so weights that are not trained cost a link nothing
but at first.

If groups hold stages, there are also local copies, far more often, of which each rank keeps a few for itself: the others of
a group have all that a lost member had, so going back to the last local copies is all that its loss costs.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

from accept_mpi.comm.messages import Committed, Control, Copied, ReplicaChunks, Replicated
from accept_mpi.failpoints import failpoint
from accept_mpi.pipeline.stage import Stage
from accept_mpi.recovery.barriers import SNAPSHOT, Barriers, Post
from accept_mpi.recovery.layer_state import Arriving, Blobs, chunked, copies, states
from accept_mpi.recovery.replicas import Replicas

_CHUNK = 1 << 16  # bytes per message: 5 ms at 100 Mbit/s; `comm.background` decides how many are in flight


class Route(NamedTuple):
    """Path of the copies that a rank makes."""

    stage: int | None
    """The stage that this rank holds; None if it is idle."""
    ranks: list[int]
    """The ranks that hold stages 0, 1, ..."""
    size: int
    """Number of ranks, idle ones included."""
    member: int = 0
    """Index of this rank in the group that holds its stage."""
    members: int = 1
    """Number of ranks in that group."""
    groups: int = 0
    """Number of stages that groups hold, each of which two ranks report."""

    @property
    def next(self) -> int:
        """The rank that gets this stage's copy: the next stage's (for the last stage the first's), or, if there is only one
        stage, one that the plan leaves idle."""
        assert self.stage is not None
        if len(self.ranks) > 1:
            return self.ranks[(self.stage + 1) % len(self.ranks)]
        return (self.ranks[self.stage] + 1) % self.size


class Replication:
    """One rank's part in replication during a deployment."""

    def __init__(
        self, replicas: Replicas, route: Route, on: bool, barriers: Barriers, post: Post, sending: Callable[[], bool],
        first: int = 0,
    ) -> None:  # fmt: skip
        """``on``: whether copies go to other ranks; ``sending()``: whether an earlier copy is still being sent; ``first``:
        steps made before this deployment."""
        self._replicas, self._route, self.on = replicas, route, on
        self._barriers, self._post, self._sending = barriers, post, sending
        self._first = first
        self._sent: Blobs = {}
        """The last copy that this rank has sent, which its receiver has, too."""
        self._arriving: dict[tuple[int, int], Arriving] = {}
        self._last: dict[int, Blobs] = {}
        """The last whole copy that has arrived, by stage."""
        self._whole: dict[int, set[tuple[int, int]]] = {}
        """On rank 0: stages whose copy has arrived, and members that keep one, by step."""

    # -- main thread ---------------------------------------------------------------------------------------------------

    def restart(self, step: int, stage: Stage) -> None:
        """Keep the state with which the stage begins a plan after ``step`` steps."""
        self._barriers.begin_after(step)
        self._replicas.keep(step, states(stage))

    def begin(self, step: int, stage: Stage, flags: int) -> None:
        """Keep the stage's state after ``step`` steps, and send it on in the background (an extra snapshot only if the
        previous copy has been sent). ``flags``: those of the barrier."""
        failpoint("snapshot")
        blobs = states(stage)
        self._replicas.keep(step, blobs)
        if self._route.members > 1:  # the other members have the same state, so it need not be sent
            if self.on and flags & SNAPSHOT and self._route.member < 2:  # either may be lost before the other has kept it
                assert self._route.stage is not None
                self._post(0, Replicated(step, self._route.stage, self._route.member), False)
        elif self.on and (flags & SNAPSHOT or not self._sending()):
            assert self._route.stage is not None
            for chunks in chunked(blobs, _CHUNK, self._sent):
                self._post(self._route.next, ReplicaChunks(step, self._route.stage, len(blobs), chunks), True)
            self._sent = blobs

    def keep(self, step: int, stage: Stage) -> None:
        """Keep a local copy of the stage's state after ``step`` steps, and tell the first stage what it took."""
        began = time.monotonic()
        self._replicas.keep_local(step, copies(stage))
        assert self._route.stage is not None
        self._post(self._route.ranks[0], Copied(self._route.stage, time.monotonic() - began), False)

    # -- data-plane thread ---------------------------------------------------------------------------------------------

    def handle(self, control: Control) -> bool:
        """Handle a message about copies; returns False for other messages."""
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
        """Take chunks of another stage's copy; report the copy to rank 0 once it is complete."""
        if copy.step <= self._first:  # the rest of a copy that the plan before was sending when it ended
            return
        key = copy.step, copy.stage
        arriving = self._arriving.setdefault(key, Arriving(self._last.get(copy.stage)))
        arriving.add(copy.chunks)
        if len(arriving.whole) == copy.layers:
            del self._arriving[key]
            self._replicas.keep(copy.step, arriving.whole)
            self._last[copy.stage] = arriving.whole
            self._post(0, Replicated(copy.step, copy.stage), False)

    def _count(self, arrived: Replicated) -> None:
        """Commit a snapshot once two ranks have each stage's state; on rank 0."""
        whole = self._whole.setdefault(arrived.step, set())
        whole.add((arrived.stage, arrived.member))
        if len(whole) == len(self._route.ranks) + self._route.groups:
            self._whole = {step: stages for step, stages in self._whole.items() if step > arrived.step}
            for rank in range(self._route.size):
                self._post(rank, Committed(arrived.step), False)

"""Chain replication in the background: after some steps each stage's state goes to the rank of the stage after it.

The first stage decides after which step, and a flag on the step's first micro-batch tells the others, so that every stage
takes its copy after the same update. What is whole at the next rank is reported to rank 0; when that holds of all stages,
the snapshot is committed and older ones are forgotten. A snapshot begins when the one before is committed, never earlier.

Where one stage's state takes its link longer than the job allows, there are extra ones in between: every stage keeps its
own copy, and those whose copy before is on its way no more send it on. So a loss costs as many steps as the lost stage's own
copy needs, not the largest one's.

How often (``recovery.replicate_every``): so many steps, less those that the last one took to be committed, so that a loss
costs no more than that; or "auto": sqrt(2 C M) seconds, with C what a snapshot takes and M the mean time between failures
(Young 1974; Daly 2006, first order), and never more than ``_MOST_SHARE`` of the time.
"""

import math
import time
from collections.abc import Callable
from typing import Any

from accept_mpi.comm.messenger import Message
from accept_mpi.failpoints import failpoint
from accept_mpi.job import MOST_EXTRA, Recovery
from accept_mpi.pipeline.stage import Stage
from accept_mpi.plan import Place
from accept_mpi.recovery.barriers import CHECKPOINT, EXTRA, REPLAN, SNAPSHOT
from accept_mpi.recovery.layer_state import Arriving, chunked, states
from accept_mpi.recovery.replicas import Replicas

_CHUNK = 1 << 16  # 5 ms at 100 Mbit/s; `comm.background` decides how many are under way
_MOST_SHARE = 0.03
_SOON = 3  # steps of a new plan before its first snapshot
_FIRST_SECONDS = 2.0  # before anything is known of what a snapshot takes

Post = Callable[[int, str, Any, bool], None]
"""Send a control message: to whom, its kind and body, and whether it may wait until nothing else is to be sent."""


class Replication:
    """One rank's part, as long as a plan holds."""

    def __init__(
        self,
        recovery: Recovery,
        replicas: Replicas,
        place: Place,
        ranks: list[int],
        size: int,
        survives: bool,
        post: Post,
        sending: Callable[[], bool],
    ) -> None:
        """``ranks``: that hold stages 0, 1, ...; ``size``: of all, idle ones too; ``survives``: whether copies help;
        ``sending``: whether what was posted to wait is not sent yet."""
        self._recovery, self._replicas, self._survives = recovery, replicas, survives
        self._post, self._sending = post, sending
        self._place, self._ranks, self._size = place, ranks, size
        self._arriving: dict[tuple[int, int], Arriving] = {}
        self._whole: dict[int, set[int]] = {}
        self._pending: tuple[int, float] | None = None
        self._lag, self._soon = 1, 0
        self._copied = self._extra = 0  # the last step with a copy; extra ones since the last snapshot
        self._seconds: float | None = None
        self._last_time = time.monotonic()
        self._now = 0
        self._stop = self._stopping = self._replan = False

    @property
    def on(self) -> bool:
        return self._survives and self._size > 1 and self._recovery.replicate_every != 0

    # -- main thread ---------------------------------------------------------------------------------------------------

    def flags(self, step: int) -> int:
        """First stage: how the step that begins (counted from 0) ends."""
        if self._replan:
            self._replan = False
            return REPLAN
        flags = self._due(step)
        if flags:
            self._copied, self._extra = step + 1, self._extra + 1 if flags == EXTRA else 0
        if self._stop and not self._stopping:
            self._stopping = True
            self._post(0, "stopping", step + 1, False)
            flags |= CHECKPOINT
        return flags

    def _due(self, step: int) -> int:
        """SNAPSHOT, EXTRA or 0."""
        self._now = step + 1
        if not self.on:
            return 0
        every = self._recovery.replicate_every
        if self._soon:
            wanted = step + 1 >= self._soon
        elif isinstance(every, int):
            wanted = step + 1 - self._copied >= max(1, every - self._lag)
        else:
            wanted = self._pending is None and time.monotonic() - self._last_time >= self.period
        if not wanted:
            return 0
        if self._pending is not None:
            return EXTRA if self._extra < MOST_EXTRA else 0
        self._pending, self._soon = (step + 1, time.monotonic()), 0
        return SNAPSHOT

    @property
    def period(self) -> float:
        """Seconds between two snapshots where the job says "auto"."""
        if self._seconds is None:
            return _FIRST_SECONDS
        return max(math.sqrt(2 * self._seconds * self._recovery.mean_time_between_failures), self._seconds / _MOST_SHARE)

    def ask_to_stop(self) -> None:
        """Any rank: let the run end with a checkpoint."""
        self._post(self._ranks[0], "stop", None, False)

    def ask_to_replan(self) -> None:
        """Rank 0: let the plan end with the next step that begins."""
        self._post(self._ranks[0], "replan", None, False)

    def restart(self, step: int, stage: Stage) -> None:
        """A plan begins after ``step`` steps. Whoever sent layers here has them still, so they need not go further at once:
        the first steps make up for the loss, the next snapshot comes soon."""
        self._soon = step + _SOON
        self._replicas.keep(step, states(stage))

    def begin(self, step: int, stage: Stage, flags: int) -> None:
        """Keep the stage's state after ``step`` steps, and send it on in the background."""
        failpoint("snapshot")
        blobs = states(stage)
        self._replicas.keep(step, blobs)
        if self.on and (flags & SNAPSHOT or not self._sending()):
            stages = len(self._ranks)
            # The only stage's goes to a rank that the plan leaves idle.
            after = self._ranks[(self._place.stage + 1) % stages] if stages > 1 else (self._ranks[0] + 1) % self._size
            for pieces in chunked(blobs, _CHUNK):
                body = {"step": step, "stage": self._place.stage, "layers": len(blobs), "pieces": pieces}
                self._post(after, "replica", body, True)

    # -- data-plane thread ---------------------------------------------------------------------------------------------

    def handle(self, message: Message) -> bool:
        """Returns whether the message was about replicas."""
        if message.kind == "replica":
            self._take(message.body)
        elif message.kind == "replicated":
            self._count(message.body["step"], message.body["stage"])
        elif message.kind == "committed":
            self._commit(message.body)
        elif message.kind == "stop":
            self._stop = True
        elif message.kind == "replan":
            self._replan = True
        else:
            return False
        return True

    def _take(self, body: dict[str, Any]) -> None:
        key = body["step"], body["stage"]
        arriving = self._arriving.setdefault(key, Arriving())
        arriving.add(body["pieces"])
        if len(arriving.whole) == body["layers"]:
            del self._arriving[key]
            self._replicas.keep(body["step"], arriving.whole)
            self._post(0, "replicated", {"step": body["step"], "stage": body["stage"]}, False)

    def _count(self, step: int, stage: int) -> None:
        """Rank 0."""
        whole = self._whole.setdefault(step, set())
        whole.add(stage)
        if len(whole) == len(self._ranks):
            self._whole = {later: stages for later, stages in self._whole.items() if later > step}
            for rank in range(self._size):
                self._post(rank, "committed", step, False)

    def _commit(self, step: int) -> None:
        self._replicas.commit(step)
        if self._pending is not None and self._pending[0] == step:
            self._seconds = time.monotonic() - self._pending[1]
            self._lag = max(1, self._now - step)
            self._last_time, self._pending = time.monotonic(), None

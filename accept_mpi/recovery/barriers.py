"""Barriers: marks on a step's first micro-batch that say how the step ends.

The first stage decides; the mark travels to the last stage with the activations. Each stage sees it before its own update of
that step, so all stages act after the same update, in every schedule, without separate messages and without draining the
pipeline (like the markers of Chandy and Lamport 1985 and the checkpoint barriers of Apache Flink).

The job's ``recovery.replicate_every`` says when a snapshot is due. If it is a number, snapshots begin so many steps apart,
less the steps that the last one took to be committed, so that a loss costs at most that number of steps. If it is "auto",
they begin every sqrt(2 C M) seconds, with C the seconds that a snapshot takes and M the mean time between failures (Young
1974; Daly 2006, first order), but take at most ``_MOST_SHARE`` of the time.

Where groups hold stages, local copies are made in between, as often as a given share of the time allows.
"""

import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from accept_mpi.comm.messages import Control, Copied, ReplanAsked, StepFlags, StopAsked, Stopping
from accept_mpi.errors import DeadlineError
from accept_mpi.job import MOST_EXTRA, Recovery

SNAPSHOT, CHECKPOINT, REPLAN, EXTRA, LOCAL, OVER = 0x8000, 0x4000, 0x2000, 0x1000, 0x0800, 0x0400
"""Bits of a message's ``flags``: its step ends with a snapshot, with a checkpoint that the job did not ask for, with the
end of its plan, with an extra snapshot, which a stage sends on only if it has sent its previous one, with a local copy,
which every rank keeps for itself, or, beside the end of its plan, with the end of the run."""

AHEAD = 2
"""Steps by which the decision about a step comes before it begins, if groups hold stages: every rank must know it then,
also one that takes none of the step's micro-batches."""

Post = Callable[[int, Control, bool], None]
"""A function that sends a control message: (receiver's rank, message, whether it may wait until training sends nothing)."""

_CHECK_SECONDS = 0.1
_MOST_SHARE = 0.03
_SOON = 3  # steps of a new plan before its first snapshot
_FIRST_SECONDS = 2.0  # between snapshots until one has shown how long it takes
_OUTLIER = 1.5  # factor by which a local copy may take longer than the one before: what takes longer was interrupted
_LOCAL_EVERY = 4  # steps between local copies until one has shown how long it takes


class LocalCopies(NamedTuple):
    """How often there are local copies."""

    least: int
    """Fewest steps between two: of the few that each rank keeps, one must be of the same step on all ranks."""
    share: float
    """Share of the time that they may take on the slowest rank."""


class Barriers:
    """Decides on the first stage how steps end. On other ranks it only passes on requests from signals and from rank 0."""

    def __init__(
        self, recovery: Recovery, first: int, snapshots: bool, post: Post, local: LocalCopies | None = None
    ) -> None:
        """``first``: rank of the first stage; ``snapshots``: whether the run keeps any; ``local``: None if there are
        no local copies."""
        self._recovery, self._first, self._snapshots, self._post = recovery, first, snapshots, post
        self._local, self._local_step = local, 0
        self._began, self._step_seconds = time.monotonic(), 0.0
        self._copy_seconds: dict[int, float] = {}
        """What a local copy takes, by stage."""
        self._pending: tuple[int, float] | None = None
        """Step and start (monotonic seconds) of the snapshot that is not committed yet."""
        self._lag, self._soon = 1, 0
        self._copied = self._extra = 0  # the last step with a copy; extra snapshots since the last regular one
        self._seconds: float | None = None
        self._last_time = time.monotonic()
        self._now = 0
        self._stop = self._stopping = False
        self._replan = 0
        self._decided: dict[int, int] = {}
        """Flags of coming steps that the first stage has told this rank."""
        self._told = threading.Condition()

    # -- main thread ---------------------------------------------------------------------------------------------------

    def flags(self, step: int) -> int:
        """Decide how ``step`` (counted from 0), which is about to begin, will end; returns bits. On the first stage only."""
        with self._told:  # the end of the run may be asked for at this moment
            flags, self._replan = self._replan, 0
        if flags:
            return flags
        flags = self._due(step)
        if flags:
            self._copied, self._extra = step + 1, self._extra + 1 if flags == EXTRA else 0
        else:
            flags = self._local_due(step)
        if self._stop and not self._stopping:
            self._stopping = True
            self._post(0, Stopping(step + 1), False)
            flags |= CHECKPOINT
        return flags

    def tell_all(self, step: int, ranks: Iterable[int]) -> None:
        """Decide how ``step``, which is to begin ``AHEAD`` steps from now, will end, and tell all ``ranks`` that hold a
        stage, which take it by ``told``; on the first stage's leader."""
        flags = self.flags(step)
        for rank in ranks:
            self._post(rank, StepFlags(step, flags), False)

    def told(self, step: int, deadline: float, check: Callable[[], None]) -> int:
        """The flags of a step that ``tell_all`` decided; waits at most ``deadline`` seconds. Raises DeadlineError, and what
        ``check`` raises."""
        until = time.monotonic() + deadline
        with self._told:
            while not self._told.wait_for(lambda: step in self._decided, _CHECK_SECONDS):
                check()
                if time.monotonic() > until:
                    raise DeadlineError(f"waited {deadline:.0f} s for the first stage to say how step {step + 1} ends")
            return self._decided.pop(step)

    def _due(self, step: int) -> int:
        """SNAPSHOT, EXTRA or 0, for a step that is about to begin."""
        self._now = step + 1
        if not self._snapshots:
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

    def _local_due(self, step: int) -> int:
        """LOCAL or 0, for a step that is about to begin."""
        now = time.monotonic()
        took, self._began = now - self._began, now
        self._step_seconds = took if not self._step_seconds else 0.8 * self._step_seconds + 0.2 * took
        if not self._local or not self._snapshots:
            return 0
        every = _LOCAL_EVERY
        if self._copy_seconds:
            every = math.ceil(max(self._copy_seconds.values()) / max(self._local.share * self._step_seconds, 1e-9))
        if step + 1 - max(self._local_step, self._copied) < max(every, self._local.least):
            return 0
        self._local_step = step + 1
        return LOCAL

    @property
    def period(self) -> float:
        """Seconds between two snapshots if ``replicate_every`` is "auto"."""
        if self._seconds is None:
            return _FIRST_SECONDS
        return max(math.sqrt(2 * self._seconds * self._recovery.mean_time_between_failures), self._seconds / _MOST_SHARE)

    def begin_after(self, step: int) -> None:
        """Make the first snapshot of a plan that begins after ``step`` steps follow ``_SOON`` steps later: the first steps
        make up for the loss, and the ranks that sent layers still hold them."""
        self._soon = step + _SOON

    def ask_to_stop(self) -> None:
        """Ask the first stage to end the run with a checkpoint; on any rank."""
        self._post(self._first, StopAsked(), False)

    def ask_to_replan(self, over: bool = False) -> None:
        """Ask the first stage to end the plan, or if ``over`` the run, with the next step that begins; on rank 0."""
        self._post(self._first, ReplanAsked(over), False)

    # -- data-plane thread ---------------------------------------------------------------------------------------------

    def handle(self, control: Control) -> bool:
        """Handle a message that asks for a barrier; returns False for other messages."""
        if isinstance(control, StopAsked):
            self._stop = True
        elif isinstance(control, ReplanAsked):
            with self._told:
                self._replan |= REPLAN | OVER if control.over else REPLAN
        elif isinstance(control, Copied):
            known = self._copy_seconds.get(control.stage, control.seconds)
            self._copy_seconds[control.stage] = min(control.seconds, _OUTLIER * known)
        elif isinstance(control, StepFlags):
            with self._told:
                self._decided[control.step] = control.flags
                self._told.notify_all()
        else:
            return False
        return True

    def committed(self, step: int) -> None:
        """Note that the snapshot after ``step`` steps is complete: every stage's copy has arrived."""
        if self._pending is not None and self._pending[0] == step:
            self._seconds = time.monotonic() - self._pending[1]
            self._lag = max(1, self._now - step)
            self._last_time, self._pending = time.monotonic(), None

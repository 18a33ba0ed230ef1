"""The data plane: one thread per rank that owns all MPI traffic, while the main thread computes.

Nonblocking is not asynchronous: MPI moves a message only while someone calls it. So this thread drives progress, encodes
and decodes, and sleeps in between (Open MPI's own waits would spin and take the core). The computing thread hands tensors
over by queue and never blocks in a send.
"""

import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol

from mpi4py import MPI

from accept_mpi.codecs.message import Header
from accept_mpi.comm.background import Background
from accept_mpi.comm.channels import Channel
from accept_mpi.comm.ends import Receiver, Sender
from accept_mpi.comm.messages import Control, Event, Message
from accept_mpi.comm.messenger import Messenger
from accept_mpi.errors import DeadlineError
from accept_mpi.logs.recorder import Recorder
from accept_mpi.polling import (
    LIVELY_SECONDS,
    POLL_ALONE,
    POLL_AWAITED,
    POLL_IDLE,
    POLL_RARE,
    POLL_SENDING,
)


class Moving(Protocol):
    """A part of the data plane that makes messages of its own out of others (``group_sum.GroupSum``)."""

    def move(self) -> bool: ...

    @property
    def pending(self) -> bool: ...

    def fail(self) -> None: ...


_ABANDON_SECONDS = 5.0
_SWITCH_SECONDS = 0.0005
_UNCODED_REPORTED = 10


class DataPlane:
    """The data-plane thread, with its channels and the control messages that it sends and handles."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        messenger: Messenger,
        recorder: Recorder,
        handle: Callable[[Message], bool],
        shares_core: bool = False,
    ) -> None:
        """``comm``: communicator that only this plane uses while it runs. ``shares_core``: True if this thread and the
        computing one have one core together. ``handle``: called on this thread with each control message, must be quick, and
        returns True if it took the message; others go back to the messenger when the thread ends.
        """
        self._thread = threading.Thread(target=self._run, name="data plane", daemon=True)
        self._comm = comm
        self._messenger = messenger
        self._recorder = recorder
        self._handle = handle
        self.shares_core = shares_core
        self._outgoing: list[Sender] = []
        self._incoming: list[Receiver] = []
        self._groups: list[Moving] = []
        self._requests: list[MPI.Prequest] = []
        """Those of all channels, as the last look found them."""
        self._ends: list[Sender | Receiver] = []
        """Whose requests these are."""
        self._sends_bulk = self._expects_bulk = self._awaits_copies = False
        """What the last look found under way."""
        self._posts: queue.SimpleQueue[tuple[int, Control] | None] = queue.SimpleQueue()
        self.background = Background(messenger)
        self._not_taken: list[Message] = []
        # Python's default lets a thread wait 5 ms for the GIL while another computes; a transfer needs it several times.
        sys.setswitchinterval(_SWITCH_SECONDS)
        self._uncoded = 0
        self._stopping = self._abandoned = False
        self._moved = 0.0
        self._error: BaseException | None = None
        self._failed: BaseException | None = None
        self._awaited = False

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def outgoing(self, end: Channel) -> Sender:
        """Add the sending end of a channel (before ``start``)."""
        self._outgoing.append(Sender(self, end))
        return self._outgoing[-1]

    def incoming(self, end: Channel) -> Receiver:
        """Add the receiving end of a channel (before ``start``)."""
        self._incoming.append(Receiver(self, end, self._comm))
        return self._incoming[-1]

    def add_group(self, group: Moving) -> None:
        """Have this thread move a group's sums (before ``start``)."""
        self._groups.append(group)

    def post(self, dest: int, control: Control, bulk: bool = False) -> None:
        """Queue a control message to rank ``dest``, from any thread.

        ``bulk``: send it in the background (``Background``), and not at all after ``stop``.
        """
        if bulk:
            self.background.put(dest, control)
        else:
            self._posts.put((dest, control))

    def wake(self) -> None:
        """End the thread's pause between two polls, from any thread."""
        self._posts.put(None)

    def hurry(self, awaited: bool) -> None:
        """Poll more often while the computing thread waits for a message (``awaited``), or as usual again."""
        self._awaited = awaited

    def report_uncoded(self, header: Header, end: Channel) -> None:
        """Send rank 0 an event for a message whose values could not be coded; only for the first few."""
        if self._uncoded < _UNCODED_REPORTED:
            text = f"micro-batch {header.micro_batch}: {end} were not finite, or too large for the codec, and went uncoded"
            self.post(0, Event(self._recorder.clock.now(), header.step + 1, text))
        self._uncoded += 1

    def check(self) -> None:
        """Raise the error that ended the thread, if one did."""
        if self._error is not None:
            raise self._error

    def fail(self, error: BaseException) -> None:
        """End the thread with another thread's error, so that whoever waits for a message gets it."""
        self._failed = error
        self.wake()

    def stop(self, deadline: float) -> None:
        """Send all queued messages, a checkpoint's perhaps, and end the thread. Raises DeadlineError if none of them arrives
        for ``deadline`` seconds, or the error that ended the thread."""
        self._stopping = True
        self.wake()
        arrived = -1
        while self._thread.is_alive() and arrived < self._messenger.arrived:
            arrived = self._messenger.arrived
            self._thread.join(deadline)
        self.check()
        if self._thread.is_alive():
            raise DeadlineError(f"waited {deadline:.0f} s for the other ranks to take the last messages")
        for incoming in self._incoming:
            incoming.close()

    def abandon(self) -> list[object]:
        """End the thread without completing transfers; its communicators have been revoked. Returns what must be kept, since
        MPI may still read from it and write to it."""
        self._abandoned = True
        self.wake()
        if self._thread.is_alive():
            self._thread.join(_ABANDON_SECONDS)
        return [*(one.under_way for one in self._outgoing), *(one.under_way for one in self._incoming)]

    def _run(self) -> None:
        """Move all transfers until ``stop`` or ``abandon``; an error is kept for ``check``."""
        try:
            changed = True
            while not self._abandoned and not self._done():
                if self._failed is not None:
                    raise self._failed
                if changed := self._move(changed):
                    self._moved = time.monotonic()
                else:
                    changed = self._pause()
            self._messenger.keep(self._not_taken)
        except BaseException as error:
            self._error = error
            for incoming in self._incoming:
                incoming.fail()
            for outgoing in self._outgoing:
                outgoing.fail()
            for group in self._groups:
                group.fail()

    def _done(self) -> bool:
        if not self._stopping:
            return False
        drained = not any(out.waiting or out.active for out in self._outgoing)
        return drained and self._posts.empty() and self._messenger.idle

    def _move(self, changed: bool) -> bool:
        """Poll all transfers once; returns True if anything moved.

        ``changed``: something has moved or another thread has woken this one since the last poll. If not, MPI has the only
        news: most polls find none, and each line of Python is slow while another thread computes.
        """
        moved = False
        for message in self._messenger.poll():
            if not self._handle(message):
                self._not_taken.append(message)
            moved = True
        if self._test() or changed or self._awaits_copies:
            moved |= self._look()
        if self.background.busy and not self._stopping:
            moved |= self.background.move(quiet=not any(out.waiting or out.sends_bulk for out in self._outgoing))
        return moved

    def _look(self) -> bool:
        """Go through all channels and groups; returns True if anything moved."""
        moved = False
        for out in self._outgoing:
            if out.waiting or out.active:
                moved |= out.move(self._comm, self._recorder)
        for incoming in self._incoming:
            if incoming.arrived is not None:
                moved |= incoming.move(self._recorder)
        for group in self._groups:
            moved |= group.move()
        self._requests, self._ends = [], []
        ends: list[Sender | Receiver] = [*self._outgoing, *self._incoming]
        for end in ends:
            requests = end.requests()
            self._requests += requests
            self._ends += [end] * len(requests)
        self._awaits_copies = any(out.awaits_copies for out in self._outgoing)
        self._sends_bulk = any(out.sends_bulk for out in self._outgoing)
        bulk = any(out.waiting for out in self._outgoing) or any(incoming.brings_bulk for incoming in self._incoming)
        self._expects_bulk = bulk or any(group.pending for group in self._groups)
        return moved

    def _test(self) -> bool:
        """Test the requests of all channels in one call; returns True if one is done. One after the other, each would let
        MPI look at all its sockets.

        Testsome looks at them only if nothing is done, and says so next time; that the messenger has just made MPI look is
        why it comes first. All are persistent: once one has failed, Testsome frees all others that the loss concerns, even
        those under way to ranks that live, whose answers then end the job (Open MPI 5.0).
        """
        if not self._requests:
            return False
        statuses: list[MPI.Status] = []
        done = MPI.Request.Testsome(self._requests, statuses)
        for n, status in zip(done or (), statuses, strict=False):
            self._ends[n].note(status)
        return bool(done)

    def _expects_much(self) -> bool:
        """True if more frequent polls would speed up a transfer."""
        return self._expects_bulk or self._stopping or self.background.busy or not self._messenger.quiet

    def _interval(self) -> float:
        """Seconds until the next poll."""
        if not (self._outgoing or self._incoming):
            # Ranks send control messages one at a time, so after a message others are likely to follow soon.
            return POLL_SENDING if time.monotonic() - self._moved < LIVELY_SECONDS else POLL_ALONE
        if self._awaited or self._awaits_copies:
            return POLL_AWAITED
        if self._sends_bulk:
            return POLL_SENDING
        return POLL_RARE if self.shares_core and not self._expects_much() else POLL_IDLE

    def _pause(self) -> bool:
        """Sleep until the next poll is due or another thread posts or wakes; returns True if one did."""
        interval, woken = self._interval(), False
        try:
            while True:
                post = self._posts.get(timeout=interval)
                if post is not None:
                    (self._messenger.begin if post[1].urgent else self._messenger.send)(*post)
                interval, woken = 0.0, True
        except queue.Empty:
            return woken

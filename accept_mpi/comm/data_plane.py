"""The data plane: one thread a rank owns all MPI traffic while the other computes.

Nonblocking is not asynchronous: MPI moves a message only while someone calls it. So this thread drives progress, encodes
and decodes, and sleeps in between (Open MPI's own waits would spin and steal the core). The computing thread hands tensors
over by queue and never blocks in a send.
"""

import queue
import sys
import threading
import time
from collections.abc import Callable

from mpi4py import MPI

from accept_mpi.codecs.message import Header
from accept_mpi.comm.background import Background
from accept_mpi.comm.channels import Channel, Receiver, Sender
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

_ABANDON_SECONDS = 5.0
_SWITCH_SECONDS = 0.0005
_UNCODED_REPORTED = 10


class DataPlane(threading.Thread):
    """The thread, its endpoints, and the control messages that share it."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        messenger: Messenger,
        recorder: Recorder,
        handle: Callable[[Message], bool],
        shares_core: bool = False,
    ) -> None:
        """``comm`` is this plane's alone, as long as it runs. ``handle`` is called on this thread with each control message
        and says whether it took it; it must not take long. ``shares_core``: with a thread that computes.

        What it does not take goes back to the messenger when the thread ends.
        """
        super().__init__(name="data plane", daemon=True)
        self._comm = comm
        self._messenger = messenger
        self._recorder = recorder
        self._handle = handle
        self._shares_core = shares_core
        self._outgoing: list[Sender] = []
        self._incoming: list[Receiver] = []
        self._posts: queue.SimpleQueue[tuple[int, Control] | None] = queue.SimpleQueue()
        self.background = Background(messenger)
        self._not_taken: list[Message] = []
        # Python lets a thread that asks for its lock wait 5 ms while another computes, and a transfer asks several times.
        sys.setswitchinterval(_SWITCH_SECONDS)
        self._uncoded = 0
        self._stopping = self._abandoned = False
        self._moved = 0.0
        self._error: BaseException | None = None
        self._awaited = False

    def outgoing(self, end: Channel) -> Sender:
        """Add an endpoint to send through (before ``start``)."""
        self._outgoing.append(Sender(self, end))
        return self._outgoing[-1]

    def incoming(self, end: Channel) -> Receiver:
        """Add an endpoint to receive through (before ``start``)."""
        self._incoming.append(Receiver(self, end, self._comm))
        return self._incoming[-1]

    def post(self, dest: int, control: Control, bulk: bool = False) -> None:
        """Send a control message, from any thread. ``bulk``: when training sends nothing, and not at all after ``stop``."""
        if bulk:
            self.background.put(dest, control)
        else:
            self._posts.put((dest, control))

    def wake(self) -> None:
        self._posts.put(None)

    def hurry(self, awaited: bool) -> None:
        """The computing thread waits for a message from now on, or no longer: poll more often, or less."""
        self._awaited = awaited

    def report_uncoded(self, header: Header, end: Channel) -> None:
        """Tell rank 0 of a message whose values could not be coded; of the first few."""
        if self._uncoded < _UNCODED_REPORTED:
            text = f"micro-batch {header.micro_batch}: {end} were not finite and went uncoded"
            self.post(0, Event(self._recorder.clock.now(), header.step + 1, text))
        self._uncoded += 1

    def check(self) -> None:
        """Raise what ended the thread, if something did."""
        if self._error is not None:
            raise self._error

    def stop(self, deadline: float) -> None:
        """Send out what is queued and end the thread. Raises DeadlineError where a peer does not take it."""
        self._stopping = True
        self.wake()
        self.join(deadline)
        self.check()
        if self.is_alive():
            raise DeadlineError(f"waited {deadline:.0f} s for the other ranks to take the last messages")
        for incoming in self._incoming:
            incoming.close()

    def abandon(self) -> None:
        """End the thread, whatever is under way; its communicators are revoked."""
        self._abandoned = True
        self.wake()
        if self.is_alive():
            self.join(_ABANDON_SECONDS)

    def run(self) -> None:
        try:
            while not self._abandoned and not self._done():
                if self._move():
                    self._moved = time.monotonic()
                else:
                    self._pause()
            self._messenger.keep(self._not_taken)
        except BaseException as error:
            self._error = error
            for incoming in self._incoming:
                incoming.fail()
            for outgoing in self._outgoing:
                outgoing.fail()

    def _done(self) -> bool:
        drained = not any(out.waiting or out.active for out in self._outgoing)
        return self._stopping and drained and self._posts.empty() and self._messenger.idle

    def _move(self) -> bool:
        """One look at everything; whether anything moved."""
        moved = False
        for out in self._outgoing:
            moved |= out.move(self._comm, self._recorder)
        for incoming in self._incoming:
            moved |= incoming.move(self._recorder)
        for message in self._messenger.poll():
            if not self._handle(message):
                self._not_taken.append(message)
            moved = True
        if not self._stopping:
            moved |= self.background.move(quiet=not any(out.waiting or out.sends_bulk for out in self._outgoing))
        return moved

    def _expects_much(self) -> bool:
        """Whether something is under way that more looks bring on."""
        bulk = any(out.waiting for out in self._outgoing) or any(incoming.brings_bulk for incoming in self._incoming)
        return bulk or self._stopping or self.background.busy or not self._messenger.quiet

    def _interval(self) -> float:
        """Seconds to the next look."""
        if not (self._outgoing or self._incoming):
            # Others send one message at a time: what comes at all should not wait long.
            return POLL_SENDING if time.monotonic() - self._moved < LIVELY_SECONDS else POLL_ALONE
        if self._awaited:
            return POLL_AWAITED
        if any(out.sends_bulk for out in self._outgoing):
            return POLL_SENDING
        return POLL_RARE if self._shares_core and not self._expects_much() else POLL_IDLE

    def _pause(self) -> None:
        """Sleep until the next look is due, or the computing thread has something."""
        interval = self._interval()
        try:
            while True:
                post = self._posts.get(timeout=interval)
                if post is not None:
                    self._messenger.send(*post)
                interval = 0.0
        except queue.Empty:
            pass

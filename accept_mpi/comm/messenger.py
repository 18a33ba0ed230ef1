"""Control messages between ranks: MessagePack over a separate communicator, without pickle and without blocking calls.

The main thread uses a messenger while a run is set up; while a deployment runs, only the data-plane thread does.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from mpi4py import MPI

from accept_mpi.comm.messages import AnyControl, Control, Gather, Message, Scatter
from accept_mpi.errors import DeadlineError

_TAG = 7
_DECODER = msgspec.msgpack.Decoder(AnyControl)
C = TypeVar("C", bound=Control)
POLL_SECONDS = 0.0005
"""Seconds between two polls while waiting."""


class Sending:
    """A control message in flight."""

    def __init__(self, request: MPI.Request, data: bytes) -> None:
        self._request, self._data, self._began = request, data, time.monotonic()
        self.took: float | None = None
        """Seconds until its receiver had it; None before that."""

    def look(self) -> bool:
        """Poll once; returns True if the receiver has the message.

        A lost receiver is not noticed here but by ``Messenger.poll``, which looks for messages of all: ``Test`` would free
        the request, and if the receiver's last answer then came, MPI would end the job (Open MPI 5.0).
        """
        if self.took is None and self._request.Get_status() and self._request.Test():
            self.took = time.monotonic() - self._began
        return self.took is not None


class Messenger:
    """Sends and receives control messages; every wait has a deadline."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        """``comm``: communicator that only this messenger uses."""
        self._comm = comm
        self.rank, self.size = self._comm.rank, self._comm.size
        self._queue: deque[tuple[int, Control]] = deque()
        self._sending: Sending | None = None
        self._beside: list[Sending] = []
        self._receiving: tuple[MPI.Request, bytearray, int] | None = None
        self._status = MPI.Status()
        self._received: deque[Message] = deque()
        self.arrived = 0
        """Number of messages of the queue that have reached their receivers."""
        self._interrupt: Callable[[], None] | None = None
        """A call that the polling thread makes at its next poll."""

    def interrupt_with(self, call: Callable[[], None]) -> None:
        """Have the polling thread make this call at its next poll; for threads that must not call MPI."""
        self._interrupt = call

    def send(self, dest: int, control: Control) -> None:
        """Queue a message to rank ``dest``. Calls of ``poll`` send the queue in order, one message at a time. Nothing may
        change the message any more: it becomes bytes when its turn comes, so a checkpoint that waits is there once."""
        self._queue.append((dest, control))

    def begin(self, dest: int, control: Control) -> Sending:
        """Send a message to rank ``dest`` immediately, ahead of the queue."""
        self._beside.append(self._start(dest, msgspec.msgpack.encode(control)))
        return self._beside[-1]

    def poll(self) -> list[Message]:
        """Advance sends and receives, and return the messages that have arrived."""
        if self._interrupt:
            self._interrupt()
            self._interrupt = None
        if self._sending and self._sending.look():
            self._sending = None
            self.arrived += 1
        if self._beside:
            self._beside = [sending for sending in self._beside if not sending.look()]
        if self._queue and not self._sending:
            dest, control = self._queue.popleft()  # one at a time: a checkpoint cannot crowd out training
            self._sending = self._start(dest, msgspec.msgpack.encode(control))
        # Receive one at a time, in order. A long message (a piece of a snapshot) takes many polls to arrive.
        while self._receiving or self._find():
            assert self._receiving
            request, buffer, source = self._receiving
            if not request.Test():
                break
            self._receiving = None
            self._received.append(Message(source, _DECODER.decode(buffer)))
        messages = list(self._received)
        self._received.clear()
        return messages

    def _start(self, dest: int, data: bytes) -> Sending:
        """Start a send in synchronous mode: it completes when its receiver has the message."""
        return Sending(self._comm.Issend([data, MPI.BYTE], dest, _TAG), data)

    def _find(self) -> bool:
        """Start receiving the next message; returns False if none has arrived."""
        status = self._status
        found = self._comm.Improbe(MPI.ANY_SOURCE, _TAG, status)
        if found:
            buffer = bytearray(status.Get_count(MPI.BYTE))
            self._receiving = found.Irecv([buffer, MPI.BYTE]), buffer, status.Get_source()
        return found is not None

    @property
    def idle(self) -> bool:
        """True if all messages have been received by their receivers."""
        return not self._queue and not self._sending and not self._beside

    @property
    def quiet(self) -> bool:
        """True if no message is in flight, in or out."""
        return self.idle and not self._receiving

    def flush(self, deadline: float, awaited: str) -> None:
        """Poll until all sends are received; messages that arrive meanwhile are kept for a later ``poll``.

        ``deadline``: seconds to wait; ``awaited``: the purpose, for the error. Raises DeadlineError.
        """
        until = time.monotonic() + deadline
        while not self.idle:
            self.keep(self.poll())
            if time.monotonic() > until:
                raise DeadlineError(f"rank {self.rank} waited {deadline:.0f} s to send: {awaited}")
            time.sleep(POLL_SECONDS)

    def expect(self, kind: type[C], sources: set[int], deadline: float, awaited: str) -> dict[int, C]:
        """Wait for one message of ``kind`` from each of ``sources``; returns them by rank. Others are kept for a later
        ``poll``. Raises DeadlineError, which names the missing ranks, after ``deadline`` seconds."""
        until = time.monotonic() + deadline
        bodies: dict[int, C] = {}
        while sources - bodies.keys():
            later = []
            for message in self.poll():
                control = message.control
                if isinstance(control, kind) and message.source in sources and message.source not in bodies:
                    bodies[message.source] = control
                else:
                    later.append(message)
            self.keep(later)
            if time.monotonic() > until:
                missing = ", ".join(map(str, sorted(sources - bodies.keys())))
                raise DeadlineError(f"rank {self.rank} waited {deadline:.0f} s for rank {missing}: {awaited}")
            if sources - bodies.keys():
                time.sleep(POLL_SECONDS)
        return bodies

    def keep(self, messages: list[Message]) -> None:
        """Put messages back, to be returned by a later ``poll`` or ``expect``."""
        self._received.extend(messages)

    def allgather(self, value: Any, deadline: float, awaited: str) -> list[Any]:
        """Every rank's value, in the order of ranks, on every rank; all ranks call this together. Raises DeadlineError."""
        others = set(range(self.size)) - {0}
        if self.rank == 0:
            values = self.expect(Gather, others, deadline, awaited)
            together = [value, *(values[rank].value for rank in range(1, self.size))]
            for rank in others:
                self.send(rank, Scatter(together))
        else:
            self.send(0, Gather(value))
            together = self.expect(Scatter, {0}, deadline, awaited)[0].values
        self.flush(deadline, awaited)
        return list(together)

    def broadcast(self, value: Any, deadline: float, awaited: str) -> Any:
        """Rank 0's value, on every rank; all ranks call this together. Raises DeadlineError."""
        return self.allgather(value if self.rank == 0 else None, deadline, awaited)[0]

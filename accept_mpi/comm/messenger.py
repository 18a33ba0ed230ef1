"""Typed control messages between ranks: MessagePack over their own communicator, never pickle, never a blocking call.

Used by the main thread while a run is set up, by the data-plane thread (and only by it) from then on.
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
"""Between two looks while waiting."""


class Sending:
    """A message under way."""

    def __init__(self, request: MPI.Request, data: bytes) -> None:
        self._request, self._data, self._began = request, data, time.monotonic()
        self.took: float | None = None
        """Seconds until its receiver had it; None: not yet."""

    def look(self) -> bool:
        """Whether its receiver has it."""
        if self.took is None and self._request.Test():
            self.took = time.monotonic() - self._began
        return self.took is not None


class Messenger:
    """Sends and receives control messages; every wait has a deadline."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        """``comm``: for this messenger alone."""
        self._comm = comm
        self.rank, self.size = self._comm.rank, self._comm.size
        self._queue: deque[tuple[int, bytes]] = deque()
        self._sending: Sending | None = None
        self._beside: list[Sending] = []
        self._receiving: tuple[MPI.Request, bytearray, int] | None = None
        self._received: deque[Message] = deque()
        self._interrupt: Callable[[], None] | None = None
        """What the thread that polls is to do first, set by one that keeps out of MPI."""

    def interrupt_with(self, call: Callable[[], None]) -> None:
        """Have the thread that polls make this call first; for threads that keep out of MPI."""
        self._interrupt = call

    def send(self, dest: int, control: Control) -> None:
        """Queue a message; it goes out, in order, as ``poll`` is called."""
        self._queue.append((dest, msgspec.msgpack.encode(control)))

    def begin(self, dest: int, control: Control) -> Sending:
        """Send a message at once, beside what is queued."""
        self._beside.append(self._start(dest, msgspec.msgpack.encode(control)))
        return self._beside[-1]

    def poll(self) -> list[Message]:
        """Move sends on and return what has arrived."""
        if self._interrupt:
            self._interrupt()
            self._interrupt = None
        if self._sending and self._sending.look():
            self._sending = None
        if self._beside:
            self._beside = [sending for sending in self._beside if not sending.look()]
        if self._queue and not self._sending:
            self._sending = self._start(*self._queue.popleft())  # one at a time: a checkpoint cannot crowd out training
        # One at a time, in order. A long one (a piece of a snapshot) takes many looks to come in.
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
        """In synchronous mode: done when its receiver has it."""
        return Sending(self._comm.Issend([data, MPI.BYTE], dest, _TAG), data)

    def _find(self) -> bool:
        """Begin to receive what has arrived, if anything has."""
        status = MPI.Status()
        found = self._comm.Improbe(MPI.ANY_SOURCE, _TAG, status)
        if found:
            buffer = bytearray(status.Get_count(MPI.BYTE))
            self._receiving = found.Irecv([buffer, MPI.BYTE]), buffer, status.Get_source()
        return found is not None

    @property
    def idle(self) -> bool:
        """Whether everything has been taken by its receiver."""
        return not self._queue and not self._sending and not self._beside

    @property
    def quiet(self) -> bool:
        """Whether nothing is under way, in or out."""
        return self.idle and not self._receiving

    def flush(self, deadline: float, awaited: str) -> None:
        """Poll until all sends are taken; what arrives meanwhile is kept. Raises DeadlineError."""
        until = time.monotonic() + deadline
        while not self.idle:
            self.keep(self.poll())
            if time.monotonic() > until:
                raise DeadlineError(f"rank {self.rank} waited {deadline:.0f} s to send: {awaited}")
            time.sleep(POLL_SECONDS)

    def expect(self, kind: type[C], sources: set[int], deadline: float, awaited: str) -> dict[int, C]:
        """One message of ``kind`` from each of ``sources``. Raises DeadlineError naming who is missing."""
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
        """Every rank's value, in the order of ranks, on every rank."""
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
        """Rank 0's value, on every rank."""
        return self.allgather(value if self.rank == 0 else None, deadline, awaited)[0]

"""The data plane: one thread a rank owns all MPI traffic while the other computes.

Nonblocking is not asynchronous: MPI moves a message only while someone calls it. So this thread drives progress, encodes
and decodes, and sleeps in between (Open MPI's own waits would spin and steal the core). The computing thread hands tensors
over by queue and never blocks in a send.
"""

import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from mpi4py import MPI

from accept_mpi.codec import (
    HEADER_BYTES,
    Bytes,
    Decoded,
    Header,
    Specs,
    Tensors,
    TensorSpec,
    aligned,
    announced,
    buffer_bytes,
    decode,
    describe,
    encode,
    raw_bytes,
)
from accept_mpi.coding import Coding
from accept_mpi.comm.background import Background
from accept_mpi.comm.messenger import Message, Messenger
from accept_mpi.errors import DeadlineError, ProtocolError
from accept_mpi.looks import SENDING_SECONDS, SOCKET_BYTES
from accept_mpi.recorder import Recorder
from accept_mpi.seeds import CODE, mix
from accept_mpi.tree import LONE, Tree

# Seconds between two looks at MPI: while the computing thread waits for a message; while something larger than a socket
# takes at once is being sent; otherwise; on a lone rank; and where nothing would be gained from looking while the only core
# computes: what has arrived is decoded when a send or a wait wakes this thread. A look costs some 0.1 ms of that core, for
# its caches are cold.
_LIVELY_SECONDS = 0.2
_POLL_AWAITED, _POLL_SENDING, _POLL_IDLE, _POLL_ALONE, _POLL_RARE = 0.0002, SENDING_SECONDS, 0.008, 0.02, 0.032
_BUFFERED_BYTES = 1 << 19
_ABANDON_SECONDS = 5.0
_SWITCH_SECONDS = 0.0005
_UNCODED_REPORTED = 10
_RECEIVES_POSTED = 3
_SENDS_POSTED = 3
_LARGER = 1 << 14  # tag of the messages that are larger than the buffer which waits for them, in front of the boundary's
_GROWTH = 1 << 12  # buffers grow to a multiple of so many bytes


class Endpoint(NamedTuple):
    """One direction of one boundary as seen from one rank."""

    peer: int
    boundary: int
    direction: int
    specs: dict[int, Specs]
    limit: int
    """Most messages that the schedule can leave waiting."""
    coding: Coding
    seed: int
    """The job's, for stochastic rounding."""
    trees: Mapping[int, Tree] = MappingProxyType({})
    """What activations belong to."""

    @property
    def tag(self) -> int:
        return 2 * self.boundary + self.direction

    @property
    def buffer_bytes(self) -> int:
        return max(buffer_bytes(specs, self.coding) for specs in self.specs.values())

    def __str__(self) -> str:
        return f"{('activations', 'gradients')[self.direction]} across boundary {self.boundary}"


class _Item(NamedTuple):
    step: int
    micro_batch: int
    samples: int
    flags: int
    scale: float
    specs: Specs
    flat: Tensors
    description: bytes
    """Empty where all is as agreed."""


class Slots:
    """How large the buffers are in which an endpoint's messages are received, one after another in turn.

    A message that does not fit is announced by its header alone and comes under a tag of its own; from then on its slot has
    room for such a one. Both ends count alike.
    """

    def __init__(self, nbytes: int) -> None:
        self._sizes = [nbytes] * _RECEIVES_POSTED
        self._turn = 0

    @property
    def next(self) -> int:
        """Bytes that the next message may have."""
        return self._sizes[self._turn]

    def pass_by(self, wire: int) -> int:
        """The next message has so many bytes. Returns those of its slot afterwards."""
        size = max(self.next, -(-wire // _GROWTH) * _GROWTH if wire > self.next else 0)
        self._sizes[self._turn] = size
        self._turn = (self._turn + 1) % _RECEIVES_POSTED
        return size


class Outgoing:
    """Where the computing thread puts tensors for a peer."""

    def __init__(self, plane: "DataPlane", end: Endpoint) -> None:
        self.end = end
        self._plane = plane
        self._room = threading.Semaphore(end.limit + _SENDS_POSTED)
        self.waiting: deque[_Item] = deque()
        self.free = [aligned(end.buffer_bytes) for _ in range(_SENDS_POSTED)]
        self._slots = Slots(end.buffer_bytes)
        self.active: deque[tuple[list[MPI.Request], Bytes, int]] = deque()

    @property
    def sends_bulk(self) -> bool:
        """Whether something is under way that MPI must be called for again and again."""
        return any(wire > SOCKET_BYTES for _, _, wire in self.active)

    def send(
        self,
        step: int,
        micro_batch: int,
        samples: int,
        tensors: Tensors,
        flags: int = 0,
        deadline: float | None = None,
        tree: Tree | None = None,
        scale: float = 1.0,
    ) -> None:
        """Queue tensors. With ``deadline`` (evaluation) wait so long for room; in training the schedule guarantees room.
        ``tree``: what activations belong to.

        Raises AssertionError where the schedule broke that promise, DeadlineError where no room came.
        """
        self._plane.check()
        if not self._room.acquire(blocking=deadline is not None, timeout=deadline):
            self._plane.check()
            if deadline is None:
                raise AssertionError(f"more than {self.end.limit} messages wait to be sent: {self.end}")
            raise DeadlineError(f"waited {deadline:.0f} s for rank {self.end.peer} to take {self.end}")
        self._plane.check()
        specs, description = self._specs(samples, tensors, tree, training=deadline is None)
        flat = tuple(spec.flatten(tensor) for spec, tensor in zip(specs, tensors, strict=True))
        self.waiting.append(_Item(step, micro_batch, samples, flags, scale, specs, flat, description))
        self._plane.wake()

    def _specs(self, samples: int, tensors: Tensors, tree: Tree | None, training: bool) -> tuple[Specs, bytes]:
        """The specs of these tensors, and their description where that is not what was agreed."""
        specs = self.end.specs.get(samples)
        as_usual = specs is not None and len(specs) == len(tensors) and tree in (None, self.end.trees.get(samples))
        if as_usual and all(spec.fits(tensor, training) for spec, tensor in zip(specs or (), tensors, strict=True)):
            return specs or (), b""
        specs = tuple(map(TensorSpec.of, tensors))
        return specs, describe(specs, LONE if tree is None else tree)

    def fail(self) -> None:
        """Data-plane thread: it ends with an error; whoever waits for room is to learn that."""
        self._room.release()

    def drain(self, deadline: float) -> None:
        """Wait until the peer has everything. Raises DeadlineError."""
        until = time.monotonic() + deadline
        while self.waiting or self.active:
            self._plane.check()
            if time.monotonic() > until:
                raise DeadlineError(f"waited {deadline:.0f} s for rank {self.end.peer} to take {self.end}")
            time.sleep(_POLL_IDLE)

    def move(self, comm: MPI.Intracomm, recorder: Recorder) -> bool:
        """Data-plane thread: finish sends that are taken, begin those that wait."""
        moved = False
        while self.active and all(request.Test() for request in self.active[0][0]):
            self.free.append(self.active.popleft()[1])
            self._room.release()
            moved = True
        while self.waiting and self.free:
            item, buffer = self.waiting[0], self.free.pop()
            start = recorder.clock.now()
            fields = item._asdict() | {"direction": self.end.direction, "boundary": self.end.boundary}
            specs, flat, coding = fields.pop("specs"), fields.pop("flat"), self.end.coding
            if (needed := buffer_bytes(specs, coding, item.description)) > buffer.size:
                buffer = aligned(needed)
            key = mix(CODE, self.end.seed, item.step, item.micro_batch, self.end.tag)
            header = encode(specs, flat, buffer, coding, key, now=recorder.clock.now, **fields)
            wire, raw = HEADER_BYTES + header.length, raw_bytes(specs)
            recorder.add("encode", start, item.step + 1, item.micro_batch, self.end.boundary, self.end.direction, raw, wire)
            self.active.append((self._begin(comm, header, buffer[:wire]), buffer, wire))
            self.waiting.popleft()
            moved = True
        return moved

    def _begin(self, comm: MPI.Intracomm, header: Header, message: Bytes) -> list[MPI.Request]:
        """Synchronous mode: done when the peer has it, so that at most _SENDS_POSTED messages are ever under way."""
        tag, requests = self.end.tag, []
        if message.size > self._slots.next:
            requests.append(comm.Issend([header.announce(), MPI.BYTE], self.end.peer, tag))
            tag += _LARGER
        self._slots.pass_by(message.size)
        return [*requests, comm.Issend([message, MPI.BYTE], self.end.peer, tag)]


class Incoming:
    """Where the computing thread takes a peer's tensors from, in the order of the schedule."""

    def __init__(self, plane: "DataPlane", end: Endpoint, comm: MPI.Intracomm) -> None:
        self.end = end
        self._plane = plane
        self._comm = comm
        self._ready: queue.SimpleQueue[Decoded | None] = queue.SimpleQueue()
        self._posted: deque[tuple[MPI.Prequest, Bytes]] = deque()
        self._slots = Slots(end.buffer_bytes)
        self._larger: tuple[MPI.Request, Bytes] | None = None
        """A message that was announced."""
        self.brings_bulk = True
        """Whether the last message was larger than what the kernel keeps until it is taken: the next one, too, comes only
        as fast as this side looks."""
        for _ in range(_RECEIVES_POSTED):
            self._post(aligned(end.buffer_bytes))

    def _post(self, buffer: Bytes) -> None:
        request = self._comm.Recv_init([buffer, MPI.BYTE], self.end.peer, self.end.tag)
        request.Start()
        self._posted.append((request, buffer))

    def receive(self, step: int, micro_batch: int, deadline: float, recorder: Recorder) -> Decoded:
        """The message of this micro-batch, waiting ``deadline`` seconds at most.

        Raises DeadlineError, and ProtocolError where another message comes first.
        """
        start = recorder.clock.now()
        try:
            item = self._ready.get_nowait()
        except queue.Empty:
            self._plane.awaited = True
            self._plane.wake()
            try:
                item = self._ready.get(timeout=deadline)
            except queue.Empty:
                self._plane.check()
                raise DeadlineError(
                    f"waited {deadline:.0f} s for rank {self.end.peer} to send {self.end}, micro-batch {micro_batch}"
                ) from None
            finally:
                self._plane.awaited = False
            recorder.add("wait", start, step + 1, micro_batch, self.end.boundary, self.end.direction)
        self._plane.check()
        assert item is not None
        header = item.header
        if (header.step, header.micro_batch) != (step, micro_batch):
            raise ProtocolError(
                f"expected micro-batch {micro_batch} of step {step}, "
                f"got {header.micro_batch} of step {header.step}: {self.end}"
            )
        return item

    def move(self, recorder: Recorder) -> bool:
        """Data-plane thread: decode what has arrived, as long as the computing thread has room for it."""
        moved = False
        while self._ready.qsize() < self.end.limit and (message := self._arrived()) is not None:
            start = recorder.clock.now()
            self.brings_bulk = message.size > _BUFFERED_BYTES
            decoded = decode(self.end.specs, message, self.end.coding, self.end.trees)
            header = decoded.header
            if (header.boundary, header.direction) != (self.end.boundary, self.end.direction):
                raise ProtocolError(f"a message for boundary {header.boundary} came as {self.end}")
            if header.codec != self.end.coding.number:
                self._plane.report_uncoded(header, self.end)
            self._ready.put(decoded)
            place = (header.step + 1, header.micro_batch, self.end.boundary, self.end.direction, decoded.raw, message.size)
            recorder.add("send", header.sent, *place, end=start, of=(self.end.peer, self.end.boundary + self.end.direction))
            recorder.add("decode", start, *place)
            self._again(message.size)
            moved = True
        return moved

    def _arrived(self) -> Bytes | None:
        """The next message, once it is there."""
        request, buffer = self._posted[0]
        if self._larger is None:
            status = MPI.Status()
            if not request.Test(status):
                return None
            message = buffer[: status.Get_count(MPI.BYTE)]
            nbytes = announced(message)
            if not nbytes:
                return message
            larger = aligned(nbytes)
            self._larger = self._comm.Irecv([larger, MPI.BYTE], self.end.peer, self.end.tag + _LARGER), larger
        coming, larger = self._larger
        return larger if coming.Test() else None

    def _again(self, wire: int) -> None:
        """Wait in the same slot for the message after the next ones."""
        self._larger = None
        request, buffer = self._posted.popleft()
        size = self._slots.pass_by(wire)
        if size > buffer.size:
            request.Free()
            self._post(aligned(size))
        else:
            request.Start()
            self._posted.append((request, buffer))

    def fail(self) -> None:
        self._ready.put(None)

    def close(self) -> None:
        """Take back the posted receives."""
        for request, _ in self._posted:
            request.Cancel()
            request.Test()


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
        self._outgoing: list[Outgoing] = []
        self._incoming: list[Incoming] = []
        self._posts: queue.SimpleQueue[tuple[int, str, Any] | None] = queue.SimpleQueue()
        self.background = Background(messenger)
        self._not_taken: list[Message] = []
        # Python lets a thread that asks for its lock wait 5 ms while another computes, and a transfer asks several times.
        sys.setswitchinterval(_SWITCH_SECONDS)
        self._uncoded = 0
        self._stopping = self._abandoned = False
        self._moved = 0.0
        self._error: BaseException | None = None
        self.awaited = False

    def outgoing(self, end: Endpoint) -> Outgoing:
        """Add an endpoint to send through (before ``start``)."""
        self._outgoing.append(Outgoing(self, end))
        return self._outgoing[-1]

    def incoming(self, end: Endpoint) -> Incoming:
        """Add an endpoint to receive through (before ``start``)."""
        self._incoming.append(Incoming(self, end, self._comm))
        return self._incoming[-1]

    def post(self, dest: int, kind: str, body: Any, bulk: bool = False) -> None:
        """Send a control message, from any thread. ``bulk``: when training sends nothing, and not at all after ``stop``."""
        if bulk:
            self.background.put(dest, kind, body)
        else:
            self._posts.put((dest, kind, body))

    def wake(self) -> None:
        self._posts.put(None)

    def report_uncoded(self, header: Header, end: Endpoint) -> None:
        """Tell rank 0 of a message whose values could not be coded; of the first few."""
        if self._uncoded < _UNCODED_REPORTED:
            text = f"micro-batch {header.micro_batch}: {end} were not finite and went uncoded"
            self.post(0, "event", {"seconds": self._recorder.clock.now(), "step": header.step + 1, "text": text})
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
            return _POLL_SENDING if time.monotonic() - self._moved < _LIVELY_SECONDS else _POLL_ALONE
        if self.awaited:
            return _POLL_AWAITED
        if any(out.sends_bulk for out in self._outgoing):
            return _POLL_SENDING
        return _POLL_RARE if self._shares_core and not self._expects_much() else _POLL_IDLE

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

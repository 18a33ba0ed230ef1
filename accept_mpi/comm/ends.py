"""Both ends of a channel: the computing thread puts tensors in or takes them out, the data plane moves messages.

Each message is received into one of a few buffers, in turn; one that does not fit is announced by its header alone and
follows separately.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from mpi4py import MPI

from accept_mpi.codecs.basis import NO_BASES, Bases, Basis
from accept_mpi.codecs.message import (
    HEADER_BYTES,
    Bytes,
    Decoded,
    Header,
    Label,
    aligned,
    announced,
    buffer_bytes,
    decode,
    describe,
    encode,
    encode_in_place,
    raw_bytes,
)
from accept_mpi.codecs.tensors import Specs, Tensors, TensorSpec, as_in_training
from accept_mpi.comm.channels import Channel, Plane, wait_for
from accept_mpi.device.compute import Given, here
from accept_mpi.direction import Direction
from accept_mpi.errors import DeadlineError, ProtocolError
from accept_mpi.logs.recorder import Recorder
from accept_mpi.polling import SOCKET_BYTES, wait_while
from accept_mpi.seeds import CODE, mix
from accept_mpi.tree import LONE, Tree

_POLL = 0.008
_BUFFERED_BYTES = 1 << 19
_RECEIVES_POSTED = 3
_SENDS_POSTED = 3
_LARGER = 1 << 14  # added to the tag of messages that are larger than the buffer posted for them
_GROWTH = 1 << 12  # buffers grow to a multiple of this many bytes


class _Item(NamedTuple):
    label: Label
    specs: Specs
    flat: Tensors
    description: bytes
    """Format of the tensors; empty if it is the one agreed on."""
    ready: Callable[[], bool] | None = None
    """Tells when the tensors have arrived from a device (``Given``)."""
    bases: Bases = NO_BASES

    @property
    def is_ready(self) -> bool:
        return self.ready is None or self.ready()


class Slots:
    """Sizes of the buffers in which a channel's messages are received, in turn. Both ends keep the same count.

    A message that does not fit is announced by its header alone and follows under a separate tag; from then on its slot has
    room for a message of that size.
    """

    def __init__(self, nbytes: int) -> None:
        self._sizes = [nbytes] * _RECEIVES_POSTED
        self._turn = 0

    @property
    def next(self) -> int:
        """Maximum bytes of the next message."""
        return self._sizes[self._turn]

    def pass_by(self, wire: int) -> int:
        """Count the next message, of ``wire`` bytes; returns the bytes of its slot afterwards."""
        size = max(self.next, -(-wire // _GROWTH) * _GROWTH if wire > self.next else 0)
        self._sizes[self._turn] = size
        self._turn = (self._turn + 1) % _RECEIVES_POSTED
        return size


class Sender:
    """The sending end of a channel: the computing thread queues tensors, the data plane encodes and sends them."""

    def __init__(self, plane: Plane, end: Channel) -> None:
        self.end = end
        self._told = NO_BASES
        """The bases that the receiver knows, once it has all that is queued."""
        self._plane = plane
        self._room = threading.Semaphore(end.limit + _SENDS_POSTED)
        self.waiting: deque[_Item] = deque()
        self.free = [aligned(end.buffer_bytes) for _ in range(_SENDS_POSTED)]
        self._slots = Slots(end.buffer_bytes)
        self.active: deque[tuple[list[MPI.Prequest], Bytes, list[Bytes]]] = deque()
        """Requests of messages in flight, their buffers, and what they consist of."""
        self._done = 0
        """How many requests of the oldest message in flight are done."""

    @property
    def awaits_copies(self) -> bool:
        """True if the next message could be sent were it not still on its way from a device."""
        return bool(self.waiting and self.free and self.waiting[0].ready is not None)

    @property
    def sends_bulk(self) -> bool:
        """True if a message larger than a socket's buffer is in flight: only repeated calls of MPI move it on."""
        return any(parts[-1].size > SOCKET_BYTES for _, _, parts in self.active)

    def send(
        self,
        step: int,
        micro_batch: int,
        samples: int,
        tensors: Tensors,
        *,
        flags: int = 0,
        suspect: int = 0,
        scale: float = 1.0,
        tree: Tree | None = None,
        deadline: float | None = None,
    ) -> None:
        """Queue tensors for the peer.

        ``flags``, ``suspect``, ``scale``: header fields (``codecs.message.Header``). ``tree``: structure of activations.
        ``deadline``: seconds to wait for room, in evaluation; without it, in training, the schedule guarantees room.
        Raises AssertionError if the schedule broke that promise, DeadlineError if no room came in time.
        """
        self._plane.check()
        if not self._room.acquire(blocking=deadline is not None, timeout=deadline):
            self._plane.check()
            if deadline is None:
                raise AssertionError(f"more than {self.end.limit} messages wait to be sent: {self.end}")
            raise DeadlineError(f"waited {deadline:.0f} s for rank {self.end.peer} to take {self.end}")
        self._plane.check()
        specs, description = self._specs(samples, tensors, tree, training=deadline is None)
        if (bases := self.end.bases(step)) is not self._told:
            self._told = bases
            usual = self.end.trees.get(samples, LONE) if tree is None else tree
            description = describe(specs, usual, bases)
        ready = tensors.ready if isinstance(tensors, Given) else None
        flat = tuple(self._values(spec, tensor, ready is None) for spec, tensor in zip(specs, tensors, strict=True))
        label = Label(self.end.direction, self.end.boundary, step, micro_batch, samples, flags, suspect, scale)
        self.waiting.append(_Item(label, specs, flat, description, ready, bases))
        self._plane.wake()

    def _values(self, spec: TensorSpec, tensor: torch.Tensor | None, of_stage: bool) -> torch.Tensor | None:
        """The values to send. Activations without a gradient are copied: they may be state that a layer changes before they
        are sent, if they are the stage's own tensors (``of_stage``)."""
        flat = spec.flatten(tensor)
        without = tensor is not None and not tensor.requires_grad
        may_change = of_stage and without and self.end.direction is Direction.FORWARD
        return flat.clone() if may_change and flat is not None else flat

    def _specs(self, samples: int, tensors: Tensors, tree: Tree | None, training: bool) -> tuple[Specs, bytes]:
        """The specs of these tensors, and their description if the format is not the one agreed on (else empty)."""
        specs = self.end.specs.get(samples)
        as_usual = specs is not None and len(specs) == len(tensors) and tree in (None, self.end.trees.get(samples))
        if as_usual and all(spec.fits(tensor, training) for spec, tensor in zip(specs or (), tensors, strict=True)):
            return specs or (), b""
        found = tuple(map(TensorSpec.of, tensors))
        if not training:
            found = as_in_training(found, next(iter(self.end.specs.values()), ()))
        return found, describe(found, LONE if tree is None else tree)

    def fail(self) -> None:
        """Wake a thread that waits for room, since the data plane ends with an error. Called on the data-plane thread."""
        self._room.release()

    def drain(self, deadline: float) -> None:
        """Wait until the peer has received everything. Raises DeadlineError after ``deadline`` seconds."""
        what = f"rank {self.end.peer} to take {self.end}"
        wait_while(lambda: self.waiting or self.active, _POLL, deadline, self._plane.check, what)

    def requests(self) -> Sequence[MPI.Prequest]:
        """Those of the oldest message in flight, for the data plane to test."""
        return self.active[0][0] if self.active else ()

    def note(self, status: MPI.Status) -> None:
        """Count a request that is done. Called on the data-plane thread."""
        self._done += 1

    @property
    def under_way(self) -> object:
        """The messages that MPI is sending, and their requests."""
        return list(self.active)

    def move(self, comm: MPI.Intracomm, recorder: Recorder) -> bool:
        """Complete the send that the peer has received and start queued ones; returns True if there were any. Called on the
        data-plane thread, after ``requests`` have been tested."""
        moved = False
        if self.active and self._done == len(self.active[0][0]):
            requests, buffer, _ = self.active.popleft()
            for request in requests:
                request.Free()
            self._done = 0
            self.free.append(buffer)
            self._room.release()
            moved = True
        while self.waiting and self.free and self.waiting[0].is_ready:
            item, buffer = self.waiting[0], self.free.pop()
            start = recorder.clock.now()
            label, specs, coding = item.label, item.specs, self.end.coding
            if (needed := buffer_bytes(specs, coding, item.description)) > buffer.size:
                buffer = aligned(needed)
            found = encode_in_place(label, item.flat, buffer, now=recorder.clock.now) if self.end.in_place else None
            if found is not None:
                header, parts = found[0], [buffer[:HEADER_BYTES], found[1]]
            else:
                key = mix(CODE, self.end.seed, label.step, label.micro_batch, self.end.tag)
                header = encode(
                    label,
                    specs,
                    item.flat,
                    buffer,
                    coding,
                    key,
                    now=recorder.clock.now,
                    description=item.description,
                    bases=item.bases,
                )
                parts = [buffer[: HEADER_BYTES + header.length]]
            if not self.end.in_group:
                wire, raw = HEADER_BYTES + header.length, raw_bytes(specs)
                recorder.add("encode", start, self.end.subject(label.step, label.micro_batch, raw, wire))
            self.active.append((self._begin(comm, header, parts), buffer, parts))
            self.waiting.popleft()
            moved = True
        return moved

    def _begin(self, comm: MPI.Intracomm, header: Header, parts: list[Bytes]) -> list[MPI.Prequest]:
        """Start to send a message, which may lie in several parts, in synchronous mode: it completes when the peer receives
        it, so at most _SENDS_POSTED messages are in flight."""
        tag, requests, wire = self.end.tag, [], HEADER_BYTES + header.length
        if wire > self._slots.next:
            requests.append(self._start(comm, [header.announce(), MPI.BYTE], tag))
            tag += _LARGER
        self._slots.pass_by(wire)
        if len(parts) == 1:
            return [*requests, self._start(comm, [parts[0], MPI.BYTE], tag)]
        layout = MPI.BYTE.Create_hindexed([part.size for part in parts], list(map(MPI.Get_address, parts))).Commit()
        requests.append(self._start(comm, [MPI.BOTTOM, 1, layout], tag))
        layout.Free()
        return requests

    def _start(self, comm: MPI.Intracomm, what: list[Any], tag: int) -> MPI.Prequest:
        """Start to send this."""
        request = cast(MPI.Prequest, comm.Ssend_init(what, self.end.peer, tag))
        request.Start()
        return request


class Receiver:
    """The receiving end of a channel: the data plane decodes messages, the computing thread takes their tensors in the order
    of the schedule."""

    def __init__(self, plane: Plane, end: Channel, comm: MPI.Intracomm) -> None:
        self.end = end
        self._plane = plane
        self._comm = comm
        self._ready: queue.SimpleQueue[Decoded | None] = queue.SimpleQueue()
        self._held = False
        """True while so many messages wait for the computing thread that no more are taken from MPI."""
        self._posted: deque[tuple[MPI.Prequest, Bytes]] = deque()
        self._slots = Slots(end.buffer_bytes)
        self._larger: tuple[MPI.Prequest, Bytes] | None = None
        """Receive of an announced message that exceeds its slot."""
        self.arrived: MPI.Status | None = None
        """Status of the request of ``requests``, once it is done."""
        self._bases: dict[int, Basis] = {}
        self.took_bulk = True
        """True if the last message was larger than the kernel's receive buffer."""
        for _ in range(_RECEIVES_POSTED):
            self._post(aligned(end.buffer_bytes))

    def _post(self, buffer: Bytes) -> None:
        self._posted.append((self._start(buffer, self.end.tag), buffer))

    def _start(self, buffer: Bytes, tag: int) -> MPI.Prequest:
        """Start to receive a message."""
        request = self._comm.Recv_init([buffer, MPI.BYTE], self.end.peer, tag)
        request.Start()
        return request

    def receive(self, step: int, micro_batch: int, deadline: float, recorder: Recorder) -> Decoded:
        """The message of this micro-batch; waits for it at most ``deadline`` seconds.

        Raises DeadlineError if it does not come, ProtocolError if another message comes first.
        """
        start = recorder.clock.now()
        try:
            item = self._ready.get_nowait()
        except queue.Empty:
            what = f"rank {self.end.peer} to send {self.end}, micro-batch {micro_batch}"
            item = wait_for(self._plane, self._ready, deadline, what)
            recorder.add("wait", start, self.end.subject(step, micro_batch))
        if self._held:
            self._plane.wake()
        self._plane.check()
        assert item is not None
        header = item.header
        if (header.step, header.micro_batch) != (step, micro_batch):
            raise ProtocolError(
                f"expected micro-batch {micro_batch} of step {step}, "
                f"got {header.micro_batch} of step {header.step}: {self.end}"
            )
        return item

    def poll(self) -> Decoded | None:
        """The next decoded message if there is one. Called on the data-plane thread, instead of ``receive``."""
        return None if self._ready.empty() else self._ready.get_nowait()

    def requests(self) -> Sequence[MPI.Prequest]:
        """The next message's, for the data plane to test, unless ``limit`` messages wait for the computing thread, which
        then wakes the data plane when it takes one."""
        self._held = True  # before the look, so that whoever takes a message after it sees this
        if self._ready.qsize() >= self.end.limit:
            return ()
        self._held = False
        return (self._larger[0] if self._larger else self._posted[0][0],)

    def note(self, status: MPI.Status) -> None:
        """Note that the request is done. Called on the data-plane thread."""
        self.arrived = status

    @property
    def brings_bulk(self) -> bool:
        """True if the next message probably is as large as a large last one, and then arrives only as fast as this side
        polls. (Of a group's sums none is needed while this rank computes.)"""
        return self.took_bulk and not self.end.in_group

    @property
    def under_way(self) -> object:
        """The buffers that MPI may write to, and their requests."""
        return [*self._posted, self._larger]

    def move(self, recorder: Recorder) -> bool:
        """Decode the next message if it has arrived; returns True if so. Called on the data-plane thread, after
        ``requests`` have been tested."""
        if self.arrived is None or (message := self._whole(self.arrived)) is None:
            return False
        start = recorder.clock.now()
        self.took_bulk = message.size > _BUFFERED_BYTES
        decoded = decode(self.end.specs, message, self.end.coding, self.end.trees, self.end.in_place, self._bases)
        header = decoded.header
        if (header.boundary, header.direction) != (self.end.boundary, self.end.direction):
            raise ProtocolError(f"a message for boundary {header.boundary} came as {self.end}")
        if header.codec != self.end.coding.number:
            self._plane.report_uncoded(header, self.end)
        if not self.end.in_group:  # gradients are summed on the host
            decoded = decoded._replace(tensors=here().fetch(decoded.tensors))
        self._ready.put(decoded)
        subject = self.end.subject(header.step, header.micro_batch, decoded.raw, message.size)
        arrived = max(start, header.sent)  # two hosts' clocks never agree quite
        if self.end.in_group:
            recorder.add("sum", header.sent, subject, end=arrived)
        else:
            sender, _ = self.end.direction.ends(self.end.boundary)
            recorder.add("send", header.sent, subject, end=arrived, of=(self.end.peer, sender))
            recorder.add("decode", start, subject)
        self._again(message.size)
        return True

    def _whole(self, status: MPI.Status) -> Bytes | None:
        """The message whose request is done; None if it was an announcement, whose message is received now."""
        self.arrived = None
        if self._larger is not None:
            return self._larger[1]
        message = self._posted[0][1][: status.Get_count(MPI.BYTE)]
        nbytes = announced(message)
        if not nbytes:
            return message
        larger = aligned(nbytes)
        self._larger = self._start(larger, self.end.tag + _LARGER), larger
        return None

    def _again(self, wire: int) -> None:
        """Post the receive of the message just taken (``wire`` bytes) again, in the same slot."""
        if self._larger:
            self._larger[0].Free()
            self._larger = None
        request, buffer = self._posted.popleft()
        size = self._slots.pass_by(wire)
        if size > buffer.size or self.end.in_place:
            request.Free()
            self._post(aligned(size))
        else:
            request.Start()
            self._posted.append((request, buffer))

    def fail(self) -> None:
        """Wake a thread that waits for a message, since the data plane ends with an error."""
        self._ready.put(None)

    def close(self) -> None:
        """Cancel the posted receives, and free those that no message had met."""
        for request, _ in self._posted:
            request.Cancel()
            if request.Test():
                request.Free()

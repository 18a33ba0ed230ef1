"""Both ends of a channel over a wire of this process: messages come in order, whatever their sizes, and no more than agreed
are under way."""

from collections import deque
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from accept_mpi.codecs.coding import NONE, Coding, parse
from accept_mpi.codecs.message import HEADER_BYTES
from accept_mpi.codecs.tensors import TensorSpec
from accept_mpi.comm.channels import Channel
from accept_mpi.comm.ends import Receiver, Sender
from accept_mpi.direction import Direction
from accept_mpi.errors import DeadlineError, ProtocolError
from accept_mpi.logs.recorder import Clock, Recorder


class Request:
    """True while it is not done, as mpi4py's are."""

    def __init__(self, buffer: Any) -> None:
        self.buffer, self.started, self.cancelled, self.done = buffer, True, False, False

    def __bool__(self) -> bool:
        return not self.done

    def Start(self) -> None:
        self.started = True

    def Free(self) -> None:
        self.started = False

    def Cancel(self) -> None:
        self.cancelled = True

    def Test(self) -> bool:
        return self.cancelled


class Status(NamedTuple):
    size: int

    def Get_count(self, kind: Any) -> int:
        return self.size


class Wire:
    """Synchronous sends and receives of one rank to itself."""

    def __init__(self) -> None:
        self.sends: dict[int, deque[Request]] = {}
        self.receives: dict[int, deque[Request]] = {}
        self.sent: list[tuple[int, int]] = []
        """Tag and bytes of each message."""

    def Issend(self, what: Any, peer: int, tag: int) -> Request:
        self.sent.append((tag, what[0].size))
        self.sends.setdefault(tag, deque()).append(found := Request(what[0]))
        return found

    def Recv_init(self, what: Any, peer: int, tag: int) -> Request:
        found = Request(what[0])
        found.started = False
        self.receives.setdefault(tag, deque()).append(found)
        return found

    def Irecv(self, what: Any, peer: int, tag: int) -> Request:
        self.receives.setdefault(tag, deque()).append(found := Request(what[0]))
        return found

    def arrived(self, request: Request) -> Any:
        """The status of a receive for which a message is there, else None."""
        for tag, posted in self.receives.items():
            if request in posted and request.started and (waiting := self.sends.get(tag)):
                sent = waiting.popleft()
                assert sent.buffer.size <= request.buffer.size, "a message larger than its buffer"
                request.buffer[: sent.buffer.size] = sent.buffer
                sent.done, request.started = True, False
                return Status(sent.buffer.size)
        return None


class Plane:
    def __init__(self) -> None:
        self.woken = 0
        self.uncoded: list[int] = []
        self.error: Exception | None = None

    def hurry(self, awaited: bool) -> None: ...

    def check(self) -> None:
        if self.error:
            raise self.error

    def wake(self) -> None:
        self.woken += 1

    def report_uncoded(self, header: Any, end: Channel) -> None:
        self.uncoded.append(header.micro_batch)


class Pair:
    """A sender and its receiver."""

    def __init__(self, limit: int = 100, coding: Coding = NONE, direction: Direction = Direction.FORWARD) -> None:
        self.plane, self.wire = Plane(), Wire()
        specs = {4: (TensorSpec.of(torch.zeros(4, 3, requires_grad=True)),)}
        end = Channel(0, 5, direction, specs, limit, coding)
        self.sender = Sender(self.plane, end)
        self.receiver = Receiver(self.plane, end, self.wire)  # type: ignore[arg-type]
        self.recorder = Recorder(Clock(0.0), 0, 0)

    def look(self) -> bool:
        """What the data plane does in a poll."""
        moved = self.sender.move(self.wire, self.recorder)  # type: ignore[arg-type]
        for request in self.receiver.requests():
            self.receiver.arrived = self.wire.arrived(request)  # type: ignore[arg-type]
        return self.receiver.move(self.recorder) or moved

    def run(self) -> None:
        while self.look():
            pass

    def take(self, k: int) -> torch.Tensor:
        (found,) = self.receiver.receive(0, k, 0.01, self.recorder).tensors
        assert found is not None
        return found


def rows(count: int, seed: int = 0) -> torch.Tensor:
    values = torch.randn(count, 3, generator=torch.Generator().manual_seed(seed))
    return values.requires_grad_()


def test_messages_of_any_size_come_in_order() -> None:
    pair = Pair()
    sizes = [4, 4, 3000, 4, 9, 2000, 3000, 5000, 0, 4, 3000, 3000, 3000, 7000, 4]
    given = [rows(size, k) for k, size in enumerate(sizes)]
    for k, values in enumerate(given):
        pair.sender.send(0, k, len(values), (values,))
    pair.run()
    for k, values in enumerate(given):
        assert torch.equal(pair.take(k), values)
    assert not pair.sender.waiting
    assert not pair.sender.active
    pair.sender.drain(0.01)
    pair.receiver.close()
    (usual,) = pair.wire.receives.keys() - {pair.receiver.end.tag + (1 << 14)}
    assert all(request.cancelled for request in pair.wire.receives[usual] if request.started)


def test_a_slot_that_has_grown_is_announced_no_message() -> None:
    """Each of three buffers in turn grows once."""
    pair = Pair()
    for k in range(12):
        pair.sender.send(0, k, 2000, (rows(2000, k),))
        pair.run()
        assert torch.equal(pair.take(k), rows(2000, k))
    assert [size for _, size in pair.wire.sent].count(HEADER_BYTES) == 3
    assert len(pair.wire.sent) == 12 + 3


def test_no_more_messages_are_taken_than_the_schedule_leaves_waiting() -> None:
    pair = Pair(limit=2)
    for k in range(2):
        pair.sender.send(0, k, 4, (rows(4, k),))
    pair.run()
    for k in range(2, 5):
        pair.sender.send(0, k, 4, (rows(4, k),))
    pair.run()
    assert not pair.receiver.requests()
    assert len(pair.sender.active) == 3
    woken = pair.plane.woken
    pair.take(0)
    assert pair.plane.woken == woken + 1, "whoever takes a message wakes the data plane"
    assert pair.receiver.requests()
    pair.run()
    assert [int((pair.take(k) == rows(4, k)).all()) for k in range(1, 3)] == [1, 1]


def test_room_for_what_is_sent() -> None:
    """Beyond what the schedule can leave waiting is a mistake in training; an evaluation waits."""
    pair = Pair(limit=2)
    for k in range(2 + 3):
        pair.sender.send(0, k, 4, (rows(4, k),))
    with pytest.raises(AssertionError, match="more than 2 messages"):
        pair.sender.send(0, 5, 4, (rows(4),))
    with pytest.raises(DeadlineError, match="rank 0 to take activations across boundary 5"):
        pair.sender.send(0, 5, 4, (rows(4),), deadline=0.01)
    with pytest.raises(DeadlineError, match="to take activations"):
        pair.sender.drain(0.01)
    pair.run()
    pair.sender.send(0, 5, 4, (rows(4),), deadline=0.01)
    pair.plane.error = ProtocolError("over")
    pair.sender.fail()
    with pytest.raises(ProtocolError, match="over"):
        pair.sender.send(0, 6, 4, (rows(4),), deadline=5.0)


def test_what_a_layer_changes_later_is_sent_as_it_was() -> None:
    pair = Pair()
    state = torch.ones(4, 3)
    pair.sender.send(0, 0, 4, (state,))
    state.zero_()
    pair.run()
    assert torch.equal(pair.take(0), torch.ones(4, 3))


def test_what_comes_out_of_turn_is_refused() -> None:
    pair = Pair()
    pair.sender.send(0, 1, 4, (rows(4),))
    pair.run()
    with pytest.raises(ProtocolError, match="expected micro-batch 0 of step 0, got 1 of step 0"):
        pair.take(0)
    with pytest.raises(DeadlineError, match="waited 0 s for rank 0 to send activations across boundary 5, micro-batch 2"):
        pair.take(2)
    other = Pair(direction=Direction.BACKWARD)
    other.receiver.end = other.receiver.end._replace(boundary=6)
    other.sender.send(0, 0, 4, (rows(4),))
    with pytest.raises(ProtocolError, match="a message for boundary 5 came as gradients across boundary 6"):
        other.run()


def test_what_could_not_be_coded_is_reported() -> None:
    pair = Pair(coding=parse("fp16", False))
    large = [rows(2000, k) for k in range(3)]
    with torch.no_grad():
        large[1][0, 0] = np.inf
    for k, values in enumerate(large):
        pair.sender.send(0, k, 2000, (values,))
    pair.run()
    assert pair.plane.uncoded == [1]
    back = [pair.take(k) for k in range(3)]
    assert torch.equal(back[1], large[1])
    assert not torch.equal(back[0], large[0])


def test_a_loss_wakes_who_waits() -> None:
    pair = Pair()
    pair.plane.error = ProtocolError("over")
    pair.receiver.fail()
    with pytest.raises(ProtocolError, match="over"):
        pair.take(0)

"""Both ends of a channel over a wire of this process: messages come in order, whatever their sizes, and no more than agreed
are under way."""

import threading
import time
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from accept_mpi.codecs.basis import NO_BASES, Bases, basis_of, seen
from accept_mpi.codecs.coding import NONE, Coding, parse
from accept_mpi.codecs.message import HEADER_BYTES
from accept_mpi.codecs.tensors import TensorSpec
from accept_mpi.comm import ends
from accept_mpi.comm.channels import Channel
from accept_mpi.comm.ends import Receiver, Sender
from accept_mpi.device.compute import Given
from accept_mpi.direction import Direction
from accept_mpi.errors import DeadlineError, ProtocolError
from accept_mpi.logs.recorder import Clock, Recorder
from accept_mpi.tree import LONE, Tree, flatten


class Request:
    """A persistent request."""

    def __init__(self, buffer: Any) -> None:
        self.buffer, self.started, self.cancelled, self.done = buffer, False, False, False

    def Start(self) -> None:
        self.started, self.done = True, False

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

    def Ssend_init(self, what: Any, peer: int, tag: int) -> Request:
        self.sent.append((tag, what[0].size))
        self.sends.setdefault(tag, deque()).append(found := Request(what[0]))
        return found

    def Recv_init(self, what: Any, peer: int, tag: int) -> Request:
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
        self.woken = self.checked = 0
        self.uncoded: list[int] = []
        self.error: Exception | None = None

    def hurry(self, awaited: bool) -> None: ...

    def check(self) -> None:
        self.checked += 1
        if self.error:
            raise self.error

    def wake(self) -> None:
        self.woken += 1

    def report_uncoded(self, header: Any, end: Channel) -> None:
        self.uncoded.append(header.micro_batch)


class Pair:
    """A sender and its receiver."""

    def __init__(
        self, limit: int = 100, coding: Coding = NONE, direction: Direction = Direction.FORWARD,
        like: tuple[torch.Tensor, ...] = (torch.zeros(4, 3, requires_grad=True),), tree: Tree = LONE,
        in_group: bool = False,
    ) -> None:  # fmt: skip
        """``like``, ``tree``: what is agreed on for 4 samples."""
        self.plane, self.wire = Plane(), Wire()
        end = Channel(
            0, 5, direction, {4: tuple(map(TensorSpec.of, like))}, limit, coding, trees={4: tree}, in_group=in_group
        )
        self.sender = Sender(self.plane, end)
        self.receiver = Receiver(self.plane, end, self.wire)  # type: ignore[arg-type]
        self.recorder = Recorder(Clock(0.0), 0, 0)

    def look(self) -> bool:
        """What the data plane does in a poll."""
        moved = self.sender.move(self.wire, self.recorder)  # type: ignore[arg-type]
        for request in self.receiver.requests():
            if status := self.wire.arrived(request):  # type: ignore[arg-type]
                self.receiver.note(status)
        for request in self.sender.requests():
            if request.done:  # type: ignore[attr-defined]
                self.sender.note(Status(0))  # type: ignore[arg-type]
                request.done = False  # type: ignore[attr-defined]
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


@pytest.mark.parametrize("in_group", [False, True])
def test_large_messages_are_polled_for_where_computing_needs_them(in_group: bool) -> None:
    """A rank that computes needs the next activations, but no sums before it has given its own gradients (``pending``)."""
    pair = Pair(in_group=in_group)
    for k, size in enumerate((1, (1 << 16) + 1, 1)):  # too odd to be sent from where they are
        pair.sender.send(0, k, size, (rows(size, k),))
        pair.run()
        pair.take(k)
        assert pair.receiver.brings_bulk == (size > 1 and not in_group)


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


def test_a_loss_wakes_who_waits_for_room() -> None:
    pair = Pair(limit=0)
    for k in range(3):
        pair.sender.send(0, k, 4, (rows(4, k),))
    ended: list[Exception] = []

    def wait() -> None:
        try:
            pair.sender.send(0, 3, 4, (rows(4),), deadline=1000.0)
        except ProtocolError as error:
            ended.append(error)

    waiting, checked = threading.Thread(target=wait, daemon=True), pair.plane.checked
    waiting.start()
    while pair.plane.checked == checked:
        time.sleep(0.001)
    pair.plane.error = ProtocolError("over")
    pair.sender.fail()
    waiting.join(20)
    assert len(ended) == 1
    assert len(pair.sender.waiting) == 3


def test_all_is_sent_when_the_peer_has_it() -> None:
    pair = Pair()
    pair.sender.send(0, 0, 4, (rows(4),))
    pair.sender.move(pair.wire, pair.recorder)  # type: ignore[arg-type]
    with pytest.raises(DeadlineError, match="to take activations"):
        pair.sender.drain(0.01)


def test_other_structures_and_numbers_of_tensors_are_described() -> None:
    """Of the same shapes, too: who receives puts them together as they were."""
    one, two = torch.zeros(4, 3, requires_grad=True), torch.zeros(4, 3)
    _, usual = flatten({"a": one, "b": two})
    _, other = flatten({"b": one, "a": two})
    _, alone = flatten({"a": one})
    pair = Pair(like=(one, two), tree=usual)
    for k, (tree, count) in enumerate([(usual, 2), (other, 2), (alone, 1), (usual, 2), (None, 2), (None, 1)]):
        pair.sender.send(0, k, 4, (rows(4, k), torch.ones(4, 3))[:count], tree=tree)
    pair.run()
    found = [pair.receiver.receive(0, k, 0.01, pair.recorder) for k in range(6)]
    assert [one.tree for one in found] == [usual, other, alone, usual, usual, LONE]
    assert [bool(one.header.described) for one in found] == [False, True, True, False, False, True]
    assert [len(one.tensors) for one in found] == [2, 2, 1, 2, 2, 1]


def test_masks_are_not_coded_in_an_evaluation_either() -> None:
    """There no tensor wants a gradient, whatever the number of samples; what is as agreed needs no description."""
    pair = Pair(coding=parse("fp16", False), like=(torch.zeros(4, 32, requires_grad=True), torch.zeros(4, 32)))
    for k, size in enumerate((4, 7)):
        values, mask = torch.randn(size, 32), torch.randn(size, 32)
        pair.sender.send(0, k, size, (values, mask), deadline=1.0)
        pair.run()
        found = pair.receiver.receive(0, k, 0.01, pair.recorder)
        assert found.header.described == 0 if size == 4 else found.header.described
        back, same = found.tensors
        assert back is not None
        assert not back.equal(values)
        assert same is not None
        assert same.equal(mask)


def test_each_step_rounds_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """And each micro-batch and direction."""
    keys: list[int] = []
    encode = ends.encode

    def noted(*given: Any, **named: Any) -> Any:
        keys.append(given[5])
        return encode(*given, **named)

    monkeypatch.setattr(ends, "encode", noted)
    for direction in Direction:
        pair = Pair(direction=direction)
        for step, k in ((0, 0), (0, 1), (1, 0)):
            pair.sender.send(step, k, 4, (rows(4),))
        pair.run()
    assert len(set(keys)) == 6


def test_bases_come_with_the_first_message_that_uses_them() -> None:
    torch.manual_seed(0)
    values, tree = torch.randn(16, 32, 32), flatten({"a": torch.zeros(1)})[1]
    basis = basis_of(seen(values @ torch.randn(32, 32), None, 32))
    assert basis is not None
    learned: Bases = {0: basis}
    pair = Pair(coding=parse("fp16", False), like=(values.requires_grad_(),), tree=tree)
    pair.sender.end = pair.sender.end._replace(bases=lambda step: learned if step in (1, 2, 3) else NO_BASES)
    for step in range(4):
        pair.sender.send(step, 0, 4, (values,))
    pair.sender.send(4, 0, 4, (values,), tree=(other := flatten([torch.zeros(1)])[1]))
    pair.run()
    found = [pair.receiver.receive(step, 0, 0.01, pair.recorder) for step in range(5)]
    assert [bool(one.header.described) for one in found] == [False, True, False, False, True]
    assert [one.tree for one in found] == [tree] * 4 + [other]
    for one in found:
        (back,) = one.tensors
        assert back is not None
        assert float((back - values).detach().square().mean()) < 0.01


def test_what_a_group_received_stays_as_it_came() -> None:
    """Chunks of gradients lie in the buffers that received them."""
    pair = Pair()
    pair.receiver.end = pair.receiver.end._replace(in_group=True)
    taken = []
    for k in range(9):
        pair.sender.send(0, k, 4, (rows(4, k),))
        pair.run()
        taken.append(pair.take(k))
    assert all(torch.equal(values, rows(4, k)) for k, values in enumerate(taken))


def test_what_is_on_its_way_from_a_device_is_waited_for() -> None:
    pair = Pair()
    there: list[bool] = []
    pair.sender.send(0, 0, 4, Given((rows(4),), lambda: bool(there)))
    pair.sender.send(0, 1, 4, (rows(4, 1),))
    pair.run()
    assert not pair.wire.sent
    assert pair.sender.awaits_copies
    there.append(True)
    pair.run()
    assert torch.equal(pair.take(0), rows(4))
    assert torch.equal(pair.take(1), rows(4, 1))
    assert not pair.sender.awaits_copies

"""Layers' states go to the ranks that need them, whoever has them; what else arrives meanwhile is kept."""

import threading
from collections import deque
from typing import Any

import pytest

from accept_mpi.comm.messages import Committed, Control, LayerChunks, Message
from accept_mpi.errors import DeadlineError
from accept_mpi.plan import make_plan
from accept_mpi.recovery import restore
from accept_mpi.recovery.replicas import Holdings, Replicas
from accept_mpi.recovery.restore import Origin, fetch, newest_snapshot


class Sending:
    took: float | None = None


class Messenger:
    """One of several in this process: a message is sent when its receiver has polled."""

    def __init__(self, rank: int, boxes: list[deque[Any]]) -> None:
        self.rank, self.size, self.boxes = rank, len(boxes), boxes
        self.kept: list[Message] = []
        self.most = 0
        """Most messages that were under way from here at once."""
        self.sent: list[tuple[int, Sending]] = []
        self.sizes: list[int] = []

    def begin(self, dest: int, control: Control) -> Sending:
        sending = Sending()
        self.sent.append((dest, sending))
        self.most = max(self.most, sum(one.took is None for _, one in self.sent))
        assert isinstance(control, LayerChunks)
        self.sizes.append(sum(len(part) for _, _, part in control.chunks))
        self.boxes[dest].append((Message(self.rank, control), sending))
        return sending

    def poll(self) -> list[Message]:
        found = []
        while self.boxes[self.rank]:
            message, sending = self.boxes[self.rank].popleft()
            sending.took = 0.0
            found.append(message)
        return found

    def keep(self, messages: list[Message]) -> None:
        self.kept += messages


def blob(step: int, layer: int) -> bytes:
    return bytes([step, layer]) * (500 * layer + 10)


def moved(held: list[Holdings], step: int, plan: Any) -> tuple[list[Messenger], list[dict[int, bytes]]]:
    """What each rank has after all of them have fetched."""
    boxes: list[deque[Any]] = [deque() for _ in held]
    messengers = [Messenger(rank, boxes) for rank in range(len(held))]
    found: list[dict[int, bytes]] = [{} for _ in held]
    boxes[2].append((Message(0, Committed(3)), Sending()))

    def one(rank: int) -> None:
        store = Replicas()
        for at, layers in held[rank].items():
            store.keep(at, {layer: blob(at, layer) for layer in layers})
        origin = Origin(step, held, False)
        found[rank] = fetch(messengers[rank], plan, origin, store, 20.0)  # type: ignore[arg-type]

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(len(held))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return messengers, found


def test_each_rank_gets_the_layers_of_its_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """From several ranks, in pieces of which few are under way at once; of the step that was agreed on."""
    monkeypatch.setattr(restore, "_PIECE", 300)
    plan = make_plan(8, [2, 5], ranks=[2, 0, 3])
    held: list[Holdings] = [{7: [0, 1, 6], 9: [0, 1]}, {7: [2, 3, 4]}, {7: [1, 5]}, {7: [4, 7]}]
    messengers, found = moved(held, 7, plan)
    for rank, layers in enumerate((range(2, 5), range(0), range(2), range(5, 8))):
        assert found[rank] == {layer: blob(7, layer) for layer in layers}
    assert all(one.most <= 4 for one in messengers)
    assert messengers[1].most == 4
    assert max(size for one in messengers for size in one.sizes) <= 300
    for one in messengers:
        dests = [dest for dest, _ in one.sent]
        assert dests == sorted(dests), "one receiver after another"
    assert [message.control for message in messengers[2].kept] == [Committed(3)]
    assert not any(messengers[rank].kept for rank in (0, 1, 3))


def test_a_rank_that_sends_nothing_is_named() -> None:
    boxes: list[deque[Any]] = [deque(), deque()]
    held: list[Holdings] = [{}, {7: [0, 1]}]
    with pytest.raises(DeadlineError, match="rank 0 waited 0 s for the state of layers from rank 1"):
        fetch(Messenger(0, boxes), make_plan(2, [1]), Origin(7, held, False), Replicas(), 0.05)  # type: ignore[arg-type]
    store = Replicas()
    store.keep(7, {0: blob(7, 0), 1: blob(7, 1)})
    with pytest.raises(DeadlineError, match="rank 1 waited 0 s for another rank to take layers"):
        fetch(Messenger(1, boxes), make_plan(2, [1]), Origin(7, held, False), store, 0.05)  # type: ignore[arg-type]


@pytest.mark.parametrize(("disk", "step", "on_disk"), [(4, 5, False), (5, 5, False), (6, 6, True), (0, 5, False)])
def test_the_newest_of_memories_and_disk(disk: int, step: int, on_disk: bool) -> None:
    """Rank 0's disk counts, whatever the others have there."""
    told = [[{"5": [0], "8": [0]}, disk], [{"5": [1, 2]}, 99], [{}, 0]]

    class Runtime:
        messenger = type("M", (), {"allgather": staticmethod(lambda mine, seconds, what: told)})
        startup_seconds = 1.0

    found = newest_snapshot(Runtime(), Replicas(), 99, 3)  # type: ignore[arg-type]
    assert (found.step, found.on_disk) == (step, on_disk)
    assert [one.get(step, []) for one in found.held] == ([[0, 1, 2], [], []] if on_disk else [[0], [1, 2], []])

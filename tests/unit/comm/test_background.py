"""Bulk beside training: many pieces under way while they arrive soon, one where they are slow, hardly any while training
sends."""

from typing import Any

import pytest

from accept_mpi.comm import background
from accept_mpi.comm.background import Background
from accept_mpi.comm.messages import Control, LayerChunks


class Wire:
    """Takes pieces as a messenger does; ``arrive`` lets those under way be there after so many seconds."""

    def __init__(self) -> None:
        self.under_way: list[Any] = []

    def begin(self, dest: int, control: Control) -> Any:
        self.under_way.append(type("Sending", (), {"took": None})())
        return self.under_way[-1]

    def arrive(self, seconds: float) -> int:
        count = len(self.under_way)
        for sending in self.under_way:
            sending.took = seconds
        self.under_way = []
        return count


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def bulk(wire: Wire) -> Background:
    found = Background(wire)  # type: ignore[arg-type]
    for number in range(200):
        found.put(1, LayerChunks(number))
    return found


def test_pieces_that_arrive_soon_let_more_go_and_late_ones_fewer(wire: Wire, bulk: Background) -> None:
    sent = []
    for _ in range(12):
        assert bulk.move(quiet=True)
        assert not bulk.move(quiet=True)
        sent.append(wire.arrive(0.03))
    assert sent[:4] == [1, 2, 3, 4]
    assert sent[-1] == background._MOST
    for _ in range(3):
        bulk.move(quiet=True)
        last = wire.arrive(0.5)
    assert last == 1
    bulk.move(quiet=True)
    wire.arrive(0.03)
    bulk.move(quiet=True)
    assert wire.arrive(0.03) == 2


def test_while_training_sends_one_goes_now_and_then(wire: Wire, bulk: Background, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(background.time, "monotonic", lambda: now[0])
    sent = 0
    for _ in range(100):
        now[0] += 0.01
        bulk.move(quiet=False)
        sent += wire.arrive(0.001)
    assert sent == pytest.approx(1 / background._PATIENCE_SECONDS, abs=1)


def test_a_piece_that_has_not_arrived_holds_the_next_one_back(wire: Wire, bulk: Background) -> None:
    bulk.move(quiet=True)
    assert bulk.busy
    assert not bulk.move(quiet=True)
    assert len(wire.under_way) == 1

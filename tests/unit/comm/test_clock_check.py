"""A rank's clock is moved into what an answer proves, and no further."""

import pytest

from accept_mpi.comm.clock_check import ClockCheck
from accept_mpi.comm.messages import Control, Message
from accept_mpi.logs.recorder import Clock

Sent = list[tuple[int, Control]]


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that all hosts share, in place of ``time.monotonic``."""
    shared = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: shared[0])
    return shared


def compare(now: list[float], clocks: list[Clock], there: float, back: float) -> Sent:
    """Have rank 0 ask rank 1, with a question and an answer under way for so many seconds; returns all messages."""
    posted: list[Sent] = [[], []]
    parts = [
        ClockCheck(clock, rank, 2, lambda dest, control, of=sent: of.append((dest, control)))
        for rank, (clock, sent) in enumerate(zip(clocks, posted, strict=True))
    ]
    now[0] += ClockCheck.every_seconds + 1
    parts[0].ask()
    parts[0].ask()  # not again before the answer
    assert [dest for dest, _ in posted[0]] == [1]
    now[0] += there
    assert parts[1].handle(Message(0, posted[0][0][1]))
    now[0] += back
    assert parts[0].handle(Message(1, posted[1][0][1]))
    for _, control in posted[0][1:]:
        assert parts[1].handle(Message(0, control))
    now[0] += ClockCheck.every_seconds + 1
    parts[0].ask()
    assert posted[0][-1] != posted[0][-2]
    return [*posted[0][:-1], *posted[1]]


@pytest.mark.parametrize(("off", "left"), [(-3.0, -0.2), (-0.1, -0.1), (0.0, 0.0), (0.4, 0.4), (2.0, 0.5)])
def test_a_clock_is_moved_no_further_than_it_must_be(now: list[float], off: float, left: float) -> None:
    clocks = [Clock(0.0), Clock(0.0, off)]
    sent = compare(now, clocks, there=0.2, back=0.5)
    assert clocks[1].now() - clocks[0].now() == pytest.approx(left)
    assert clocks[0].now() == now[0]
    assert len(sent) == (2 if off == left else 3)

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


def compare(now: list[float], clocks: list[Clock], there: float, back: float) -> None:
    """Have rank 1 ask rank 0, with a question and an answer under way for so many seconds."""
    posted: list[Sent] = [[], []]
    first, second = (
        ClockCheck(clock, rank, lambda dest, control, of=sent: of.append((dest, control)))
        for rank, (clock, sent) in enumerate(zip(clocks, posted, strict=True))
    )
    first.ask()
    second.ask()
    now[0] += ClockCheck.every_seconds + 1
    second.ask()  # not again before the answer
    now[0] -= ClockCheck.every_seconds + 1
    ((dest, question),) = posted[1]
    now[0] += there
    assert dest == 0
    assert first.handle(Message(1, question))
    with pytest.raises(ZeroDivisionError):  # still waiting
        second.settle(1.0, lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    now[0] += back
    ((dest, answer),) = posted[0]
    assert dest == 1
    assert second.handle(Message(0, answer))
    second.settle(0.0, lambda: None)
    second.ask()  # not yet again
    assert len(posted[1]) == 1


@pytest.mark.parametrize(("off", "left"), [(-3.0, -0.5), (-0.4, -0.4), (0.0, 0.0), (0.1, 0.1), (2.0, 0.2)])
def test_a_clock_is_moved_no_further_than_it_must_be(now: list[float], off: float, left: float) -> None:
    clocks = [Clock(0.0), Clock(0.0, off)]
    compare(now, clocks, there=0.2, back=0.5)
    assert clocks[1].now() - clocks[0].now() == pytest.approx(left)
    assert clocks[0].now() == now[0]

"""What links cost, found in traces that the simulator made: recorded and run again without links."""

import math

import numpy as np
import pytest

from accept_mpi.log import BACKWARD, FORWARD, KINDS, TRACE, Rows
from accept_mpi.replay import link_cost, recorded
from accept_mpi.schedule import Kind, actions
from accept_mpi.simulate import simulate

STAGES, STEPS, MICRO = 3, 12, 4
SECONDS = {"F": 1.0, "B": 2.0, "W": 1.0, "U": 0.1}


def traced(kind: Kind, transfer: float, slack: int) -> Rows:
    """The log of a simulated run: actions, waits and sends."""
    walks = [actions(kind, s, STAGES, [MICRO] * STEPS, slack) for s in range(STAGES)]
    run = simulate(walks, lambda s, action: SECONDS[action.kind] * (1 + s / 10), lambda boundary, way: transfer)
    rows, done = [], {}
    for s, (walk, spans) in enumerate(zip(walks, run.spans, strict=True)):
        before = 0.0
        for action, (start, end) in zip(walk, spans, strict=True):
            way = BACKWARD if action.kind == "B" else FORWARD
            place = (action.step + 1, action.micro_batch)
            if start > before:
                rows.append((before, start, s, s, KINDS.index("wait"), s - 1 + way, way, *place, 0, 0))
            rows.append((start, end, s, s, KINDS.index(action.kind), -1, -1, *place, 0, 0))
            if action.kind in "FB":
                done[s, way, *place] = end
            before = end
    for (s, way, step, k), end in done.items():
        peer = s - 1 if way else s + 1
        if 0 <= peer < STAGES:
            rows.append((end, end + transfer, s, s, KINDS.index("send"), min(s, peer), way, step, k, 4, 4))
    return np.sort(np.array(rows, TRACE), order="start")


@pytest.mark.parametrize("kind", ["1f1b", "1f1b-async", "zero-bubble", "gpipe"])
def test_links_of_no_time_cost_nothing(kind: Kind) -> None:
    trace = traced(kind, 0.0, 1)
    assert link_cost(trace).exposed == pytest.approx(0, abs=1e-9)
    walks, durations, _ = recorded(trace)
    assert all(d == pytest.approx(SECONDS[a.kind] * (1 + s / 10)) for s, ds in enumerate(durations) for a, d in ds.items())
    assert walks[0] == [a._replace(step=a.step + 1, version=0) for a in actions(kind, 0, STAGES, [MICRO] * STEPS, 1)]


def test_room_in_the_pipeline_hides_transfers() -> None:
    hidden = link_cost(traced("1f1b-async", 1.0, 2))
    assert hidden.hidden == pytest.approx(1, abs=0.01)
    assert hidden.busiest > 0.2 * hidden.seconds
    without_room = link_cost(traced("1f1b-async", 1.0, 0))
    assert without_room.hidden < 0.7


def test_exposed_is_what_the_links_add() -> None:
    """A synchronous step's transfers are hidden in part: the replay finds the run that has none."""
    slow, free = (link_cost(traced("1f1b", transfer, 1)) for transfer in (0.7, 0.0))
    assert slow.exposed == pytest.approx(slow.seconds - free.seconds)
    assert slow.exposed > 0.1 * slow.seconds


def test_too_little_to_say() -> None:
    trace = traced("1f1b", 0.5, 0)
    cost = link_cost(trace[trace["step"] <= 2])
    assert cost.seconds == 0
    assert math.isnan(cost.hidden)
    assert math.isnan(link_cost(trace[:0]).hidden)

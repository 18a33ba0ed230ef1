"""What links cost, found in traces that the simulator made: recorded and run again without links."""

import math

import numpy as np
import pytest

from accept_mpi.direction import Direction
from accept_mpi.logs.format import KINDS, TRACE, Rows
from accept_mpi.logs.replay import link_cost, mean_times, recorded
from accept_mpi.logs.timeline import plan_rows
from accept_mpi.pipeline.schedule import ScheduleKind, actions
from accept_mpi.pipeline.simulator import simulate
from accept_mpi.plan import make_plan

STAGES, STEPS, MICRO = 3, 12, 4
SECONDS = {"F": 1.0, "B": 2.0, "W": 1.0, "U": 0.1}


def traced(kind: ScheduleKind, transfer: float, slack: int) -> Rows:
    """The log of a simulated run: actions, waits and sends."""
    walks = [actions(kind, s, STAGES, [MICRO] * STEPS, slack) for s in range(STAGES)]
    run = simulate(walks, lambda s, action: SECONDS[action.kind] * (1 + s / 10), lambda source, target: transfer)
    rows, done = [], {}
    for s, (walk, spans) in enumerate(zip(walks, run.spans, strict=True)):
        before = 0.0
        for action, (start, end) in zip(walk, spans, strict=True):
            way = Direction.of(action.kind)
            place = (action.step + 1, action.micro_batch)
            if start > before:
                rows.append((before, start, s, s, KINDS.index("wait"), s - 1 + way, way, *place, 0, 0, 0))
            rows.append((start, end, s, s, KINDS.index(action.kind), -1, -1, *place, 0, 0, 0))
            if action.kind in "FB":
                done[s, way, *place] = end
            before = end
    for (s, way, step, k), end in done.items():
        peer = s - 1 if way else s + 1
        if 0 <= peer < STAGES:
            rows.append((end, end + transfer, s, s, KINDS.index("send"), min(s, peer), way, step, k, 4, 4, 0))
    return np.sort(np.array(rows, TRACE), order="start")


@pytest.mark.parametrize("kind", ["1f1b", "1f1b-async", "zero-bubble", "gpipe"])
def test_links_of_no_time_cost_nothing(kind: ScheduleKind) -> None:
    trace = traced(kind, 0.0, 1)
    assert link_cost(trace).exposed == pytest.approx(0, abs=1e-9)
    walks, durations, *_ = recorded(trace)
    assert all(d == pytest.approx(SECONDS[a.kind] * (1 + s / 10)) for s, ds in enumerate(durations) for a, d in ds.items())
    listed = actions(kind, 0, STAGES, [MICRO] * STEPS, 1)
    assert walks[0] == [a._replace(step=a.step + 1, version=0, whole=False) for a in listed]


@pytest.mark.parametrize("kind", ["1f1b", "zero-bubble"])
def test_a_damaged_trace_costs_something_or_nothing(kind: ScheduleKind) -> None:
    """A micro-batch that only one stage knows is no exception."""
    trace = traced(kind, 1.0, 1)
    for at in np.flatnonzero(np.isin(trace["kind"], [KINDS.index("F"), KINDS.index("B")]))[:: STEPS // 2]:
        damaged = trace.copy()
        damaged["micro_batch"][at] = 235
        assert link_cost(damaged).seconds >= 0


def test_means_of_stages_that_put_off_some() -> None:
    """B and W of a micro-batch take as long together as all of them in the mean; W alone what it takes where it is."""
    for slack in (0, 2):
        trace = traced("zero-bubble", 0.0, slack)
        for stage, took in mean_times(trace).items():
            mine = trace[(trace["stage"] == stage) & (trace["step"] > 4)]
            back = mine[np.isin(mine["kind"], [KINDS.index("B"), KINDS.index("W")])]
            each = (back["end"] - back["start"]).sum() / MICRO / len(np.unique(mine["step"]))
            assert took["B"] + took.get("W", 0.0) == pytest.approx(each)
            assert took.get("W", 1 + stage / 10) == pytest.approx(1 + stage / 10)
            assert ("W" in took) == (stage > 0)


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


def test_an_evaluation_waits_under_the_name_of_a_forward() -> None:
    """Of micro-batch 1 after step 6 and of micro-batch 1 in step 6: taken for the latter's, F took less than no time."""
    trace = traced("1f1b", 0.5, 1)
    later = trace["start"] > trace["end"][(trace["step"] == 6) & (trace["kind"] == KINDS.index("U"))].max() - 1e-9
    trace["start"][later] += 20
    trace["end"][later] += 20
    began = trace["start"][later].min() - 20
    extra = []
    for s in range(STAGES):
        extra.append((began + s, began + s + 0.5, s, s, KINDS.index("wait"), s - 1, Direction.FORWARD, 6, 1, 0, 0, 0))
        extra.append((began + s + 0.5, began + s + 1, s, s, KINDS.index("E"), -1, -1, 6, 1, 0, 0, 0))
    both = np.sort(np.concatenate([trace, np.array(extra, TRACE)]), order="start")
    _, durations, *_ = recorded(both)
    assert all(took > 0 for taken in durations for took in taken.values())
    forwards = [took for action, took in durations[1].items() if action.kind == "F"]
    assert max(forwards[1:]) < 21.2  # one has the pause in it
    assert np.median(forwards) == pytest.approx(1.1)


def test_plans_of_different_stages() -> None:
    """Three stages, two after a loss (which makes the last step once more), three again: the longest of them counts."""
    parts, at = [], 0.0
    for stages, first, last in ((3, 1, 6), (2, 6, 8), (3, 9, 12)):
        part = traced("1f1b", 0.1, 1)
        part = part[(part["step"] >= first) & (part["step"] <= last) & (part["stage"] < stages)]
        # Two stages: what only three do is left out, the second one waits for nobody behind it.
        shift = at - part["start"].min()
        part["start"] += shift
        part["end"] += shift
        parts.append(part)
        at = float(part["end"].max()) + 5
    cost = link_cost(np.concatenate(parts))
    alone = link_cost(parts[0][parts[0]["step"] <= 5])
    assert cost.seconds == pytest.approx(alone.seconds)
    assert cost.exposed == pytest.approx(alone.exposed)


def test_ranks_and_layers_that_change_hands() -> None:
    """Steps under one plan count, also where as many ranks hold as many stages as before."""
    trace = traced("1f1b", 0.1, 1)
    wanted = link_cost(trace[trace["step"] <= 8])
    late = trace["step"] > 8
    for after in ({2: 3}, {0: 2, 2: 0}):
        other = trace.copy()
        other["rank"][late] = [after.get(rank, rank) for rank in trace["rank"][late]]
        assert link_cost(other) == wanted
    plans = np.concatenate([plan_rows(make_plan(6, [2, 4])), plan_rows(make_plan(6, [1, 4]), 99.0, 8)])
    assert link_cost(trace, plans) == wanted


def test_too_little_to_say() -> None:
    trace = traced("1f1b", 0.5, 0)
    cost = link_cost(trace[trace["step"] <= 2])
    assert cost.seconds == 0
    assert math.isnan(cost.hidden)
    assert math.isnan(link_cost(trace[:0]).hidden)


def test_a_rank_that_only_updates_stays_in_its_place() -> None:
    """A member of a group may take no micro-batch; the ranks behind it keep their numbers."""
    trace = traced("1f1b", 0.5, 1)
    computes = np.isin(trace["kind"], [KINDS.index(kind) for kind in "FB"])
    assert recorded(trace[~((trace["rank"] == 1) & computes)]).ranks == recorded(trace).ranks

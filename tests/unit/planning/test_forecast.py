"""Forecasts: long steps without simulating each micro-batch, messages that cost a shared core, runs simulated again."""

import msgspec
import numpy as np
import pytest
from clusters import cluster
from clusters import job as planner_job

from accept_mpi.codecs.coding import bits_of
from accept_mpi.direction import Crossing, Direction
from accept_mpi.errors import UserError
from accept_mpi.logs.timeline import between
from accept_mpi.pipeline.schedule import KINDS, ScheduleKind
from accept_mpi.plan import Lanes, make_plan, with_lanes
from accept_mpi.planning import forecast as module
from accept_mpi.planning.estimate import forecast_of, replayed
from accept_mpi.planning.forecast import Forecast
from accept_mpi.planning.message_model import Traffic, message_seconds
from accept_mpi.planning.planner import plan_for
from accept_mpi.polling import SENDING_SECONDS
from accept_mpi.profiling.cluster_profile import StageTimes

FREE = {"none": 0.0}


def pipeline(kind: ScheduleKind, stages: int, micro_batches: int, **more: float) -> Forecast:
    """Uneven stages on links that take a third of the slowest."""
    profiles = [StageTimes(1e-3 * (1 + s % 3), 2e-3 * (1 + s % 3), FREE, FREE, update=1e-4) for s in range(stages)]
    crossings = {(b, way): Traffic(1000, 64, 4064 / 3e-3) for b in range(stages - 1) for way in Direction}
    return Forecast(kind, micro_batches, 2, [msgspec.structs.replace(p, **more) for p in profiles], crossings)


def codecs(forecast: Forecast) -> dict[Crossing, str]:
    return dict.fromkeys(forecast.crossings, "none")


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_step_goes_on_as_it_began(kind: ScheduleKind, monkeypatch: pytest.MonkeyPatch) -> None:
    short = pipeline(kind, 6, 200)
    seconds, busy = short.steady(codecs(short))
    monkeypatch.setattr(module, "_MANY", 100)
    long = pipeline(kind, 6, 200)
    found, load = long.steady(codecs(long))
    assert found == pytest.approx(seconds, rel=0.01)
    assert load == pytest.approx(busy, abs=0.01)
    assert long.step(codecs(long)) == pytest.approx(found)


@pytest.mark.parametrize("slow", range(4))
def test_the_slowest_stage_sets_the_step_wherever_it_is(slow: int) -> None:
    """Behind a slow first stage others catch up with what it sent ahead, for eight steps at 0.84 of its time."""
    profiles = [StageTimes(0.04, 0.10, FREE, FREE, update=1e-3) for _ in range(4)]
    profiles[slow] = StageTimes(0.06, 0.14, FREE, FREE, update=1e-3)
    free = Forecast("1f1b-async", 4, 2, profiles, {(b, way): Traffic(10, 0, 1e9) for b in range(3) for way in Direction})
    seconds, busy = free.steady(codecs(free))
    assert seconds == pytest.approx(4 * 0.2 + 1e-3, rel=0.01)
    assert busy[slow] == pytest.approx(1.0, abs=0.01)
    trace = free.trace(codecs(free), range(4))
    steps = np.unique(trace["step"])
    start, end = between(trace, int(steps[3]), int(steps[6]))
    assert (end - start) / 3 == pytest.approx(seconds, rel=0.01)


def test_messages_cost_a_shared_core() -> None:
    """A stage between two others has four a micro-batch."""
    free, shared = (pipeline("1f1b-async", 4, 8, seconds_per_message=2e-3, shared=flag) for flag in (False, True))
    each = message_seconds(0.0, 0.0, 0.0, 0.0, 2e-3)
    assert each > 2e-3
    assert shared.handling(1, Direction.FORWARD, codecs(shared)) == pytest.approx(2 * each)
    assert shared.handling(0, Direction.FORWARD, codecs(shared)) == pytest.approx(each)
    assert free.handling(1, Direction.FORWARD, codecs(free)) == 0
    assert shared.steady(codecs(shared))[0] > 1.3 * free.steady(codecs(free))[0]


def test_who_sends_more_than_a_socket_takes_polls_for_it() -> None:
    """As long as the link takes for it; not for what arrives, nor for little."""
    pipe = pipeline("1f1b-async", 2, 8, seconds_per_message=2e-3, shared=True)
    place, crossing = (0, Direction.FORWARD), pipe.crossings[0, Direction.FORWARD]
    fixed = message_seconds(0.0, 0.0, 0.0, 0.0, 2e-3)
    for values, polls in ((1 << 15, 0.0), (1 << 18, 0.5 / SENDING_SECONDS * 0.1 * 2e-3)):
        pipe.crossings[place] = msgspec.structs.replace(crossing, values=values, other_bytes=0, rate=values * 4 / 0.5)
        assert pipe.handling(0, Direction.FORWARD, {place: "none"}) == pytest.approx(fixed + polls)
        assert pipe.handling(1, Direction.FORWARD, {place: "none"}) == pytest.approx(fixed)
    assert polls > 10 * 2e-3


def test_a_stages_boundaries_share_its_link_as_they_are_coded() -> None:
    """4 MB a second; 0.4 MB across boundary 0 and 40 KB across boundary 1, 100 and 10 ms alone. By what they would be
    uncoded, the small one beside the large one with 4 bits seemed to take all of 110 ms."""
    costs = dict.fromkeys(("none", "uniform:4"), 0.0)
    crossings = {(b, way): Traffic(size, 0, 4e6) for b, size in enumerate((100_000, 10_000)) for way in Direction}
    pipe = Forecast("1f1b-async", 4, 2, [StageTimes(0.1, 0.2, costs, costs)] * 3, crossings, [4e6] * 3)
    names = codecs(pipe)
    assert pipe.message((1, Direction.FORWARD), "none") == pytest.approx(0.01)
    for place in crossings:
        assert pipe.message(place, "none", names) == pytest.approx(0.11), "the middle stage's link carries both"
    large = {place: "uniform:4" for place in crossings if place[0] == 0}
    assert pipe.message((1, Direction.BACKWARD), "none", names | large) == pytest.approx(
        0.01 + 0.1 * bits_of("uniform:4") / 32
    )
    assert pipe.with_links(0.5).message((1, Direction.FORWARD), "none", names) == pytest.approx(0.22)


def test_messages_are_on_their_way_at_the_same_time() -> None:
    """Over a VPN a message may take longer than the slowest stage, and yet hides, since the next ones follow it."""
    near, far, farther = (pipeline("1f1b-async", 2, 8) for _ in range(3))
    far.crossings = {at: msgspec.structs.replace(crossing, latency=4e-3) for at, crossing in far.crossings.items()}
    assert far.steady(codecs(far))[0] == pytest.approx(near.steady(codecs(near))[0], rel=0.02)
    farther.crossings = {at: msgspec.structs.replace(crossing, latency=1.0) for at, crossing in farther.crossings.items()}
    assert farther.steady(codecs(farther))[0] > 8 / 5 * 2.0, "five are in flight, each there and back"


def test_a_message_waits_for_its_latency() -> None:
    quick, late = pipeline("1f1b", 2, 4), pipeline("1f1b", 2, 4)
    late.crossings = {at: msgspec.structs.replace(crossing, latency=0.05) for at, crossing in late.crossings.items()}
    assert late.step(codecs(late)) > quick.step(codecs(quick)) + 0.09


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_simulated_again_takes_what_it_took(kind: ScheduleKind) -> None:
    """The trace of a forecast, as if it were a run's."""
    found, job = cluster(1, 2, 1, rate=1e5), planner_job(f"pipeline.schedule={kind}")
    plan = plan_for(found, job).plan
    forecast = forecast_of(found, job, plan)
    names = codecs(forecast)
    trace = forecast.trace(names, plan.leaders)
    assert replayed(found, job, plan, trace) == pytest.approx((forecast.steady(names)[0],) * 3, rel=0.01)
    alone = make_plan(len(found.outline.layers), [], [])
    trace = forecast_of(found, job, alone).trace({}, [0])
    assert replayed(found, job, alone, trace) == pytest.approx((forecast_of(found, job, alone).steady({})[0],) * 3, rel=0.01)
    with pytest.raises(UserError, match="fewer than three"):
        replayed(found, job, alone, trace[:0])


@pytest.mark.parametrize("lanes", [{}, {1: 2}])
def test_a_group_in_any_order_is_simulated_again(lanes: dict[int, Lanes]) -> None:
    """Its fast member may come before one of a smaller number."""
    found, job = cluster(3.1, 1, 2), planner_job("pipeline.groups=true", "pipeline.schedule=1f1b")
    again = []
    for group, paces in (([1, 0], [1.0, 3.1]), ([0, 1], [3.1, 1.0])):
        plan = with_lanes(make_plan(len(found.outline.layers), [8], None, [group, 2], [paces, [1.0]]), lanes)
        trace = forecast_of(found, job, plan).trace(plan.codecs, [rank for _, rank, _ in plan.slots])
        again.append(tuple(replayed(found, job, plan, trace)))
    assert again[0] == pytest.approx(again[1], rel=0.01)

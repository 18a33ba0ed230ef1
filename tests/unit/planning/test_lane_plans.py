"""Plans whose ranks compute several micro-batches at a time."""

import msgspec
import pytest
from clusters import LAYERS, cluster, job

from accept_mpi.direction import Direction
from accept_mpi.errors import UserError
from accept_mpi.logs.replay import mean_times, rerun
from accept_mpi.plan import make_plan, with_lanes
from accept_mpi.planning.estimate import estimate, fits, forecast_of, least_seconds, with_codecs
from accept_mpi.planning.planner import lanes_for, plan_for
from accept_mpi.planning.tables import lanes_table, stage_table
from accept_mpi.profiling.cluster_profile import ClusterProfile

AUTO, OFF = "pipeline.lanes=auto", "pipeline.lanes=off"


def with_gains(fleet: ClusterProfile, *gains: dict[int, float]) -> ClusterProfile:
    devices = [msgspec.structs.replace(device, lanes=gain) for device, gain in zip(fleet.devices, gains, strict=True)]
    return msgspec.structs.replace(fleet, devices=devices)


def test_lanes_are_taken_where_they_pay() -> None:
    fleet = with_gains(cluster(1, 1), {2: 0.7}, {2: 0.99})
    assert lanes_for(fleet, job(AUTO)) == {0: 2}
    assert lanes_for(fleet, job(OFF)) == {}
    assert lanes_for(fleet, job("pipeline.lanes=2")) == {0: 2, 1: 2}
    assert lanes_for(fleet, job(AUTO, "train.batch_size=8", "train.micro_batches=1")) == {}
    found, without = plan_for(fleet, job(AUTO)), plan_for(fleet, job(OFF))
    assert found.plan.laned
    assert not without.plan.laned
    assert found.expected < 0.95 * without.expected
    assert least_seconds(fleet, job(AUTO)) <= found.step < least_seconds(fleet, job(OFF)) * 1.1
    assert found.plan.stages[0].stop - found.plan.stages[0].start > LAYERS / 2  # the device with lanes holds more
    assert "2 lanes" in "\n".join(stage_table(fleet, found, 8))
    assert not plan_for(with_gains(cluster(1, 1), {2: 0.98}, {2: 1.1}), job(AUTO)).plan.laned


def test_lanes_that_do_not_fit_are_not_taken() -> None:
    """Each lane has gradients of its own."""
    fleet = with_gains(cluster(1, 1), {2: 0.6}, {2: 0.6})
    found = plan_for(fleet, job(AUTO))
    assert found.plan.laned
    tight = [
        msgspec.structs.replace(device, memory=need - 1) for device, need in zip(fleet.devices, found.memory, strict=True)
    ]
    small = plan_for(msgspec.structs.replace(fleet, devices=tight), job(AUTO))
    assert fits(msgspec.structs.replace(fleet, devices=tight), small)


@pytest.mark.parametrize("keys", [(), ("pipeline.transfer_slack=0", "pipeline.recompute=off")])
def test_lanes_that_are_asked_for_fit(keys: tuple[str, ...]) -> None:
    """Their memory was not looked at: plans came out that a device has no room for."""
    asked = job("pipeline.lanes=4", "pipeline.schedule=1f1b", *keys)
    needs = plan_for(cluster(1, 2, 2), asked).memory
    fitted = 0
    for share in (1.2, 0.9, 0.7, 0.5, 0.3, 0.1):
        fleet = cluster(1, 2, 2, memory=[share * max(needs)] * 3)
        try:
            found = plan_for(fleet, asked)
        except UserError:
            continue
        assert found.plan.stages[0].lanes
        assert fits(fleet, found), share
        fitted += 1
    assert 2 <= fitted < 6


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero-bubble", "1f1b-async"])
def test_a_step_with_lanes_takes_what_they_gain(schedule: str) -> None:
    """Two lanes that halve each other's speed take as long as turns, twice as fast ones half as long."""
    plan = make_plan(LAYERS, [])
    keys = job(f"pipeline.schedule={schedule}")
    turns = estimate(with_gains(cluster(1), {2: 1.0}), keys, plan)
    for gain in (1.0, 0.5):
        found = estimate(with_gains(cluster(1), {2: gain}), keys, with_lanes(plan, {0: 2}))
        assert found.step == pytest.approx(gain * turns.step, rel=0.02)
        assert found.busy[0] == pytest.approx(1, abs=0.02)
        assert found.computes[0] == pytest.approx(gain * turns.computes[0])
        assert found.memory[0] > turns.memory[0]


def test_lanes_of_a_group() -> None:
    plan = with_lanes(make_plan(LAYERS, [6], ranks=[[0, 1], 2]), {0: 2})
    fleet = with_gains(cluster(1, 1, 1), {2: 0.5}, {}, {})
    found = estimate(fleet, job(), plan)
    assert len(found.busy) == len(found.computes) == len(found.memory) == 3
    assert plan.slots == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 2, 0)]
    left = plan.without({1})
    assert left is not None
    assert left.stages[0].lanes == (2,)


def test_a_forecast_is_repeated_by_the_simulator_from_its_own_trace() -> None:
    """The trace of a forecast, taken for that of a run, gives the same step; F and B are those of a lane."""
    fleet = with_gains(cluster(1, 1), {2: 0.6}, {2: 0.6})
    plan = with_codecs(estimate(fleet, job(), with_lanes(make_plan(LAYERS, [6]), {0: 2, 1: 2})))
    foreseen = forecast_of(fleet, job(), plan)
    trace = foreseen.trace(plan.codecs, [rank for _, rank, _ in plan.slots])
    assert set(trace["lane"].tolist()) == {0, 1}
    again = rerun(trace, lambda a, b: foreseen.messages(plan.codecs)[0](2 * a, 2 * b))
    assert again is not None
    assert again.seconds == pytest.approx(again.took, rel=0.02)
    for rank, took in mean_times(trace).items():
        assert took["F"] == pytest.approx(foreseen.profiles[2 * rank].forward, rel=0.02)


def test_the_table_of_lanes() -> None:
    fleet = with_gains(cluster(1, 2), {2: 0.5**0.2, 4: 0.25**0.2}, {})
    found = plan_for(fleet, job(OFF))
    text = "\n".join(lanes_table(fleet, job(OFF), found))
    assert "1.32 x" in text
    assert "0.80" in text
    assert "a step of this plan: in turn" in text
    assert "no device has threads" in lanes_table(cluster(1), job(), plan_for(cluster(1), job()))[0]


@pytest.mark.parametrize("sums", ["exact", "none"])
def test_lanes_of_a_rank_add_to_one_sum(sums: str) -> None:
    """A rank of a group handles as many contributions with lanes as without them."""
    fleet = cluster(1, 1, shared=[True] * 2, seconds_per_byte=[1e-9] * 2)
    devices = [msgspec.structs.replace(one, encode=dict.fromkeys(one.encode, 1e-8)) for one in fleet.devices]
    fleet = msgspec.structs.replace(fleet, devices=devices)
    asked, plan = job("pipeline.groups=true", f"pipeline.gradients={sums}"), make_plan(LAYERS, [], None, [(0, 1)])
    each = [
        forecast_of(fleet, asked, with_lanes(plan, dict.fromkeys(range(2), lanes))).handling(0, Direction.BACKWARD, {})
        for lanes in (1, 2)
    ]
    assert each[1] == pytest.approx(each[0])
    assert each[0] > 0

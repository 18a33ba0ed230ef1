"""Plans whose first stages take longer than the last ones."""

import itertools
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from clusters import LAYERS, cluster, job

from accept_mpi.planning import planner
from accept_mpi.planning.estimate import estimate
from accept_mpi.planning.formulation import problem_of
from accept_mpi.planning.front_loaded import front_loaded
from accept_mpi.planning.job_plan import open_plan
from accept_mpi.planning.planner import plan_for
from accept_mpi.planning.problem import Solution

SLACK = "pipeline.transfer_slack=2"


@pytest.mark.parametrize("slack", [0, 2])
@pytest.mark.parametrize("count", [4, 8, 32])
@pytest.mark.parametrize("speeds", [(1, 1, 1), (1, 1.3, 1.7), (3, 1, 2)])
def test_nearly_the_best_of_all_cuts_and_orders(speeds: tuple[float, ...], count: int, slack: int) -> None:
    asked = job("pipeline.schedule=1f1b", f"train.micro_batches={count}", f"pipeline.transfer_slack={slack}")
    fleet = cluster(*speeds)
    problem = problem_of(fleet, asked)

    def step(one: Solution) -> float:
        return estimate(fleet, asked, open_plan(asked, LAYERS, one.edges[1:-1], one.devices)).step

    every = [
        Solution(order, (0, *cuts, LAYERS), (0,) * (len(order) - 1))
        for stages in (2, 3)
        for order in itertools.permutations(range(3), stages)
        for cuts in itertools.combinations(range(1, LAYERS), stages - 1)
    ]
    found = front_loaded(problem)
    assert min(map(step, found)) <= 1.08 * min(map(step, every))  # a layer is a twelfth of all
    assert len(set(found)) == len(found) > 1


def test_what_waits_for_nothing_may_take_longest() -> None:
    """A slow device and two fast ones, 48 layers, twelve micro-batches."""
    asked = job("pipeline.schedule=1f1b", "train.micro_batches=12", SLACK)
    fleet = cluster(3, 1, 1)
    keys = "forward", "backward", "weight_gradient", "update"
    devices = [
        msgspec.structs.replace(one, **{key: [seconds / 4 for seconds in getattr(one, key) * 4] for key in keys})
        for one in fleet.devices
    ]
    outline = msgspec.structs.replace(fleet.outline, layers=[*fleet.outline.layers] * 4)
    fine = msgspec.structs.replace(fleet, devices=devices, outline=outline)
    found = plan_for(fine, asked)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "front_loaded", lambda problem: [])
        before = plan_for(fine, asked)
    assert found.expected < 0.95 * before.expected
    assert found.plan.leaders == [1, 2, 0]
    seconds = [found.computes[found.plan.leaders.index(rank)] for rank in found.plan.leaders]
    assert seconds == sorted(seconds, reverse=True)


def test_what_a_device_must_not_get_and_what_stays_together() -> None:
    asked = job("pipeline.schedule=1f1b", SLACK)
    problem = problem_of(cluster(1, 1, 2, data=[True, True, False]), asked)
    for plan in front_loaded(problem):
        assert 2 not in (plan.devices[0], plan.devices[-1])
    together = replace(problem, uncuttable=frozenset(set(range(1, LAYERS)) - {5}))
    found = front_loaded(together)
    assert found
    assert {plan.edges for plan in found} == {(0, 5, LAYERS)}
    assert not front_loaded(replace(problem, uncuttable=frozenset(range(1, LAYERS))))
    assert not front_loaded(problem.take([0]))


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_fewer_micro_batches_in_flight_where_that_is_faster(schedule: str) -> None:
    rng = np.random.default_rng(2)
    slacks = []
    for _ in range(12):
        fleet = cluster(*rng.uniform(1, 4, 4), rate=float(10 ** rng.uniform(5, 7)))
        asked = job(f"pipeline.schedule={schedule}", "train.micro_batches=4")
        found = plan_for(fleet, asked)
        slacks.append(found.plan.slack)
        for slack in range(3):
            other = msgspec.structs.replace(found.plan, slack=slack)
            given = job(f"pipeline.schedule={schedule}", "train.micro_batches=4", f"pipeline.transfer_slack={slack}")
            assert found.expected <= estimate(fleet, given, other).expected * (1 + 1e-9)
    assert max(slacks) == 2
    assert schedule == "1f1b" or min(slacks) < 2

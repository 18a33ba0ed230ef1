"""What a stage of a plan is foreseen to hold, beside what its schedule makes it hold."""

import itertools
from collections.abc import Iterable

import msgspec
import pytest
from clusters import LAYERS, cluster, job

from accept_mpi.pipeline.deal import widths
from accept_mpi.pipeline.schedule import Action, Updates, actions
from accept_mpi.plan import make_plan, with_lanes
from accept_mpi.planning import planner, search
from accept_mpi.planning.formulation import problem_of
from accept_mpi.planning.job_plan import open_plan
from accept_mpi.planning.memory import MemoryModel, memory_of
from accept_mpi.planning.planner import plan_for
from accept_mpi.planning.problem import Problem, Solution, cost
from accept_mpi.profiling.cluster_profile import ClusterProfile


def versions(walk: Iterable[Action]) -> int:
    """Most versions of the weights: those that micro-batches between F and B use, the newest and the optimizer's own."""
    flying: list[int] = []
    newest = most = 0
    for action in walk:
        if action.kind == "F":
            flying.append(action.version)
        elif action.kind == "B":
            flying.pop(0)
        else:
            newest = action.version + 1
        most = max(most, 1 + len({*flying, newest}))
    return most


def peak(walk: Iterable[Action]) -> int:
    """Most micro-batches between F and B."""
    return max(itertools.accumulate({"F": 1, "B": -1}.get(action.kind, 0) for action in walk))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "1f1b-async", "1f1b-delayed"])
@pytest.mark.parametrize("slack", [0, 1, 2])
def test_micro_batches_in_flight(schedule: str, slack: int) -> None:
    whens: tuple[Updates, ...] = ("usual", "prompt", "late") if schedule == "1f1b-delayed" else ("usual",)
    for count, stages in itertools.product((1, 2, 3, 5, 8), (1, 2, 3, 5)):
        asked = job(f"pipeline.schedule={schedule}", f"train.micro_batches={count}")
        model = MemoryModel(cluster(*[1] * stages), asked, stages, slack)
        steps = 4 + -(-(stages + slack * stages) // count)
        for s, when in itertools.product(range(stages), whens):
            walk = actions(asked.pipeline.schedule, s, stages, [count] * steps, slack, updates=when)
            assert model.in_flight[stages - 1 - s] == peak(walk), (count, stages, s, when)


@pytest.mark.parametrize("sync", ["true", "false"])
@pytest.mark.parametrize("lanes", [1, 2])
def test_weights_of_groups_and_lanes(sync: str, lanes: int) -> None:
    """Asynchronously more versions are in use, the more micro-batches a stage works on at a time."""
    shapes = [[0], [1], [2]], [[0, 1], [2]], [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 1]]
    for count, groups in itertools.product((1, 2, 4, 8), shapes):
        size, stages = sum(map(len, groups)), len(groups)
        asked = job("pipeline.groups=true", f"train.micro_batches={count}", f"pipeline.vertical_sync={sync}")
        plan = make_plan(LAYERS, [2, 4][: stages - 1], None, groups)
        plan = with_lanes(plan, dict.fromkeys(range(size), lanes))
        fleet, wide = cluster(*[1] * size), widths(plan.stages)
        bare = [msgspec.structs.replace(one, saved_bytes=0) for one in fleet.outline.layers]
        fleet = msgspec.structs.replace(fleet, outline=msgspec.structs.replace(fleet.outline, layers=tuple(bare)))
        needs = memory_of(fleet, asked, plan)
        for (s, _), need in zip(plan.holders, needs, strict=True):
            layers = bare[plan.stages[s].start : plan.stages[s].stop]
            weights = sum(layer.parameter_bytes for layer in layers)
            walk = actions("1f1b-async", s, stages, [count] * 30, plan.slack, asked.pipeline.vertical_sync, wide)
            others = sum(map(MemoryModel(fleet, asked, 1, 2).state, layers)) - weights  # gradients and the optimizer's
            summing = (4 if len(groups[s]) > 1 else 0) + (2 + lanes if lanes > 1 else 0)
            assert need >= versions(walk) * weights + others + summing * weights, (count, groups, s)


def frozen(fleet: ClusterProfile, buffers: int = 0) -> ClusterProfile:
    layers = [
        msgspec.structs.replace(one, frozen_bytes=one.parameter_bytes, buffer_bytes=buffers, saved_bytes=0)
        for one in fleet.outline.layers
    ]
    return msgspec.structs.replace(fleet, outline=msgspec.structs.replace(fleet.outline, layers=tuple(layers)))


def test_what_is_frozen_has_no_versions_but_copies() -> None:
    """Of a frozen layer there is one version, whatever is in flight, and each snapshot has a copy of all of it."""
    plan, none = make_plan(LAYERS, [6]), "output.checkpoint_at_end=false"
    alone, kept = (frozen(cluster(1, 1, snapshots=[on] * 2), buffers=100) for on in (False, True))
    weights = sum(layer.parameter_bytes + 100 for layer in alone.outline.layers[:6])
    received = 4 * 4 * 64 + 64
    for name in ("sgd", "adamw"):
        asked = job(f"train.optimizer.name={name}", "train.micro_batches=1", none)
        flying = MemoryModel(alone, asked, 2, plan.slack).in_flight[0] * received
        assert memory_of(alone, asked, plan) == [weights, weights + flying]
        assert memory_of(kept, asked, plan) == [5 * weights, 5 * weights + flying]


def test_a_checkpoint_is_made_of_a_copy() -> None:
    """While training goes on, or, at the end, in place of gradients and what was in flight; it was not counted."""
    fleet, plan = cluster(1), make_plan(LAYERS, [])
    fleet = msgspec.structs.replace(
        fleet,
        outline=msgspec.structs.replace(
            fleet.outline, layers=tuple(msgspec.structs.replace(one, saved_bytes=0) for one in fleet.outline.layers)
        ),
    )
    weights = sum(layer.parameter_bytes for layer in fleet.outline.layers)
    keys = "train.optimizer.name=adamw", "pipeline.schedule=1f1b"
    none = memory_of(fleet, job(*keys, "output.checkpoint_at_end=false"), plan)
    assert none == [4 * weights]
    assert memory_of(fleet, job(*keys), plan) == [6 * weights]
    assert memory_of(fleet, job(*keys, "output.checkpoint_every=5"), plan) == [7 * weights]
    assert memory_of(fleet, job("train.optimizer.name=sgd", "pipeline.schedule=1f1b"), plan) == [2 * weights]


def test_what_is_kept_beside_gradients_and_updates() -> None:
    """What coding leaves out of a group's sum, twice; for a correction the last update, and the weights before this one."""
    fleet, none = cluster(1, 1), "output.checkpoint_at_end=false"
    weights = sum(layer.parameter_bytes for layer in fleet.outline.layers)
    group = make_plan(LAYERS, [], None, [[0, 1]])
    exact, plain, coded = (
        memory_of(fleet, job("pipeline.groups=true", f"pipeline.gradients={how}", none), group)
        for how in ("exact", "none", "bf16")
    )
    assert exact == plain == [need - 2 * weights for need in coded]
    delayed = "pipeline.schedule=1f1b-delayed", none
    with_it, without = (
        memory_of(fleet, job(*delayed, f"train.optimizer.correction={how}"), make_plan(LAYERS, []))
        for how in ("extrapolate", "none")
    )
    assert with_it == [without[0] + 2 * weights]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "1f1b-async", "1f1b-delayed", "zero-bubble"])
@pytest.mark.parametrize("lanes", ["off", "3", "F+B"])
def test_the_search_counts_what_plans_need(schedule: str, lanes: str) -> None:
    """For devices alone, with the lanes that the job asks for: the search's memory is that of the plan."""
    if lanes == "F+B" and schedule in ("1f1b-async", "1f1b-delayed"):
        pytest.skip("does not go together")
    fleet = cluster(1, 1, 1, snapshots=[True] * 3)
    layers = [
        msgspec.structs.replace(one, frozen_bytes=one.parameter_bytes * (n % 2), buffer_bytes=7 * n)
        for n, one in enumerate(fleet.outline.layers)
    ]
    fleet = msgspec.structs.replace(fleet, outline=msgspec.structs.replace(fleet.outline, layers=tuple(layers)))
    for keys in ((), ("output.checkpoint_every=3",), ("train.optimizer.name=adamw", "train.ema=0.9")):
        asked = job(f"pipeline.schedule={schedule}", f"pipeline.lanes={lanes}", "pipeline.transfer_slack=1", *keys)
        plan = open_plan(asked, LAYERS, [3, 8])
        if lanes != "off":
            plan = with_lanes(plan, dict.fromkeys(range(3), asked.pipeline.lanes))
        needs = memory_of(fleet, asked, plan)
        for most, room in itertools.product(range(3), (-1, 1)):
            rooms = [need + (room if n == most else 1) for n, need in enumerate(needs)]
            problem = problem_of(fleet.within(rooms), asked)
            assert cost(problem, Solution((0, 1, 2), (0, 3, 8, LAYERS), (0, 0))).fits is (room > 0)


@pytest.mark.parametrize(
    "schedule", [("zero-bubble",), ("1f1b-async", "pipeline.vertical_sync=true", "train.micro_batches=1")]
)
def test_few_stages_need_no_memory_for_a_longer_pipeline(schedule: tuple[str, ...]) -> None:
    """What a stage keeps depends on the stages before it there. A device that is enough by itself, or with one other, is
    used, however many devices there are."""
    asked = job(f"pipeline.schedule={schedule[0]}", "pipeline.transfer_slack=0", 'pipeline.recompute="off"', *schedule[1:])
    fleet = cluster(1, 30, 30, 30)
    alone, both = (open_plan(asked, LAYERS, cuts, ranks) for cuts, ranks in (([], [0]), ([6], [0, 1])))
    (needs,) = memory_of(fleet, asked, alone)
    found = plan_for(fleet.within([needs, *[1e9] * 3]), asked)
    assert found.plan.leaders == [0]
    needs = max(memory_of(fleet, asked, both))
    two = cluster(1, 1, 30, 30)
    assert sorted(plan_for(two.within([needs] * 4), asked).plan.leaders) == [0, 1]


def test_gpus_do_not_hold_what_is_copied() -> None:
    """That is in their hosts' memory: a model that fits was refused. Beside CPUs it counts on all devices."""
    keys = "train.optimizer.name=adamw", "output.checkpoint_every=5", "pipeline.schedule=1f1b"
    plan = make_plan(LAYERS, [6])
    needs = [
        memory_of(cluster(1, 1, snapshots=[True] * 2, alone=list(alone)), job(*keys), plan)
        for alone in ((False, False), (True, False), (True, True))
    ]
    weights = sum(layer.parameter_bytes for layer in cluster(1).outline.layers[:6])
    assert needs[0] == needs[1] == [need + (4 + 1) * 3 * weights for need in needs[2]]


def test_with_room_for_everything_one_search_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven devices took four times as long to plan for as they had to."""
    asked = job("pipeline.schedule=zero-bubble", "pipeline.transfer_slack=0")
    searches: list[int] = []

    def solve(problem: Problem, ordered: bool) -> Solution:
        searches.append(problem.devices)
        return search.solve(problem, ordered)

    monkeypatch.setattr(planner, "solve", solve)
    fleet = cluster(1, 1, 1)
    roomy = plan_for(fleet, asked)
    once = len(searches)
    needs = max(roomy.memory)
    assert plan_for(fleet.within([needs] * 3), asked).plan == roomy.plan
    assert len(searches) > 2 * once

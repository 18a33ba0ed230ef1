"""What a stage of a plan is foreseen to hold, beside what its schedule makes it hold."""

import itertools
from collections.abc import Iterable

import msgspec
import pytest
from clusters import LAYERS, cluster, job

from accept_mpi.pipeline.deal import widths
from accept_mpi.pipeline.schedule import Action, Updates, actions
from accept_mpi.plan import make_plan, with_lanes
from accept_mpi.planning.memory import MemoryModel, memory_of


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

"""What a stage of a plan is foreseen to hold, beside what its schedule makes it hold."""

import itertools
from collections.abc import Iterable

import pytest
from clusters import cluster, job

from accept_mpi.pipeline.schedule import Action, Updates, actions
from accept_mpi.planning.memory import MemoryModel


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

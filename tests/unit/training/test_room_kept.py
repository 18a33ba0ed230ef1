"""What a start that lacked memory leaves for the next one."""

from types import SimpleNamespace
from typing import Any

import pytest
from clusters import cluster, job

from accept_mpi.plan import BoundaryCodecs, Plan, StagePlan
from accept_mpi.planning.memory import memory_of
from accept_mpi.training.run import _LESS, _Run


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_in_a_group_too_it_is_of_the_rank_that_lacked_it(rank: int) -> None:
    """A plan has more ranks than stages then, and the ranks of the first stage need not be the first."""
    stages = StagePlan(start=0, stop=3, ranks=(2, 0), paces=(1.0, 3.0)), StagePlan(start=3, stop=12, ranks=(1,))
    plan, fleet = Plan(stages=stages, boundaries=(BoundaryCodecs(),)), cluster(1, 1, 1)
    kept: list[tuple[int, float]] = []
    run: Any = SimpleNamespace(
        job=job(),
        _deployment=SimpleNamespace(plan=plan, place=plan.place(rank)),
        _disk=SimpleNamespace(keep_room=lambda place, need: kept.append((place, need))),
        _of_now=lambda runtime: fleet,
    )
    runtime: Any = SimpleNamespace(rank=rank, hosts=[{"machine_id": str(n)} for n in range(3)])
    _Run.lacked_memory(run, runtime)
    needs = memory_of(fleet, job(), plan)
    assert len(set(needs)) == 3
    assert kept == [(0, _LESS * needs[[2, 0, 1].index(rank)])]

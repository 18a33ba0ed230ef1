"""What a run says after some steps of how it compares with its plan."""

import numpy as np
import pytest
from clusters import LAYERS, cluster

from accept_mpi.logs.format import KINDS, TRACE, Rows
from accept_mpi.logs.observers import StepDone
from accept_mpi.plan import make_plan, recomputing
from accept_mpi.planning.comparison import STEPS, WARM, PlanCheck


def rows_of(number: int, step: float, factors: dict[int, float], stages: int = 2, back: float = 12e-3) -> Rows:
    """What each rank computes in one step, its layers ``factors`` times as slow as foreseen. ``back``: seconds of a B."""
    rows = []
    for rank, factor in factors.items():
        for k in range(4):
            for kind, seconds in (("F", 6e-3), ("B", back)):
                start = step * number
                place = (rank, rank % stages, KINDS.index(kind), -1, -1, number, k, 0, 0, 0)
                rows.append((start, start + factor * seconds, *place))
    return np.array(rows, TRACE)


def done(number: int, step: float = 0.1) -> StepDone:
    return StepDone(number, 0, 8, 1.0, 0.5, 0.1, (3 if number < WARM else 1) * step * number, 80.0)


@pytest.mark.parametrize(
    ("step", "slow", "said"),
    [
        (0.1, 1.0, "a step takes 100 ms, 100 ms were foreseen"),
        (0.15, 1.5, "a step takes 150 ms, 100 ms were foreseen; computing takes longer than foreseen on rank 1 (edge1) "
         "1.50 x"),
        (0.15, 1.0, "a step takes 150 ms, 100 ms were foreseen; ranks compute as fast as foreseen, so links or waiting "
         "take the rest"),
    ],
)  # fmt: skip
def test_one_line(step: float, slow: float, said: str) -> None:
    lines: list[tuple[int, str]] = []
    plan = make_plan(LAYERS, [6], None, [0, 1])
    check = PlanCheck(plan, cluster(1, 1), 0.1, 4, lambda at, text: lines.append((at, text)))
    for number in range(1, 30):
        check.step(done(number, step))
        check.trace(rows_of(number, step, {0: 1.0, 1: slow}))
    assert lines == [(WARM + STEPS, said)]


def test_a_member_without_micro_batches_is_not_waited_for() -> None:
    lines: list[str] = []
    plan = make_plan(LAYERS, [], None, [[0, 1]], [[1.0, 20.0]])
    check = PlanCheck(plan, cluster(1, 20), 0.1, 4, lambda at, text: lines.append(text))
    for number in range(1, 30):
        check.step(done(number))
        check.trace(rows_of(number, 0.1, {0: 2.0}, 1))
    assert lines == ["a step takes 100 ms, 100 ms were foreseen"]


def test_a_stage_that_computes_its_forwards_again_is_not_slow() -> None:
    lines: list[str] = []
    plan = recomputing(make_plan(LAYERS, [6], None, [0, 1]), [0, 1])
    check = PlanCheck(plan, cluster(1, 4 / 3), 0.1, 4, lambda at, text: lines.append(text))
    for number in range(1, 30):
        check.step(done(number, 0.15))
        check.trace(rows_of(number, 0.15, {0: 1.0, 1: 1.0}, back=18e-3))
    assert "ranks compute as fast as foreseen" in lines[0]


def test_rows_do_not_pile_up_where_a_rank_is_gone() -> None:
    plan = make_plan(LAYERS, [6], None, [0, 1])
    check = PlanCheck(plan, cluster(1, 1), 0.1, 4, lambda at, text: None)
    for number in range(1, 300):
        check.step(done(number))
        check.trace(rows_of(number, 0.1, {0: 1.0} if number > WARM else {0: 1.0, 1: 1.0}))
    assert sum(map(len, check._rows)) <= 2 * 8 * (WARM + STEPS)


def test_ranks_have_the_numbers_that_they_had_when_the_job_began() -> None:
    plan = make_plan(LAYERS, [6], None, [0, 1])
    check = PlanCheck(plan, cluster(1, 1), 0.1, 4, lambda at, text: None, [0, 2])
    assert check.line(0.2, {0: 1.0, 1: 2.0}).endswith("on rank 2 (edge1) 2.00 x")

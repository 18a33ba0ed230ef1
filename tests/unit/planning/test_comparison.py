"""What a run says after some steps of how it compares with its plan."""

import numpy as np
import pytest
from clusters import LAYERS, cluster

from accept_mpi.logs.format import KINDS, TRACE
from accept_mpi.logs.observers import StepDone
from accept_mpi.plan import make_plan
from accept_mpi.planning.comparison import STEPS, WARM, PlanCheck


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
    check = PlanCheck(plan, cluster(1, 1), 0.1, lambda at, text: lines.append((at, text)))
    for number in range(1, 30):
        rows = []
        for rank in (0, 1):
            factor = slow if rank else 1.0
            for k in range(4):
                for kind, seconds in (("F", 6e-3), ("B", 12e-3)):
                    start = step * number
                    place = (rank, rank, KINDS.index(kind), -1, -1, number, k, 0, 0, 0)
                    rows.append((start, start + factor * seconds, *place))
        check.step(StepDone(number, 0, 8, 1.0, 0.5, 0.1, (3 if number < WARM else 1) * step * number, 80.0))
        check.trace(np.array(rows, TRACE))
    assert lines == [(WARM + STEPS, said)]

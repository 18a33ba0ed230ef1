"""Plans for few micro-batches, changed as long as a step gets shorter."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from accept_mpi.planning.problem import Problem, Solution, cost
from accept_mpi.planning.refinement import _neighbours, refined

ALONE = Solution((0,), (0, 12), ())


def problem(devices: int = 3, layers: int = 12, rate: float = 1e9, bits: Sequence[float] = (32.0,)) -> Problem:
    """Equal layers on equal devices."""
    return Problem(
        layer_seconds=np.ones((devices, layers)), values=np.full(layers + 1, 100.0), other=np.zeros(layers + 1),
        rate=np.full((devices, devices), rate), host_link=np.full(devices, 1e15), codecs=tuple(map(str, bits)),
        bytes_per_value=np.array(bits) / 8, state=np.ones(layers), saved_bytes=np.ones(layers),
        capacity=np.full(devices, 1e9), in_flight=np.ones(devices), state_copies=np.ones(devices), micro_batches=4,
        real_micro_batches=4, fill=1.0,
    )  # fmt: skip


def test_micro_batches_are_few_where_they_do_not_fill_a_pipeline() -> None:
    few = problem()
    assert few.is_short
    assert not replace(few, real_micro_batches=9).is_short
    assert not few.take([1]).is_short


@pytest.mark.parametrize("plan", [ALONE, Solution((2, 0), (0, 5, 12), (0,)), Solution((1, 2, 0), (0, 1, 2, 12), (0, 0))])
def test_changes_are_plans(plan: Solution) -> None:
    """Of all kinds, each with every layer once, on devices that hold one stage each."""
    found = list(_neighbours(problem(), plan))
    assert len(set(found)) > 10
    for one in found:
        assert one.edges[0] == 0
        assert one.edges[-1] == 12
        assert all(a < b for a, b in zip(one.edges, one.edges[1:], strict=False))
        assert len(set(one.devices)) == len(one.devices) == len(one.edges) - 1 == len(one.codecs) + 1
    stages = len(plan.devices)
    assert {len(one.devices) for one in found} == {n for n in (stages - 1, stages, stages + 1) if 1 <= n <= 3}
    assert plan not in found


@pytest.mark.parametrize(("rate", "bits"), [(1e9, (32.0,)), (50.0, (32.0, 2.0))])
def test_one_change_after_the_other(rate: float, bits: Sequence[float]) -> None:
    """From one device to three, where only the strongest codec makes links fast enough, too."""
    few = problem(rate=rate, bits=bits)

    def seconds(plan: Solution) -> float:
        return min(cost(few, replace(plan, codecs=(n,) * len(plan.codecs))).step for n in range(len(bits)))

    found = refined(few, ALONE, seconds)
    assert seconds(ALONE) == 48
    assert len(found.devices) == 3
    assert seconds(found) <= 1.05 * seconds(Solution((0, 1, 2), (0, 4, 8, 12), (0, 0)))


def test_what_the_slowest_stage_forbids_is_not_simulated() -> None:
    few = problem()
    best = Solution((0, 1, 2), (0, 4, 8, 12), (0, 0))
    tried = []

    def seconds(plan: Solution) -> float:
        tried.append(plan)
        return 4 * 4 / 0.99

    assert refined(few, best, seconds) == best
    assert all(cost(few, plan).bottleneck <= 4 for plan in tried)

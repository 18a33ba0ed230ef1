"""The forecast by which codecs are chosen for given cuts."""

import pytest

from accept_mpi.direction import Direction
from accept_mpi.job_file import parse
from accept_mpi.plan import BoundaryCodecs, Lanes, Plan, StagePlan
from accept_mpi.planning.message_model import Traffic
from accept_mpi.profiling.cluster_profile import StageTimes
from accept_mpi.training.codec_selection import forecast_from_leaders

JOB = """
model.name = "m"
data.name = "d"
output.directory = "r"
train = { batch_size = 64, micro_batches = 16, steps = 1 }
pipeline = { schedule = "1f1b-async", gradients = "bf16" }
"""
FREE = dict.fromkeys(("none", "bf16"), 0.0)


def step(paces: tuple[float, ...], lanes: tuple[Lanes, ...] = (), gradients: int = 0, micro_batches: int = 16) -> float:
    """Seconds of a step if the first of two stages takes 0.03 s a micro-batch on its first rank, the second 0.006 s."""
    members = tuple(range(len(paces)))
    stages = (
        StagePlan(start=0, stop=1, ranks=members, paces=paces, lanes=lanes),
        StagePlan(start=1, stop=2, ranks=(len(paces),)),
    )
    plan = Plan(stages=stages, boundaries=(BoundaryCodecs(forward="none", backward="none"),), slack=2, gradients="")
    profiles = [StageTimes(t / 3, 2 * t / 3, FREE, FREE) for t in (0.03, 0.006)]
    crossings = {(0, way): Traffic(1000, 64, 1e7) for way in Direction}
    job = parse(JOB, "job", [f"train.micro_batches={micro_batches}"])
    return forecast_from_leaders(job, plan, profiles, crossings, [gradients, 0]).step(
        {(0, way): "none" for way in Direction}
    )


def test_who_holds_a_stage_together_shares_its_micro_batches() -> None:
    """A group was foreseen as if its first rank took all micro-batches, so links seemed to have twice as long for each."""
    assert step((1.0,)) == pytest.approx(16 * 0.03, rel=0.01)
    assert step((1.0, 1.0)) == pytest.approx(8 * 0.03, rel=0.1)
    assert step((3.0, 1.0)) == pytest.approx(4 * 0.03, rel=0.1)  # the other is three times as fast
    assert step((1.0, 3.0)) == pytest.approx(12 * 0.03, rel=0.1)


def test_lanes_are_not_taken_for_a_gain() -> None:
    assert step((1.0,), (2,)) == pytest.approx(16 * 0.03, rel=0.1)
    assert step((1.0,), ("F+B",)) == pytest.approx(16 * 0.03, rel=0.1)


def test_a_group_sums_its_gradients_over_links_like_its_neighbours() -> None:
    assert step((1.0, 1.0), gradients=100_000_000) > 2 * step((1.0, 1.0))

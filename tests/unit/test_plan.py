"""Plans: even cuts, cuts that make no sense, JSON both ways."""

import pytest

from accept_mpi.plan import BoundaryCodecs, Plan, even_cuts, make_plan


def test_even_cuts_differ_by_one_layer_at_most() -> None:
    for layers in range(1, 30):
        for stages in range(1, layers + 1):
            plan = make_plan(layers, even_cuts(layers, stages))
            sizes = [stage.stop - stage.start for stage in plan.stages]
            assert sum(sizes) == layers
            assert max(sizes) - min(sizes) <= 1
            assert [plan.place(rank).stage for rank in range(stages)] == list(range(stages))


def test_even_cuts_keep_layers_together() -> None:
    assert even_cuts(12, 3, {3, 4, 5}) == [2, 8]
    assert even_cuts(12, 2, range(1, 10)) == [10]
    assert even_cuts(12, 4, range(1, 10)) == [10, 11]
    assert even_cuts(12, 3, range(1, 12)) == []
    for layers in range(1, 12):
        for stages in range(1, 8):
            cuts = even_cuts(layers, stages, {2, 3, 7})
            assert not {2, 3, 7} & set(cuts)
            assert len(make_plan(layers, cuts).stages) == min(stages, len({*range(1, layers)} - {2, 3, 7}) + 1)


@pytest.mark.parametrize("cuts", [[0, 3], [3, 3], [4, 2], [2, 6], [2, 9]])
def test_cuts_that_leave_a_stage_empty(cuts: list[int]) -> None:
    with pytest.raises(ValueError, match=r"leave a stage empty: they must increase strictly and lie within 1\.\.5"):
        make_plan(6, cuts)


def test_places_in_another_order_and_of_idle_ranks() -> None:
    plan = make_plan(6, [2, 4], ranks=[3, 0, 1])
    assert [plan.place(rank).stage for rank in range(5)] == [1, 2, -1, 0, -1]
    assert (plan.place(0).before, plan.place(0).after) == (3, 1)
    assert (plan.place(3).before, plan.place(3).after, plan.place(3).first) == (None, 0, True)
    assert plan.place(1).last
    assert plan.place(4).idle
    assert list(plan.layers_of(0)) == [2, 3]
    assert not plan.layers_of(2)


def test_json() -> None:
    plan = make_plan(6, [2, 4], [BoundaryCodecs(forward="bf16"), BoundaryCodecs(backward="uniform:2")])
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.boundaries[1].backward == "uniform:2"

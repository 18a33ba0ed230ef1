"""Plans in which stages compute forwards again, or have copies of a tied parameter: where memory and links make that pay."""

import itertools

import msgspec
import numpy as np
import pytest
import torch
from clusters import LAYERS, cluster, job
from torch import nn

from accept_mpi.errors import UserError
from accept_mpi.models import as_chain
from accept_mpi.models.shared import Shared
from accept_mpi.plan import make_plan, recomputing
from accept_mpi.planning.estimate import fits
from accept_mpi.planning.memory import memory_of
from accept_mpi.planning.planner import plan_for, plans_for
from accept_mpi.planning.tables import verdict
from accept_mpi.planning.ties import parted, with_ties
from accept_mpi.profiling.cluster_profile import ClusterProfile
from accept_mpi.profiling.outline import outline

SAVED = 1_000_000
SYNCHRONOUS, SLACK = "pipeline.schedule=1f1b", "pipeline.transfer_slack=2"


def fat(found: ClusterProfile, room: float) -> ClusterProfile:
    """The same cluster with layers that keep much from F to B, and devices with so many bytes each."""
    layers = tuple(msgspec.structs.replace(one, saved_bytes=SAVED) for one in found.outline.layers)
    devices = [msgspec.structs.replace(one, memory=room) for one in found.devices]
    return msgspec.structs.replace(found, outline=msgspec.structs.replace(found.outline, layers=layers), devices=devices)


def test_recomputing_where_memory_is_short() -> None:
    plenty = plan_for(fat(cluster(1, 1), 1e12), job(SYNCHRONOUS, SLACK))
    assert not any(stage.recompute for stage in plenty.plan.stages)
    most = max(plenty.memory)
    short = fat(cluster(1, 1), 0.45 * most)
    found, even = plans_for(short, job(SYNCHRONOUS, SLACK))
    assert [stage.recompute for stage in found.plan.stages] == [True, False]
    assert max(found.memory) <= 0.45 * most
    assert found.step > plenty.step  # a forward more for each backward of the first stage
    kept = plan_for(short, job(SYNCHRONOUS, SLACK, "pipeline.recompute=off"))
    assert found.step < kept.step  # which has to leave most layers to the other device
    assert any(
        "compute their forwards again on stage 0" in line for line in verdict(short, job(SYNCHRONOUS, SLACK), found, even)
    )
    with pytest.raises(UserError, match="no cuts fit"):
        plan_for(fat(cluster(1, 1), 0.4 * most), job(SYNCHRONOUS, SLACK, "pipeline.recompute=off"))
    assert plan_for(fat(cluster(1, 1), 0.4 * most), job(SYNCHRONOUS, SLACK)).plan.stages[0].recompute
    with pytest.raises(UserError, match="no cuts fit"):
        plan_for(fat(cluster(1, 1), 3 * SAVED), job(SYNCHRONOUS, SLACK))


def test_recomputing_everywhere_if_asked() -> None:
    found = plan_for(fat(cluster(1, 1, 1), 1e12), job(SYNCHRONOUS, "pipeline.recompute=on"))
    assert [stage.recompute for stage in found.plan.stages] == [True, True, False]


@pytest.mark.parametrize("how", ["on", "auto"])
@pytest.mark.parametrize("seed", range(4))
def test_a_plan_that_recomputes_is_found_wherever_one_fits(how: str, seed: int) -> None:
    """Devices have room for shares of the layers that differ much, and the stages at the end hold fewer micro-batches."""
    rng = np.random.default_rng(seed)
    asked = job(SYNCHRONOUS, SLACK, f"pipeline.recompute={how}")
    fleet = fat(cluster(1, 1, 1), 1e12)
    rooms = [[0.1, 11.5, 2.5], *(rng.dirichlet((0.5, 0.5, 0.5), 5) * rng.uniform(12.5, 15)).tolist()]
    for room in rooms:
        devices = [msgspec.structs.replace(d, memory=r * SAVED) for d, r in zip(fleet.devices, room, strict=True)]
        short = msgspec.structs.replace(fleet, devices=devices)
        possible = [
            recomputing(make_plan(LAYERS, cuts, None, order), range(3))
            for count in (1, 2, 3)
            for cuts in itertools.combinations(range(1, LAYERS), count - 1)
            for order in itertools.permutations(range(3), count)
        ]
        needs = [(memory_of(short, asked, plan), plan.leaders) for plan in possible]
        if any(all(n <= room[r] * SAVED for n, r in zip(*one, strict=True)) for one in needs):
            assert fits(short, plan_for(short, asked)), room
        else:
            with pytest.raises(UserError, match="cuts"):
                plan_for(short, asked)


def tied(found: ClusterProfile, nbytes: int) -> ClusterProfile:
    one = Shared(0, LAYERS - 1, "layers 0 and 11 share", False, ((0, "w"), (LAYERS - 1, "w")), True, nbytes)
    return msgspec.structs.replace(found, outline=msgspec.structs.replace(found.outline, shared=(one,)))


def test_ties_are_parted_where_links_allow() -> None:
    fast, slow = tied(cluster(1, 1, 1), 100), tied(cluster(1, 1, 1), 10**8)
    wide = plan_for(fast, job(SYNCHRONOUS)).plan
    assert len(wide.stages) > 1
    assert parted(fast.outline.shared, wide)[0][1] == [0, len(wide.stages) - 1]
    assert len(plan_for(slow, job(SYNCHRONOUS)).plan.stages) == 1
    assert len(plan_for(fast, job("pipeline.schedule=1f1b-async")).plan.stages) == 1


def test_a_tie_that_does_not_fit_apart_stays_together() -> None:
    """The search knows nothing of what the sum of a tied parameter's gradients takes."""
    apart = tied(cluster(1, 1), 100)
    plan = plan_for(apart, job(SYNCHRONOUS))
    assert len(plan.plan.stages) == 2
    need = min(memory_of(cluster(1, 1), job(SYNCHRONOUS), plan.plan))
    whole = max(memory_of(apart, job(SYNCHRONOUS), make_plan(LAYERS, [])))
    short = cluster(1, 1, memory=[whole, need + 10])
    short = tied(short, 100)
    found = plan_for(short, job(SYNCHRONOUS, "pipeline.transfer_slack=2", "pipeline.recompute=off"))
    assert fits(short, found)


def test_what_a_tie_costs() -> None:
    """Two ranks: each sends half of every micro-batch's gradients and half of the sum; the last micro-batch's hide behind
    nothing."""
    fleet = tied(cluster(1, 1, rate=1e6), 1000)
    plan = plan_for(tied(cluster(1, 1, rate=1e9), 10), job(SYNCHRONOUS)).plan
    each = 500 / 1e6
    assert with_ties(fleet, job(SYNCHRONOUS), plan, 1.0) == pytest.approx(1.0 + 2 * each)
    assert with_ties(fleet, job(SYNCHRONOUS), plan, 0.0) == pytest.approx(8 * each + 2 * each)
    own = job(SYNCHRONOUS, "pipeline.gradients=none")
    assert with_ties(fleet, own, plan, 0.0) == pytest.approx(each + 2 * each)


def test_stages_with_a_copy_hold_what_its_sum_takes() -> None:
    """Four copies of its gradients, as in the sum of a group; in a group the parameter is one of those that are summed."""
    fleet, nbytes = cluster(1, 1, 1), 1000
    for groups, more in (([0, 1, 2], [4, 0, 4]), ([[0, 1], 2], [0, 0, 4])):
        plan = make_plan(LAYERS, [4, 8][: len(groups) - 1], None, groups)
        with_tie, without = (memory_of(one, job(SYNCHRONOUS), plan) for one in (tied(fleet, nbytes), fleet))
        assert [a - b for a, b in zip(with_tie, without, strict=True)] == [each * nbytes for each in more]
    whole = make_plan(LAYERS, [], None, [0])
    (together,), (apart,) = (memory_of(one, job(SYNCHRONOUS), whole) for one in (tied(fleet, nbytes), fleet))
    assert together == apart - 2 * nbytes, "weights and gradients are there once"


def test_what_is_tied_counts_once_in_a_stage() -> None:
    """As a stage has it, while copies have it under each of its names: a model that fits was refused."""
    first, last = nn.Embedding(1000, 8), nn.Linear(8, 1000, bias=False)
    last.weight = first.weight
    model = outline(as_chain([first, nn.Linear(8, 8), last]), 0, (torch.zeros(4, dtype=torch.int64),))
    nbytes = 1000 * 8 * 4
    assert [one.nbytes for one in model.shared] == [nbytes]
    times = {name: [1e-3] * 3 for name in ("forward", "backward", "weight_gradient", "update")}
    device, whole = msgspec.structs.replace(cluster(1).devices[0], **times), make_plan(3, [])
    for snapshots, schedule in itertools.product((False, True), ("1f1b", "1f1b-async", "1f1b-delayed")):
        keys = "train.optimizer.name=adamw", "pipeline.recompute=off", "output.checkpoint_at_end=false"
        asked = job(f"pipeline.schedule={schedule}", *keys)
        own = msgspec.structs.replace(device, snapshots=snapshots)
        fleet = ClusterProfile(model, [own], [[1e12]], [[0.0]])
        untied = msgspec.structs.replace(fleet, outline=msgspec.structs.replace(model, shared=()))
        (need,), (more,) = (memory_of(one, asked, whole) for one in (fleet, untied))
        versions = {"1f1b": 1, "1f1b-async": 3, "1f1b-delayed": 2}[schedule]
        assert more - need == (versions + 3) * nbytes
        assert len(plan_for(fleet.within([need]), asked).plan.stages) == 1
        with pytest.raises(UserError, match="cuts"):
            plan_for(fleet.within([need - 1000]), asked)


def test_only_the_first_of_several_uses_may_be_apart() -> None:
    three = Shared(0, 9, "three layers share", False, ((0, "w"), (5, "w"), (9, "w")), True, 10)
    fleet = cluster(1, 1, 1)
    fleet = msgspec.structs.replace(fleet, outline=msgspec.structs.replace(fleet.outline, shared=(three,)))
    found = plan_for(fleet, job(SYNCHRONOUS))
    assert not {stage.start for stage in found.plan.stages} & set(range(6, 10))

"""From measurements to a plan: fast devices get more, memory and data decide who may, forecasts agree with hand counts."""

import msgspec
import numpy as np
import pytest
import torch
from clusters import LAYERS, WIDTH, cluster, job
from torch import nn

from accept_mpi.codecs.message import HEADER_BYTES
from accept_mpi.direction import Direction
from accept_mpi.errors import UserError
from accept_mpi.models import as_chain
from accept_mpi.models.shared import Shared
from accept_mpi.plan import make_plan
from accept_mpi.planning import planner
from accept_mpi.planning.codec_choice import check_codecs, codec_pairs, codings_of
from accept_mpi.planning.estimate import estimate
from accept_mpi.planning.forecast import Forecast
from accept_mpi.planning.formulation import problem_of
from accept_mpi.planning.message_model import Traffic, message_seconds
from accept_mpi.planning.planner import even_plan, plan_for, plans_for
from accept_mpi.planning.problem import NoPlan, Problem, Solution, lower_bound
from accept_mpi.planning.search import solve
from accept_mpi.planning.tables import table
from accept_mpi.polling import SENDING_SECONDS
from accept_mpi.profiling.cluster_profile import ClusterProfile, StageTimes
from accept_mpi.profiling.outline import outline

AUTO_CODECS = 'pipeline.forward="auto"', 'pipeline.backward="auto"'


def layers_by_rank(found: object, ranks: int) -> list[int]:
    return [len(found.plan.layers_of(rank)) for rank in range(ranks)]  # type: ignore[attr-defined]


def test_devices_that_are_as_good_take_what_they_hold() -> None:
    fleet = cluster(1, 1, 1)
    held = [range(8, 12), range(4), range(4, 8)]
    assert [plan_for(fleet, job()).plan.layers_of(rank) for rank in range(3)] == [range(4), range(4, 8), range(8, 12)]
    assert [plan_for(fleet, job(), held).plan.layers_of(rank) for rank in range(3)] == held
    # So they do where one was measured a little slower than the others.
    assert [plan_for(cluster(1, 1.04, 1), job(), held).plan.layers_of(rank) for rank in range(3)] == held
    # The second one is slow, and stays where it has little to do.
    slow = cluster(1, 2, 1)
    usual = plan_for(slow, job())
    near = plan_for(slow, job(), [[], range(12), []])
    assert layers_by_rank(near, 3) == layers_by_rank(usual, 3)
    # One that the plan leaves idle is as good as one that it uses.
    far = cluster(1, 1, rate=1e3)
    assert layers_by_rank(plan_for(far, job(), [[], range(12)]), 2) == [0, 12]
    assert layers_by_rank(plan_for(far, job(), [range(12), []]), 2) == [12, 0]


def test_fast_devices_get_more_layers() -> None:
    assert layers_by_rank(plan_for(cluster(1, 1, 2), job()), 3) == [5, 5, 2]
    assert layers_by_rank(plan_for(cluster(1, 1), job()), 2) == [6, 6]


def test_a_device_that_would_cost_more_stays_idle() -> None:
    devices = cluster(1, 100, 1)
    found, even = plans_for(devices, job())
    assert layers_by_rank(found, 3) == [6, 0, 6]
    assert any("idle" in line and "edge1" in line for line in table(devices, job(), found, even))


def sharing(found: ClusterProfile, *shared: Shared) -> ClusterProfile:
    return msgspec.structs.replace(found, outline=msgspec.structs.replace(found.outline, shared=shared))


@pytest.mark.parametrize("schedule", ["1f1b-async", "1f1b"])
def test_layers_that_share_stay_together(schedule: str) -> None:
    """Wherever a plan comes from: found, even cuts, after a loss, on many devices, without a device that is far slower."""
    wanted = job(f"pipeline.schedule={schedule}")
    ties = Shared(0, 7, "layers 0 and 7 share a parameter"), Shared(8, 9, "more"), Shared(0, 11, "a table", True)
    for speeds, held in (
        ((1, 1, 1), ()),
        ((1, 30, 1), ()),
        ((1, 1, 1), [range(8, 12), range(4), range(4, 8)]),
        ([1] * 12, ()),
    ):
        fleet = sharing(cluster(*speeds), *ties)
        assert plan_for(cluster(*speeds), wanted, held).plan.stages[1].start < 8
        found, even = plan_for(fleet, wanted, held), plans_for(fleet, wanted)[1]
        for plan in (found.plan, even.plan):
            assert {stage.start for stage in plan.stages} <= {0, 8, 10, 11}
            assert len(plan.stages) > 1
    assert layers_by_rank(plan_for(sharing(cluster(1, 2, 1), *ties), wanted), 3) == [8, 0, 4]


def test_devices_stay_idle_where_layers_cannot_be_parted() -> None:
    fleet = sharing(cluster(1, 1, 1), Shared(0, 11, "layers 0 and 11 share a parameter"))
    found, even = plans_for(fleet, job())
    assert layers_by_rank(found, 3) == layers_by_rank(even, 3) == [12, 0, 0]
    assert "layers 0 and 11 share a parameter, so they are in one stage" in table(fleet, job(), found, even)
    memory: list[object] = [4e5, 4e5]
    wanted = job("pipeline.schedule=1f1b")
    assert plan_for(cluster(1, 1, memory=memory), wanted)
    small = sharing(cluster(1, 1, memory=memory), Shared(0, 11, "layers 0 and 11 share a parameter"))
    with pytest.raises(UserError, match=r"no cuts fit \(layers that share what is trained stay together\)"):
        plan_for(small, wanted)


def test_a_far_slower_device_must_be_worth_its_stage() -> None:
    """A tenth as fast as the others: a layer is all that it could take, which saves less than measuring it is off."""
    layers = 40

    def fleet(slow: float) -> ClusterProfile:
        few = cluster(1, 1, slow)
        times = ("forward", "backward", "weight_gradient", "update")
        devices = [msgspec.structs.replace(d, **{k: getattr(d, k)[:1] * layers for k in times}) for d in few.devices]
        drawn = outline(as_chain([nn.Linear(WIDTH, WIDTH) for _ in range(layers)]), 0, (torch.zeros(4, WIDTH),))
        return msgspec.structs.replace(few, devices=devices, outline=drawn)

    assert layers_by_rank(plan_for(fleet(10), job()), 3) == [20, 20, 0]
    assert all(layers_by_rank(plan_for(fleet(3), job()), 3))
    # Where it has to be used, it is.
    few = fleet(10)
    small = [msgspec.structs.replace(d, memory=m) for d, m in zip(few.devices, (1.1e6, 1.1e6, 1e9), strict=True)]
    assert all(layers_by_rank(plan_for(msgspec.structs.replace(few, devices=small), job()), 3))


def test_cuts_leave_links_room() -> None:
    """As codecs do: in front of layer 6 a transfer takes 16 of the 16.5 ms that stages compute there, and any wavering of
    the link would make both wait."""
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    layers[5], layers[6] = nn.Linear(WIDTH, 64 * WIDTH), nn.Linear(64 * WIDTH, WIDTH)
    wide = outline(as_chain(layers), 0, (torch.zeros(4, WIDTH),))
    nbytes = 4 * 4 * 64 * WIDTH

    def cut(rate: float) -> list[int]:
        none = [0.0] * LAYERS
        took = [1.5e-3 if n in (5, 6) else 3e-3 for n in range(LAYERS)]
        measured = cluster(1, 1, rate=rate, forward=[took, took], backward=[none, none])
        return layers_by_rank(plan_for(msgspec.structs.replace(measured, outline=wide), job()), 2)

    assert sorted(cut(nbytes / 16e-3)) == [5, 7]
    assert cut(nbytes / 5e-3) == [6, 6]


def test_a_full_link_may_be_worth_it() -> None:
    """28 ms on the link, whatever the cut; 18 of computing on each of two devices, or 36 on one."""
    link_bound = cluster(1, 1, rate=(64 + 4 * WIDTH * 4) / 28e-3)
    assert layers_by_rank(plan_for(link_bound, job()), 2) == [6, 6]


def test_slow_links_leave_the_model_on_one_device() -> None:
    assert sorted(layers_by_rank(plan_for(cluster(1, 1, rate=1e3), job()), 2)) == [0, 12]


def test_a_step_of_an_asynchronous_pipeline_is_its_slowest_stage() -> None:
    """6 layers of 3 ms, 8 micro-batches; and half of the time with one device twice as slow idle a third of the time."""
    found = plan_for(cluster(1, 1), job())
    assert found.step == pytest.approx(8 * 6 * 3e-3, rel=1e-3)
    assert found.busy == pytest.approx([1, 1], rel=1e-3)
    uneven = estimate(cluster(1, 1), job(), make_plan(LAYERS, [8]))
    assert uneven.step == pytest.approx(8 * 8 * 3e-3, rel=1e-3)
    assert uneven.busy == pytest.approx([1, 0.5], rel=1e-2)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_synchronous_step_fills_and_drains(schedule: str) -> None:
    found = plan_for(cluster(1, 1), job(f"pipeline.schedule={schedule}"))
    assert found.step == pytest.approx((8 + 1) * 6 * 3e-3, rel=1e-2)


def test_zero_bubble_fills_the_drain_with_weight_gradients() -> None:
    one, other = (plan_for(cluster(1, 1), job(f"pipeline.schedule={kind}")).step for kind in ("1f1b", "zero-bubble"))
    assert other < 0.97 * one


def test_only_devices_with_the_data_are_first_and_last() -> None:
    found = plan_for(cluster(1, 1, 1, data=[True, False, True]), job())
    assert found.plan.place(1).stage == 1
    alone = plan_for(cluster(1, 1, 1, data=[False, True, False]), job())
    assert layers_by_rank(alone, 3) == [0, 12, 0]


def test_data_on_one_device_that_cannot_hold_the_model() -> None:
    with pytest.raises(UserError, match="only edge0 has it"):
        plan_for(cluster(1, 1, data=[True, False], memory=[9e4, 1e9]), job())


def test_data_on_no_device() -> None:
    with pytest.raises(UserError, match="no device that is there has it"):
        plan_for(cluster(1, 1, data=[False, False]), job())


def test_a_device_without_the_data_does_not_hide_what_is_possible() -> None:
    """Its layers at the ends are never; the others tell how fast it is."""
    problem = problem_of(cluster(1, 1, 1, data=[True, True, False]), job())
    assert lower_bound(problem) == pytest.approx(LAYERS * 3e-3 / 3, rel=0.15)


def test_a_device_whose_messages_cost_more_than_its_layers_save_stays_idle() -> None:
    """Two layers there are 15 ms instead of 18 elsewhere, but a stage in the middle has four messages a micro-batch."""
    for message, layers in ((0.0, [5, 2, 5]), (3e-3, [6, 0, 6])):
        fleet = cluster(1, 2.5, 1, shared=[True] * 3, seconds_per_message=[0.0, message, 0.0], data=[True, False, True])
        assert layers_by_rank(plan_for(fleet, job()), 3) == layers


def messages_of(fleet: ClusterProfile, size: int) -> np.ndarray | None:
    """The partitioner's seconds for messages, where ``size`` times as many values cross."""
    layers = [
        msgspec.structs.replace(
            layer, inputs=tuple(msgspec.structs.replace(spec, shape=(4, WIDTH * size)) for spec in layer.inputs)
        )
        for layer in fleet.outline.layers
    ]
    large = msgspec.structs.replace(fleet, outline=msgspec.structs.replace(fleet.outline, layers=layers))
    return problem_of(large, job(*AUTO_CODECS)).messages


def test_what_is_sent_slowly_is_polled_for() -> None:
    """One core computes and sends: a large message costs it more on a slow link, most uncoded; a small one, which a socket
    takes at once, does not; nor any where the data plane has a core of its own."""
    fast, slow, free = (
        cluster(1, 1, rate=rate, shared=[shared] * 2, seconds_per_message=[1e-3] * 2, of=job(*AUTO_CODECS))
        for rate, shared in ((1e12, True), (1e6, True), (1e6, False))
    )
    assert messages_of(free, 1) is None
    small, large = messages_of(slow, 1), messages_of(slow, 1000)
    assert small == pytest.approx(messages_of(fast, 1))
    nbytes = 4 * 4 * WIDTH * 1000 + HEADER_BYTES
    fixed = 2 * message_seconds(0.0, 0.0, 0.0, 0.0, 1e-3)
    assert large[0, 5, 0] == pytest.approx(fixed + nbytes / 1e6 / SENDING_SECONDS * 0.1e-3)
    assert (large[0, 5, 1:] < large[0, 5, 0]).all()
    assert large[0, 5, 0] > 10 * messages_of(fast, 1000)[0, 5, 0]


@pytest.mark.parametrize("size", [1, 1000])
def test_partitioner_and_forecast_agree_on_what_messages_take(size: int) -> None:
    """There were two models, which counted polls, fixed costs and bytes besides differently."""
    costs = {"none": 1e-10, "bf16": 2e-10, "uniform:8": 8e-10, "uniform:6": 1e-9, "uniform:4": 9e-10, "uniform:3": 1e-9,
             "uniform:2": 7e-10, "mbq:1": 5e-9}  # fmt: skip
    fleet = cluster(
        1, 1, rate=2e6, shared=[True] * 2, seconds_per_message=[1e-3] * 2, seconds_per_byte=[2e-9] * 2, encode=[costs] * 2,
        decode=[{name: 3 * cost for name, cost in costs.items()}] * 2, of=job(*AUTO_CODECS),
    )  # fmt: skip
    messages = messages_of(fleet, size)
    names, pairs = codec_pairs(job(*AUTO_CODECS).pipeline)
    values = 4 * WIDTH * size
    times = StageTimes(
        0.0,
        0.0,
        fleet.devices[0].encode,
        fleet.devices[0].decode,
        seconds_per_byte=2e-9,
        seconds_per_message=1e-3,
        shared=True,
    )
    other = fleet.outline.crossing(5).other
    traffic = {(0, way): Traffic(values, other, 2e6) for way in Direction}
    forecast = Forecast("1f1b", 8, 2, [times, times], traffic, host_links=[2e6, 2e6])
    for k, (forward, backward) in enumerate(pairs):
        codecs = {(0, Direction.FORWARD): forward, (0, Direction.BACKWARD): backward}
        both = sum(forecast.handling(stage, way, codecs) for stage in (0, 1) for way in Direction)
        assert messages[:, 5, k].sum() == pytest.approx(both), names[k]


def test_half_precision_is_coded_where_links_are_slow() -> None:
    """What crosses in bf16 counted as bytes that no codec makes fewer: one device seemed faster than three."""
    chain = as_chain([nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    found = []
    for precision in ("float32", "bf16"):
        asked = job(*AUTO_CODECS, f"train.precision={precision}")
        model = outline(chain, 0, (torch.zeros(512, WIDTH),), precision=precision)
        fleet = msgspec.structs.replace(cluster(1, 1, 1, rate=2e6, of=asked), outline=model)
        found.append(plan_for(fleet, asked))
    assert [len(one.plan.stages) for one in found] == [3, 3]
    assert found[0].step == pytest.approx(found[1].step)
    assert {choice.name for choice in found[1].choices.values()} < {"uniform:4", "uniform:3", "uniform:2"}


def test_uneven_batches_have_fewer_micro_batches() -> None:
    """33 samples among 32: 16 of 2 and one of 1."""
    whole, few = (plan_for(cluster(1), job(f"train.batch_size={n}", "train.micro_batches=32")).step for n in (64, 33))
    assert few == pytest.approx(whole * 17 / 32)


@pytest.mark.parametrize("schedule", ["1f1b", "1f1b-async"])
def test_links_of_long_latency_leave_devices_idle(schedule: str) -> None:
    """The search knows nothing of latency; one device alone was not compared, though it may be many times as fast."""
    fleet = cluster(1, 1, 1)
    far = msgspec.structs.replace(fleet, latency=[[1.0] * 3] * 3)
    keys = job(f"pipeline.schedule={schedule}", "train.batch_size=8", "train.micro_batches=1")
    assert plan_for(far, keys).step <= estimate(far, keys, make_plan(LAYERS, [])).step * 1.001


def test_a_search_that_misses_plans_is_not_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    def misses(problem: Problem, ordered: bool = False) -> Solution:
        if not ordered:
            raise NoPlan("no cuts fit")
        return solve(problem, True)

    monkeypatch.setattr(planner, "solve", misses)
    assert sum(layers_by_rank(plan_for(cluster(1, 1), job()), 2)) == LAYERS


def test_one_version_at_all_stages_wants_memory_for_those_of_the_first() -> None:
    problems = [
        problem_of(cluster(1, 1, 1), job("train.micro_batches=1", f"pipeline.vertical_sync={on}"))
        for on in ("true", "false")
    ]
    assert (problems[0].state_copies >= problems[1].state_copies).all()
    assert problems[0].state_copies[0] == problems[0].state_copies[-1] > problems[1].state_copies[0]


def test_frozen_layers_want_no_gradients() -> None:
    """Neither memory for them, nor do any come back from a boundary behind frozen layers alone."""
    chain = as_chain([nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    frozen = as_chain([nn.Linear(WIDTH, WIDTH).requires_grad_(n >= 6) for n in range(LAYERS)])
    both = [cluster(1, 1), msgspec.structs.replace(cluster(1, 1), outline=outline(frozen, 0, (torch.zeros(4, WIDTH),)))]
    assert both[0].outline == outline(chain, 0, (torch.zeros(4, WIDTH),))
    assert both[0].outline.key != both[1].outline.key
    plan = make_plan(LAYERS, [6])
    asked = job("pipeline.schedule=gpipe", "output.checkpoint_at_end=false")
    trained, resting = (estimate(one, asked, plan) for one in both)
    parameters = sum(layer.parameter_bytes for layer in both[0].outline.layers[:6])
    assert trained.memory[0] - resting.memory[0] >= parameters
    assert trained.memory[1] == pytest.approx(resting.memory[1])
    assert resting.choices[0, Direction.BACKWARD].seconds < trained.choices[0, Direction.BACKWARD].seconds


def test_a_link_is_not_what_ranks_of_one_host_share() -> None:
    one = cluster(1, 1, 1, rate=1e7)
    devices = [msgspec.structs.replace(device, host="edge0" if n < 2 else "edge2") for n, device in enumerate(one.devices)]
    rate = [[1e10 if a < 2 and b < 2 else 1e7 for b in range(3)] for a in range(3)]
    assert msgspec.structs.replace(one, devices=devices, rate=rate).host_link(0) == 1e7


def test_memory_decides() -> None:
    """A layer is 64 x 65 values of 4 bytes, in 4 (weights, gradient, two versions); edge0 has room for some."""
    found = plan_for(cluster(1, 2, memory=[250e3, 1e9]), job())
    assert 0 < layers_by_rank(found, 2)[0] < 6
    with pytest.raises(UserError, match="no cuts fit"):
        plan_for(cluster(1, 1, memory=[100e3, 100e3]), job())
    with pytest.raises(UserError, match="layer 0 alone needs"):
        plan_for(cluster(1, 1, memory=[1e3, 1e3]), job())


def test_snapshots_take_memory() -> None:
    """Four more copies of the weights, there is no momentum; ten where a loss is to cost so many steps at most."""
    free, copied = (plan_for(cluster(1, 1, snapshots=[keeps, keeps]), job()).memory[0] for keeps in (False, True))
    assert copied - free == 4 * 6 * 64 * 65 * 4
    often = plan_for(cluster(1, 1, snapshots=[True, True]), job("recovery.replicate_every=2")).memory[0]
    assert often - free == 10 * 6 * 64 * 65 * 4
    with pytest.raises(UserError, match=r"recovery\.replicate_every = 0"):
        plan_for(cluster(1, 1, memory=[3e5, 3e5], snapshots=[True, True]), job())


def test_a_slow_boundary_is_cut_where_codecs_make_it_fast_enough() -> None:
    """4 x 64 floats each way, a micro-batch in 18 ms: 60 kB/s cannot carry them uncoded, with 4 bits they can."""
    uncoded = plan_for(cluster(1, 1, rate=3e4), job())
    assert sorted(layers_by_rank(uncoded, 2)) == [0, 12]
    coded = job("pipeline.forward=auto", "pipeline.backward=auto")
    assert layers_by_rank(plan_for(cluster(1, 1, rate=3e4, of=coded), coded), 2) == [6, 6]


def test_the_table_names_hosts_layers_and_the_gain() -> None:
    found = cluster(1, 3)
    lines = table(found, job(), *plans_for(found, job()))
    assert "edge0 (rank 0)" in lines[1]
    assert "0..8" in lines[1]
    assert "with even cuts 432 ms (2.0 x)" in lines[-1]
    assert even_plan(found, job()).layers_of(0) == range(6)


def test_lists_of_codecs_go_with_given_cuts_only() -> None:
    with pytest.raises(UserError, match="which cuts = "):
        codings_of(job('pipeline.forward=["none"]'))
    for changed, by in (("pipeline.cuts=auto", 'cuts = "auto" chooses'), ("pipeline.adapt=true", "pipeline.adapt changes")):
        with pytest.raises(UserError, match=f"one codec per boundary, and {by} the boundaries"):
            check_codecs(job('pipeline.forward=["none"]', "pipeline.cuts=[2]", changed).pipeline)

"""Plans in which groups of devices hold stages."""

import itertools
import math

import msgspec
import numpy as np
import pytest
from clusters import LAYERS, cluster, job

from accept_mpi.errors import UserError
from accept_mpi.plan import Plan, make_plan
from accept_mpi.planning import divisions as ways
from accept_mpi.planning import group_problem
from accept_mpi.planning import groups as groups_of
from accept_mpi.planning.adaptation import redealt
from accept_mpi.planning.codec_choice import check_codecs, codings, codings_of, sums_of
from accept_mpi.planning.divisions import kinds_of, partitions
from accept_mpi.planning.estimate import Estimate, estimate, roughly, with_codecs
from accept_mpi.planning.formulation import problem_of
from accept_mpi.planning.group_problem import GroupProblems
from accept_mpi.planning.job_plan import plan_from_job
from accept_mpi.planning.planner import even_plan, plan_for
from accept_mpi.planning.problem import Problem, Solution, cost
from accept_mpi.planning.tables import table
from accept_mpi.profiling.cluster_profile import ClusterProfile
from accept_mpi.recovery.regroup import plan_after_loss

ON = "pipeline.groups=true"


def uneven(*speeds: float, layers: list[float], rate: float = 1e9) -> ClusterProfile:
    """Devices that take ``layers`` times ``speeds`` milliseconds; the activations in front of a layer are as ever."""
    plain = cluster(*speeds, rate=rate)
    devices = [
        msgspec.structs.replace(
            device,
            forward=[1e-3 * speed * each for each in layers],
            backward=[2e-3 * speed * each for each in layers],
            weight_gradient=[1e-3 * speed * each for each in layers],
        )
        for device, speed in zip(plain.devices, speeds, strict=True)
    ]
    return msgspec.structs.replace(plain, devices=devices)


def test_a_long_layer_is_shared() -> None:
    """One layer takes as long as all the others together: only a group can halve it."""
    fleet = uneven(1, 1, 1, layers=[0.5] * 6 + [6.0] + [0.5] * 5)
    alone, found = plan_for(fleet, job()), plan_for(fleet, job(ON))
    assert found.step < 0.75 * alone.step
    assert any(len(stage.ranks) > 1 for stage in found.plan.stages)
    assert np.mean(found.busy) > 0.85
    lines = table(fleet, job(ON), found, estimate(fleet, job(ON), even_plan(fleet, job())))
    assert "micro-batches" in lines[0]
    assert any(f"{count} of 8" in line for line in lines for count in (3, 4, 8))


def test_a_device_that_holds_stages_alone_is_in_no_group() -> None:
    fleet = uneven(1, 1, 1, layers=[0.5] * 6 + [6.0] + [0.5] * 5)
    for apart in ([0], [1, 2], [0, 1, 2]):
        devices = [msgspec.structs.replace(device, alone=n in apart) for n, device in enumerate(fleet.devices)]
        plan = plan_for(msgspec.structs.replace(fleet, devices=devices), job(ON)).plan
        assert not any(len(stage.ranks) > 1 and set(stage.ranks) & set(apart) for stage in plan.stages)
        assert plan.hybrid == (len(apart) == 1)


def test_what_is_as_fast_without_groups_stays_without() -> None:
    assert not plan_for(cluster(1, 1, 1), job(ON)).plan.hybrid


def test_slow_links_forbid_heavy_groups() -> None:
    """Gradients of 16 KB a layer and step, or activations of 1 KB a micro-batch."""
    fleet = uneven(1, 1, layers=[12.0] + [0.01] * 11, rate=1e9)
    assert plan_for(fleet, job(ON)).plan.hybrid
    slow = uneven(1, 1, layers=[12.0] + [0.01] * 11, rate=2e5)
    exact, summed = plan_for(slow, job(ON)), plan_for(slow, job(ON, "pipeline.gradients=none"))
    assert summed.step <= exact.step


@pytest.mark.parametrize(("rate", "expected"), [(1e9, "exact"), (3e5, "uniform:4")])
def test_sums_are_as_mild_as_the_links_allow(rate: float, expected: str) -> None:
    """On slow links fewer bits train faster; otherwise what is bit for bit as in one process."""
    fleet = uneven(1, 1, layers=[12.0] + [0.01] * 11, rate=rate)
    found = plan_for(fleet, job(ON, "pipeline.gradients=auto"))
    exact = plan_for(fleet, job(ON, "pipeline.gradients=exact"))
    assert found.plan.gradients == expected
    assert found.expected <= (1.0 if expected == "exact" else 0.95) * exact.expected
    assert f"gradients {'exactly' if expected == 'exact' else 'as uniform:4'}" in "\n".join(
        table(fleet, job(ON), found, found)
    )
    assert with_codecs(found).gradients == expected
    assert not plan_for(fleet, job(ON)).plan.gradients  # as the job says


def test_a_plan_says_how_gradients_are_summed_only_where_the_job_leaves_it_open() -> None:
    plan = make_plan(4, [2], ranks=[[0, 1], 2])
    chosen = msgspec.structs.replace(plan, gradients="bf16")
    auto, given = job("pipeline.gradients=auto"), job("pipeline.gradients=uniform:8")
    assert (sums_of(auto, chosen), sums_of(auto, plan), sums_of(auto)) == ("bf16", "exact", "exact")
    assert sums_of(given, plan) == "uniform:8"
    assert "bf16" in codings(auto, chosen)
    assert {"bf16", "uniform:4"} <= codings_of(auto).keys()
    left = chosen.without({0})
    assert left is not None
    assert left.renamed({1: 0, 2: 1}).gradients == "bf16"  # after a loss, too
    with pytest.raises(UserError, match=r"pipeline\.gradients"):
        check_codecs(job("pipeline.gradients=float7").pipeline)
    with pytest.raises(UserError, match=r'carried over: no "\+sr"'):
        check_codecs(job("pipeline.gradients=uniform:4+sr").pipeline)
    with pytest.raises(UserError, match="a basis is for activations"):
        check_codecs(job("pipeline.gradients=entropy:3+basis").pipeline)


_LUMPY = [4.27, 1.62, 1.08, 0.34, 1.19, 6.77, 0.73, 5.04, 0.09, 0.56, 0.32, 0.15]


@pytest.mark.parametrize(
    ("speeds", "rate"), [((0.9, 0.94, 2.87, 2.01, 3.92, 3.41, 14.79), 1e6), ((1.4, 1.9, 2.3, 3.1, 4.2, 4.9, 5.8), 1e7)]
)
def test_not_all_divisions_of_many_unlike_devices_need_be_tried(
    monkeypatch: pytest.MonkeyPatch, speeds: tuple[float, ...], rate: float
) -> None:
    """There are 877 of seven. Nor is more tried worse: on slow links the search knows that an update waits for the sum."""
    fleet, keys = uneven(*speeds, layers=_LUMPY, rate=rate), job(ON, "pipeline.gradients=none")
    tried = plan_for(fleet, keys)
    monkeypatch.setattr(ways, "_runs", ways.partitions)
    monkeypatch.setattr(ways, "_MOST_DIVISIONS", 1000)
    best = plan_for(fleet, keys)
    assert best.plan.hybrid
    assert 0.99 * best.expected <= tried.expected <= 1.05 * best.expected


@pytest.mark.parametrize("kinds", [[0] * 7, [0, 1, 0, 0, 1, 1, 0], [0, 1, 2, 0, 1, 2, 3]])
def test_divisions_of_equal_devices_are_not_all_listed(kinds: list[int]) -> None:
    """There are four million of twelve devices, and as many went by for 77 that differ."""

    def looks(division: ways.Division) -> tuple[tuple[int, ...], ...]:
        return tuple(sorted(tuple(sorted(kinds[n] for n in group)) for group in division))

    every = dict.fromkeys(map(looks, partitions(range(7))))
    assert list(dict.fromkeys(map(looks, partitions(range(7), kinds)))) == list(every)
    assert sum(1 for _ in partitions(range(12), [0] * 12)) == 2**11


def test_a_layer_that_must_be_alone_is_not_shared() -> None:
    fleet = uneven(1, 1, 1, layers=[0.5] * 6 + [6.0] + [0.5] * 5)
    layers = list(fleet.outline.layers)
    layers[6] = msgspec.structs.replace(layers[6], alone=True)
    fleet = msgspec.structs.replace(fleet, outline=msgspec.structs.replace(fleet.outline, layers=tuple(layers)))
    found = plan_for(fleet, job(ON)).plan
    (stage,) = (stage for stage in found.stages if stage.start <= 6 < stage.stop)
    assert len(stage.ranks) == 1


@pytest.mark.parametrize("room", [1e9, math.inf])
def test_equal_devices_are_of_one_kind_whatever_memory_they_have(room: float) -> None:
    fleet = cluster(1, 1, 1.05, 2, 2, memory=[room] * 5)
    assert kinds_of(fleet, problem_of(fleet, job(ON))) == [0, 0, 0, 1, 1]
    other = msgspec.structs.replace(
        fleet, devices=[msgspec.structs.replace(fleet.devices[0], memory=5e8), *fleet.devices[1:]]
    )
    assert kinds_of(other, problem_of(other, job(ON))) == [0, 1, 1, 2, 2]


@pytest.mark.parametrize("schedule", ["1f1b-async", "1f1b-delayed", "1f1b"])
@pytest.mark.parametrize(("speeds", "data"), [((2, 9, 2), (1, 0, 1)), ((1, 1, 1, 1), (1, 0, 0, 1)), ((1, 1), (1, 0))])
def test_who_lacks_the_data_holds_no_end(schedule: str, speeds: tuple[float, ...], data: tuple[int, ...]) -> None:
    """Nor does it in a group."""
    fleet = uneven(*speeds, layers=[6.0] + [0.5] * 10 + [6.0])
    devices = [msgspec.structs.replace(one, data=bool(has)) for one, has in zip(fleet.devices, data, strict=True)]
    found = plan_for(msgspec.structs.replace(fleet, devices=devices), job(ON, f"pipeline.schedule={schedule}")).plan
    ends = {*found.stages[0].ranks, *found.stages[-1].ranks}
    assert all(data[rank] for rank in ends)


def every_plan(devices: int, cuts: list[int], speeds: list[float]) -> list[Plan]:
    """All plans of these devices (some idle) with cuts among these."""
    found = []
    for count in range(1, devices + 1):
        for used in itertools.combinations(range(devices), count):
            for division in partitions(used):
                for groups in itertools.permutations(division):
                    for edges in itertools.combinations(cuts, len(groups) - 1):
                        paces = [[speeds[n] for n in group] for group in groups]
                        found.append(make_plan(LAYERS, edges, None, groups, paces))
    return found


CASES = [
    *((schedule, 8, seed) for schedule in ("1f1b-async", "1f1b") for seed in range(6)),
    *(
        (schedule, count, seed)
        for schedule in ("1f1b", "1f1b-delayed", "zero-bubble")
        for count in (2, 3)
        for seed in range(8)
    ),
]


@pytest.mark.parametrize(("schedule", "micro_batches", "seed"), CASES)
def test_against_all_plans(schedule: str, micro_batches: int, seed: int) -> None:
    """Three devices, cuts at four places: nothing that can be simulated is much faster than what is found. With fewer
    micro-batches than devices a pipeline is never full, so that the slowest stage is not what decides."""
    rng = np.random.default_rng(seed)
    speeds = rng.choice([1.0, 1.0, 2.0, 4.0], 3).tolist()
    layers = rng.uniform(0.1, 3, LAYERS)
    possible = [2, 5, 6, 9]
    fleet = uneven(*speeds, layers=layers.tolist(), rate=float(rng.choice([1e6, 1e9])))
    wanted = job(ON, f"pipeline.schedule={schedule}", f"train.micro_batches={micro_batches}")
    best: Estimate | None = None
    for plan in every_plan(3, possible, speeds):
        one = estimate(fleet, wanted, plan)
        best = one if best is None or one.step < best.step else best
    assert best is not None
    found = plan_for(fleet, wanted)
    assert found.step <= 1.06 * best.step, (found.plan, best.plan)


def test_a_lost_member_leaves_its_micro_batches_to_the_others() -> None:
    fleet = uneven(1, 1, 1, layers=[0.5] * 6 + [6.0] + [0.5] * 5)
    plan = make_plan(LAYERS, [9], None, [(0, 1, 2), (3,)], [[1.0, 1.0, 2.0], [1.0]])
    four = cluster(1, 1, 1, 1)
    left = plan_after_loss(job(ON), plan, None, [0, 2, 3])
    assert [(stage.start, stage.stop, stage.ranks, stage.paces) for stage in left.stages] == [
        (0, 9, (0, 1), (1.0, 2.0)), (9, 12, (2,), ())
    ]  # fmt: skip
    known = plan_after_loss(job(ON), make_plan(LAYERS, [9], None, [(0, 1, 2), (3,)]), four.only([0, 1, 3]), [0, 1, 3])
    assert [stage.start for stage in known.stages] == [0, 9]
    assert known.stages[0].ranks == (0, 1)
    # A stage that is lost as a whole goes to a neighbour.
    gone = plan_after_loss(job(ON), plan, None, [0, 1, 2])
    assert [(stage.start, stage.stop, stage.ranks) for stage in gone.stages] == [(0, 12, (0, 1, 2))]
    assert fleet.devices


def test_a_slower_member_gets_fewer_micro_batches() -> None:
    plan = make_plan(LAYERS, [9], None, [(0, 1), (2,)])
    dealt = redealt(plan, {0: 3.0, 1: 1.0, 2: 1.0})
    assert dealt.stages[0].paces == (3.0, 1.0)
    assert dealt.stages[1] == plan.stages[1]


def test_forecasts_of_groups_by_hand() -> None:
    """A stage of two beside one as fast as both: 8 micro-batches in 8 x 18 ms, and the sum of gradients on the link."""
    fleet = cluster(1, 1, 1)
    plan = make_plan(LAYERS, [8], None, [(0, 1), (2,)])
    found = estimate(fleet, job(ON), plan)
    assert found.step == pytest.approx(8 * 12e-3, rel=0.02)  # two share 8 layers, one has 4: 24 and 12 ms
    assert found.busy == pytest.approx([1, 1, 1], abs=0.03)
    summed = job(ON, "pipeline.schedule=1f1b", "pipeline.gradients=none")
    synchronous = estimate(cluster(1, 1, rate=1e6), summed, make_plan(LAYERS, [], None, [(0, 1)]))
    gradients = 4 * LAYERS * (64 * 64 + 64)
    summing = 2 * (gradients / 2 / 1e6)  # which begins when half of the layers have gone back
    assert synchronous.step == pytest.approx(4 * 36e-3 + summing - 12e-3, rel=0.02)


@pytest.mark.parametrize("schedule", ["1f1b", "1f1b-async", "gpipe"])
def test_exact_sums_take_the_link_where_no_message_does(schedule: str) -> None:
    """Two ranks with the whole model: each sends half of the gradients after each of its 4 micro-batches, and half of the
    sum."""
    gradients = 4 * LAYERS * (64 * 64 + 64)
    asked, plan = job(ON, f"pipeline.schedule={schedule}"), make_plan(LAYERS, [], None, [(0, 1)])
    slow, fast = (estimate(cluster(1, 1, rate=rate), asked, plan).step for rate in (1e6, 1e9))
    # Computed before anything is sent: half of the layers have gone back.
    first = {"1f1b": 24e-3, "1f1b-async": 24e-3, "gpipe": 4 * 12e-3 + 12e-3}[schedule]
    assert slow == pytest.approx(first + 5 * gradients / 2 / 1e6, rel=0.02)
    assert fast == pytest.approx(4 * 36e-3, rel=0.15)


@pytest.mark.parametrize("sums", ["exact", "none"])
@pytest.mark.parametrize("schedule", ["1f1b", "1f1b-async"])
def test_the_search_charges_no_more_than_is_simulated(schedule: str, sums: str) -> None:
    """By more than 2 %, where sums decide, too: else plans are given up that would have been the best."""
    asked = job(ON, f"pipeline.schedule={schedule}", f"pipeline.gradients={sums}", "pipeline.transfer_slack=2")
    for rate, speeds in itertools.product((1e5, 1e6, 4e6, 1e9), ((1, 1, 1, 1), (1, 3, 1, 2))):
        fleet = uneven(*speeds, layers=_LUMPY, rate=rate)
        problem = problem_of(fleet, asked)
        maker = GroupProblems(fleet, asked, [problem], sums)
        for division, edges in ((((0, 1),), ()), (((0, 1, 2),), ()), (((0, 1), (2, 3)), (6,)), (((0, 1, 2), (3,)), (8,))):
            solution = Solution(tuple(range(len(division))), (0, *edges, LAYERS), (0,) * len(edges))
            promised = cost(maker.problem(division, 0), solution).bottleneck * 8
            assert promised <= 1.02 * estimate(fleet, asked, maker.plan(division, solution)).step, (rate, speeds, division)


@pytest.mark.parametrize("sums", ["none", "bf16"])
def test_a_sum_between_steps_takes_the_links_once(sums: str) -> None:
    """Synchronously the gradients' sums of a step are sent while no micro-batch is under way: they make a step as much
    longer as they take, and the micro-batches' messages no slower."""
    keys = ("cuts=[6]", "ranks=[[0, 1], [2, 3]]", "schedule=1f1b", f"gradients={sums}", "forward=none", "backward=none")
    asked = job(*(f"pipeline.{key}" for key in keys), "pipeline.groups=true")
    profile = cluster(1.0, 1.0, 1.0, 1.0, rate=1e6, of=asked)

    def step(nbytes: int) -> float:
        layers = tuple(msgspec.structs.replace(one, parameter_bytes=nbytes) for one in profile.outline.layers)
        of = msgspec.structs.replace(profile, outline=msgspec.structs.replace(profile.outline, layers=layers))
        return estimate(of, asked, plan_from_job(asked, LAYERS, 4, lambda: ())).step

    nbytes = 40_000
    there_and_back = 2 * 1e-6 * 6 * nbytes / 2 * (0.5 if sums == "bf16" else 1.0)  # of half a stage's gradients
    assert step(nbytes) - step(0) == pytest.approx(there_and_back, rel=0.1)


def test_of_many_divisions_only_promising_ones_are_cut_at_all_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """200 layers on eight unlike devices took a minute and more; what is found takes hardly longer."""
    fleet = uneven(1, 1.3, 1.7, 2.2, layers=[0.5] * 6 + [6.0] + [0.5] * 5)
    whole = plan_for(fleet, job(ON))
    assert whole.plan.hybrid
    sizes: list[int] = []

    def improve(problem: Problem, most: float, close: float) -> Solution | None:
        sizes.append(problem.layers)
        return original(problem, most, close)

    original = groups_of.improve
    monkeypatch.setattr(groups_of, "improve", improve)
    for name, few in (("_MUCH", 1000), ("_COARSE", 8), ("_MOST_PROMISING", 3)):
        monkeypatch.setattr(groups_of, name, few)
    found = plan_for(fleet, job(ON))
    assert found.expected <= 1.03 * whole.expected
    assert sizes.count(LAYERS) <= 2 * 3  # at both loads of the links
    assert len(sizes) > 2 * 10
    assert set(sizes) - {LAYERS} <= set(range(4, 9))


@pytest.mark.parametrize("whole", [True, False])
def test_micro_batches_go_to_whoever_ends_them_first(whole: bool) -> None:
    """Many at once, which ends as when they are dealt one after the other."""
    rng = np.random.default_rng(5)
    for _ in range(50):
        runs = rng.integers(1, 5, (int(rng.integers(2, 8)), 20)).astype(float)  # many end at the same time
        runs = runs if whole else runs * rng.uniform(0.9, 1.1, runs.shape)
        dealt = int(rng.integers(1, 70))
        ends = np.zeros_like(runs)
        for _ in range(dealt):
            member = (ends + runs).argmin(axis=0)
            ends[member, np.arange(20)] += runs[member, np.arange(20)]
        np.testing.assert_allclose(group_problem._ends(runs, dealt), ends, rtol=1e-9)
    assert not group_problem._ends(np.zeros((2, 1)), 3).any()


def test_candidates_are_compared_roughly_before_codecs_are_chosen() -> None:
    """With the codecs that take least time each, a step takes no longer than with the milder ones that an estimate
    chooses, and at most ``TOLERANCE`` less; what does not fit is no candidate."""
    asked = job(ON, "pipeline.forward=auto", "pipeline.backward=auto")
    for rate in (1e5, 1e6, 1e7):
        fleet = cluster(1, 2, 1, rate=rate, of=asked)
        plan = make_plan(LAYERS, [6], ranks=[[0, 1], 2])
        rough, chosen = roughly(fleet, asked, plan), estimate(fleet, asked, plan).expected
        assert rough <= chosen * (1 + 1e-9)
        assert chosen <= 1.03 * rough
        assert roughly(fleet.within([1e3, 1e9, 1e9]), asked, plan) == math.inf

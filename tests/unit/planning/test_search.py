"""The partitioner against trying everything, on random small problems; bounds and times on large ones are benchmarks."""

import itertools
import warnings
from dataclasses import replace

import numpy as np
import pytest

from accept_mpi.planning import search
from accept_mpi.planning.balance import balance
from accept_mpi.planning.problem import Cost, NoPlan, Problem, Solution, cost, few_edges, lower_bound
from accept_mpi.planning.search import solve

INSTANCES = 2000


def random_problem(rng: np.random.Generator, devices: int, layers: int, codecs: int) -> Problem:
    """Unequal devices, slow links, codecs that cost time, memory that does not always suffice."""
    seconds = rng.uniform(0.2, 2.0, layers) * rng.choice([0.5, 1, 1, 3], devices)[:, None]
    seconds *= rng.uniform(0.8, 1.25, (devices, layers))
    extra = None
    if rng.random() < 0.3:  # what a run takes beyond its sum grows with its length
        length = np.arange(layers + 1)
        extra = rng.uniform(0, 0.2, devices)[:, None, None] * np.maximum(0, length[None, None, :] - length[None, :, None])
    values = np.concatenate([[0], rng.integers(1, 8, layers - 1) * 100, [0]]).astype(float)
    kept = np.arange(1.0, devices + 1) if rng.random() < 0.5 else np.ones(devices)
    uncuttable = frozenset(np.flatnonzero(rng.random(layers) < 0.4)[1:].tolist()) if rng.random() < 0.3 else frozenset()
    return Problem(
        layer_seconds=seconds,
        extra_seconds=extra,
        values=values,
        other=np.concatenate([[0], rng.choice([0.0, 64.0], layers - 1), [0]]),
        rate=rng.choice([300.0, 1000.0, 4000.0], (devices, devices)),
        host_link=rng.choice([600.0, 2000.0, np.inf], devices),
        codecs=("a", "b", "c")[:codecs],
        bytes_per_value=np.array([4.0, 1.0, 0.5])[:codecs],
        messages=values[:, None] * rng.uniform(0, 4e-4, (devices, 1, codecs)) * (np.arange(codecs) > 0)
        + rng.choice([0.0, 0.1], (devices, 1, 1)),
        state=rng.uniform(0, 4e3, layers),
        saved_bytes=rng.uniform(0, 2e3, layers),
        capacity=rng.choice([4e3, 8e3, 16e3, 1e9], devices),
        in_flight=kept,
        state_copies=kept if rng.random() < 0.3 else np.ones(devices),
        micro_batches=float(rng.integers(1, 9)),
        fixed=rng.uniform(0, 2e3, layers) if rng.random() < 0.3 else None,
        least=rng.uniform(0, 6e3, layers) if rng.random() < 0.3 else None,
        fill=float(rng.choice([0.0, 0.0, 1.0])),
        uncuttable=uncuttable,
    )


def everything(problem: Problem, ordered: bool = False) -> list[Solution]:
    """All plans: which devices, in which order, cut where, with which codecs."""
    found = []
    for count in range(1, min(problem.devices, problem.layers) + 1):
        orders = itertools.combinations if ordered else itertools.permutations
        for devices in orders(range(problem.devices), count):
            for cuts in itertools.combinations(range(1, problem.layers), count - 1):
                for codecs in itertools.product(range(len(problem.codecs)), repeat=count - 1):
                    found.append(Solution(devices, (0, *cuts, problem.layers), codecs))
    return found


def least(problem: Problem, ordered: bool = False) -> float | None:
    costs = (cost(problem, plan) for plan in everything(problem, ordered))
    return min((c.step if problem.fill else c.bottleneck for c in costs if c.fits), default=None)


def test_equals_trying_everything() -> None:
    """Any order and subset for asynchronous schedules; the given order, where filling counts, too."""
    rng = np.random.default_rng(1)
    none, idle, coded, kept = 0, 0, 0, 0
    for number in range(INSTANCES):
        devices = int(rng.integers(1, 5 if number % 10 == 0 else 4))
        problem = random_problem(rng, devices, int(rng.integers(2, 6)), int(rng.integers(1, 3 if devices < 4 else 2)))
        ordered = bool(problem.fill) or bool(rng.random() < 0.2)
        expected = least(problem, ordered)
        if expected is None:
            none += 1
            with pytest.raises(NoPlan, match="MiB"):
                solve(problem, ordered)
            continue
        plan = solve(problem, ordered)
        found = cost(problem, plan)
        assert found.fits, (number, plan)
        assert (found.step if problem.fill else found.bottleneck) == pytest.approx(expected, rel=1e-6), (number, plan)
        assert found.bottleneck >= lower_bound(problem) * (1 - 1e-9)
        idle += len(plan.devices) < problem.devices
        coded += any(plan.codecs)
        if problem.uncuttable:
            kept += not problem.uncuttable.isdisjoint(solve(replace(problem, uncuttable=frozenset()), ordered).edges)
    seen = (none / 50, idle / 200, coded / 200, kept / 30)
    assert min(seen) > 1, "the instances exercise memory, idle devices, codecs and layers that stay together"


def test_a_synchronous_search_begins_near_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans with caps far above the least bottleneck are most of the work, and none of them can be best."""
    caps: list[float] = []
    below = search._Exact.below

    def counted(find: search._Exact, cap: float, fill: float = 0.0, most: float = np.inf) -> Solution | None:
        caps.extend([cap] if fill else [])
        return below(find, cap, fill, most)

    problem = replace(
        random_problem(np.random.default_rng(11), 4, 40, 3), fill=1.0, micro_batches=8.0, capacity=np.ones(4) * 1e9
    )
    monkeypatch.setattr(search._Exact, "below", counted)
    best = cost(problem, solve(problem, True))
    assert max(caps) < 2 * best.bottleneck


def test_a_long_synchronous_search_ends_near_the_shortest_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """It tried one bottleneck after the other, each a billionth lower: minutes for 24 devices, 200 layers and all codecs."""
    rng = np.random.default_rng(5)
    below, sweeps = search._Exact.below, []

    def counted(find: search._Exact, cap: float, fill: float = 0.0, most: float = np.inf) -> Solution | None:
        sweeps.append(fill)
        return below(find, cap, fill, most)

    monkeypatch.setattr(search._Exact, "below", counted)
    for _ in range(20):
        free = {"capacity": np.ones(5) * 1e9, "extra_seconds": None, "uncuttable": frozenset()}
        problem = replace(random_problem(rng, 5, 60, 3), fill=1.0, micro_batches=20.0, **free)
        steps, counts = [], []
        for long in (np.inf, 0.0):
            monkeypatch.setattr(search, "_LONG", long)
            sweeps.clear()
            steps.append(cost(problem, solve(problem, True)).step)
            counts.append(np.count_nonzero(sweeps))
        assert steps[0] * (1 - 1e-9) <= steps[1] <= steps[0] * (1 + 2e-3)
        assert counts[1] <= min(20, counts[0])


def test_what_is_not_at_the_bottleneck_is_spread_evenly() -> None:
    """Without links and limits, against trying everything: the least norm of all plans that are as good. With them: never a
    worse bottleneck than allowed, never out of memory."""
    rng = np.random.default_rng(4)
    changed = 0
    for _ in range(150):
        problem = replace(random_problem(rng, 3, 7, 2), fill=0.0, extra_seconds=None)
        problem.layer_seconds[:, 0] *= 5  # which decides alone
        free = replace(problem, values=0 * problem.values, other=0 * problem.other, capacity=np.full(3, 1e9))
        plan = solve(free, True)
        cap = 1.02 * cost(free, plan).bottleneck
        good = [cost(free, p) for p in everything(free, True) if not any(p.codecs)]
        least_norm = min(norm(c) for c in good if c.fits and c.bottleneck <= cap)
        even = balance(free, plan)
        assert norm(cost(free, even)) <= least_norm / 0.97 * (1 + 1e-9)
        assert norm(cost(free, even)) <= norm(cost(free, plan))
        assert cost(free, even).fits
        assert cost(free, even).bottleneck <= cap * (1 + 1e-9)
        changed += even != plan
        try:
            plan = solve(problem, bool(rng.random() < 0.5))
        except NoPlan:
            continue
        reached, whole = cost(problem, balance(problem, plan)), cost(problem, plan)
        assert reached.fits
        assert reached.bottleneck <= 1.0201 * whole.bottleneck
        assert norm(reached) <= norm(whole) * (1 + 1e-9)
    assert changed > 15


def norm(reached: Cost) -> float:
    return sum(seconds**8 for seconds in reached.stages) ** (1 / 8)


def test_the_beam_is_near_the_exact_search(monkeypatch: pytest.MonkeyPatch) -> None:
    from accept_mpi.planning import search

    rng = np.random.default_rng(2)
    ratios = []
    for _ in range(30):
        problem = replace(random_problem(rng, 5, 14, 2), capacity=np.full(5, 1e9), fill=0.0, extra_seconds=None)
        exact = cost(problem, solve(problem)).bottleneck
        monkeypatch.setattr(search, "MOST_EXACT", 1)
        found = cost(problem, solve(problem))
        assert found.fits
        ratios.append(found.bottleneck / exact)
        monkeypatch.undo()
    assert min(ratios) >= 1 - 1e-3
    assert np.mean(ratios) < 1.05, ratios


def test_a_device_far_too_slow_stays_idle() -> None:
    seconds = np.ones((3, 12)) * np.array([[1.0], [100.0], [1.0]])
    free = np.full((3, 3), 1e12)
    problem = Problem(
        layer_seconds=seconds, values=np.full(13, 10.0), other=np.zeros(13), rate=free, host_link=free[0], state=np.ones(12),
        saved_bytes=np.ones(12), capacity=np.full(3, 1e9), in_flight=np.ones(3), state_copies=np.ones(3),
    )  # fmt: skip
    plan = solve(problem)
    assert sorted(plan.devices) == [0, 2]
    assert plan.edges == (0, 6, 12)


def test_says_what_does_not_fit() -> None:
    problem = replace(
        random_problem(np.random.default_rng(3), 2, 4, 1), state=np.array([1, 1, 900, 1]) * 2.0**20,
        capacity=np.full(2, 2.0**28),
    )  # fmt: skip
    with pytest.raises(NoPlan, match=r"layer 2 alone needs 900\.0 MiB and the largest device has 256\.0 MiB"):
        solve(problem)
    many = replace(
        problem, state=np.full(4, 2.0**27), state_copies=np.ones(2), in_flight=np.ones(2), capacity=np.full(2, 1.5 * 2.0**27)
    )
    with pytest.raises(NoPlan, match="no cuts fit"):
        solve(many)


@pytest.mark.timeout(60)
def test_layers_that_take_no_time_end_the_search() -> None:
    """A lower bound of nothing: the bisection never came to an end (a model of two layers, on four ranks, in CI)."""
    rng = np.random.default_rng(2)
    problem = replace(random_problem(rng, 3, 4, 1), fill=0.0)
    free = replace(
        problem, layer_seconds=np.zeros_like(problem.layer_seconds), extra_seconds=None, messages=None,
        capacity=np.full(3, 1e18),
    )  # fmt: skip
    assert cost(free, solve(free)).fits
    silent = replace(free, values=np.zeros(5), other=np.zeros(5))
    assert cost(silent, solve(silent)).bottleneck == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert balance(silent, solve(silent)) == solve(silent)


def test_a_missing_time_is_refused() -> None:
    problem = random_problem(np.random.default_rng(0), 3, 5, 1)
    problem.layer_seconds[0, 1] = np.nan
    with pytest.raises(ValueError, match="layer_seconds"):
        solve(problem)


def test_a_stage_holds_what_it_received() -> None:
    problem = Problem(
        layer_seconds=np.ones((2, 2)), values=np.array([0.0, 100.0, 0.0]), other=np.array([8.0, 8.0, 0.0]),
        rate=np.full((2, 2), 1e9), host_link=np.full(2, 1e9), state=np.zeros(2), saved_bytes=np.zeros(2),
        capacity=np.array([0.0, 408.0]), in_flight=np.ones(2), state_copies=np.ones(2),
    )  # fmt: skip
    assert cost(problem, Solution((0, 1), (0, 1, 2), (0,))).fits
    assert not cost(replace(problem, capacity=np.array([0.0, 407.0])), Solution((0, 1), (0, 1, 2), (0,))).fits
    assert solve(problem).edges == (0, 1, 2)


def test_layers_that_stay_together_cost_what_they_cost_apart() -> None:
    """A coarse problem is the same one with fewer places to cut."""
    rng = np.random.default_rng(7)
    for _ in range(200):
        layers = int(rng.integers(3, 12))
        fine = random_problem(rng, 4, layers, 3)
        inside = np.flatnonzero(rng.random(layers) < 0.6)[1:]
        edges = [0, *sorted({int(edge) for edge in inside} - {0}), layers]
        coarse = fine.coarse(edges)
        count = int(rng.integers(1, min(4, len(edges) - 1) + 1))
        cuts = sorted(rng.choice(np.arange(1, len(edges) - 1), count - 1, replace=False).tolist())
        devices, codecs = tuple(rng.permutation(4)[:count].tolist()), tuple(rng.integers(0, 3, count - 1).tolist())
        mine = Solution(devices, (0, *cuts, len(edges) - 1), codecs)
        same = Solution(devices, tuple(edges[cut] for cut in mine.edges), codecs)
        there, here = cost(coarse, mine), cost(fine, same)
        assert there.fits == here.fits
        assert (there.step, *there.stages, *there.links) == pytest.approx((here.step, *here.stages, *here.links))


def test_few_edges_are_where_least_crosses() -> None:
    problem = random_problem(np.random.default_rng(3), 3, 40, 1)
    narrow = [3, 8, 13, 18, 23, 28, 33, 38]  # between blocks, as in a transformer
    values = np.where(np.isin(np.arange(41), narrow), 10.0, 1000.0)
    even = replace(problem, layer_seconds=np.ones((3, 40)), values=values, other=np.zeros(41), uncuttable=frozenset())
    assert few_edges(even, 8) == [0, 3, 8, 13, 18, 23, 33, 38, 40]  # one for each seventh of the work
    kept = few_edges(replace(even, uncuttable=frozenset({8, 18})), 8)
    assert len(kept) == 9
    assert not {8, 18} & set(kept)
    assert len(few_edges(replace(even, uncuttable=frozenset(range(1, 40))), 8)) == 2


def test_codecs_that_others_beat_are_left_out() -> None:
    """No cost of a best plan changes by it."""
    rng = np.random.default_rng(3)
    fewer = 0
    for number in range(200):
        problem = random_problem(rng, int(rng.integers(1, 4)), int(rng.integers(2, 6)), 3)
        useful = problem.with_useful_codecs()
        assert useful.bytes_per_value[-1] == 0.5  # the fewest bytes
        assert [float(size) for size in useful.bytes_per_value] == [[4.0, 1.0, 0.5]["abc".index(c)] for c in useful.codecs]
        fewer += len(useful.codecs) < 3
        expected = least(problem, True)
        if expected is not None:
            found = cost(useful, solve(useful, True))
            assert (found.step if problem.fill else found.bottleneck) == pytest.approx(expected, rel=1e-6), number
        assert len(replace(problem, messages=None).with_useful_codecs().codecs) == 1
    assert fewer > 20


def test_room_for_all_layers_is_room_for_every_plan() -> None:
    """Whatever the devices and cuts; and a problem with a little less of it has a plan that does not fit."""
    rng = np.random.default_rng(4)
    for _ in range(100):
        problem = replace(random_problem(rng, 3, 4, 1), uncuttable=frozenset())
        room = 1e3
        while not (roomy := replace(problem, capacity=np.full(3, room))).is_roomy:
            room *= 1.05
        assert all(cost(roomy, plan).fits for plan in everything(roomy))
        assert not replace(roomy, capacity=np.array([room, room, room / 1.06])).is_roomy

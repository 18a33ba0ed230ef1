"""The closed forms of forward beside backward, against grid search, brute force and the simulator."""

import itertools

import numpy as np
import pytest

from accept_mpi.pipeline.beside import beside
from accept_mpi.pipeline.schedule import actions
from accept_mpi.pipeline.simulator import simulate
from accept_mpi.planning.lane_model import (
    Pipeline,
    beside_gain,
    beside_seconds,
    best_share,
    exponent_of,
    in_turn_seconds,
    lanes_gain,
    partition,
    unlike_units,
)

CASES = [
    Pipeline(f, b, stages, micro_batches, c)
    for f, b, stages, micro_batches, c in itertools.product((0.5, 1.0), (0.7, 2.0), (1, 2, 5), (1, 4, 32), (0.0, 0.4))
]


@pytest.mark.parametrize("of", CASES, ids=str)
def test_best_share_is_the_least_of_a_grid(of: Pipeline) -> None:
    least = min(beside_seconds(of, float(r)) for r in np.linspace(0.005, 0.995, 397))
    assert beside_seconds(of, best_share(of)) <= least * (1 + 1e-9)
    assert beside_seconds(of, best_share(of)) >= least * 0.99


@pytest.mark.parametrize("of", CASES, ids=str)
def test_simulator_and_closed_form_agree(of: Pipeline) -> None:
    for share, g in ((best_share(of), 1.0), (0.4, 0.8)):
        wide = [of.micro_batches] * of.stages  # nothing bounds what is in flight
        walks = [actions("1f1b", s, of.stages, [of.micro_batches], widths=wide) for s in range(of.stages)]
        apart = beside(walks)
        took = {"F": of.forward * share**-g, "B": of.backward * (1 - share) ** -g, "U": 0.0}
        run = simulate(
            apart.walks, lambda _, a, took=took: took[a.kind], lambda *_: of.transfer, stages=apart.stages, needs=apart.needs
        )
        assert run.makespan == pytest.approx(beside_seconds(of, share, g), rel=1e-9)
    walks = [actions("1f1b", s, of.stages, [of.micro_batches], slack=2) for s in range(of.stages)]
    turns = simulate(walks, lambda _, a: {"F": of.forward, "B": of.backward, "U": 0.0}[a.kind], lambda *_: of.transfer)
    assert turns.makespan <= in_turn_seconds(of) * (1 + 1e-9)


def test_a_separable_resource_gains_nothing_and_others_gain_more_from_equal_lanes() -> None:
    assert beside_gain(1, 2, 1.0) == pytest.approx(1)
    assert lanes_gain(2, 1.0) == 1
    for g in (0.9, 0.8, 0.7):
        best = max(3 / max(r**-g, 2 * (1 - r) ** -g) for r in np.linspace(0.01, 0.99, 981))
        assert beside_gain(1, 2, g) == pytest.approx(best, rel=2e-3)
        assert 1 < beside_gain(1, 2, g) < lanes_gain(2, g)
        assert exponent_of(4, 1 / lanes_gain(4, g)) == pytest.approx(g)


def test_what_beside_gains_where_a_pass_gains_nothing_from_more() -> None:
    """An exponent near 0 is what small layers measure; times to its inverse's power are too small for a float."""
    assert beside_gain(1e-4, 2e-4, 1.0) == pytest.approx(1.0)
    for exponent in (0.01, 1e-9, 0.0, -0.3):
        assert beside_gain(1e-4, 2e-4, exponent) == pytest.approx(1.5, rel=0.01)
        assert beside_gain(0.0, 2e-4, exponent) == 1.0
        assert beside_gain(0.0, 0.0, exponent) == 1.0
    assert 0 < best_share(Pipeline(0.0, 0.0, 1, 1)) < 1


def test_partition_equals_brute_force() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        devices, layers, most = int(rng.integers(1, 4)), int(rng.integers(4, 8)), 4
        units = rng.integers(2, most + 1, devices)
        times = np.full((2, devices, most + 1, layers), np.inf)
        for n, count in enumerate(units):
            for u in range(1, count + 1):
                times[:, n, u] = rng.uniform(0.5, 2, (2, layers)) / u
        transfer = rng.uniform(0, 3, layers)
        found = partition(*times, transfer)
        best = np.inf
        for cuts in itertools.combinations(range(1, layers), devices - 1):
            edges = (0, *cuts, layers)
            sides = [
                min(max(times[0, n, u, a:b].sum(), times[1, n, units[n] - u, a:b].sum()) for u in range(1, units[n]))
                for n, (a, b) in enumerate(itertools.pairwise(edges))
            ]
            best = min(best, max([*sides, *(transfer[cut] for cut in cuts)]))
        assert found.bottleneck == pytest.approx(best)
        assert (found.edges[0], found.edges[-1], len(found.units)) == (0, layers, devices)


def test_units_of_unlike_kinds() -> None:
    alike = unlike_units((1.0, 1.0), (2.0, 2.0))
    assert (alike.seconds, alike.forwards) == (1.5, ())
    made_for_forward = unlike_units((1.0, 0.125), (2.0, 1e6))
    assert made_for_forward.forwards == (1,)
    assert made_for_forward.seconds == pytest.approx(2.0)
    rng = np.random.default_rng(1)
    for _ in range(20):
        forward, backward = rng.uniform(0.2, 3, (2, 4))
        options = [1 / (1 / forward).sum() + 1 / (1 / backward).sum()]
        for some in itertools.chain(*(itertools.combinations(range(4), k) for k in (1, 2, 3))):
            rest = [n for n in range(4) if n not in some]
            options.append(max(1 / (1 / forward[list(some)]).sum(), 1 / (1 / backward[rest]).sum()))
        assert unlike_units(forward, backward).seconds == pytest.approx(min(options))

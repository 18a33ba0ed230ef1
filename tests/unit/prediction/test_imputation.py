"""What a device has not measured: guessed from operations, from others in proportion, or predicted from what was learned."""

import math

import msgspec
import numpy as np
import pytest
import torch
from test_layer_timer import job, mobile
from test_predictor import device
from test_predictor import model as made_up
from torch import nn

from accept_mpi.models import as_chain
from accept_mpi.models.losses import find_loss
from accept_mpi.prediction.imputation import impute, learned
from accept_mpi.prediction.predictor import Predictor
from accept_mpi.prediction.samples import DeviceSamples
from accept_mpi.profiling.layer_timer import Subject, time_layers
from accept_mpi.profiling.layer_times import LayerTimes, nothing_measured
from accept_mpi.profiling.outline import outline

cross_entropy = find_loss("cross_entropy")


def test_a_budget_that_ends_early_leaves_the_rest_to_a_guess() -> None:
    chain, model, inputs = mobile()
    few = time_layers(Subject(chain, model, job(), cross_entropy, (inputs,), torch.zeros(4, dtype=torch.int64)), 1e-6)
    assert few.measured[0]
    assert not few.measured[-1]
    forward, backward, _, _ = impute([few], model)
    assert np.isfinite(forward).all()
    assert (backward > 0).mean() > 0.9


def test_a_device_without_data_guesses_the_first_layers_from_the_others() -> None:
    chain, model, inputs = mobile()
    target = torch.zeros(4, dtype=torch.int64)
    whole = time_layers(Subject(chain, model, job(), cross_entropy, (inputs,), target), 2.0)
    without = time_layers(Subject(chain, model, job(), cross_entropy, (), None), 2.0)
    assert not without.measured[0]
    forward, *_ = impute([whole, without], model)
    assert forward[1][0] > 0


def times_of(values: list[float]) -> LayerTimes:
    row = tuple(values)
    return LayerTimes(row, tuple(2 * v for v in row), tuple(0 * v for v in row), tuple(0 * v for v in row), 1.0, (), 1.0)


def test_gaps_are_filled_in_proportion() -> None:
    """A device four times as slow on what both have measured is taken to be so on the rest."""
    chain = as_chain(nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)]))
    model = outline(chain, 0, (torch.zeros(5, 4),))
    forward, backward, _, _ = impute([times_of([1.0, 2.0, 3.0]), times_of([4.0, math.nan, math.nan])], model)
    assert forward[1].tolist() == pytest.approx([4, 8, 12])
    assert backward[1] == pytest.approx(2 * forward[1])


def test_a_device_that_was_not_asked_is_as_fast_as_the_others() -> None:
    chain = as_chain(nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)]))
    model = outline(chain, 0, (torch.zeros(5, 4),))
    forward, backward, _, _ = impute([times_of([1.0, 2.0, 3.0]), nothing_measured(model)], model)
    assert forward[1].tolist() == pytest.approx([1, 2, 3])
    assert backward[1].tolist() == pytest.approx([2, 4, 6])


def layer_times(seed: int, probed: list[int]) -> LayerTimes:
    """A made-up device that has measured some of its ten pieces."""
    known, layers = device(seed, made_up())
    rows = np.full((2, len(layers)), np.nan)
    for a, b in known.probes[probed]:
        rows[:, a:b] = layers[a:b].T
    runs = tuple((int(a), int(b), *layers[a:b].sum(axis=0).tolist()) for a, b in known.probes[sorted(probed)])
    forward, backward = (tuple(row.tolist()) for row in rows)
    return LayerTimes(forward, backward, tuple(v / 2 for v in backward), forward, 1.0, runs, 1.0)


def test_gaps_are_predicted_from_what_was_learned() -> None:
    """Three probes of ten; how far it is ahead of a capacity ratio on real devices is the predictor experiment's to say."""
    predictor = learned([device(seed, made_up())[0] for seed in range(10)], None)
    errors = []
    for seed in range(100, 106):
        truth = device(seed, made_up())[1].sum(axis=1)
        times = [layer_times(50, list(range(10))), layer_times(seed, [0, 3, 7])]
        filled, proportional = impute(times, made_up(), predictor), impute(times, made_up())
        assert np.isfinite(filled).all()
        assert not np.array_equal(filled[:, 1], proportional[:, 1])
        assert np.array_equal(filled[:, 0], proportional[:, 0])
        assert filled[0, 1, 0] == times[1].forward[0]  # what was measured stays
        assert filled[2, 1] == pytest.approx(filled[1, 1] / 2)
        took, wanted = (np.convolve(x, np.ones(6), "valid") for x in (filled[0, 1] + filled[1, 1], truth))
        errors.append(np.abs(took / wanted - 1).mean())
    assert np.mean(errors) < 0.08


def test_a_device_that_measured_nothing_is_not_predicted() -> None:
    predictor = Predictor.train([device(0, made_up())[0]], steps=2)
    none = msgspec.structs.replace(layer_times(1, []), pieces=())
    times = [layer_times(0, list(range(10))), none]
    assert np.isfinite(impute(times, made_up(), predictor)).all()


def test_a_stored_predictor_learns_only_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, other = device(0, made_up())[0], device(1, made_up())[0], device(0, made_up(1))[0]
    assert learned([], None) is None
    predictor = learned([first], None)
    assert predictor is not None
    adapted = []

    def adapt(self: Predictor, *fresh: DeviceSamples, seconds: float) -> Predictor:
        adapted.append([known.device for known in fresh])
        return self

    monkeypatch.setattr(Predictor, "adapt", adapt)
    assert learned([first], predictor) is predictor
    assert adapted == []
    third = device(2, made_up())[0]
    learned([first, second, third], predictor)
    assert adapted == [[second.device, third.device]]  # at once: each alone takes as long
    again = learned([first, other], predictor)
    assert again is not predictor
    assert again is not None
    assert again.models == {first.model, other.model}


def test_devices_are_probed_where_the_networks_doubt() -> None:
    data = [device(seed, made_up())[0] for seed in range(3)]
    predictor = Predictor.train(data, steps=20)
    assert sorted(predictor.order(made_up(), data[0].probes)) == list(range(10))
    assert predictor.order(made_up(1), data[0].probes) == []
    assert predictor.order(made_up(), data[0].probes[:5]) == []

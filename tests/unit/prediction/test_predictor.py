"""The latency predictor on made-up devices: arithmetic and memory speeds of their own, and a taste for some layers."""

import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from conftest import ROOT
from torch import nn

from accept_mpi.models import as_chain
from accept_mpi.prediction.accept_network import DualStream, train_dual_stream
from accept_mpi.prediction.predictor import Predictor
from accept_mpi.prediction.samples import DeviceSamples, membership
from accept_mpi.profiling.outline import Outline, outline

sys.path.insert(0, str(ROOT / "jobs"))
from harness.baselines import by_capacity, by_layers, by_nearest, by_operations

STEPS = 120


def model(kind: int = 0) -> Outline:
    """Alternating layers, wide and narrow."""
    widths = [[16, 256, 64, 512, 32], [128, 32, 384, 48, 96]][kind]
    layers: list[nn.Module] = []
    before = widths[-1]
    for n in range(20):
        width = widths[n % 5]
        layers += [nn.Linear(before, width)] if n % 3 else [nn.Linear(before, width), nn.ReLU()]
        before = width
    return outline(as_chain(layers), 0, (torch.zeros(64, widths[-1]),))


def device(seed: int, of: Outline) -> tuple[DeviceSamples, np.ndarray]:
    """What a device takes: its operations, its bytes, its calls; layer times (layers, 2) beside it."""
    generator = np.random.default_rng(seed)
    rate, bandwidth, call = np.exp(generator.normal([23, 21.5, -11], [0.8, 0.8, 0.5]))
    forward = np.array([x.operations / rate + (x.saved_bytes + x.parameter_bytes) / bandwidth + call for x in of.layers])
    layers = np.stack([forward, forward * generator.uniform(1.7, 2.3)], axis=1)
    count = len(of.layers)
    edges = np.linspace(0, count, 11).astype(int)
    probes = np.stack([edges[:-1], edges[1:]], axis=1)
    some = np.random.default_rng(5)
    intervals = np.array([sorted(some.choice(count + 1, 2, replace=False)) for _ in range(30)])
    noise = np.exp(generator.normal(0, 0.01, (30, 2)))
    known = DeviceSamples(of, f"device{seed}", probes, membership(probes, count) @ layers, intervals,
                  (membership(intervals, count) @ layers) * noise, layers)  # fmt: skip
    return known, layers


def error(predicted: np.ndarray, known: DeviceSamples) -> float:
    return float(np.abs(predicted.sum(axis=1) / known.times.sum(axis=1) - 1).mean())


@pytest.fixture(scope="module")
def trained() -> tuple[Predictor, list[DeviceSamples]]:
    data = [device(seed, model(kind))[0] for seed in range(10) for kind in (0, 1)]
    return Predictor.train(data, steps=STEPS), data


def test_a_device_never_seen_is_predicted_better_than_by_simpler_ways(
    trained: tuple[Predictor, list[DeviceSamples]],
) -> None:
    predictor, _data = trained
    ours, operations, capacity, nearest = [], [], [], []
    others = [device(seed, model())[0] for seed in range(10)]
    for seed in range(100, 106):
        known, _ = device(seed, model())
        ours.append(error(predictor.predict(known, known.intervals)[0], known))
        operations.append(error(by_operations(known, known.intervals), known))
        capacity.append(error(by_capacity(known, others[0], known.intervals), known))
        nearest.append(error(by_nearest(known, others, known.intervals), known))
    assert np.mean(ours) < 0.05
    assert np.mean(ours) < 0.8 * min(map(np.mean, (operations, capacity, nearest)))


def test_a_model_never_seen(trained: tuple[Predictor, list[DeviceSamples]]) -> None:
    """Trained on one model only, its features carry over to the other."""
    predictor = Predictor.train([device(seed, model(0))[0] for seed in range(10)], steps=STEPS)
    found = [
        error(predictor.predict(known, known.intervals)[0], known) for known, _ in (device(s, model(1)) for s in range(6))
    ]
    assert np.mean(found) < 0.15


def test_probes_are_met_but_for_the_beginning_of_a_sub_model(trained: tuple[Predictor, list[DeviceSamples]]) -> None:
    predictor, _ = trained
    known, _ = device(200, model())
    predicted, _ = predictor.predict(known, known.probes)
    assert np.abs(predicted / known.probe_times - 1).mean() < 0.05


def test_adapting_helps_and_forgets_nothing(trained: tuple[Predictor, list[DeviceSamples]]) -> None:
    """A device whose wide layers are three times as slow as anyone's."""
    predictor, data = trained
    known, layers = device(300, model())
    odd = layers * np.array([[3.0 if x.operations > 1e6 else 1.0] for x in known.outline.layers])
    times = membership(known.intervals, len(odd)) @ odd
    strange = DeviceSamples(
        known.outline, "odd", known.probes, membership(known.probes, len(odd)) @ odd, known.intervals, times
    )
    before = error(predictor.predict(strange, strange.intervals)[0], strange)
    old = np.mean([error(predictor.predict(k, k.intervals)[0], k) for k in data])
    adapted = predictor.adapt(strange)
    assert error(adapted.predict(strange, strange.intervals)[0], strange) < before
    assert np.mean([error(adapted.predict(k, k.intervals)[0], k) for k in data]) < old + 0.01


def test_it_comes_back_from_hdf5(trained: tuple[Predictor, list[DeviceSamples]], tmp_path: Path) -> None:
    predictor, data = trained
    with h5py.File(tmp_path / "x.h5", "w") as file:
        predictor.write(file.create_group("predictor"))
        assert file["predictor/data/00000/errors"].shape == (30, 2)
        again = Predictor.read(file["predictor"])
    for known in data[:3]:
        assert np.array_equal(predictor.predict(known, known.intervals)[0], again.predict(known, known.intervals)[0])


def test_the_sum_of_layers_is_exact_where_layers_add_up() -> None:
    known, _ = device(1, model())
    assert error(by_layers(known, known.intervals), known) < 0.02


def test_two_streams_learn() -> None:
    data = [device(seed, model())[0] for seed in range(4)]
    network = train_dual_stream(data, steps=180)
    fresh = DualStream([data[0].outline.key])

    def loss(one: DualStream) -> float:
        with torch.no_grad():
            return error(one(data[0], data[0].intervals).exp().numpy(), data[0])

    assert loss(network) < 0.3 < loss(fresh)

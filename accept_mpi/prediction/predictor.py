"""Predicts how long any range of layers takes on any device: a dual-stream network that corrects a physical prior.

AccEPT's network (``accept_network``) learns times from nothing. This one (ours) starts from the best known time of every
layer: the device's own measurement within a probe; else a mixture of other devices' times that reproduces this device's
probes; else operations and memory at an average core's rates. One stream sees each layer's features and the origin of its
time, the other the device; joined, they correct the layer's time. The sum over layers is close but not exact: a whole stage
finds less in the caches than a probe of a tenth of the model. A second, smaller network learns that from the range's size
and the device. By construction, probes come out as measured. The spread of several separately trained networks tells how
certain they are. Since only relative errors count, everything is learned in logarithms.
"""

import copy
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

from accept_mpi.files.hdf5 import Damaged, group_in, text_in, values_in
from accept_mpi.prediction.fitting import BETA, descend, mlp, some_of
from accept_mpi.prediction.samples import (
    F64,
    PROBES,
    DeviceSamples,
    Intervals,
    device_vector,
    features,
    guesses,
    interval_features,
    membership,
)
from accept_mpi.profiling.cluster_profile import outline_in
from accept_mpi.profiling.outline import Outline

_WIDTH = 48
_MEMBERS = 4
_STEPS, _RATE = 300, 3e-3
_ADAPT_STEPS, _ADAPT_RATE = 60, 5e-4
_FEWER = (2, 4, 7)  # numbers of probes in training examples that stand for devices with too little time for all
_ORDERED_BY = 4  # newest known devices by which the order of probes for unknown ones is chosen
_MIXING = 200  # multiplicative updates of the mixture's weights
_SAVED = ("probes", "probe_times", "intervals", "times", "own")

Tensor = torch.Tensor


class _Correction(nn.Module):
    """One network of ``Predictor``. Before training it corrects nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = mlp(8 + 3, _WIDTH, _WIDTH)
        self.device = mlp(2 * PROBES, _WIDTH, _WIDTH)
        self.joined = mlp(3 * _WIDTH, _WIDTH, 2)
        self.whole = mlp(8 + _WIDTH, _WIDTH, 2)
        for last in (self.joined[-1], self.whole[-1]):
            nn.init.zeros_(last.weight)  # type: ignore[arg-type]
            nn.init.zeros_(last.bias)  # type: ignore[arg-type]

    def layers(self, view: "_View") -> tuple[Tensor, Tensor]:
        """(layers, 2) seconds of each layer, without the correction for a range's size (``of_runs``), and the device's
        vector."""
        u, v = self.layer(view.layers), self.device(view.device)
        raw = (view.prior + self.joined(torch.cat([u, v.expand_as(u), u * v], dim=1))).exp()
        scale = view.measured / (view.cover @ raw).clamp_min(1e-12) / self.of_runs(view.probes, v)
        # Layers outside all probes are scaled by the geometric mean of the probes' scales.
        reached = view.cover.sum(dim=0)[:, None]
        return raw * (view.cover.T @ scale + (1 - reached) * scale.log().mean(dim=0).exp()), v

    def of_runs(self, runs: Tensor, v: Tensor) -> Tensor:
        """(k, 2) ratios of a range's time to the sum of its layers' times. ``runs``: features of the ranges; ``v``: the
        device's vector."""
        return self.whole(torch.cat([runs, v.expand(len(runs), -1)], dim=1)).exp()

    def forward(self, view: "_View") -> Tensor:
        """(k, 2) seconds of the view's intervals."""
        layers, v = self.layers(view)
        return (view.inside @ layers) * self.of_runs(view.runs, v)


@dataclass(frozen=True)
class _View:
    """A network's inputs for k intervals of one model on one device."""

    layers: Tensor
    """(layers, 8 + 3): features of each layer, and the origin of its prior, one-hot."""
    prior: Tensor
    """(layers, 2) logarithms of seconds."""
    device: Tensor
    """(2 x PROBES,): ``device_vector``."""
    cover: Tensor
    """(probes, layers) binary: the layers of each probe."""
    probes: Tensor
    """(probes, 8): ``interval_features`` of the probes."""
    measured: Tensor
    """(probes, 2) seconds that the probes took."""
    inside: Tensor
    """(k, layers) binary: the layers of each interval."""
    runs: Tensor
    """(k, 8): ``interval_features`` of the intervals."""
    wanted: Tensor | None = None
    """(k, 2) logarithms of the intervals' measured seconds."""


def _view(known: DeviceSamples, others: Sequence[DeviceSamples], intervals: Intervals, times: F64 | None = None) -> _View:
    """Inputs for ``intervals`` on the device of ``known``. ``others``: devices from which its layer times may be mixed;
    ``times``: (k, 2) measured seconds of the intervals, for training."""
    prior, source = _prior(known, others)

    def tensor(array: F64) -> Tensor:
        return torch.tensor(array, dtype=torch.float32)

    return _View(
        layers=tensor(np.concatenate([features(known.outline), np.eye(3)[source]], axis=1)),
        prior=tensor(np.log(prior)),
        device=tensor(device_vector(known)),
        cover=tensor(membership(known.probes, known.layers)),
        probes=tensor(interval_features(known.outline, known.probes)),
        measured=tensor(known.probe_times),
        inside=tensor(membership(intervals, known.layers)),
        runs=tensor(interval_features(known.outline, intervals)),
        wanted=None if times is None else tensor(np.log(times)),
    )


def _prior(known: DeviceSamples, others: Sequence[DeviceSamples]) -> tuple[F64, Intervals]:
    """(layers, 2) seconds, and the (layers,) origin of each: 0 own measurement, 1 other devices, 2 operations and memory."""
    prior, source = guesses(known.outline), np.full(known.layers, 2)
    cover = membership(known.probes, known.layers)
    prior *= known.probe_times.sum() / (cover @ prior).sum()
    tables = [o.own for o in others if o.model == known.model and o.device != known.device and np.isfinite(o.own).all()]
    if tables:
        prior, source = _mixed(known.probe_times, cover, np.array(tables)), np.ones(known.layers, int)
    mine = np.isfinite(known.own).all(axis=1)
    prior[mine], source[mine] = known.own[mine], 0
    return np.maximum(prior, 1e-7), source


def _mixed(measured: F64, cover: F64, tables: F64) -> F64:
    """(layers, 2) seconds: the mixture of devices' layer times (``tables``: (devices, layers, 2)) that best reproduces the
    probes' measured times in relative terms. Non-negative least squares by Lee and Seung's multiplicative updates."""
    parts = np.array([(cover @ table / measured).ravel() for table in tables]).T
    weights = np.full(parts.shape[1], 1 / np.maximum(parts.sum(axis=1).mean(), 1e-12))
    for _ in range(_MIXING):
        weights *= parts.sum(axis=0) / np.maximum(parts.T @ (parts @ weights), 1e-12)
    return np.tensordot(weights, tables, 1)


class Predictor:
    """An ensemble of networks that predict times; their spread tells how certain the prediction is."""

    def __init__(self, members: list[_Correction], memory: Sequence[DeviceSamples]) -> None:
        self._members = members
        self.memory = tuple(memory)
        """Samples that it has learned from."""

    @property
    def models(self) -> set[str]:
        """Keys of the models that it has learned from."""
        return {known.model for known in self.memory}

    @staticmethod
    def train(data: Sequence[DeviceSamples], seed: int = 0, steps: int = _STEPS, seconds: float = math.inf) -> "Predictor":
        """Train a predictor on ``data``, for at most ``steps`` per network and ``seconds`` in total."""
        until = time.monotonic() + seconds
        members = []
        views = _lessons(data, data, seed)
        for member in range(_MEMBERS):
            torch.manual_seed(1000 * seed + member)
            network = _Correction()
            generator = torch.Generator().manual_seed(1000 * seed + member)
            _fit(network, views, steps, _RATE, generator, (), _share(until, _MEMBERS - member))
            members.append(network)
        return Predictor(members, data)

    @torch.no_grad()
    def predict(self, known: DeviceSamples, intervals: Intervals) -> tuple[F64, F64]:
        """(k, 2) seconds forward and backward of k intervals on the device of ``known``, and (k, 2) the networks' spread
        relative to them."""
        view = _view(known, self.memory, intervals)
        return _together([network(view) for network in self._members])

    @torch.no_grad()
    def layers(self, known: DeviceSamples, stages: int = PROBES) -> tuple[F64, F64]:
        """(layers, 2) seconds forward and backward of every layer in a pipeline of about ``stages`` stages, and (layers, 2)
        the networks' spread relative to them."""
        work = guesses(known.outline)[:, 0]
        ends = work.cumsum() / work.sum()
        around = np.array([np.searchsorted(ends, (e - 0.5 / stages, e + 0.5 / stages)) for e in ends])
        around[:, 1] = np.minimum(around[:, 1] + 1, known.layers)
        view = _view(known, self.memory, around)
        each = []
        for network in self._members:
            layers, v = network.layers(view)
            each.append(layers * network.of_runs(view.runs, v))
        return _together(each)

    def order(self, outline: Outline, candidates: Intervals) -> list[int]:
        """The order in which an unknown device should measure the candidates, as indices.

        Each next one is where the networks would be least certain of known devices, given the ones before. Empty if no known
        device has measured exactly these candidates of this model.
        """
        known = [k for k in self.memory if k.model == outline.key and np.array_equal(k.probes, candidates)][-_ORDERED_BY:]
        if not known:
            return []
        chosen = [int(np.sum([k.probe_times for k in known], axis=(0, 2)).argmax())]
        while len(chosen) < len(candidates):
            left = np.array([k for k in range(len(candidates)) if k not in chosen])
            doubt = sum(self._doubt(k.only(chosen), k.probes[left]) / k.probe_times.sum() for k in known)
            chosen.append(int(left[np.argmax(doubt)]))
        return chosen

    def _doubt(self, known: DeviceSamples, candidates: Intervals) -> F64:
        """(k,) seconds by which the networks differ on each candidate."""
        seconds, spread = self.predict(known, candidates)
        return (seconds * spread).sum(axis=1)

    def adapt(
        self, *fresh: DeviceSamples, seed: int = 0, steps: int = _ADAPT_STEPS, seconds: float = math.inf
    ) -> "Predictor":
        """A predictor that has also learned the ``intervals`` of ``fresh``, trained for at most ``steps`` per network and
        ``seconds`` in total. Half of each batch replays earlier samples, so that they are not forgotten."""
        until = time.monotonic() + seconds
        new = {(known.model, known.device) for known in fresh}
        others = [known for known in self.memory if (known.model, known.device) not in new]
        memory = [*others, *fresh]
        views = _lessons(fresh, memory, seed)
        draw = np.random.default_rng(seed)
        picked = [others[k] for k in draw.permutation(len(others))[:steps]]
        replay = _lessons(picked, memory, seed) if picked else []
        members = [copy.deepcopy(network) for network in self._members]
        for member, network in enumerate(members):
            generator = torch.Generator().manual_seed(77 + 1000 * seed + member)
            _fit(network, views, steps, _ADAPT_RATE, generator, replay, _share(until, _MEMBERS - member))
        return Predictor(members, memory)

    def write(self, group: Any) -> None:
        """Write the weights, the samples they were learned from and the errors on these into an HDF5 group."""
        for number, network in enumerate(self._members):
            for name, value in network.state_dict().items():
                group[f"weights/{number}/{name}"] = value.numpy()
        for key, outline in {known.model: known.outline for known in self.memory}.items():
            group[f"models/{key}"] = np.frombuffer(msgspec.json.encode(outline), np.uint8)
        for number, known in enumerate(self.memory):
            entry = group.create_group(f"data/{number:05}")
            entry.attrs.update(model=known.model, device=known.device)
            for name in _SAVED:
                entry[name] = getattr(known, name)
            if len(known.intervals):
                predicted, _ = self.predict(known, known.intervals)
                entry["errors"] = predicted / known.times - 1

    @staticmethod
    def read(group: Any) -> "Predictor":
        """Read a predictor from a group that ``write`` filled. Raises Damaged or RuntimeError if it is not valid."""
        members, weights = [], group_in(group, "weights")
        for number in range(_MEMBERS):
            network = _Correction()
            saved = group_in(weights, str(number))
            shapes = {name: tuple(value.shape) for name, value in network.state_dict().items()}
            values = {name: values_in(saved, name, kinds="f", shape=shape) for name, shape in shapes.items()}
            if not all(np.isfinite(value).all() for value in values.values()):
                raise Damaged("a predictor with a weight that is not finite")
            network.load_state_dict({name: torch.tensor(value) for name, value in values.items()})
            members.append(network)
        models = {key: outline_in(group_in(group, "models"), key) for key in group_in(group, "models")}
        data = group_in(group, "data")
        return Predictor(members, [_known_in(group_in(data, number), models) for number in data])


def _known_in(entry: Any, models: Mapping[str, Outline]) -> DeviceSamples:
    """One of a predictor's samples from its HDF5 group. ``models``: outlines by key. Raises Damaged if it is not valid."""
    model = models.get(text_in(entry, "model"))
    if model is None:
        raise Damaged("what was learned is of a model that is not there")
    shapes: dict[str, tuple[int | None, ...]] = dict.fromkeys(_SAVED, (None, 2)) | {"own": (len(model.layers), 2)}
    kinds = {"probes": "i", "intervals": "i"}
    found = {name: values_in(entry, name, kinds=kinds.get(name, "f"), shape=shape) for name, shape in shapes.items()}
    for name, times in (("probes", "probe_times"), ("intervals", "times")):
        runs = found[name]
        inside = (runs[:, 0] >= 0) & (runs[:, 0] < runs[:, 1]) & (runs[:, 1] <= len(model.layers))
        known = np.isfinite(found[times]) & (found[times] > 0)
        if len(runs) != len(found[times]) or not inside.all() or not known.all():
            raise Damaged(f"{name} that there cannot be")
    if not len(found["probes"]) or (found["own"] < 0).any() or np.isinf(found["own"]).any():
        raise Damaged("times that there cannot be")
    return DeviceSamples(model, text_in(entry, "device"), *(found[name] for name in _SAVED))


def _lessons(data: Sequence[DeviceSamples], others: Sequence[DeviceSamples], seed: int) -> list[_View]:
    """Training examples: each of ``data`` in every form in which a prediction may be needed: with its own layer times, with
    its probes alone, with few of these, and as a model that no other device has measured."""
    generator = np.random.default_rng(seed)
    found = []
    for known in data:
        if not len(known.intervals):
            continue
        bare = replace(known, layer_times=None)
        found += [(known, others), (bare, others), (bare, ())]
        for count in _FEWER:
            if count < len(known.probes):
                found.append((known.only(generator.choice(len(known.probes), count, replace=False)), others))
    return [_view(known, others, known.intervals, known.times) for known, others in found]


def _fit(
    network: _Correction, views: Sequence[_View], steps: int, rate: float, generator: torch.Generator,
    replay: Sequence[_View], until: float,
) -> None:  # fmt: skip
    """Train ``network`` on ``views``, and as much on ``replay``, until ``until`` (``time.monotonic``) at the latest. The
    loss is the relative error: the smooth absolute difference of logarithms."""

    def loss(view: _View) -> Tensor:
        assert view.wanted is not None
        return nn.functional.smooth_l1_loss(network(view).clamp_min(1e-9).log(), view.wanted, beta=BETA)

    def losses(step: int) -> list[Tensor]:
        picked = [loss(views[n]) for n in some_of(len(views), generator)]
        return picked + ([loss(replay[n]) for n in some_of(len(replay), generator)] if replay else [])

    if views:
        descend(network, losses, steps, rate, until)


def _share(until: float, members: int) -> float:
    """Deadline (``time.monotonic``) for the next of ``members`` networks, if all get equal parts of the time left."""
    now = time.monotonic()
    return now + (until - now) / members


def _together(each: Sequence[Tensor]) -> tuple[F64, F64]:
    """Geometric mean of the networks' predictions, and the standard deviation of their logarithms."""
    logs = np.log(np.maximum([one.double().numpy() for one in each], 1e-9))
    return np.exp(logs.mean(axis=0)), logs.std(axis=0)

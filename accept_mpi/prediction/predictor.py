"""How long any run of layers takes on any device: a dual-stream network that corrects a physical prior.

AccEPT's network (``dual_stream``) learns times from nothing. This one (ours) begins with what is known of every layer: this
device's own clocks between the layers of its probes; else what other devices took, mixed so that the mixture takes what this
device's probes took; else operations and memory at a middling core's rates. One stream sees each layer's features and where
its time is from, the other the device; joined, they correct the layer's time. A sum over layers is close but not right: a
whole stage finds less in the caches than a probe of a tenth of the model does, which a second, smaller network learns from
the run's size and the device. Probes come out as measured by construction. Several networks, trained apart, tell by their
spread how sure they are. All errors are relative, so everything is learned in logarithms.
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
_FEWER = (2, 4, 7)  # probes of devices that could not take all
_ORDERED_BY = 4  # known devices, the newest, that say in which order another is probed
_MIXING = 200  # multiplicative updates
_SAVED = ("probes", "probe_times", "intervals", "times", "own")

Tensor = torch.Tensor


class _Correction(nn.Module):
    """One network of ``Predictor``. It begins as no correction at all."""

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
        """(layers, 2) seconds of each as a part of a run of no size, and the device's vector."""
        u, v = self.layer(view.layers), self.device(view.device)
        raw = (view.prior + self.joined(torch.cat([u, v.expand_as(u), u * v], dim=1))).exp()
        scale = view.measured / (view.cover @ raw).clamp_min(1e-12) / self.of_runs(view.probes, v)
        # What no probe covers goes at the pace of all that some probe does.
        reached = view.cover.sum(dim=0)[:, None]
        return raw * (view.cover.T @ scale + (1 - reached) * scale.log().mean(dim=0).exp()), v

    def of_runs(self, runs: Tensor, v: Tensor) -> Tensor:
        """(k, 2): how much longer than the sum of their layers runs with these features take."""
        return self.whole(torch.cat([runs, v.expand(len(runs), -1)], dim=1)).exp()

    def forward(self, view: "_View") -> Tensor:
        """(k, 2) seconds of the view's intervals."""
        layers, v = self.layers(view)
        return (view.inside @ layers) * self.of_runs(view.runs, v)


@dataclass(frozen=True)
class _View:
    """One model on one device as the networks see it."""

    layers: Tensor
    prior: Tensor
    """(layers, 2) logarithms of seconds."""
    device: Tensor
    cover: Tensor
    """(probes, layers) binary."""
    probes: Tensor
    measured: Tensor
    inside: Tensor
    """(k, layers) binary: the intervals asked for."""
    runs: Tensor
    wanted: Tensor | None = None
    """(k, 2) logarithms."""


def _view(known: DeviceSamples, others: Sequence[DeviceSamples], intervals: Intervals, times: F64 | None = None) -> _View:
    """``others``: what is known of devices that this one's layers may be mixed from."""
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
    """(layers, 2) seconds; (layers,) where each is from: 0 its own clocks, 1 other devices, 2 operations and memory."""
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
    """(layers, 2): devices' layer times, each with a weight of its own and none below 0, such that probes take what was
    measured, as nearly as relative errors go (non-negative least squares by Lee and Seung's updates)."""
    parts = np.array([(cover @ table / measured).ravel() for table in tables]).T
    weights = np.full(parts.shape[1], 1 / np.maximum(parts.sum(axis=1).mean(), 1e-12))
    for _ in range(_MIXING):
        weights *= parts.sum(axis=0) / np.maximum(parts.T @ (parts @ weights), 1e-12)
    return np.tensordot(weights, tables, 1)


class Predictor:
    """Several networks that agree where they know."""

    def __init__(self, members: list[_Correction], memory: Sequence[DeviceSamples]) -> None:
        self._members = members
        self.memory = tuple(memory)
        """What it learned from."""

    @property
    def models(self) -> set[str]:
        """Keys of the models that it has learned."""
        return {known.model for known in self.memory}

    @staticmethod
    def train(data: Sequence[DeviceSamples], seed: int = 0, steps: int = _STEPS, seconds: float = math.inf) -> "Predictor":
        """Pre-train on what is known, for ``seconds`` at most."""
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
        """(k, 2) seconds forward and backward, and (k, 2) how far the networks are apart, as a share of them."""
        view = _view(known, self.memory, intervals)
        return _together([network(view) for network in self._members])

    @torch.no_grad()
    def layers(self, known: DeviceSamples, stages: int = PROBES) -> tuple[F64, F64]:
        """(layers, 2) seconds forward and backward of every layer, in a pipeline of about so many stages; and how far the
        networks are apart."""
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
        """In which order to measure the candidates on a device never seen: each time where the networks would be least sure
        of devices that are known. Empty where none of these has measured the candidates of this model."""
        known = [k for k in self.memory if k.model == outline.key and np.array_equal(k.probes, candidates)][-_ORDERED_BY:]
        if not known:
            return []
        chosen = [int(np.sum([k.probe_times for k in known], axis=(0, 2)).argmax())]
        while len(chosen) < len(candidates):
            left = np.array([k for k in range(len(candidates)) if k not in chosen])
            doubt = sum(self._doubt(k.only(chosen), k.probes[left]) / k.probe_times.sum() for k in known)
            chosen.append(int(left[np.argmax(doubt)]))
        return chosen

    def next_probe(self, known: DeviceSamples, candidates: Intervals) -> int:
        """Which of the candidates to measure next: where the networks disagree by most seconds."""
        return int(self._doubt(known, candidates).argmax())

    def _doubt(self, known: DeviceSamples, candidates: Intervals) -> F64:
        seconds, spread = self.predict(known, candidates)
        return (seconds * spread).sum(axis=1)

    def adapt(
        self, *fresh: DeviceSamples, seed: int = 0, steps: int = _ADAPT_STEPS, seconds: float = math.inf
    ) -> "Predictor":
        """Learn what was observed on devices (their ``intervals``): half of each batch is that, half is replayed from what
        was known before, so that nothing is lost. ``seconds``: at most."""
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
        """Weights, what it learned from, and its errors on that, into an HDF5 group."""
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
        """From an HDF5 group that ``write`` has filled. Raises Damaged or RuntimeError where it was not."""
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
    """What a predictor has learned from, from an HDF5 group. Raises Damaged."""
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
    """Each of ``data`` in all the ways in which something like it may be asked for: with its own clocks; with its probes
    alone; with few of them; and as a model that nobody has seen."""
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
    """Least mean relative error (as a smooth absolute difference of logarithms)."""

    def loss(view: _View) -> Tensor:
        assert view.wanted is not None
        return nn.functional.smooth_l1_loss(network(view).clamp_min(1e-9).log(), view.wanted, beta=BETA)

    def losses(step: int) -> list[Tensor]:
        picked = [loss(views[n]) for n in some_of(len(views), generator)]
        return picked + ([loss(replay[n]) for n in some_of(len(replay), generator)] if replay else [])

    if views:
        descend(network, losses, steps, rate, until)


def _share(until: float, members: int) -> float:
    """When a network must be done so that so many have the same time each."""
    now = time.monotonic()
    return now + (until - now) / members


def _together(each: Sequence[Tensor]) -> tuple[F64, F64]:
    """The networks' mean (of logarithms), and their spread."""
    logs = np.log(np.maximum([one.double().numpy() for one in each], 1e-9))
    return np.exp(logs.mean(axis=0)), logs.std(axis=0)

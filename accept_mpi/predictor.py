"""How long any run of layers takes on any device: a dual-stream network on top of a physical prior, and what it must beat.

AccEPT's predictor (reconstruction; its sizes and losses are not known) maps a sub-model, as a binary vector over layers,
and a device, as the measured times of ``PROBES`` representative sub-models, to a time. ``DualStream`` is that. ``Predictor``
goes on from there (ours): one stream sees each layer's features beside the binary vector, so models never seen work; what it
says of single layers is scaled to the probes, which cover the model, so a sum over layers is right by construction and the
network only decides how a probe's time is shared within; several networks, trained apart, tell by their spread how sure they
are. All errors are relative, so everything is learned in logarithms.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from accept_mpi.outline import Outline
from accept_mpi.probe import guess

PROBES = 10
_WIDTH = 64
_LAYERS = 128  # layers that the binary vector has room for
_MEMBERS = 4
_STEPS, _RATE = 400, 3e-3
_ADAPT_STEPS, _ADAPT_RATE = 60, 3e-4

Floats = npt.NDArray[np.float64]
Intervals = npt.NDArray[np.int64]
"""(k, 2): first layer, last + 1."""


@dataclass(frozen=True)
class Known:
    """One model on one device: what was measured. Times are (k, 2): seconds forward and backward."""

    outline: Outline
    device: str
    probes: Intervals
    """Runs of layers that cover the model."""
    probe_times: Floats
    intervals: Intervals = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    """Other sub-models."""
    times: Floats = field(default_factory=lambda: np.zeros((0, 2)))

    @property
    def layers(self) -> int:
        return len(self.outline.layers)


def features(outline: Outline) -> Floats:
    """(layers, 8): what a layer is, without its device."""
    rows = []
    for index, layer in enumerate(outline.layers):
        ahead = outline.crossing(index + 1)[0] if index + 1 < len(outline.layers) else 0
        values = outline.crossing(index)[0]
        work = guess(layer.operations, layer.held, layer.parameter_bytes)
        rows.append([
            math.log(work), math.log1p(layer.operations), math.log1p(layer.held), math.log1p(layer.parameter_bytes),
            math.log1p(values), math.log1p(ahead), math.log1p(layer.operations / (1 + layer.held + layer.parameter_bytes)),
            float(layer.operations > 0),
        ])  # fmt: skip
    return np.array(rows)


def guesses(outline: Outline) -> Floats:
    """(layers, 2): seconds forward and backward on a middling core, from operations and memory."""
    forward = np.array([guess(x.operations, x.held, x.parameter_bytes) for x in outline.layers])
    return np.stack([forward, 2 * forward], axis=1)


def device_vector(known: Known) -> Floats:
    """(2 x PROBES,): logarithms of probe times over the guess for the same layers, resampled to PROBES along the work."""
    work = guesses(known.outline)
    ratios = np.log([times / work[a:b].sum(axis=0) for (a, b), times in zip(known.probes, known.probe_times, strict=True)])
    middle = (np.arange(len(ratios)) + 0.5) / len(ratios)
    at = (np.arange(PROBES) + 0.5) / PROBES
    return np.concatenate([np.interp(at, middle, ratios[:, way]) for way in (0, 1)])


def membership(intervals: Intervals, layers: int) -> Floats:
    """(k, layers): binary vectors."""
    place = np.arange(layers)
    return ((place >= intervals[:, :1]) & (place < intervals[:, 1:])).astype(float)


# -- baselines -----------------------------------------------------------------------------------------------------------


def by_operations(known: Known, intervals: Intervals) -> Floats:
    """FLOPs-linear: one rate a device, from all its probes."""
    operations = np.array([layer.operations for layer in known.outline.layers])
    seconds = known.probe_times.sum(axis=0) / operations.sum()
    return membership(intervals, known.layers) @ operations[:, None] * seconds


def by_capacity(known: Known, reference: Known, layer_times: Floats, intervals: Intervals) -> Floats:
    """FTPipeHD: a reference device's layers, (layers, 2) seconds, times one capacity ratio."""
    ratio = known.probe_times.sum() / reference.probe_times.sum()
    return ratio * (membership(intervals, known.layers) @ layer_times)


def by_layers(layer_times: Floats, intervals: Intervals) -> Floats:
    """PipeDream: the sum of the device's own layers, each measured."""
    return membership(intervals, len(layer_times)) @ layer_times


def by_nearest(known: Known, others: Sequence[tuple[Known, Floats]], intervals: Intervals) -> Floats:
    """The layers, (layers, 2) seconds, of the known device whose probes are most alike in proportion, scaled."""
    mine = np.log(known.probe_times)

    def distance(other: Known) -> float:
        difference = mine - np.log(other.probe_times)
        return float((difference - difference.mean()).std())

    nearest, layer_times = min(others, key=lambda pair: distance(pair[0]))
    return by_capacity(known, nearest, layer_times, intervals)


# -- AccEPT's network ----------------------------------------------------------------------------------------------------


class DualStream(nn.Module):
    """AccEPT (reconstruction): binary vector and probe times, a stream each, joined with their product; two times out."""

    def __init__(self, models: Sequence[str]) -> None:
        super().__init__()
        self.models = {key: n for n, key in enumerate(models)}
        self.sub_model = _mlp(_LAYERS + len(self.models), _WIDTH, _WIDTH)
        self.device = _mlp(2 * PROBES, _WIDTH, _WIDTH)
        self.joined = _mlp(3 * _WIDTH, _WIDTH, 2)

    def forward(self, known: Known, intervals: Intervals) -> torch.Tensor:
        """(k, 2): logarithms of seconds."""
        chosen = np.zeros((len(intervals), _LAYERS + len(self.models)))
        chosen[:, : known.layers] = membership(intervals, known.layers)
        if known.outline.key in self.models:
            chosen[:, _LAYERS + self.models[known.outline.key]] = 1
        u = self.sub_model(torch.tensor(chosen, dtype=torch.float32))
        v = self.device(torch.tensor(device_vector(known), dtype=torch.float32)).expand_as(u)
        return self.joined(torch.cat([u, v, u * v], dim=1)) - 5


def train_dual_stream(data: Sequence[Known], seed: int = 0, steps: int = _STEPS) -> DualStream:
    """AccEPT's network, pre-trained on what is known."""
    torch.manual_seed(seed)
    network = DualStream(sorted({known.outline.key for known in data}))
    generator = torch.Generator().manual_seed(seed)

    def loss(known: Known) -> torch.Tensor:
        wanted = torch.tensor(np.log(known.times), dtype=torch.float32)
        return nn.functional.smooth_l1_loss(network(known, known.intervals), wanted, beta=0.02)

    _descend(network, lambda _: [loss(data[int(i)]) for i in _some(len(data), generator)], 3 * steps, _RATE)
    return network


def _some(count: int, generator: torch.Generator) -> list[int]:
    return torch.randint(count, (min(8, count),), generator=generator).tolist()


def _descend(network: nn.Module, losses: Callable[[int], list[torch.Tensor]], steps: int, rate: float) -> None:
    optimizer = torch.optim.AdamW(network.parameters(), lr=rate, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        optimizer.zero_grad()
        torch.stack(losses(step)).mean().backward()
        optimizer.step()
        schedule.step()


# -- ours ----------------------------------------------------------------------------------------------------------------


class _Shares(nn.Module):
    """One network of ``Predictor``: seconds of every layer, before they are scaled to the probes."""

    def __init__(self, layers: dict[str, int]) -> None:
        """``layers``: number of layers of each known model, by key."""
        super().__init__()
        self.layers = layers
        self.offset = {}
        total = 0
        for key, count in layers.items():
            self.offset[key] = total
            total += count
        self.own = nn.Embedding(total + 1, _WIDTH)  # what the binary vector selects; the last: a model never seen
        nn.init.zeros_(self.own.weight)
        self.layer = _mlp(8, _WIDTH, _WIDTH)
        self.device = _mlp(2 * PROBES, _WIDTH, _WIDTH)
        self.joined = _mlp(3 * _WIDTH, _WIDTH, 2)
        last: Any = self.joined[-1]
        nn.init.zeros_(last.weight)
        self.start = nn.Linear(_WIDTH, 2)  # a sub-model's own beginning and end, as a share of its time
        nn.init.zeros_(self.start.weight)
        nn.init.zeros_(self.start.bias)

    def forward(self, known: Known, forget: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """(layers, 2) logarithms of seconds; (2,) seconds that a sub-model takes besides. ``forget``: as if the model had
        never been seen."""
        inputs = torch.tensor(_scaled(features(known.outline)), dtype=torch.float32)
        first = self.offset.get(known.outline.key, -1)
        unknown = first < 0 or forget
        chosen = torch.full((known.layers,), self.own.num_embeddings - 1) if unknown else torch.arange(known.layers) + first
        u = self.layer(inputs) + self.own(chosen) * (0.0 if unknown else 1.0)
        v = self.device(torch.tensor(device_vector(known), dtype=torch.float32))
        both = v.expand_as(u)
        raw = torch.tensor(np.log(guesses(known.outline)), dtype=torch.float32)
        return raw + self.joined(torch.cat([u, both, u * both], dim=1)), self.start(v)


def _mlp(inputs: int, width: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, width), nn.SiLU(), nn.Linear(width, outputs))


def _scaled(rows: Floats) -> Floats:
    """Features to about -1 to 1."""
    return (rows - np.array([-9, 13, 12, 8, 10, 10, 3, 0.5])) / np.array([2, 8, 4, 6, 4, 4, 2, 0.5])


def _predict(network: _Shares, known: Known, intervals: Intervals, forget: bool = False) -> torch.Tensor:
    """(k, 2) seconds."""
    logs, besides = network(known, forget)
    raw = logs.exp()
    cover = torch.tensor(membership(known.probes, known.layers), dtype=torch.float32)
    measured = torch.tensor(known.probe_times, dtype=torch.float32)
    # A probe has its own beginning and end; what is left is its layers'.
    share = torch.tanh(besides) * 0.2
    scale = measured * (1 - share) / (cover @ raw).clamp_min(1e-12)
    layers = raw * (cover.T @ scale)
    mine = torch.tensor(membership(intervals, known.layers), dtype=torch.float32)
    constant = share * measured.mean(dim=0)
    return mine @ layers + constant


class Predictor:
    """Several networks that agree where they know."""

    def __init__(self, members: list[_Shares], memory: list[Known]) -> None:
        self._members = members
        self._memory = memory

    @staticmethod
    def train(data: Sequence[Known], seed: int = 0, steps: int = _STEPS) -> "Predictor":
        """Pre-train on what is known."""
        layers = {known.outline.key: known.layers for known in data}
        members = []
        for member in range(_MEMBERS):
            torch.manual_seed(1000 * seed + member)
            network = _Shares(layers)
            _fit(network, data, steps, _RATE, torch.Generator().manual_seed(1000 * seed + member))
            members.append(network)
        return Predictor(members, list(data))

    @torch.no_grad()
    def predict(self, known: Known, intervals: Intervals) -> tuple[Floats, Floats]:
        """(k, 2) seconds forward and backward, and (k, 2) how far the networks are apart, as a share of them."""
        each = np.array([_predict(network, known, intervals).double().numpy() for network in self._members])
        logs = np.log(np.maximum(each, 1e-9))
        return np.exp(logs.mean(axis=0)), logs.std(axis=0)

    def write(self, group: Any) -> None:
        """Weights, what it learned from, and its errors on that, into an HDF5 group."""
        group["layers"] = np.frombuffer(msgspec.json.encode(self._members[0].layers), np.uint8)
        for number, network in enumerate(self._members):
            for name, value in network.state_dict().items():
                group[f"weights/{number}/{name}"] = value.numpy()
        models = {known.outline.key: known.outline for known in self._memory}
        for key, outline in models.items():
            group[f"models/{key}"] = np.frombuffer(msgspec.json.encode(outline), np.uint8)
        for number, known in enumerate(self._memory):
            entry = group.create_group(f"data/{number:05}")
            entry.attrs.update(model=known.outline.key, device=known.device)
            for name in ("probes", "probe_times", "intervals", "times"):
                entry[name] = getattr(known, name)
            if len(known.intervals):
                predicted, _ = self.predict(known, known.intervals)
                entry["errors"] = predicted / known.times - 1

    @staticmethod
    def read(group: Any) -> "Predictor":
        """From an HDF5 group that ``write`` has filled."""
        layers = msgspec.json.decode(group["layers"][:].tobytes(), type=dict[str, int])
        members = []
        for number in range(len(group["weights"])):
            network = _Shares(layers)
            saved = group[f"weights/{number}"]
            network.load_state_dict({name: torch.tensor(saved[name][()]) for name in network.state_dict()})
            members.append(network)
        models = {key: msgspec.json.decode(raw[:].tobytes(), type=Outline) for key, raw in group["models"].items()}
        memory = [
            Known(
                models[entry.attrs["model"]], entry.attrs["device"],
                *(entry[name][:] for name in ("probes", "probe_times", "intervals", "times")),
            )
            for entry in group["data"].values()
        ]  # fmt: skip
        return Predictor(members, memory)

    def next_probe(self, known: Known, candidates: Intervals) -> int:
        """Which of the candidates to measure next: where the networks disagree by most seconds."""
        seconds, spread = self.predict(known, candidates)
        return int((seconds * spread).sum(axis=1).argmax())

    def adapt(self, fresh: Known, seed: int = 0, steps: int = _ADAPT_STEPS) -> "Predictor":
        """Learn what was observed on a device (``fresh.intervals``): half of each batch is that, half is replayed from what
        was known before, so that nothing is lost."""
        members = [copy.deepcopy(network) for network in self._members]
        for member, network in enumerate(members):
            generator = torch.Generator().manual_seed(77 + 1000 * seed + member)
            replay = [self._memory[int(i)] for i in torch.randperm(len(self._memory), generator=generator)[:steps]]
            _fit(network, [fresh], steps, _ADAPT_RATE, generator, replay)
        return Predictor(members, [*self._memory, fresh])


def _fit(
    network: _Shares,
    data: Sequence[Known],
    steps: int,
    rate: float,
    generator: torch.Generator,
    replay: Sequence[Known] = (),
) -> None:
    """Least mean relative error (as a smooth absolute difference of logarithms)."""

    def loss(known: Known) -> torch.Tensor:
        # Half of the time without what was learned of this very model, so that features alone suffice.
        forget = bool(torch.rand((), generator=generator) < 0.5)
        predicted = _predict(network, known, known.intervals, forget).clamp_min(1e-9).log()
        wanted = torch.tensor(np.log(known.times), dtype=torch.float32)
        return nn.functional.smooth_l1_loss(predicted, wanted, beta=0.02)

    def losses(step: int) -> list[torch.Tensor]:
        picked = [data[i] for i in _some(len(data), generator)]
        if replay:
            picked += [replay[(step * len(picked) + k) % len(replay)] for k in range(len(picked))]
        return [loss(known) for known in picked]

    _descend(network, losses, steps, rate)

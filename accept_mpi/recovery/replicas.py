"""Snapshots in memory: each rank keeps its own layers' state and that of the stage before it, so that a lost rank's layers
are still somewhere (FTPipeHD's chain replication, section III-E).

A layer's state is one safetensors blob: ``weights/<name>`` and ``optimizer/<what>/<name>``, names as in the whole model.
"""

import io
import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch.nn.parameter import is_lazy

from accept_mpi.errors import UserError, shown
from accept_mpi.job import Optimizer
from accept_mpi.pipeline.optimizer import COUNTER, state_names
from accept_mpi.pipeline.stage import Stage
from accept_mpi.recovery.disk_replicas import Blobs
from accept_mpi.recovery.tensor_file import read_header

Holdings = dict[int, list[int]]
"""Step -> layers whose state after it a rank holds."""

Piece = tuple[int, int, Any]
"""A layer, how many bytes its state has, and some of them, in order."""

MOST_EXTRA = 3
"""Own copies between two snapshots, where a loss is to cost so many steps at most."""

_WEIGHTS, _OPTIMIZER = "weights/", "optimizer/"


class Disk(Protocol):
    """Where snapshots outlive the process (``spill.Spill``)."""

    def write(self, step: int, layers: Blobs) -> None: ...

    def drop_after(self, step: int) -> None: ...


def most_held(replicate_every: int | str) -> int:
    """States of a stage's size that a rank holds at most: its own and its neighbour's, of the last snapshot, the next one
    and extra ones in between. ``replicate_every``: as in the job, not 0."""
    return 2 * (2 + (MOST_EXTRA if isinstance(replicate_every, int) else 0))


class Replicas:
    """What one rank holds of the model's state after which steps. Any thread."""

    def __init__(self) -> None:
        self.disk: Disk | None = None
        self._lock = threading.Lock()
        self._steps: dict[int, Blobs] = {}

    def keep(self, step: int, layers: Mapping[int, bytes]) -> None:
        """States of layers after ``step`` steps."""
        with self._lock:
            self._steps.setdefault(step, {}).update(layers)

    def commit(self, step: int) -> None:
        """The snapshot after ``step`` is whole everywhere: no earlier one is needed."""
        with self._lock:
            self._steps = {s: blobs for s, blobs in self._steps.items() if s >= step}
            layers = dict(self._steps.get(step, {}))
        if self.disk and layers:
            self.disk.write(step, layers)

    def back_to(self, step: int) -> None:
        """What comes after ``step`` will be made anew."""
        with self._lock:
            self._steps = {s: blobs for s, blobs in self._steps.items() if s <= step}
        if self.disk:
            self.disk.drop_after(step)

    def clear(self) -> None:
        """Give the memory back."""
        with self._lock:
            self._steps = {}

    def holdings(self) -> Holdings:
        with self._lock:
            return {step: sorted(blobs) for step, blobs in self._steps.items()}

    def get(self, step: int, layer: int) -> bytes:
        with self._lock:
            return self._steps[step][layer]

    @property
    def nbytes(self) -> int:
        """Memory that all of it takes."""
        with self._lock:
            return sum(len(blob) for blobs in self._steps.values() for blob in blobs.values())


def states(stage: Stage) -> Blobs:
    """All layers of a stage as they are now."""
    tensors: dict[int, dict[str, torch.Tensor]] = {stage.start + i: {} for i in range(len(stage.names))}
    index = {name: stage.start + i for i, name in enumerate(stage.names)}
    for key, value in stage.weights().items():
        tensors[index[_layer(key)]][_WEIGHTS + key] = value
    for key, value in stage.optimizer_state().items():
        tensors[index[_layer(key.partition("/")[2])]][_OPTIMIZER + key] = value
    return {layer: safetensors.torch.save(own) for layer, own in tensors.items()}


def pack(weights: Mapping[str, torch.Tensor], optimizer: Mapping[str, torch.Tensor]) -> bytes:
    """One layer's state."""
    named = {_WEIGHTS + key: value for key, value in weights.items()}
    return safetensors.torch.save(named | {_OPTIMIZER + key: value for key, value in optimizer.items()})


def load(stage: Stage, blobs: Mapping[int, bytes], options: Optimizer) -> int:
    """Give a stage the state of its layers, under a job's optimizer. Raises UserError where they are another model's, or
    nothing to go on from. Returns how many tensors are left out, which are another optimizer's."""
    weights, optimizer = {}, {}
    for blob in blobs.values():
        try:
            found = safetensors.torch.load(blob)
        except (SafetensorError, ValueError, KeyError) as error:
            raise UserError(f"the state of a layer is damaged: {error}") from error
        for key, value in found.items():
            if key.startswith(_WEIGHTS):
                weights[key.removeprefix(_WEIGHTS)] = value
            else:
                optimizer[key.removeprefix(_OPTIMIZER)] = value
    wanted = state_names(options)
    ours = {key: value for key, value in optimizer.items() if key.partition("/")[0] in wanted}
    _check_weights(stage, weights)
    _check_optimizer(stage, ours, wanted)
    stage.load(weights, ours)
    return len(optimizer) - len(ours)


def fitting(blobs: Blobs, names: Sequence[str]) -> Blobs:
    """Of states that come from a disk, those of a model's layers that hold nothing but their layer's tensors."""
    return {layer: blob for layer, blob in blobs.items() if 0 <= layer < len(names) and _is_of(blob, names[layer])}


def _is_of(blob: bytes, name: str) -> bool:
    try:
        entries = read_header(io.BytesIO(blob), len(blob))
    except ValueError:
        return False
    inner = [
        key.removeprefix(_WEIGHTS) if key.startswith(_WEIGHTS) else key.removeprefix(_OPTIMIZER).partition("/")[2]
        for key in entries
    ]
    return all(_layer(key) == name for key in inner)


def _check_weights(stage: Stage, weights: Mapping[str, torch.Tensor]) -> None:
    """What fits by name has the very kind and shape that the model has, since to load is to convert without a word; missing
    and unexpected names are found there. A buffer may be infinite (a mask); from a parameter training goes on."""
    buffers = {
        f"{name}.{key}": buffer
        for name, layer in zip(stage.names, stage.layers, strict=True)
        for key, buffer in layer.named_buffers()
    }
    for name, own in [*buffers.items(), *stage.named_parameters()]:
        value = weights.get(name)
        if value is None or is_lazy(own):
            continue
        if value.dtype != own.dtype:
            raise UserError(f'the checkpoint holds "{name}" as {_kind(value)}, this model has {_kind(own)}')
        if own.requires_grad:
            _check_values(name, value, own)


def _check_optimizer(stage: Stage, state: Mapping[str, torch.Tensor], wanted: frozenset[str]) -> None:
    """Raises UserError where state is not that of this stage's parameters, each with all that belongs to it."""
    parameters, found = dict(stage.named_parameters()), dict[str, set[str]]()
    for key, value in state.items():
        what, _, name = key.partition("/")
        own = parameters.get(name)
        if own is None:
            raise UserError(
                f'the checkpoint holds the optimizer\'s "{shown(what)}" of "{shown(name)}", which is no parameter here'
            )
        found.setdefault(name, set()).add(what)
        if what != COUNTER:
            _check_values(f"{what} of {name}", value, own)
        elif value.shape or not value.is_floating_point() or not 0 <= value.item() < math.inf:
            raise UserError(f'the checkpoint holds "{name}" after a number of updates that cannot be')
    for name, there in found.items():
        if missing := wanted - there:
            raise UserError(f'the checkpoint lacks the optimizer\'s "{min(missing)}" of "{name}"')


def _check_values(name: str, value: torch.Tensor, own: torch.Tensor) -> None:
    if value.shape != own.shape or value.dtype != own.dtype:
        raise UserError(
            f'the checkpoint holds "{name}" as {_kind(value)} {tuple(value.shape)}, '
            f"this model has {_kind(own)} {tuple(own.shape)}"
        )
    if not bool(torch.isfinite(value.float() if value.is_floating_point() else value).all()):
        raise UserError(f'the checkpoint holds values of "{name}" that are not finite: training cannot go on from there')


def _kind(value: torch.Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def cut(blobs: Mapping[int, bytes], size: int) -> Iterator[list[Piece]]:
    """Layers' states as messages of ``size`` bytes, which share their memory."""
    message: list[Piece] = []
    room = size
    for layer, blob in blobs.items():
        rest = memoryview(blob)
        while rest:
            message.append((layer, len(blob), rest[:room]))
            room, rest = room - len(message[-1][2]), rest[room:]
            if not room:
                yield message
                message, room = [], size
    if message:
        yield message


class Arriving:
    """Layers' states of which pieces come in, each layer's in order."""

    def __init__(self) -> None:
        self.whole: Blobs = {}
        self._growing: dict[int, bytearray] = {}

    def add(self, pieces: Iterable[Piece]) -> None:
        """Those of a message."""
        for layer, total, data in pieces:
            growing = self._growing.setdefault(layer, bytearray())
            growing += data
            if len(growing) == total:
                self.whole[layer] = bytes(self._growing.pop(layer))


def newest(held: Sequence[Holdings], layers: int) -> int | None:
    """The last step after which every layer's state is held by someone; ``held``: by rank."""
    for step in sorted({step for holdings in held for step in holdings}, reverse=True):
        if len({layer for holdings in held for layer in holdings.get(step, ())}) == layers:
            return step
    return None


def sources(held: Sequence[Holdings], step: int, wanted: Sequence[range]) -> dict[tuple[int, int], list[int]]:
    """Who sends which layers to whom: (from, to) -> layers. ``wanted``: layers by rank. Those who hold a layer share the
    sending."""
    moves: dict[tuple[int, int], list[int]] = {}
    for dest, layers in enumerate(wanted):
        for layer in layers:
            if layer in held[dest].get(step, ()):
                continue
            holders = [rank for rank, holdings in enumerate(held) if layer in holdings.get(step, ())]
            source = min(holders, key=lambda rank, to=dest: sum(len(m) for (a, _), m in moves.items() if a == rank))  # type: ignore[misc]
            moves.setdefault((source, dest), []).append(layer)
    return moves


def _layer(name: str) -> str:
    """ "features-3" of "features-3.conv.weight"."""
    return name.partition(".")[0]

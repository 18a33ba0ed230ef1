"""State of layers (weights and optimizer state) as bytes, whole and in chunks."""

import functools
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch.nn.parameter import is_lazy

from accept_mpi.errors import UserError, shown
from accept_mpi.job import Optimizer
from accept_mpi.pipeline.kept_bases import BASES
from accept_mpi.pipeline.kept_norms import NORMS
from accept_mpi.pipeline.optimizer import SCALARS, STATES, state_names
from accept_mpi.pipeline.remembered import LAYERS, LOSS
from accept_mpi.pipeline.stage import Stage
from accept_mpi.recovery.tensor_file import read_header, whole

Blobs = dict[int, bytes]
"""States by layer, each of them a safetensors file as bytes."""
Chunk = tuple[int, int, Any]
"""A layer, the size of its state in bytes, and some of these bytes, or the number of those that are as in the copy before.
Chunks of a layer come in order."""
_BLOCK = 4096  # bytes that are compared as a whole with the copy before
_EVERY = frozenset[str]().union(*STATES)
"""Names of the state of all optimizers."""
_WEIGHTS, _OPTIMIZER = "weights/", "optimizer/"


class Copy:
    """Copy of a layer's tensors, which become bytes only if someone asks for them."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self.nbytes = sum(tensor.nbytes for tensor in tensors.values())

    @functools.cached_property
    def blob(self) -> bytes:
        """The layer's state as in ``Blobs``."""
        return whole(self._tensors)


def states(stage: Stage) -> Blobs:
    """Present states of all layers of a stage."""
    found = copies(stage)
    return {layer: found.pop(layer).blob for layer in list(found)}  # each copy goes when it has become bytes


def copies(stage: Stage) -> dict[int, Copy]:
    """Copies of the present tensors of all layers of a stage."""
    tensors: dict[int, dict[str, torch.Tensor]] = {stage.start + i: {} for i in range(len(stage.names))}
    index = {name: stage.start + i for i, name in enumerate(stage.names)}
    for key, value in stage.weights().items():
        tensors[index[_layer(key)]][_WEIGHTS + key] = value
    for key, value in stage.optimizer_state().items():
        tensors[index[_layer(key.partition("/")[2])]][_OPTIMIZER + key] = value
    return {layer: Copy(own) for layer, own in tensors.items()}


def pack(weights: Mapping[str, torch.Tensor], optimizer: Mapping[str, torch.Tensor]) -> bytes:
    """State of one layer, from its named weights and optimizer state."""
    named = {_WEIGHTS + key: value for key, value in weights.items()}
    return whole(named | {_OPTIMIZER + key: value for key, value in optimizer.items()})


def load(stage: Stage, blobs: Mapping[int, bytes], options: Optimizer) -> int:
    """Load the states of a stage's layers, for a job with optimizer ``options``. Returns the number of tensors that are left
    out because they belong to another optimizer. Raises UserError if the states are damaged, belong to another model or
    have values that training cannot go on from."""
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
    wanted = {name: state_names(options, is_matrix) for name, is_matrix in stage.is_matrix().items()}
    there: dict[str, frozenset[str]] = {}
    for what, _, name in (key.partition("/") for key in optimizer):
        there[name] = there.get(name, frozenset()) | ({what} & _EVERY)
    every, beside, ours = state_names(options), stage.beside, {}
    for key, value in optimizer.items():
        what, _, name = key.partition("/")
        needed = wanted.get(name, every)
        # What is whole but of another kind stays behind as a whole. What is not whole, or of no parameter, is refused below.
        another = name in wanted and there[name] in STATES and there[name] != needed
        if (what in needed and not another) or what in beside:
            ours[key] = value
    memory = {key: value for key, value in optimizer.items() if key.partition("/")[0] in (LAYERS, LOSS, BASES, NORMS)}
    _check_weights(stage, weights)
    _check_optimizer(stage, ours, wanted)
    stage.load(weights, ours | memory)
    return len(optimizer) - len(ours) - len(memory)


def fitting(blobs: Blobs, names: Sequence[str]) -> Blobs:
    """The states in ``blobs``, read from a disk, that hold only tensors of their layer. ``names``: the model's layers."""
    return {layer: blob for layer, blob in blobs.items() if 0 <= layer < len(names) and _is_of(blob, names[layer])}


def _is_of(blob: bytes, name: str) -> bool:
    """True if a state is intact and holds only tensors of the layer ``name``."""
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
    """Raise UserError unless weights have the model's dtypes, and trained ones its shapes and finite values.

    Loading would convert dtypes silently; it finds missing and unexpected names itself. A buffer may be infinite (a mask).
    """
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


def _check_optimizer(stage: Stage, state: Mapping[str, torch.Tensor], wanted: Mapping[str, frozenset[str]]) -> None:
    """Raise UserError unless optimizer state belongs to this stage's parameters and is complete for each of them, which have
    these names of state each."""
    parameters, found = dict(stage.own.every_name()), dict[str, set[str]]()
    for key, value in state.items():
        what, _, name = key.partition("/")
        own = parameters.get(name)
        if own is None:
            raise UserError(
                f'the checkpoint holds the optimizer\'s "{shown(what)}" of "{shown(name)}", which is no parameter here'
            )
        found.setdefault(name, set()).add(what)
        if what not in SCALARS:
            _check_values(f"{what} of {name}", value, own)
        elif value.shape or not value.is_floating_point() or not 0 <= value.item() < math.inf:
            raise UserError(f'the checkpoint holds "{name}" after a number of updates that cannot be')
    for name, there in found.items():  # a parameter that never had a gradient has none of the optimizer's state
        if (missing := wanted[name] - there) and there & wanted[name]:
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


def chunked(blobs: Mapping[int, bytes], size: int, before: Mapping[int, bytes] | None = None) -> Iterator[list[Chunk]]:
    """Yield layers' states as messages of up to ``size`` bytes, which share the states' memory. Of what is as in the copy
    ``before``, which the receiver has, only the length is sent: weights that are not trained cost nothing again."""
    message: list[Chunk] = []
    room = size
    for layer, blob in blobs.items():
        whole = memoryview(blob)
        for begin, end, same in _ranges(blob, before.get(layer, b"") if before else b""):
            if same:
                message.append((layer, len(blob), end - begin))
                continue
            rest = whole[begin:end]
            while rest:
                message.append((layer, len(blob), rest[:room]))
                room, rest = room - len(message[-1][2]), rest[room:]
                if not room:
                    yield message
                    message, room = [], size
    if message:
        yield message


def _ranges(blob: bytes, before: bytes) -> list[tuple[int, int, bool]]:
    """A state's ranges of bytes in order, and whether they are as in the copy before."""
    words, rest = divmod(len(blob), 8)
    if len(before) != len(blob) or not words:
        return [(0, len(blob), False)]
    apart = np.frombuffer(blob, np.uint64, words) != np.frombuffer(before, np.uint64, words)
    blocks = np.logical_or.reduceat(apart, range(0, words, _BLOCK // 8))
    begins = [*(np.flatnonzero(np.diff(blocks, prepend=~blocks[:1])) * _BLOCK).tolist(), 8 * words]
    found = [(begin, end, not blocks[begin // _BLOCK]) for begin, end in pairwise(begins)]
    return [*found, (8 * words, len(blob), False)] if rest else found


class Arriving:
    """Collects layers' states from chunks, which arrive in order for each layer."""

    def __init__(self, before: Mapping[int, bytes] | None = None) -> None:
        """``before``: the copy before, if chunks may refer to it."""
        self._before = before or {}
        self.whole: Blobs = {}
        """States that have arrived completely."""
        self._growing: dict[int, bytearray] = {}

    def add(self, pieces: Iterable[Chunk]) -> None:
        """Take the chunks of a message."""
        for layer, total, data in pieces:
            growing = self._growing.setdefault(layer, bytearray())
            if isinstance(data, int):
                data = memoryview(self._before[layer])[len(growing) : len(growing) + data]
            growing += data
            if len(growing) == total:
                self.whole[layer] = bytes(self._growing.pop(layer))


def _layer(name: str) -> str:
    """Name of a tensor's layer: "features-3" for "features-3.conv.weight"."""
    return name.partition(".")[0]

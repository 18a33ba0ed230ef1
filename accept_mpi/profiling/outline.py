"""Outlines a model without its weights: shapes at every possible cut, parameters, operations and memory of each layer.

The outline comes from a run on torch's "meta" device, where tensors have shapes but no values: it is fast, and works for a
model too big for this machine. If a layer needs values (a user's own may), layers are run for real instead, one by one.
"""

import hashlib
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from accept_mpi import tree
from accept_mpi.codecs.message import HEADER_BYTES
from accept_mpi.codecs.tensors import Specs, Tensors, TensorSpec, codable
from accept_mpi.job import Job
from accept_mpi.models.base import Chain
from accept_mpi.models.common import Common, Seen, with_loss
from accept_mpi.models.layers import calls_view, has_conv2d, in_channels_last
from accept_mpi.models.shared import Shared
from accept_mpi.models.untouched import untouched
from accept_mpi.pipeline.common_memory import Cuts
from accept_mpi.pipeline.shareable import Watch
from accept_mpi.seeds import init_seed, seeded
from accept_mpi.tree import Tree
from accept_mpi.users_code import call_layer, taken_apart
from accept_mpi.without_compiler import leave_the_compiler_out

_CODED = ("float64", "float32", "float16", "bfloat16")


class Sizes(NamedTuple):
    """Sizes of a message."""

    values: int
    """Number of values that a codec can code."""
    uncoded: int
    """Bytes of these values without a codec."""
    other: int
    """Bytes of everything else, header included."""


class LayerOutline(msgspec.Struct, frozen=True, omit_defaults=True, rename={"saved_bytes": "held"}):
    """One layer, at one micro-batch size."""

    inputs: tuple[TensorSpec, ...]
    """Tensors that cross the boundary if the model is cut in front of this layer."""
    kind: str
    """Class name of its module."""
    parameters: int
    """Number of parameters, trained and frozen."""
    parameter_bytes: int
    buffer_bytes: int
    operations: float
    """Floating-point operations of a forward, as torch counts them (matrix products and convolutions)."""
    saved_bytes: int
    """Bytes kept from F to B that no earlier layer keeps already."""
    frozen_bytes: int = 0
    """Part of ``parameter_bytes`` that is not trained."""
    tree: Tree | None = None
    """Structure whose tensors the inputs are; None for a lone tensor or a tuple of several."""
    alone: bool = False
    """True if a group of ranks cannot hold the layer (``pipeline.shareable``)."""

    @property
    def trained_bytes(self) -> int:
        """Bytes of the parameters that are trained, and of their gradients."""
        return self.parameter_bytes - self.frozen_bytes

    @property
    def unchanged_bytes(self) -> int:
        """Bytes of frozen parameters and buffers."""
        return self.frozen_bytes + self.buffer_bytes


class Outline(msgspec.Struct, frozen=True, omit_defaults=True):
    """A model at one micro-batch size."""

    samples: int
    names: tuple[str, ...]
    layers: tuple[LayerOutline, ...]
    channels_last: bool
    shared: tuple[Shared, ...] = ()
    """Tensors that layers share."""
    precision: str = "float32"
    """As ``train.precision``."""

    @property
    def key(self) -> str:
        """Hash of the outline: equal exactly for equal layers, shapes, micro-batch size, memory format and precision."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]

    def crossing(self, layer: int) -> Sizes:
        """Sizes of a message of activations if the model is cut in front of ``layer``; zeros at the ends."""
        return crossing_sizes(self.layers[layer].inputs) if 0 < layer < len(self.layers) else Sizes(0, 0, 0)

    def arriving(self, layer: int) -> int:
        """Bytes of memory that a message of activations takes where it arrives in front of ``layer``; 0 at the ends."""
        if not 0 < layer < len(self.layers):
            return 0
        return HEADER_BYTES + sum(spec.memory for spec in self.layers[layer].inputs)

    def returning(self, layer: int) -> Sizes:
        """Sizes of the message of gradients that comes back in front of ``layer``; inputs that need no gradient do not
        count."""
        return crossing_sizes(tuple(spec for spec in self.layers[layer].inputs if spec.grad))


def crossing_sizes(specs: Specs) -> Sizes:
    """Sizes of a message."""
    coded = [spec for spec, may_be in zip(specs, codable(specs), strict=True) if may_be and spec.dtype in _CODED]
    uncoded = sum(spec.nbytes for spec in coded)
    return Sizes(sum(spec.numel for spec in coded), uncoded, HEADER_BYTES + sum(spec.nbytes for spec in specs) - uncoded)


def outline_of(chain: Chain, job: Job, inputs: Tensors, of: Tree | None = None, samples: int | None = None) -> Outline:
    """The outline of a job's model for a micro-batch of ``inputs``; see ``outline``."""
    memory_format = job.train.memory_format
    channels_last = None if memory_format == "auto" else memory_format == "channels_last"
    return outline(chain, job.train.seed, inputs, channels_last, of, samples, job.train.precision)


def outline(
    chain: Chain,
    seed: int,
    inputs: Tensors,
    channels_last: bool | None = None,
    of: Tree | None = None,
    samples: int | None = None,
    precision: str = "float32",
) -> Outline:
    """The outline of a model for a micro-batch of ``inputs``.

    ``channels_last``: None uses that memory format if the model has 2-d convolutions. ``of``: the tree whose tensors the
    inputs are. ``samples``: their number, by default the first tensor's length. ``precision``: that of forwards. Raises
    UserError if a layer cannot be built or does not accept the output of the one before.
    """
    leave_the_compiler_out()
    with seeded(init_seed(seed, len(chain))):
        built: list[nn.Module] = []
        if channels_last is None:
            built = [chain.abstract(index, seed) for index in range(len(chain))]
            channels_last = in_channels_last("auto", [(has_conv2d(built), calls_view(built))])
        memory_format = torch.channels_last if channels_last else torch.contiguous_format
        given = [x.contiguous(memory_format=memory_format) if x.dim() == 4 else x for x in inputs if x is not None]
        value = tree.unflatten(of or tree.packed(len(given)), given)
        count = samples if samples is not None else len(given[0]) if given else 0
        chain.prepare(value)
        if precision == "bf16":
            found = _outline(chain, seed, value, channels_last, count, abstract=False, bf16=True)
        else:
            try:
                found = _outline(chain, seed, value, channels_last, count, abstract=True, built=built)
            except Exception:  # some layers need values, which the meta device does not have
                found = _outline(chain, seed, value, channels_last, count, abstract=False)
    return msgspec.structs.replace(found, shared=(*chain.shared(), *found.shared), precision=precision)


def _outline(
    chain: Chain,
    seed: int,
    value: Any,
    channels_last: bool,
    samples: int,
    abstract: bool,
    bf16: bool = False,
    built: Sequence[nn.Module] = (),
) -> Outline:
    """``built``: the layers on the meta device, if they have been built."""
    if abstract:
        value = tree.replace(value, lambda x: torch.empty_like(x, device="meta"))
    device = torch.device("meta" if abstract else "cpu")
    layers, held, common = [], _Held(abstract), with_loss(chain.common(), None, len(chain))
    together: dict[Common, Shared] = {}
    cuts = Cuts()
    for index in range(len(chain)):
        module = built[index] if abstract and built else (chain.abstract if abstract else chain.build)(index, seed)
        if channels_last:
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        tensors, of = taken_apart(index - 1, chain.names[index - 1], value)
        specs = tuple(map(TensorSpec.of, tensors))
        parameters, buffers = list(module.parameters()), list(module.buffers())
        cuts.before(index, tensors, [*parameters, *buffers])
        held.begin([*parameters, *buffers])
        counter = FlopCounterMode(display=False)
        counter.mod_tracker = _Global()  # type: ignore[assignment]
        saved = torch.autograd.graph.saved_tensors_hooks(held, lambda tensor: tensor)
        with untouched([module]), device, counter, saved:
            watch, seen = Watch([chain.names[index]], [module]), Seen([module], index, common)
            given = value
            with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
                value = call_layer(index, chain.names[index], module, value, setting_up=True)
            alone = bool(watch.after_forward())
            if seen.changed(grown=True):
                again = Seen([module], index, common)
                with suppress(Exception):
                    module(given)
                together |= {one: _as_shared(one) for one in again.changed()}
        if abstract and channels_last:  # convolutions on the meta device forget the layout
            value = tree.replace(value, held.laid_out)
        if not abstract:  # release this layer's graph; times 1 makes a non-leaf, which the next layer may change in place
            value = tree.replace(
                value, lambda x: x.detach().requires_grad_(x.requires_grad) * 1 if x.requires_grad else x.detach()
            )
        layers.append(
            LayerOutline(
                inputs=specs,
                kind=type(module).__name__,
                parameters=sum(p.numel() for p in parameters),
                parameter_bytes=_bytes(parameters),
                buffer_bytes=_bytes(buffers),
                operations=float(counter.get_total_flops()),
                saved_bytes=held.bytes,
                frozen_bytes=_bytes([p for p in parameters if not p.requires_grad]),
                alone=alone,
                tree=None if of == tree.packed(len(specs)) else of,
            )
        )
    written = [
        Shared(cut - 1, cut, f"layers {cut - 1} and {cut} pass on what a later one writes into") for cut in cuts.parted()
    ]
    return Outline(samples, tuple(chain.names), tuple(layers), channels_last, (*together.values(), *written))


def _as_shared(one: Common) -> Shared:
    """What a forward changes, and several layers have in common."""
    first, last = one.layers[0], one.layers[-1]
    return Shared(first, last, one.text)


class _Global:
    """What torch's counter takes for the tracker of modules: all operations are the layer's. Its own hooks the gradients of
    what modules take, which a forward that takes derivatives does not bear."""

    parents = ("Global",)

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


class _Held:
    """Counts the bytes that autograd saves for a layer's backward.

    On the meta device all layers form one graph (``connected``), and a tensor saved by two of them counts once; in a run for
    real each layer has its own graph.
    """

    def __init__(self, connected: bool) -> None:
        self._connected = connected
        self._seen: dict[int, torch.UntypedStorage] = {}  # references keep addresses from being reused
        self._own: set[int] = set()
        self.bytes = 0

    def begin(self, own: list[torch.Tensor]) -> None:
        """Start counting for another layer, whose parameters and buffers are ``own``."""
        if not self._connected:
            self._seen.clear()
        self._own, self.bytes = {_storage(tensor) for tensor in own if tensor.layout is torch.strided}, 0

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided:  # a constant, such as a graph's edges
            return tensor
        at = _storage(tensor)
        if at not in self._own and at not in self._seen:
            self._seen[at] = tensor.untyped_storage()
            self.bytes += self._seen[at].nbytes()
        return tensor

    def laid_out(self, before: torch.Tensor) -> torch.Tensor:
        """The tensor in channels_last format if it has four dimensions, otherwise itself."""
        if before.dim() != 4:
            return before
        after = before.contiguous(memory_format=torch.channels_last)
        if _storage(before) in self._seen:
            self._seen[_storage(after)] = after.untyped_storage()
        return after


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(values.numel() * values.element_size() for tensor in tensors for values in _values(tensor))


def _values(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """What holds a tensor's values: itself, or the parts of a sparse one."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    return (tensor,) if tensor.layout is torch.strided else (tensor.values(),)

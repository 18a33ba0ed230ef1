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
from accept_mpi.models.memory import images_in
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
            found = Outliner(chain, seed, channels_last, abstract=False, bf16=True).outline(value, count)
        else:
            try:
                found = Outliner(chain, seed, channels_last, abstract=True, built=built).outline(value, count)
            except Exception:  # some layers need values, which the meta device does not have
                found = Outliner(chain, seed, channels_last, abstract=False).outline(value, count)
    return msgspec.structs.replace(found, shared=(*chain.shared(), *found.shared), precision=precision)


class Outliner:
    """Outlines layers one after another: on the meta device (``abstract``), or in a run for real."""

    def __init__(
        self,
        chain: Chain,
        seed: int,
        channels_last: bool,
        abstract: bool,
        bf16: bool = False,
        built: Sequence[nn.Module] = (),
    ) -> None:
        """``bf16``: forwards compute under autocast; ``built``: the layers on the meta device, if they have been built."""
        self._chain, self._seed, self._channels_last = chain, seed, channels_last
        self._abstract, self._bf16, self._built = abstract, bf16, built
        self._common = with_loss(chain.common(), None, len(chain))
        self._held, self._cuts = _Held(abstract), Cuts()
        self._together: dict[Common, Shared] = {}
        """What layers have in common, and a forward changes."""

    def outline(self, value: Any, samples: int) -> Outline:
        """The outline for a micro-batch ``value`` of so many samples."""
        if self._abstract:
            value = tree.replace(value, lambda x: torch.empty_like(x, device="meta"))
        layers = []
        for index in range(len(self._chain)):
            layer, value = self._layer(index, value)
            layers.append(layer)
        written = [
            Shared(cut - 1, cut, f"layers {cut - 1} and {cut} pass on what a later one writes into")
            for cut in self._cuts.parted()
        ]
        shared = (*self._together.values(), *written)
        return Outline(samples, tuple(self._chain.names), tuple(layers), self._channels_last, shared)

    def _layer(self, index: int, value: Any) -> tuple[LayerOutline, Any]:
        """Outline of a layer that takes ``value``, and what the next one takes."""
        module = self._module(index)
        tensors, of = taken_apart(index - 1, self._chain.names[index - 1], value)
        specs = tuple(map(TensorSpec.of, tensors))
        parameters, buffers = list(module.parameters()), list(module.buffers())
        self._cuts.before(index, tensors, [*parameters, *buffers])
        self._held.begin([*parameters, *buffers])
        result, operations, alone = self._forward(index, module, value)
        layer = LayerOutline(
            inputs=specs,
            kind=type(module).__name__,
            parameters=sum(p.numel() for p in parameters),
            parameter_bytes=_bytes(parameters),
            buffer_bytes=_bytes(buffers),
            operations=operations,
            saved_bytes=self._held.bytes,
            frozen_bytes=_bytes([p for p in parameters if not p.requires_grad]),
            alone=alone,
            tree=None if of == tree.packed(len(specs)) else of,
        )
        return layer, self._passed_on(result)

    def _module(self, index: int) -> nn.Module:
        if self._abstract and self._built:
            module = self._built[index]
        else:
            module = (self._chain.abstract if self._abstract else self._chain.build)(index, self._seed)
        if self._channels_last:
            images_in(module, torch.channels_last)
        return module

    def _forward(self, index: int, module: nn.Module, value: Any) -> tuple[Any, float, bool]:
        """A layer's result, its operations, and whether a group of ranks cannot hold it."""
        name = self._chain.names[index]
        counter = FlopCounterMode(display=False)
        counter.mod_tracker = _Global()  # type: ignore[assignment]
        saved = torch.autograd.graph.saved_tensors_hooks(self._held, lambda tensor: tensor)
        with untouched([module]), torch.device("meta" if self._abstract else "cpu"), counter, saved:
            watch, seen = Watch([name], [module]), Seen([module], index, self._common)
            with torch.autocast("cpu", torch.bfloat16) if self._bf16 else nullcontext():
                result = call_layer(index, name, module, value, setting_up=True)
            alone = bool(watch.after_forward())
            if seen.changed(grown=True):
                again = Seen([module], index, self._common)
                with suppress(Exception):
                    module(value)
                self._together |= {one: _as_shared(one) for one in again.changed()}
        return result, float(counter.get_total_flops()), alone

    def _passed_on(self, result: Any) -> Any:
        """A layer's result as the next one takes it."""
        if not self._abstract:  # release this layer's graph; times 1 makes a non-leaf, which the next may change in place
            return tree.replace(
                result, lambda x: x.detach().requires_grad_(x.requires_grad) * 1 if x.requires_grad else x.detach()
            )
        # Convolutions on the meta device forget the layout.
        return tree.replace(result, self._held.laid_out) if self._channels_last else result


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

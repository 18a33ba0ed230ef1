"""State that several layers share: parameters, buffers and other tensors in the same memory. If trained, it must be in one
stage.

A tensor is identified by its memory, so that a repeated tensor is found as well as one that was made from another
(``nn.Parameter(embedding.weight.data)``). Memory is remembered by weak references: layers may be built, inspected and freed
one after another, since shared memory lives as long as one of the layers that share it.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.overrides import TorchFunctionMode

from accept_mpi.errors import UserError
from accept_mpi.models.held import held
from accept_mpi.models.memory import checksum, extent, memory_of
from accept_mpi.models.parts import part_at

_FILLS: set[Any] = {
    nn.init.uniform_, nn.init.normal_, nn.init.constant_, nn.init.kaiming_uniform_,
    torch.Tensor.uniform_, torch.Tensor.normal_,
}  # fmt: skip
"""Functions that initialize torch's own layers, as a ``TorchFunctionMode`` meets them."""
TABLES = (nn.Embedding, nn.EmbeddingBag)
"""Modules that look up rows of their weights, which autocast leaves as they are."""
_HELD = "tensor"
"""Kind of a part that is no parameter and no buffer (``held``)."""


class Shared(msgspec.Struct, frozen=True):
    """State that two or more layers share."""

    first: int
    """Index of the first layer that shares it."""
    last: int
    """Index of the last layer that shares it."""
    text: str
    """Half a sentence for the user: which layers share what."""
    constant: bool = False
    """True if nothing trains it: buffers, frozen parameters. Layers that share it may be in different stages, as long as
    none writes to it."""
    places: tuple[tuple[int, str], ...] = ()
    """Layers in which it occurs and all its names there, in order, if it is constant or ``tied``."""
    tied: bool = False
    """True if it is one trained parameter that layers have in common. Layers in different stages may each have a copy of it,
    if their gradients are added up before every update (``training.summing``)."""
    nbytes: int = 0
    """Bytes of a tied parameter."""
    casts: int = 0
    """Layers in which a tied parameter is more than a table (``TABLES``), so that autocast may use it in lower precision."""

    @property
    def apart(self) -> range:
        """Layers in front of which a cut would part uses of a tied parameter so that its gradients could not be added in
        the order of one process: autograd adds those of a stage's uses first, so only the first use may be apart."""
        layers = sorted({layer for layer, _ in self.places})
        return range(layers[1] + 1, layers[-1] + 1) if self.tied and len(layers) > 2 else range(0)


def uncuttable(shared: Iterable[Shared], layers: int, ties: bool) -> frozenset[int]:
    """Layers, of ``layers`` in total, in front of which the model must not be cut. ``ties``: uses of a tied parameter may be
    in different stages."""
    runs = [
        one.apart if one.tied and ties else range(max(one.first, 0) + 1, min(one.last + 1, layers))
        for one in shared
        if not one.constant
    ]
    return frozenset(cut for run in runs for cut in run)


class Part(NamedTuple):
    """A parameter or buffer of a layer."""

    name: str
    tensor: torch.Tensor
    kind: str
    written: bool
    """True if training changes it, judged by its kind."""
    identity: int = 0
    """Id of the tensor, if it is a parameter that the optimizer alone changes."""
    table: bool = False
    """True if its module is one of ``TABLES``."""


def parts(layer: nn.Module, once: bool = True) -> Iterator[Part]:
    """Yield the parameters and buffers of each module in a layer, of a module with several names ``once``."""
    changing = layer.__dict__.get("_changing", frozenset())  # names that a recorded forward was seen to write to
    for prefix, module in layer.named_modules(remove_duplicate=once):
        statistics, normed = _writes(module), isinstance(module, TABLES) and module.max_norm is not None
        for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
            for name, tensor in tensors.items():
                if tensor is not None:
                    whole = f"{prefix}.{name}" if prefix else name
                    changes = whole in changing or normed
                    written = (tensor.requires_grad if kind == "parameter" else statistics) or changes
                    trained = kind == "parameter" and tensor.requires_grad and not changes
                    identity = id(tensor) if trained else 0
                    yield Part(whole, tensor, kind, written, identity, isinstance(module, TABLES))


def _writes(module: nn.Module) -> bool:
    """True if forwards in training are known to write to a module's buffers. Others hardly ever do; ``watched`` checks."""
    spectral = any(isinstance(hook, SpectralNorm) for hook in module._forward_pre_hooks.values())
    return module.training and (spectral or isinstance(module, _NormBase | _SpectralNorm))


def refuse_lazy(what: str, layer: nn.Module) -> None:
    """Raise UserError if parameters or buffers of a layer have no shape yet."""
    for module in layer.modules():
        tensors = (*module._parameters.values(), *module._buffers.values())
        if any(is_lazy(tensor) for tensor in tensors if tensor is not None):
            raise UserError(
                f"{what} has parameters without a shape yet ({type(module).__name__}): run the model once on a sample "
                f"inside your function, before it returns"
            )


class _Unfilled(TorchFunctionMode):
    """Within the context, parameters keep whatever their memory holds instead of initial values. Memory that is not written
    costs nothing. (torch's meta device would do that, too, but a user's function may keep what it has made once.)"""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _FILLS:
            target = args[0] if args else kwargs.get("tensor")
            if isinstance(target, nn.Parameter):
                return target
        return func(*args, **(kwargs or {}))


def unfilled() -> TorchFunctionMode:
    """Context in which layers are made for their shapes, without initial values."""
    return _Unfilled()


class _Tie(NamedTuple):
    """Parts of layers that overlap in a storage, and the bytes that the first of them uses."""

    span: tuple[int, int]
    places: list[tuple[int, Part]]


class Finder:
    """Finds what layers share. The layers are shown to it one after another."""

    def __init__(self, names: Sequence[str], name_of: Callable[[int, str], str], together: bool = False) -> None:
        """``name_of``: the name in the model of a part of a layer. ``together``: all layers exist until ``found`` is called,
        so that ids say which parameters are the same."""
        self._names, self._name_of, self._together = names, name_of, together
        self._memory: dict[int, tuple[Any, list[_Tie]]] = {}

    def show(self, index: int, layer: nn.Module) -> None:
        """Inspect a layer, which may be freed afterwards. Raises UserError if it has no shape yet."""
        refuse_lazy(f'model: layer {index} "{self._names[index]}"', layer)
        others = (Part(name, tensor, _HELD, False) for name, tensor in held(layer))
        for part in (*parts(layer, once=False), *others):
            storage = memory_of(part.tensor)
            if storage is None:
                alive: Any = weakref.ref(part.tensor)
                key, span = id(part.tensor), (0, 1)
            else:
                alive = StorageWeakRef(storage)
                key, span = alive.cdata, extent(part.tensor)
            reference, ties = self._memory.get(key, (None, []))
            if isinstance(reference, weakref.ref) and reference() is not part.tensor:  # freed; a new tensor has its id
                ties = []
            if span[0] == span[1]:
                continue
            # The address of a storage is not reused while a weak reference to it exists.
            self._memory[key] = (reference if ties else alive), ties
            place = (index, part._replace(tensor=torch.empty(0)))
            tie = next((tie for tie in ties if tie.span[0] < span[1] and span[0] < tie.span[1]), None)
            if tie is None:
                ties.append(_Tie(span, [place]))
            else:
                tie.places.append(place)

    def found(self) -> tuple[Shared, ...]:
        """State that layers share, trained state first. Entries with the same first and last layer are merged."""
        by_layers: dict[tuple[bool, int, int], list[list[tuple[int, Part]]]] = {}
        tied: list[Shared] = []
        for _, ties in self._memory.values():
            for tie in ties:
                constant = not any(part.written for _, part in tie.places)
                if constant:  # each stage makes what is held without being a buffer, and nothing trains it
                    tie.places[:] = [place for place in tie.places if place[1].kind != _HELD]
                layers = [index for index, _ in tie.places]
                if not layers or min(layers) == max(layers):
                    continue
                if not constant and len(ties) == 1 and self._is_tied(tie):
                    text = self._text(min(layers), max(layers), [tie.places])
                    nbytes = tie.span[1] - tie.span[0]
                    places = tuple((index, part.name) for index, part in sorted(tie.places, key=lambda place: place[0]))
                    casts = len({index for index, part in tie.places if not part.table})
                    tied.append(Shared(min(layers), max(layers), text, False, places, True, nbytes, casts))
                else:
                    by_layers.setdefault((constant, min(layers), max(layers)), []).append(tie.places)
        others = []
        for (constant, begin, end), every in sorted(by_layers.items(), key=lambda item: item[0]):
            named = {(index, part.name) for tied_places in every if constant for index, part in tied_places}
            others.append(Shared(begin, end, self._text(begin, end, every), constant, tuple(sorted(named))))
        return (*sorted(tied, key=lambda one: (one.first, one.last)), *others)

    def _is_tied(self, tie: _Tie) -> bool:
        """True if all places have the same trained parameter."""
        known = {part.identity for _, part in tie.places}
        return self._together and len(known) == 1 and 0 not in known

    def _text(self, first: int, last: int, all_places: list[list[tuple[int, Part]]]) -> str:
        ends = [next(place for place in all_places[0] if place[0] == index) for index in (first, last)]
        called = ", ".join(dict.fromkeys(self._name_of(index, part.name) for index, part in ends))
        kind = ends[0][1].kind
        more = f" and {len(all_places) - 1} more" if len(all_places) > 1 else ""
        return f'layers {first} "{self._names[first]}" and {last} "{self._names[last]}" share a {kind} ({called}){more}'


class _WriteWatch:
    """Hooks around a layer's forward that raise UserError if it writes to what it shares with layers of other stages.

    The first forward is checked by comparing values, later ones by torch's counts of writes. A tensor whose size changes is
    a table that grows, and allowed.
    """

    def __init__(self, names: Sequence[str], text: str) -> None:
        self._names, self._text = list(names), text
        self._first = True
        self._before: list[tuple[torch.Tensor, int, int | None]] = []

    def put_on(self, layer: nn.Module) -> None:
        """Install the hooks on a layer."""
        layer.register_forward_pre_hook(self._look)
        layer.register_forward_hook(self._compare)

    def _tensors(self, layer: nn.Module) -> list[torch.Tensor | None]:
        found = []
        for name in self._names:
            module, _, last = name.rpartition(".")
            holder = part_at(layer, module)
            found.append(holder._buffers.get(last, holder._parameters.get(last)))
        return found

    def _look(self, layer: nn.Module, inputs: Any) -> None:
        self._before = [
            (tensor, tensor._version, self._sum(tensor)) if tensor is not None else (torch.empty(0), 0, None)
            for tensor in self._tensors(layer)
        ]

    def _compare(self, layer: nn.Module, inputs: Any, result: Any) -> None:
        before, self._before = self._before, []
        for now, (then, version, values) in zip(self._tensors(layer), before, strict=False):
            if now is None or now.shape != then.shape:
                continue
            if now is not then or now._version != version or self._sum(now) != values:
                raise UserError(f"{self._text} and write to it in forward, so they must be in one stage")
        self._first = False

    def _sum(self, tensor: torch.Tensor) -> int | None:
        return checksum(memory_of(tensor)) if self._first else None


def watched(layers: Sequence[nn.Module], start: int, shared: Iterable[Shared]) -> None:
    """Watch what layers ``start``, ``start`` + 1, ... share with layers of other stages. A forward that writes to it raises
    UserError."""
    stop = start + len(layers)
    for one in shared:
        if not one.constant or (start <= one.first and one.last < stop):
            continue
        for index in sorted({index for index, _ in one.places if start <= index < stop}):
            _WriteWatch([name for at, name in one.places if at == index], one.text).put_on(layers[index - start])

"""A model as a chain of layers, each built separately, so that a rank builds only the layers that it holds.

A layer is an ``nn.Module`` that takes one argument, a tensor or a tree of tensors (``tree``), and returns one. The whole
model is the ``nn.Sequential`` of all layers under their names, so ``state_dict()`` has the same names whether the model is
cut or not.

Layers are never copied: a copy loses hooks on parameters, and functions that refer to a module still refer to the original.
Where new layers are needed, the model's function is called again. What one call returns is a generation; each layer of it is
handed out once.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from msgspec.structs import replace
from torch import nn

from accept_mpi.errors import UserError
from accept_mpi.models import common
from accept_mpi.models.aliases import Aliases
from accept_mpi.models.fine_tuning import Changes
from accept_mpi.models.handed import Handed
from accept_mpi.models.modes import in_training
from accept_mpi.models.scripted import refuse_scripted
from accept_mpi.models.shared import Finder, Shared, refuse_lazy, unfilled
from accept_mpi.seeds import init_seed, seeded
from accept_mpi.users_code import RAISED

Factory = Callable[[], nn.Module]
Named = tuple[str, Factory]
Entry = nn.Module | Factory
Entries = Sequence[tuple[str, Entry]]
Found = TypeVar("Found")


class Chain:
    """Named layers, built from a seed.

    What a factory makes depends only on the seed and the layer's position, so that any cut of the chain starts from the same
    model.
    """

    def __init__(self, layers: Iterable[Named] | Entries, again: Callable[[], Entries] | None = None) -> None:
        """``layers``: factories, which may be called any number of times. With ``again``, they are what a user's function
        returned, modules or factories that may share state; each is then used once, and ``again`` makes new ones.

        Raises ValueError with a sentence if names are wrong, UserError if a layer has no shape yet.
        """
        self.undivided: list[str] = []
        """Patterns of names of modules whose forwards cannot be recorded, so that they stay whole."""
        self.one_layer = ""
        """Why the model is not divided, if its forward cannot be recorded."""
        self.changes: Changes | None = None
        """What is changed of new layers; their weights, where there is a file of them."""
        self.order: dict[str, int] = {}
        """Positions of parameters, by name, among those of a recorded model; empty: they come in the order of layers."""
        self.prepare: Callable[[Any], None] = lambda value: None
        """Prepares the layers for inputs of the shapes of this value, which a model that is recorded for each shape does
        where nothing else looks on."""
        self.autocast = False
        """True if forwards compute under torch's autocast."""
        self.looks: dict[str, str] = {}
        """Modules, settings and shapes of the model's parts as text, if its function has made them."""
        self.own_names = False
        """True if names of state are those of the whole model, without the layer's name in front."""
        self.layers = list(layers)
        if not self.layers:
            raise ValueError("a model needs at least one layer")
        self.names = [name for name, _ in self.layers]
        if wrong := [n for n in self.names if not n or "." in n or "/" in n]:
            raise ValueError(f'layer name "{wrong[0]}" must not contain "." or "/" and not be empty')
        if doubled := sorted({n for n in self.names if self.names.count(n) > 1}):
            raise ValueError(f"layer names must differ, but these come twice: {', '.join(doubled)}")
        self._again = again
        self._made: _Generation | None = None
        self._drawn: _Generation | None = None
        self._handed = Handed()
        self._shared: tuple[Shared, ...] | None = None if again else ()
        self._common: tuple[common.Common, ...] = ()
        if again:  # only the generation keeps them, and drops each when it is taken
            self._made = _Generation(self.names, self.layers)
            self.layers = []
            if self._made.modules is not None:  # they exist and can be inspected
                self._shared = self._find_shared()

    @classmethod
    def recorded(cls, names: Sequence[str], again: Callable[[], Entries], order: dict[str, int]) -> "Chain":
        """The chain of a recorded model, of which ``again`` makes new layers. Their state has the model's own names."""
        chain = cls([(name, nn.Identity) for name in names])
        chain.layers, chain._again, chain._shared, chain.own_names, chain.order = [], again, None, True, order
        return chain

    def __len__(self) -> int:
        return len(self.names)

    def build(self, index: int, seed: int) -> nn.Module:
        """Layer ``index`` with its initial weights, a new module each time. Raises UserError if it cannot be built."""
        return self.build_range(index, index + 1, seed)[0]

    def name_of(self, index: int, key: str) -> str:
        """Name in the whole model of a part of layer ``index``."""
        return name_in_model(self.names[index], key, self.own_names)

    def build_range(self, start: int, stop: int, seed: int) -> list[nn.Module]:
        """Layers ``start <= i < stop`` with their initial weights, new modules each time. They share what the model's layers
        share. Raises UserError if one cannot be built."""
        layers = self._built(start, stop, seed)
        if self.changes is not None and self.changes.file is not None:
            for index, layer in enumerate(layers, start):
                self.changes.file.load(layer, self.name_of(index, ""))
            self.changes.file.close()
        return layers

    def _built(self, start: int, stop: int, seed: int) -> list[nn.Module]:
        indices = range(start, stop)
        if self._again is None:
            return [_make(self.names, index, self.layers[index][1], seed) for index in indices]
        while True:
            if self._made is None or not self._made.has(indices):
                self._made = None  # frees what is left of it before the next one is made
                self._made = self._call_again()
            fresh = self._made.whole
            layers = [self._made.take(index, seed) for index in indices]
            used = [(index, part) for index, layer in zip(indices, layers, strict=True) for part in self._handed.used(layer)]
            if not used and (fresh or not any(layer in self._handed for layer in layers)):
                return self._handed.add(layers)
            if fresh:
                index, part = used[0]
                raise UserError(
                    f"model.name: the function gives the same {self.name_of(index, part)} whenever it is called, and "
                    "training changes that: it must make it anew, or clone it"
                )
            self._made = None  # these layers share something with ones that were handed out before

    def abstract(self, index: int, seed: int) -> nn.Module:
        """Layer ``index`` on torch's meta device, with shapes but no values. Raises UserError if it cannot be built."""
        if self._again is None:
            with torch.device("meta"), unfilled():
                layer = _make(self.names, index, self.layers[index][1], seed)
        else:
            with unfilled():
                if self._drawn is None or not self._drawn.has([index]):
                    self._drawn = None
                    self._drawn = self._call_again()
                layer = self._drawn.take(index, seed)
                if self._drawn.empty:
                    self._drawn = None
        if any(not tensor.is_meta for tensor in (*layer.parameters(), *layer.buffers())):
            layer = layer.to("meta")
        return layer

    def shared(self) -> tuple[Shared, ...]:
        """State that layers share, found once. Under autocast torch casts a parameter once for all uses in a forward, and
        adds up their gradients in lower precision, so such uses must be in one stage. Raises UserError if a layer cannot be
        built."""
        if self._shared is None:
            self._shared = self._find_shared()
        return tuple(replace(one, tied=one.tied and not (self.autocast and one.casts > 1)) for one in self._shared)

    def aliases(self) -> list[list[str]]:
        """Names in the whole model of each tensor that has several. Raises UserError if a layer cannot be built."""

        def find() -> list[list[str]]:
            seen, generation = Aliases(), self._call_again() if self._again else None
            for index in range(len(self)):
                if generation is None:
                    with torch.device("meta"):
                        layer = _make(self.names, index, self.layers[index][1], 0)
                else:
                    layer = generation.take(index, 0)
                seen.show(layer, self.name_of(index, ""))
            return seen.found()

        return unfilled_if_possible(find)

    def release(self) -> None:
        """Free layers that have been made but not handed out. New ones are made when they are asked for."""
        if self._again:
            self._made = self._drawn = None

    def whole(self, seed: int = 0) -> nn.Sequential:
        """The whole model in plain PyTorch, into which an exported checkpoint loads with ``strict=True``."""
        return nn.Sequential(OrderedDict(zip(self.names, self.build_range(0, len(self), seed), strict=True)))

    # ------------------------------------------------------------------------------------------------------------------

    def _call_again(self) -> "_Generation":
        assert self._again is not None
        entries = list(self._again())
        if (names := [name for name, _ in entries]) != self.names:
            raise UserError(
                f"model.name: the function gives other layers when it is called again: {_show(names)} instead of "
                f"{_show(self.names)}"
            )
        return _Generation(self.names, entries)

    def _find_shared(self) -> tuple[Shared, ...]:
        every = range(len(self))
        made = self._made.modules if self._made is not None else None

        def find() -> tuple[Shared, ...]:
            generation = None if made is not None else self._call_again()
            modules = made if generation is None else generation.modules
            finder, others = Finder(self.names, self.name_of, together=modules is not None), common.Finder()
            for index in every:
                layer = modules[index] if modules is not None else generation.take(index, 0)  # type: ignore[union-attr]
                finder.show(index, layer)
                others.show(index, layer)
            self._common = others.found()
            return finder.found()

        return unfilled_if_possible(find)

    def common(self) -> tuple[common.Common, ...]:
        """Python objects and variables that layers have in common. Raises UserError if a layer cannot be built."""
        self.shared()
        return self._common


def name_in_model(layer: str, key: str, own_names: bool) -> str:
    """Name in the whole model of a part of a layer. ``own_names``: as ``Chain.own_names``."""
    return key if own_names else f"{layer}.{key}"


def unfilled_if_possible(find: Callable[[], Found]) -> Found:
    """What a function finds in new layers, or makes of them, that need no initial values but for the user's own function.
    Raises UserError."""
    try:
        with unfilled():
            return find()
    except UserError:  # the user's function may need them; if not, it raises the same error again
        return find()


class _Generation:
    """Layers, or functions that make them, from one call of a model's function."""

    def __init__(self, names: Sequence[str], entries: Entries) -> None:
        self._names = names
        self._entries: list[Entry | None] = [entry for _, entry in entries]

    def has(self, indices: Iterable[int]) -> bool:
        """True if none of these layers has been taken."""
        return all(self._entries[index] is not None for index in indices)

    @property
    def whole(self) -> bool:
        """True if no layer has been taken."""
        return all(entry is not None for entry in self._entries)

    @property
    def empty(self) -> bool:
        return all(entry is None for entry in self._entries)

    @property
    def modules(self) -> list[nn.Module] | None:
        """All layers, if each is a module and none has been taken; else None."""
        found = [entry for entry in self._entries if isinstance(entry, nn.Module)]
        return found if len(found) == len(self._entries) else None

    def take(self, index: int, seed: int) -> nn.Module:
        """Hand out a layer; it can be taken only once."""
        entry, self._entries[index] = self._entries[index], None
        assert entry is not None
        return _make(self._names, index, entry, seed)


def _make(names: Sequence[str], index: int, entry: Entry, seed: int) -> nn.Module:
    """Layer from its factory, or ``entry`` itself if it is a module. Raises UserError if that fails or gives no
    ``nn.Module``."""
    what = f'model: layer {index} "{names[index]}"'
    layer: object = entry
    if not isinstance(entry, nn.Module):
        try:
            with seeded(init_seed(seed, index)):
                layer = entry()
        except UserError:
            raise
        except RAISED as error:
            raise UserError(f"{what} cannot be built: {type(error).__name__}: {error}") from error
    if not isinstance(layer, nn.Module):
        raise UserError(f"{what} is a {type(layer).__name__}, not an nn.Module")
    refuse_lazy(what, layer)
    refuse_scripted(what.removeprefix("model: "), layer)
    return in_training(layer)


def _show(names: Sequence[str]) -> str:
    some = ", ".join(names[:4])
    return f"{len(names)} ({some}{', ...' if len(names) > 4 else ''})"

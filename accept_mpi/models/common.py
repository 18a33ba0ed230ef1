"""Python objects and variables that layers have in common, through which a forward may reach another layer's.

A context object, a dictionary or a generator that several layers were given, variables of a Python module and of a class: a
rank that changes them in a forward does not change those of another. So layers that have such a thing in common, and change
it, must be in one stage. What is only read (a configuration) may be parted.
"""

import functools
import sys
import types
import weakref
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from accept_mpi.models.attributes import Digest, digest
from accept_mpi.models.held import MOST_INSIDE, OWN, filled

LIBRARIES = ("torch", "numpy", "accept_mpi", "builtins")
"""Packages whose classes and Python modules keep nothing that matters here."""
KNOWN = frozenset((*LIBRARIES, *sys.stdlib_module_names))
"""Those, and Python's own."""
_NO_STATE = (*LIBRARIES, "logging")
"""Packages whose objects do not decide what a forward gives, but for containers and generators."""
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Tables of a module's hooks."""
_DEEP = 4
_CONSTANTS = (type(None), bool, int, float, complex, str, bytes)
_VARIABLE = (*_CONSTANTS, torch.Tensor, list, dict, set, deque, bytearray, np.ndarray, torch.Generator, Random,
             np.random.Generator, np.random.RandomState)  # fmt: skip


class Place(NamedTuple):
    """Where a layer finds something."""

    python: str
    """Name of a Python module; empty: an attribute of the layer."""
    path: str
    """The layer's part that has the attribute, or the Python module's class; empty: the layer, the Python module itself."""
    steps: tuple[Any, ...]
    """Name of the attribute or variable, and the way from there through containers and objects; empty: all attributes."""
    called: bool = False
    """True if the way leads through a function, such as a hook."""

    @property
    def text(self) -> str:
        return ".".join(map(str, filter(None, (self.python, self.path, *self.steps)))) or "attributes"

    def value(self, layer: nn.Module | None) -> Any:
        """What is there now. Raises LookupError, AttributeError or TypeError if there is nothing."""
        whole = sys.modules[self.python] if self.python else layer
        owner: Any = functools.reduce(getattr, filter(None, self.path.split(".")), whole)
        whole_owner = isinstance(owner, _CALLED) or (bool(self.steps) and isinstance(self.steps[0], _Method))
        value: Any = owner if whole_owner else vars(owner)
        for step in self.steps:
            value = _part(value, step)
        return value if self.steps else {name: one for name, one in value.items() if name not in OWN}


def parts_of(value: Any) -> list[tuple[Any, Any]]:
    """What is directly in a container, an object (a module, too) or a function: steps and values."""
    if isinstance(value, list | tuple | deque):
        return list(enumerate(list(value)))
    if isinstance(value := _function(value), types.FunctionType):
        return [*((name, cell.cell_contents) for name, cell in _cells(value)), *kept_by(value)]
    if isinstance(value, functools.partial):
        return [(name, getattr(value, name)) for name in ("func", "args", "keywords")]
    if isinstance(value, types.MethodType):
        return [("__self__", value.__self__)]
    return list((value if isinstance(value, Mapping) else getattr(value, "__dict__", {})).items())


def _part(value: Any, step: Any) -> Any:
    """What is at a step. Raises LookupError, AttributeError or TypeError if there is nothing."""
    if isinstance(step, _Method):
        return _function(vars(type(value).__mro__[step.kind])[step.name])
    if isinstance(value, list | tuple | deque):
        return value[step]
    if isinstance(step, _Nth):
        return list(value.values())[step.number]
    if isinstance(value, nn.Module):
        return getattr(value, step)
    return value[step] if isinstance(value, Mapping) else dict(parts_of(value))[step]


def _cells(function: types.FunctionType) -> list[tuple[str, types.CellType]]:
    """A function's variables of the functions around it, as far as they have values."""
    return [
        (name, cell)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        if filled(cell)
    ]


def kept_by(function: types.FunctionType) -> list[tuple[str, Any]]:
    """What a function itself keeps between two calls: its attributes, and defaults that may change."""
    code, defaults = function.__code__, function.__defaults__ or ()
    named = zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults, strict=True)
    changing = [
        (name, one)
        for name, one in (*named, *(function.__kwdefaults__ or {}).items())
        if not isinstance(one, (*_CONSTANTS, torch.Tensor))
    ]
    return [*changing, *((name, one) for name, one in vars(function).items() if not name.startswith("__"))]


class _Nth(NamedTuple):
    """A step to a value of a dictionary whose keys differ between two calls of a model's function."""

    number: int

    def __str__(self) -> str:
        return str(self.number)


class _Method(NamedTuple):
    """A step to a function of an object's own class."""

    kind: int
    """Number of the class that has it, in the order in which Python looks there."""
    name: str

    def __str__(self) -> str:
        return self.name


class Common(NamedTuple):
    """Something that layers have in common."""

    places: tuple[tuple[int, Place], ...]
    """Layers, and where each finds it."""

    @property
    def layers(self) -> list[int]:
        return [layer for layer, _ in self.places]

    @property
    def what(self) -> str:
        return f"layers {self.layers[0]} and {self.layers[-1]} have {self.places[0][1].text} in common"

    @property
    def text(self) -> str:
        """Half a sentence for the user, about something that changes."""
        return f"{self.what}, and a forward changes it"


class Finder:
    """Finds what layers have in common. What they refer to must exist until all have been shown."""

    def __init__(self) -> None:
        self._found: dict[Any, dict[int, Place]] = {}
        self._alive: list[Any] = []  # so that an id stays one object's

    def show(self, index: int, one: Any) -> None:
        """Look at a layer, or at a function."""
        for key, place, value in _reached(one):
            places = self._found.setdefault(key, {})
            if index not in places or (places[index].called and not place.called):
                places[index] = place
            self._alive.append(value)

    def found(self) -> tuple[Common, ...]:
        """What two or more layers have in common, and variables of Python that at least one of them refers to."""
        return tuple(one for one in self._every() if len(one.places) > 1 or one.places[0][1].python)

    def variables(self) -> list[Common]:
        """Variables of Python, and those of functions, such as hooks, that at least one layer refers to."""
        return [one for one in self._every() if one.places[0][1].python or one.places[0][1].called]

    def _every(self) -> Iterator[Common]:
        return (Common(tuple(sorted(found.items()))) for found in self._found.values())


def with_loss(common: Sequence[Common], loss: Any, index: int) -> list[Common]:
    """What layers have in common with each other, and with a loss, as layer ``index``: variables of Python alone, since a
    loss is not made with the layers."""
    finder = Finder()
    finder.show(index, loss)
    mine = {one.places[0][1]: one.places for one in finder.found()}
    every = [Common((*one.places, *mine.get(one.places[0][1], ()))) for one in common]
    return [one for one in every if len(one.places) > 1]


class Seen:
    """What layers have in common, as it was when this object was made."""

    def __init__(self, layers: Sequence[Any], start: int, common: Sequence[Common]) -> None:
        """``layers``: those that are here, from number ``start`` on."""
        self._layers, self._start, self._common = layers, start, common
        self._own = {id(part) for one in layers if isinstance(one, nn.Module) for part in one.modules()}
        self._before = [(one, digests) for one in common if (digests := self._digests(one))]

    def again(self) -> "Seen":
        """The same, as it is now."""
        return Seen(self._layers, self._start, self._common)

    def changed(self, grown: bool = False) -> list[Common]:
        """What has changed since. ``grown``: new keys of dictionaries and new attributes count, too."""
        return [
            one
            for one, before in self._before
            if any(not old.equal(new, grows=not grown) for old, new in zip(before, self._digests(one), strict=False))
        ]

    def _digests(self, one: Common) -> list[Digest]:
        found = []
        for index, place in one.places:
            if 0 <= index - self._start < len(self._layers):
                try:
                    value = place.value(self._layers[index - self._start])
                    if id(value) in self._own:  # at which the trial of its stage looks (``Attributes``, ``Watch``)
                        continue
                    found.append(digest(_counted(value) if isinstance(value, nn.Module) else value))
                except (LookupError, AttributeError, TypeError):
                    continue
        return found


def calls(layer: nn.Module, wanted: Collection[str]) -> bool:
    """True if the code of a layer's own classes, or of functions that it calls, has one of these names."""
    names: set[str] = set()
    code: set[int] = set()
    for kind in {type(module) for module in layer.modules()}:
        for _, function in functions_of(kind):
            deque(_variables(function, names, code, 0), maxlen=0)
    return not names.isdisjoint(wanted)


_Reached = Iterator[tuple[Any, Place, Any]]
"""Something that is equal for one and the same thing, a place where it is, and the thing."""


def _reached(one: Any) -> _Reached:
    """Yield what a layer, or a function, reaches."""
    code: set[int] = set()
    seen: set[int] = set()
    if isinstance(one, types.MethodType):
        function: Any = one.__func__
        yield from _variables(function, set(), code, 0)
        one = None if isinstance(one.__self__, nn.Module) else one
    if not isinstance(one, nn.Module):  # a loss
        for name, function in functions_of(type(one)):
            yield from _inside(function, Place("", "", (_Method(0, name),), called=True), seen, code)
        yield from _inside(one, Place("", "", (), called=True), seen, code)
        return
    kinds: dict[type, tuple[str, int]] = {}
    for path, module in one.named_modules():
        if not is_of(LIBRARIES, type(module).__module__):
            yield weakref.ref(module), Place("", path, ()), None  # it may be in several layers, and must not be kept alive
        for name, value in list(vars(module).items()):
            if name not in OWN:
                yield from _inside(value, Place("", path, (name,)), seen, code)
        for name in HOOKS:
            for n, value in enumerate(list(vars(module).get(name, {}).values())):
                yield from _inside(value, Place("", path, (name, _Nth(n))), seen, code)
        for n, kind in enumerate(type(module).__mro__):
            if not is_of(LIBRARIES, kind.__module__):
                kinds.setdefault(kind, (path, n))
    for kind, (path, n) in kinds.items():
        names: set[str] = set()
        for name, function in functions_of(kind):
            yield from _variables(function, names, code, 0)
            yield from _inside(function, Place("", path, (_Method(n, name),), called=True), seen, code)
        for name, value in list(vars(kind).items()):
            if name in names and not name.startswith("__") and _may_change(value):
                yield (kind, name), Place(kind.__module__, kind.__qualname__, (name,)), value


def functions_of(kind: type) -> Iterator[tuple[str, types.FunctionType]]:
    """A class's own functions, and their names."""
    for name, value in list(vars(kind).items()):
        if isinstance(function := _function(value), types.FunctionType):
            yield name, function


def _function(value: Any) -> Any:
    """The function behind a property or a method of a class; any other value itself."""
    if isinstance(value, staticmethod | classmethod):
        return value.__func__
    return value.fget if isinstance(value, property) else value


def _inside(value: Any, place: Place, seen: set[int], code: set[int]) -> _Reached:
    """Yield the containers, objects and generators in an attribute, and what its functions refer to."""
    if isinstance(value, nn.Module) and place.called and id(value) not in seen:
        for path, module in value.named_modules():
            seen.add(id(module))
            steps = (*place.steps, *filter(None, path.split(".")))
            yield weakref.ref(module), place._replace(steps=steps), None  # as in ``_reached``
    if isinstance(value, (*_CONSTANTS, torch.Tensor)) or not (isinstance(value, _ON_THE_WAY) or _may_change(value)):
        return
    if id(value) in seen or len(seen) > MOST_INSIDE or len(place.steps) > _DEEP:
        return
    seen.add(id(value))
    if isinstance(value, _CALLED):
        place = place._replace(called=True)
    if isinstance(value, types.FunctionType):
        yield from _variables(value, set(), code, 0)
        for name, cell in _cells(value):
            if isinstance(cell.cell_contents, (*_CONSTANTS, torch.Tensor)):
                yield id(cell), place._replace(steps=(*place.steps, name)), cell
        for name, one in kept_by(value):
            if isinstance(one, (*_CONSTANTS, torch.Tensor)):
                yield (value, name), place._replace(steps=(*place.steps, name)), one
    elif not isinstance(value, _ON_THE_WAY):
        yield id(value), place, value
    for step, part in parts_of(value):
        yield from _inside(part, place._replace(steps=(*place.steps, step)), seen, code)


def _counted(module: nn.Module) -> dict[str, Any]:
    """What functions may count in a module: its own attributes and buffers. Tensors that they put there anew do not count:
    they are shown, as maps of attention are."""
    own = {name: value for name, value in vars(module).items() if name not in OWN and not isinstance(value, torch.Tensor)}
    return own | module._buffers


_CALLED = (types.FunctionType, types.MethodType, functools.partial)
_ON_THE_WAY = (tuple, *_CALLED)
"""What does not change itself, but what is in it."""


def _may_change(value: Any) -> bool:
    """True for what another may replace or change: constants, tensors, containers, generators, objects with attributes."""
    if isinstance(value, _VARIABLE):
        return True
    kinds = (type, types.ModuleType, nn.Module, *_ON_THE_WAY)
    return hasattr(value, "__dict__") and not isinstance(value, kinds) and not is_of(_NO_STATE, type(value).__module__)


def _variables(function: types.FunctionType, names: set[str], seen: set[int], depth: int) -> _Reached:
    """Yield the variables of Python modules that a function, or another one that it calls, refers to. ``names`` takes all
    names in them."""
    if id(function) in seen or depth > _DEEP or is_of(LIBRARIES, function.__module__ or ""):
        return
    seen.add(id(function))
    names |= set(_names(function.__code__))
    inner = [cell.cell_contents for _, cell in _cells(function)]
    for key, place, value in referred(function):
        if isinstance(called := _function(value), types.FunctionType):
            inner.append(called)
            if not is_of(LIBRARIES, called.__module__ or ""):
                own = ((step, one) for step, one in kept_by(called) if _may_change(one))
                yield from (((called, step), place._replace(steps=(*place.steps, step)), one) for step, one in own)
        elif _may_change(value):
            yield key, place, value
    for value in inner:
        if isinstance(value, types.FunctionType):
            yield from _variables(value, names, seen, depth + 1)


def referred(function: types.FunctionType) -> _Reached:
    """Yield what a function's code may refer to: variables of its Python module, and of the modules and classes that it
    finds there, these included."""
    names = set(_names(function.__code__))
    where = str(function.__globals__.get("__name__"))
    owners: list[tuple[Any, Place, Mapping[str, Any]]] = [(where, Place(where, "", ()), function.__globals__)]
    known = {where}
    for owner, place, table in owners:
        for name in sorted(one for one in names & table.keys() if not one.startswith("__")):
            value = table[name]
            yield (owner, name), place._replace(steps=(name,)), value
            if isinstance(value, types.ModuleType):
                within: tuple[Any, Place] = value.__name__, Place(value.__name__, "", ())
            elif isinstance(value, type):
                within = value, Place(value.__module__, value.__qualname__, ())
            else:
                continue
            if within[0] not in known and not is_of(KNOWN, within[1].python):
                known.add(within[0])
                owners.append((*within, vars(value)))


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the names that some code uses."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def is_of(packages: Collection[str], module: str) -> bool:
    """True if a Python module, by its name, belongs to one of these packages."""
    return module.split(".")[0] in packages

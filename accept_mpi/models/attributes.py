"""Finds out what a forward changes among the attributes of modules."""

import array
import ctypes
import numbers
import random
import types
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from accept_mpi.models.held import MOST_INSIDE, OWN
from accept_mpi.models.memory import checksum, memory_of

_N = TypeVar("_N", int, float)
CONSTANTS = (bool, int, float, str, type(None))
_NO_SLOTS = ("__dict__", "__weakref__")
NO_STATE = OWN | {"forward"}
"""Names of torch's own attributes, which keep nothing but constants; and of a method that something else has put there."""


@contextmanager
def _unwatched() -> Iterator[None]:
    """Within the context whoever watches torch's calls, to record a forward, does not see them."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


class _Place(NamedTuple):
    """Where an attribute is."""

    table: dict[str, Any]
    key: str
    name: str
    """Its dotted name."""
    registered: bool
    """True if it is a parameter or a buffer."""

    @property
    def value(self) -> Any:
        return self.table[self.key]

    def digest(self) -> "Digest":
        if self.registered and isinstance(self.value, torch.Tensor):
            return Digest(_Seen(self.value, written=False))
        return digest(self.value)


class Attributes:
    """The attributes of some modules and of all their parts, as they were when this object was made."""

    def __init__(self, named: Sequence[tuple[str, nn.Module]]) -> None:
        """``named``: the modules and their names, "" for none."""
        self._named = named
        with _unwatched():
            self._before = {place.name: place.digest() for place in self._places()}

    def again(self) -> "Attributes":
        """The same modules' attributes, as they are now."""
        return Attributes(self._named)

    def changed(self, but_floating: bool = False, grown: bool = False) -> list[str]:
        """Dotted names of what has changed since, also within containers and objects: numbers, texts, arrays, generators'
        states, and tensors that are others now or, unless they are parameters or buffers, have been written to. New keys of
        dictionaries do not count, since a forward may remember what it has computed, unless ``grown``. ``but_floating``:
        floating-point tensors do not count either."""
        found = []
        with _unwatched():
            for place in self._places():
                if place.name in self._before:
                    if not self._before[place.name].equal(place.digest(), but_floating, not grown):
                        found.append(place.name)
                elif grown or (
                    isinstance(place.value, (torch.Tensor, *CONSTANTS)) and not (but_floating and _floating(place.value))
                ):
                    found.append(place.name)
        return found

    def fill(self, names: Sequence[str], numbers: bool, filling: float) -> None:
        """Have the named attributes hold ``filling`` (NaN, say) in place of the values of floating-point tensors, or of
        floating-point ``numbers``."""
        for place in self._places():
            if place.name in names:
                place.table[place.key] = _filled(place.value, numbers, filling, {})

    def numbers(self, names: Sequence[str], kind: type[_N]) -> dict[str, _N]:
        """Those of the named attributes that are numbers of a ``kind`` now."""
        return {place.name: place.value for place in self._places() if place.name in names and type(place.value) is kind}

    def put(self, values: Mapping[str, float]) -> None:
        """Set attributes."""
        for place in self._places():
            if place.name in values:
                place.table[place.key] = values[place.name]

    def _places(self) -> Iterator[_Place]:
        for prefix, root in self._named:
            for path, module in root.named_modules(prefix=prefix):
                dot = f"{path}." if path else ""
                for table in (module._parameters, module._buffers):
                    yield from (_Place(table, key, dot + key, True) for key in list(table))
                own = vars(module)
                for key, value in list(own.items()):
                    if key not in NO_STATE or isinstance(value, CONSTANTS):
                        yield _Place(own, key, dot + key, False)


def _floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


class Digest:
    """What of a value may change."""

    def __init__(self, kind: Any, parts: dict[Any, "Digest"] | None = None, grows: bool = False) -> None:
        """``kind``: whatever must be equal; ``grows``: there may be more parts later."""
        self.kind, self.parts, self.grows = kind, parts or {}, grows

    def equal(self, other: "Digest", but_floating: bool = False, grows: bool = True) -> bool:
        """True if nothing has changed. ``but_floating`` as in ``Attributes.changed``; ``grows``: new keys do not count."""
        if isinstance(self.kind, _Seen) and isinstance(other.kind, _Seen):
            return (but_floating and self.kind.floating and other.kind.floating) or self.kind.same(other.kind)
        if self.kind != other.kind or not ((grows and self.grows) or self.parts.keys() == other.parts.keys()):
            return False
        both = self.parts.keys() & other.parts.keys()
        return all(self.parts[key].equal(other.parts[key], but_floating, grows) for key in both)


class _Seen:
    """A tensor at a time."""

    def __init__(self, tensor: torch.Tensor, written: bool = True, checked: bool = True) -> None:
        """``written``: whether to notice what is written to it, and ``checked``: also what torch does not count."""
        self.tensor, self.floating = tensor, tensor.is_floating_point()
        self._version = 0 if tensor.is_inference() or not written else tensor._version
        self._values = checksum(memory_of(tensor)) if written and checked and not tensor.is_meta else None

    def same(self, other: "_Seen") -> bool:
        return self.tensor is other.tensor and self._version == other._version and self._values == other._values


def digest(value: Any, seen: dict[int, Any] | None = None, checked: bool = True) -> Digest:
    """What of a value may change, now. ``checked``: also what is written to tensors and torch does not count."""
    seen = {} if seen is None else seen
    if isinstance(value, CONSTANTS):
        return Digest((type(value), "nan" if value != value else value))
    # Parameters change by updates, and torch's recurrent layers have lists of their own.
    if id(value) in seen or len(seen) > MOST_INSIDE or isinstance(value, nn.Module | nn.Parameter | type):
        return Digest(None)
    seen[id(value)] = value
    if isinstance(value, torch.Tensor):
        return Digest(_Seen(value, checked=checked))
    if isinstance(value, np.ndarray | np.generic):
        return Digest((str(value.dtype), np.shape(value), value.tobytes() if value.dtype.hasobject is False else b""))
    if (state := _generator(value)) is not None:
        return Digest(state)
    constants = isinstance(value, list | tuple | deque | set | frozenset) and all(type(one) in CONSTANTS for one in value)
    if isinstance(value, list | tuple | deque):
        parts = {} if constants else {n: digest(one, seen, checked) for n, one in enumerate(value)}
        return Digest(tuple(value) if constants else None, parts)
    if isinstance(value, set | frozenset):
        return Digest(frozenset(value) if constants else len(value))
    if isinstance(value, Iterator):
        return Digest(*_position(value, seen, checked))
    if isinstance(value, numbers.Number):  # of Python's other kinds
        return Digest((type(value), repr(value)))
    if isinstance(value, bytearray | array.array | memoryview | ctypes._SimpleCData | ctypes.Array | ctypes.Structure):
        return Digest(bytes(value))
    inside = value if isinstance(value, dict) else _inside(value)
    kind = None if inside or isinstance(value, dict) else _text(value)
    return Digest(kind, {key: digest(one, seen, checked) for key, one in list(inside.items())}, grows=True)


def _inside(value: Any) -> dict[str, Any]:
    """What an object has, in slots, too."""
    slots = [vars(kind).get("__slots__", ()) for kind in type(value).__mro__]
    names = [name for some in slots for name in ((some,) if isinstance(some, str) else tuple(some))]
    there = {name: getattr(value, name) for name in names if name not in _NO_SLOTS and hasattr(value, name)}
    return there | getattr(value, "__dict__", {})


def _text(value: Any) -> str | None:
    """What an object shows of its value (a range, bytes, a date); None if it shows only which one it is."""
    with suppress(Exception):
        return text if " at 0x" not in (text := repr(value)) else None
    return None


def _position(value: Iterator[Any], seen: dict[int, Any], checked: bool) -> tuple[Any, dict[Any, Digest]]:
    """How far an iterator has come, as far as that can be seen: kind and parts of its digest."""
    kind: Any = None
    inside = getattr(value, "__dict__", {})
    if isinstance(value, types.GeneratorType) and value.gi_frame is not None:
        kind, inside = value.gi_frame.f_lasti, value.gi_frame.f_locals
    elif type(value).__module__ in ("builtins", "itertools"):
        kind = _text(value)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                inside = dict(enumerate(value.__reduce__()[1:]))
        except Exception:  # from Python 3.14 on most of itertools keep it to themselves
            kind = kind or object()  # it may have gone on
    return kind, {key: digest(one, seen, checked) for key, one in list(inside.items())}


def _generator(value: Any) -> Any:
    """State of a generator of random numbers, None of anything else."""
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state())
    return None


def _filled(value: Any, numbers: bool, filling: float, seen: dict[int, Any]) -> Any:
    """A value with ``filling`` in it; containers and objects stay the same objects."""
    if isinstance(value, torch.Tensor):
        other = isinstance(value, nn.Parameter) or not value.is_floating_point() or numbers
        return value if other else torch.full_like(value, filling, requires_grad=False)
    if type(value) is float:
        return filling if numbers else value
    if id(value) in seen or len(seen) > MOST_INSIDE or isinstance(value, nn.Module | type):
        return value
    seen[id(value)] = value
    if type(value) is tuple:
        return tuple(_filled(one, numbers, filling, seen) for one in value)
    if isinstance(value, list | deque):
        for n, one in enumerate(list(value)):
            value[n] = _filled(one, numbers, filling, seen)
        return value
    inside = value if isinstance(value, dict) else getattr(value, "__dict__", {})
    for key, one in list(inside.items()):
        inside[key] = _filled(one, numbers, filling, seen)
    return value

"""What forwards leave in modules for later ones beside ``state_dict()``: attributes, buffers that are not persistent, and
what a loss keeps. It is kept with a stage's state, so that a run goes on from a checkpoint or a snapshot as if it had not
ended.

Numbers, text, None, tensors, arrays and torch's generators are kept, also in lists, tuples, dicts, sets, deques and objects,
which stay the same objects. What forwards change is found by trials. What only later ones change (a switch thrown after a
thousand steps, a list that is filled then, a new attribute, which parameters are trained) is kept as soon as it differs from
what it was at first.
"""

import copy
import inspect
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from accept_mpi.device.compute import here
from accept_mpi.models.attributes import Digest, digest
from accept_mpi.models.held import OWN
from accept_mpi.models.parts import part_at
from accept_mpi.pipeline.state import packed, unpacked
from accept_mpi.tree import NotATree

LAYERS, LOSS = "remembered", "loss"
"""What a stage's state calls them: "remembered/<layer's name>.<attribute>", and "loss/<last layer's name>.<attribute>"."""
THE_LOSS = "the loss"
"""Name of the loss among the modules."""
_TRAINED = ".requires_grad"
"""Behind a parameter's name: whether it wants gradients."""
_MOST_DEEP = 32
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


class _Constant(NamedTuple):
    """A module's attribute, and its value at first."""

    table: dict[str, Any]
    key: str
    name: str
    value: Any

    @property
    def now(self) -> Any:
        return self.table.get(self.key, self.value)

    @property
    def same(self) -> bool:
        now = self.now
        return now is self.value or (type(now) is type(self.value) and bool(now == self.value))


class _Value(NamedTuple):
    """A tensor or a collection that an attribute or a buffer which ``state_dict()`` leaves out has at first."""

    table: dict[str, Any]
    key: str
    name: str
    at_first: Digest
    copy: Any
    """None, unless it is to be put back."""

    @property
    def same(self) -> bool:
        return self.at_first.equal(digest(self.table.get(self.key), checked=False), grows=False)


class AtFirst:
    """What some modules have before the first step, and what is other later."""

    def __init__(self, named: Sequence[tuple[str, nn.Module]], copies: bool = False) -> None:
        """``copies``: for ``put_back``."""
        every = [(path, one) for root, module in named for path, one in module.named_modules(prefix=root)]
        self.constants = [
            _Constant(vars(one), key, f"{path}.{key}", value)
            for path, one in every
            for key, value in vars(one).items()
            if isinstance(value, _PLAIN) and key not in OWN - {"training"}
        ]
        """Constants, modes included."""
        self.values = [
            _Value(table, key, f"{path}.{key}", digest(value, checked=False), copy.deepcopy(value) if copies else None)
            for path, one in every
            for table, key, value in _collections(one)
        ]
        self._keys = [(path, vars(one), OWN.union(vars(one))) for path, one in every]
        self.trained = [
            (f"{path}.{key}{_TRAINED}", parameter, parameter.requires_grad)
            for path, one in every
            for key, parameter in one._parameters.items()
            if parameter is not None
        ]
        """Parameters, and whether they want gradients."""

    def new(self) -> Iterator[tuple[dict[str, Any], str, str]]:
        """Yield what there was not: a module's table, the attribute's name in it, and its whole name."""
        for path, table, keys in self._keys:
            yield from ((table, key, f"{path}.{key}") for key in table.keys() - keys)

    def put_back(self) -> None:
        """Set constants, tensors and collections to what they were, and take away new ones."""
        for one in self.constants:
            one.table[one.key] = one.value
        for place, value in enumerate(self.values):
            if not value.same:
                now = value.table[value.key] = copy.deepcopy(value.copy)
                self.values[place] = value._replace(at_first=digest(now, checked=False))
        for table, key, _ in [*self.new()]:
            if _is_simple(table[key], 0):
                del table[key]


class Remembered:
    """What some modules remember."""

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Module]],
        names: Collection[str] = (),
        before: "Remembered | None" = None,
        shown: Collection[Any] = (),
        anew: Collection[str] = (),
    ) -> None:
        """``named``: modules and their names, a loss as the last one; ``names``: dotted names of what is to be kept;
        ``before``: what was made for the same modules when less was known; ``shown``: names of what forwards change from the
        first on, and none reads; ``anew``: of what begins anew, since it is thrown when hooks are put on modules."""
        self.names = set(names)
        self._named = dict(named)
        self._shown, self._anew = {*shown} - self.names, {*anew}
        self._at_first: AtFirst = before._at_first if before and before._named else AtFirst(named)

    @classmethod
    def of_file(cls, named: Sequence[tuple[str, nn.Module]], state: Mapping[str, torch.Tensor]) -> "Remembered":
        """What ``state``, read from a file, says of attributes that these modules have, and that are no functions."""
        every = cls(named, [key.removeprefix(f"{LAYERS}/") for key in state])
        return cls(named, [name for _, table, key, name in every._places() if key in table and not callable(table[key])])

    def state(self) -> dict[str, torch.Tensor]:
        """Copies of what can be kept, as "<what>/<name>"."""
        found = {}
        for _, table, key, name in self._places(self.late()):
            if key in table and (value := _packed(table[key])) is not None:
                found[self._key(name)] = value
        trained = ((name, one.requires_grad) for name, one, wanted in self._at_first.trained if one.requires_grad != wanted)
        return found | {self._key(name): packed(wanted) for name, wanted in trained}

    def lost(self) -> list[str]:
        """Names of what cannot be kept."""
        return sorted(name for _, table, key, name in self._places() if key in table and _packed(table[key]) is None)

    def put(self, state: Mapping[str, torch.Tensor]) -> None:
        """Have modules remember what ``state`` gave. What they do not remember is passed over. Raises UserError if it is
        damaged."""
        kept = {self._name(key) for key in state if key.startswith((f"{LAYERS}/", f"{LOSS}/"))} - self._anew
        new: _Same = {}
        for module, table, key, name in self._places(kept):
            if (packed_value := state.get(self._key(name))) is not None:
                value = unpacked(packed_value)
                if name in self.names or (_is_simple(value, 0) and _may_be_set(module, key)):
                    table[key] = _merged(table.get(key), value, 0, new)
        for name, parameter, _ in self._at_first.trained:
            if (wanted := state.get(self._key(name))) is not None:
                parameter.requires_grad_(unpacked(wanted) is True)

    def late(self) -> set[str]:
        """Names of constants, tensors and collections that are other ones now than at first, and of new attributes."""
        found = {
            one.name
            for one in self._at_first.constants
            if not one.same and (isinstance(one.now, _PLAIN) or (one.name not in self._shown and _is_simple(one.now, 0)))
        }
        found |= {
            one.name
            for one in self._at_first.values
            if one.name not in self._shown and _is_simple(one.table.get(one.key), 0) and not one.same
        }
        new = {name for table, key, name in self._at_first.new() if name not in self._shown and _is_simple(table[key], 0)}
        return (found | new) - self._anew

    def pass_over(self, names: Collection[str]) -> None:
        """Do not keep these, unless forwards are known to read them: evaluations have made them."""
        self._shown |= {*names} - self.names

    def _places(self, more: Iterable[str] = ()) -> Iterator[tuple[nn.Module, dict[str, Any], str, str]]:
        """Yield a module, the table of it that has a name, the name there, and the whole name. ``more``: further names."""
        for whole in sorted(self.names.union(more)):
            root, _, rest = whole.partition(".")
            path, _, key = rest.rpartition(".")
            try:
                module = part_at(self._named[root], path)
            except (KeyError, AttributeError):
                continue
            yield module, module._buffers if key in module._buffers else module.__dict__, key, whole

    def _key(self, name: str) -> str:
        root, _, rest = name.partition(".")
        if root != THE_LOSS:
            return f"{LAYERS}/{name}"
        return f"{LOSS}/{self._last}.{rest}"

    def _name(self, key: str) -> str:
        """The name that has a key."""
        what, _, name = key.partition("/")
        return name if what != LOSS else THE_LOSS + name.removeprefix(self._last)

    @property
    def _last(self) -> str:
        """Name of the last layer."""
        return [name for name in self._named if name != THE_LOSS][-1]


_Same = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""Tensors that have come in the place of others, with those, by the others' ids."""


def _collections(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yield what is simple of a module's attributes, and of its buffers that ``state_dict()`` leaves out, but for constants:
    the table that has it, its name there, and the value."""
    quiet = ((module._buffers, key) for key in module._non_persistent_buffers_set if key in module._buffers)
    for table, key in (*((vars(module), key) for key in vars(module) if key not in OWN), *quiet):
        if not isinstance(table[key], _PLAIN) and _is_simple(table[key], 0):
            yield table, key, table[key]


def _is_simple(value: Any, depth: int) -> bool:
    """True for what is whole without objects that must be there already."""
    if isinstance(value, torch.Tensor):
        return not isinstance(value, nn.Parameter)
    if type(value) in (list, tuple, dict) and depth < _MOST_DEEP:
        return all(_is_simple(one, depth + 1) for one in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, _PLAIN)


def _may_be_set(module: nn.Module, key: str) -> bool:
    """True for what is simple, and for a name that means nothing to a module yet: a file may say anything."""
    if key in module._buffers:
        return key in module._non_persistent_buffers_set
    taken = key in OWN - {"training"} or hasattr(nn.Module, key)
    registered = key in module._parameters or key in module._modules
    return not taken and not registered and _is_simple(inspect.getattr_static(module, key, None), 0)


def _packed(value: Any) -> torch.Tensor | None:
    """A value as bytes, None if it cannot be kept."""
    try:
        return packed(_plain(value, 0))
    except NotATree:
        return None


def _plain(value: Any, depth: int) -> Any:
    """A value with lists in place of sets and deques, and dicts in place of objects. Raises NotATree."""
    if isinstance(value, nn.Module | nn.Parameter | type) or callable(value) or depth > _MOST_DEEP:
        raise NotATree(f"a {type(value).__name__}")
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, (*_PLAIN, torch.Tensor, torch.Size, torch.dtype, torch.device)):
        return value
    if isinstance(value, dict):
        return {key: _plain(one, depth + 1) for key, one in list(value.items())}
    if isinstance(value, list | deque):
        return [_plain(one, depth + 1) for one in value]
    if type(value) is tuple:
        return tuple(_plain(one, depth + 1) for one in value)
    if isinstance(value, set | frozenset):
        if not all(isinstance(one, _PLAIN) for one in value):
            raise NotATree("a set of other than constants")
        return sorted(value, key=repr)
    if hasattr(value, "__dict__") and not hasattr(value, "__slots__"):
        return {key: _plain(one, depth + 1) for key, one in list(vars(value).items())}
    return value  # ``packed`` knows it, or refuses it


def _merged(there: Any, value: Any, depth: int, new: _Same) -> Any:
    """A value that ``_plain`` gave, put into what is in its place, as far as that can change. ``new``: tensors that have
    come in the place of others, to which is added: parts of a record share buffers."""
    if isinstance(there, torch.Generator):
        return there.set_state(value)
    if isinstance(value, torch.Tensor):
        if not isinstance(there, torch.Tensor):
            return value.to(here().device)
        _, known = new.setdefault(id(there), (there, value.to(there.device)))
        return known if known.dtype == value.dtype and torch.equal(known.to(value.device), value) else value.to(there.device)
    if isinstance(value, list) and isinstance(there, list | deque | set | frozenset):
        if isinstance(there, frozenset):
            return frozenset(value)
        old = [*there] if not isinstance(there, set) else []
        found = [_merged(old[n] if n < len(old) else None, one, depth + 1, new) for n, one in enumerate(value)]
        there.clear()
        there.update(found) if isinstance(there, set) else there.extend(found)
        return there
    if isinstance(value, tuple):
        old = [*there] if isinstance(there, tuple) else []
        return tuple(_merged(old[n] if n < len(old) else None, one, depth + 1, new) for n, one in enumerate(value))
    if isinstance(value, dict) and there is not None and not isinstance(there, (*_PLAIN, torch.Tensor)):
        table = there if isinstance(there, dict) else vars(there)
        parts = {key: _merged(table.get(key), one, depth + 1, new) for key, one in value.items()}
        table.clear()
        table.update(parts)
        return there
    return value

"""What forwards leave in modules for later ones beside ``state_dict()``: attributes, buffers that are not persistent, and
what a loss keeps. It is kept with a stage's state, so that a run goes on from a checkpoint or a snapshot as if it had not
ended.

Numbers, text, None, tensors, arrays and torch's generators are kept, also in lists, tuples, dicts, sets, deques and objects,
which stay the same objects. What forwards change is found by trials; constants that only later ones change (a switch thrown
after a thousand steps) are kept as soon as they differ from what they were at first.
"""

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from accept_mpi.device.compute import here
from accept_mpi.models.held import OWN
from accept_mpi.pipeline.state import packed, unpacked
from accept_mpi.tree import NotATree

LAYERS, LOSS = "remembered", "loss"
"""What a stage's state calls them: "remembered/<layer's name>.<attribute>", and "loss/<last layer's name>.<attribute>"."""
THE_LOSS = "the loss"
"""Name of the loss among the modules."""
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


def _constants(named: Sequence[tuple[str, nn.Module]]) -> Iterator[_Constant]:
    """Yield the constants among the attributes of modules, modes included."""
    for root, module in named:
        for path, one in module.named_modules(prefix=root):
            own = vars(one)
            constants = [key for key, value in own.items() if isinstance(value, _PLAIN)]
            yield from (_Constant(own, key, f"{path}.{key}", own[key]) for key in constants if key not in OWN - {"training"})


class Remembered:
    """What some modules remember."""

    def __init__(
        self, named: Sequence[tuple[str, nn.Module]], names: Collection[str] = (), before: "Remembered | None" = None
    ) -> None:
        """``named``: modules and their names, a loss as the last one; ``names``: dotted names of what is to be kept;
        ``before``: what was made for the same modules when less was known."""
        self.names = set(names)
        self._named = dict(named)
        self._at_first: list[_Constant] = before._at_first if before and before._at_first else list(_constants(named))

    @classmethod
    def of_file(cls, named: Sequence[tuple[str, nn.Module]], state: Mapping[str, torch.Tensor]) -> "Remembered":
        """What ``state``, read from a file, says of attributes that these modules have, and that are no functions."""
        every = cls(named, [key.removeprefix(f"{LAYERS}/") for key in state])
        return cls(named, [name for table, key, name in every._places() if key in table and not callable(table[key])])

    def state(self) -> dict[str, torch.Tensor]:
        """Copies of what can be kept, as "<what>/<name>"."""
        found = {}
        for table, key, name in self._places(self._switched()):
            if key in table and (value := _packed(table[key])) is not None:
                found[self._key(name)] = value
        return found

    def lost(self) -> list[str]:
        """Names of what cannot be kept."""
        return sorted(name for table, key, name in self._places() if key in table and _packed(table[key]) is None)

    def put(self, state: Mapping[str, torch.Tensor]) -> None:
        """Have modules remember what ``state`` gave. What they do not remember is passed over. Raises UserError if it is
        damaged."""
        constants = [one.name for one in self._at_first if isinstance(one.now, _PLAIN) and self._key(one.name) in state]
        for table, key, name in self._places(constants):
            if (packed_value := state.get(self._key(name))) is not None:
                value = unpacked(packed_value)
                if name in self.names or isinstance(value, _PLAIN):
                    table[key] = _merged(table.get(key), value, 0)

    def _switched(self) -> list[str]:
        """Names of constants that are other ones now than at first."""
        return [one.name for one in self._at_first if isinstance(one.now, _PLAIN) and not one.same]

    def _places(self, more: Collection[str] = ()) -> Iterator[tuple[dict[str, Any], str, str]]:
        """Yield the table of a module that has a name, the name there, and the whole name. ``more``: further names."""
        for whole in sorted(self.names.union(more)):
            root, _, rest = whole.partition(".")
            path, _, key = rest.rpartition(".")
            try:
                module = self._named[root].get_submodule(path)
            except (KeyError, AttributeError):
                continue
            yield module._buffers if key in module._buffers else module.__dict__, key, whole

    def _key(self, name: str) -> str:
        root, _, rest = name.partition(".")
        if root != THE_LOSS:
            return f"{LAYERS}/{name}"
        return f"{LOSS}/{[name for name in self._named if name != THE_LOSS][-1]}.{rest}"


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


def _merged(there: Any, value: Any, depth: int) -> Any:
    """A value that ``_plain`` gave, put into what is in its place, as far as that can change."""
    if isinstance(there, torch.Generator):
        return there.set_state(value)
    if isinstance(value, torch.Tensor):
        return value.to(there.device if isinstance(there, torch.Tensor) else here().device)
    if isinstance(value, list) and isinstance(there, list | deque | set | frozenset):
        if isinstance(there, frozenset):
            return frozenset(value)
        old = [*there] if not isinstance(there, set) else []
        new = [_merged(old[n] if n < len(old) else None, one, depth + 1) for n, one in enumerate(value)]
        there.clear()
        there.update(new) if isinstance(there, set) else there.extend(new)
        return there
    if isinstance(value, tuple):
        old = [*there] if isinstance(there, tuple) else []
        return tuple(_merged(old[n] if n < len(old) else None, one, depth + 1) for n, one in enumerate(value))
    if isinstance(value, dict) and there is not None and not isinstance(there, (*_PLAIN, torch.Tensor)):
        table = there if isinstance(there, dict) else vars(there)
        parts = {key: _merged(table.get(key), one, depth + 1) for key, one in value.items()}
        table.clear()
        table.update(parts)
        return there
    return value

"""Hooks that a forward itself puts on modules, to note what they give or to change it, for its own time or for good.

No layer will have them. Those on a module that is recorded as a whole are called around that, and so are recorded.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from accept_mpi.models.common import HOOKS

_TABLES = (*HOOKS, "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called")
_Table = dict[int, Any]
Hooks = dict[tuple[str, str], _Table]
"""Tables of hooks, by the modules' names and their own."""


class OwnHooks:
    """The hooks of a model's modules, and what else their calls run, as they were when this object was made."""

    def __init__(self, model: nn.Module) -> None:
        modules = dict(model.named_modules())
        self._paths = {id(module): path for path, module in modules.items()}
        self._tables: Hooks = {(path, name): vars(module)[name] for path, module in modules.items() for name in _TABLES}
        self._first: Hooks = {place: dict(table) for place, table in self._tables.items()}
        self._calls = {id(one): (one, type(one), one.__dict__.get("forward")) for one in modules.values()}
        """What their calls run."""
        self._before = dict(self._first)
        """What forwards find, once modules that are recorded as wholes have changed what is theirs."""

    def left(self) -> Hooks:
        """Tables that are others now."""
        return {place: dict(table) for place, table in self._tables.items() if table != self._before[place]}

    def put(self, hooks: Hooks) -> None:
        """Have these hooks in place of those that there were."""
        for place, table in self._tables.items():
            _fill(table, hooks.get(place, self._first[place]))
        for module, kind, forward in self._calls.values():
            if type(module) is not kind:
                module.__class__ = kind
            if module.__dict__.get("forward") is not forward:
                module.__dict__.pop("forward", None)
                module.__dict__.update({"forward": forward} if forward else {})

    def settle(self, leaf: nn.Module) -> None:
        """After the call of a module that is recorded as a whole: what that changes of its hooks it changes again."""
        self._before.update((place, dict(self._tables[place])) for place in self._places(leaf))

    def changed(self, leaf: nn.Module) -> str:
        """Name of a table, or the forward, of a module that is recorded as a whole, or of its parts, of which the forward
        has changed more than what may be called around it; "" if there is none."""
        for path, name in self._places(leaf):
            now, before = list(self._tables[path, name]), list(self._before[path, name])
            count = len(now) - len(before)
            around = now[count:] == before if "pre" in name else now[: len(before)] == before
            if now != before and (path != self._paths[id(leaf)] or "backward" in name or not around):
                return f"{path}.{name}"
        for part in leaf.modules():
            _, kind, forward = self._calls.get(id(part), (part, type(part), part.__dict__.get("forward")))
            if type(part) is not kind or part.__dict__.get("forward") is not forward:
                return f"{self._paths[id(part)]}.forward"
        return ""

    def around(self, leaf: nn.Module) -> bool:
        """True if the forward has put hooks on a module that is recorded as a whole."""
        return any(self._tables[place] != self._before[place] for place in self._places(leaf))

    @contextmanager
    def apart(self, leaf: nn.Module, inside: Callable[..., Any]) -> Iterator[None]:
        """Within the context a module has only the hooks that the forward has put on it, and ``inside``, which is called
        when it has only the others, in place of its own forward."""
        own = vars(leaf)
        there = {"forward": own["forward"]} if "forward" in own else {}
        others = {name: self._before[self._paths[id(leaf)], name] for name in _TABLES}
        new = {name: {n: hook for n, hook in own[name].items() if n not in others[name]} for name in _TABLES}

        def have(tables: Mapping[str, _Table]) -> dict[str, _Table]:
            before = {name: dict(own[name]) for name in _TABLES}
            for name in _TABLES:
                _fill(own[name], tables[name])
            return before

        def forward(*args: Any, **kwargs: Any) -> Any:
            del own["forward"]
            own.update(there)
            left = have(others)
            found = inside(*args, **kwargs)
            others.update(have(left))
            return found

        have(new)
        own["forward"] = forward
        try:
            yield
        finally:
            own.pop("forward", None)
            own.update(there)
            have({name: own[name] | others[name] if "pre" in name else others[name] | own[name] for name in _TABLES})

    def _places(self, leaf: nn.Module) -> list[tuple[str, str]]:
        paths = [self._paths[id(part)] for part in leaf.modules() if id(part) in self._paths]
        return [(path, name) for path in paths for name in _TABLES]


def is_handle(value: Any) -> bool:
    """True for what takes a hook away, and for collections of such."""
    inside = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list | tuple) else []
    return isinstance(value, RemovableHandle) or (bool(inside) and all(map(is_handle, inside)))


def _fill(table: _Table, hooks: _Table) -> None:
    if table != hooks:
        hooks = dict(hooks)
        table.clear()
        table.update(hooks)

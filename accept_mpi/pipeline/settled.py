"""Notices late what forwards change: a switch that is thrown when a value has come up, another factor after that.

Where several ranks or lanes compute a stage's micro-batches, each throws its own switches, at a time of its own. What the
first forwards change is found before the first step (``further_forwards``); here all else is looked at between the steps.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from accept_mpi.errors import UserError
from accept_mpi.models.attributes import CONSTANTS, NO_STATE, Digest, digest
from accept_mpi.models.common import Common, Place, Seen
from accept_mpi.pipeline.grown import MISSING, Change, Largest, may_be_cache
from accept_mpi.pipeline.micro_batch import Inputs

_SHARE = 0.01
"""Share of the time that may be taken for looking into containers."""
_Origin = tuple[int, Place]
Changing = set[str | _Origin]
"""What may change: names of attributes, and places of variables."""
_FIXED = (*CONSTANTS, complex, bytes, type, torch.dtype, torch.device, torch.Size)


def place_of(common: Common) -> _Origin:
    """What stands for a variable in ``Changing``."""
    return common.places[0]


class _Module(NamedTuple):
    """A module, as it was."""

    path: str
    module: nn.Module
    own: dict[str, Any]
    buffers: dict[str, Any]
    writes: dict[str, int]
    """Torch's counts of writes, of buffers that are not BatchNorm's."""
    trained: dict[str, bool]
    """Which parameters want gradients."""

    @classmethod
    def of(cls, path: str, module: nn.Module, changing: Changing) -> "_Module":
        norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
        writes = {} if norm else {key: one._version for key, one in module._buffers.items() if one is not None}
        own = {key: one for key, one in vars(module).items() if f"{path}.{key}" not in changing}  # which may be large
        return cls(path, module, own, dict(module._buffers), writes, _trained(module))

    @property
    def same(self) -> bool:
        """True if nothing has changed, as far as a quick look tells."""
        now = self.module._buffers
        if now.keys() != self.buffers.keys() or any(now[key] is not one for key, one in self.buffers.items()):
            return False
        if any(now[key]._version != count for key, count in self.writes.items()):  # type: ignore[union-attr]
            return False
        own = vars(self.module)
        return len(own) == len(self.own) and all(own.get(key, self) is one for key, one in self.own.items())


def _trained(module: nn.Module) -> dict[str, bool]:
    return {key: one.requires_grad for key, one in module._parameters.items() if one is not None}


class Settled:
    """What forwards refer to, as it was when this object was made, or when it last looked at it."""

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Module]],
        seen: Callable[[], Seen],
        changing: Changing,
        again: Callable[[Sequence[Change], Sequence[Inputs]], bool],
    ) -> None:
        """``named``: modules and their names; ``seen`` gives the variables that they refer to; ``changing``: what may
        change; ``again``: true if forwards of other values make the same changes."""
        self._named, self._see, self._changing, self._again = named, seen, changing, again
        self.largest = Largest()
        self._next = 0.0
        self.look()

    def look(self) -> None:
        """From now on what there is now must not change."""
        self._seen = self._see()
        every = [(path, module) for root, one in self._named for path, module in one.named_modules(prefix=root)]
        self._modules = [_Module.of(path, module, self._changing) for path, module in every]
        self._deep: dict[int, tuple[str, Any, Digest]] = {}
        """Containers, objects and tensors in attributes: the name of the first one that has each, and what was in it."""
        for path, module in every:
            for key, value in vars(module).items():
                name = f"{path}.{key}"
                looked = id(value) in self._deep or isinstance(value, (*_FIXED, nn.Module))
                if not looked and key not in NO_STATE and name not in self._changing:
                    self._deep[id(value)] = name, value, digest(value, checked=False)

    def changed(self, deep: bool) -> str:
        """Name of something that has changed; empty: nothing has, but for caches that have grown. ``deep``: look into
        containers and objects now, not only when that has not been done for a while."""
        found = self._changed(deep)
        if found and self._only_caches():
            self.look()
            found = ""
        self.largest.next_step()
        return found

    def _changed(self, deep: bool) -> str:
        for one in self._modules:
            if not one.same and (keys := sorted(change.key for change in self._changes(one))):
                return f"{one.path}.{keys[0]}"
            if one.trained and one.trained != _trained(one.module):
                return f"which parameters of {one.path} are trained"
        began = time.monotonic()
        if not deep and began < self._next:
            return ""
        found = self._changed_inside()
        now = time.monotonic()
        self._next = now + (now - began) / _SHARE
        return found

    def _changed_inside(self) -> str:
        """Name of a container, an object or a variable in which something has changed."""
        found = next((name for name, value, before in self._deep.values() if _other(before, value)), "")
        if not found:
            found = next((one.places[0][1].text for one in self._seen.changed() if place_of(one) not in self._changing), "")
        return found

    def _only_caches(self) -> bool:
        """True if all that has changed are caches that have grown."""
        changes = [change for one in self._modules if not one.same for change in self._changes(one)]
        trained = all(one.trained == _trained(one.module) for one in self._modules)
        return trained and may_be_cache(changes) and not self._changed_inside() and self._again(changes, self.largest.given)

    def _changes(self, one: _Module) -> Iterator[Change]:
        """What has changed in a module that is not the same."""
        own, buffers = vars(one.module), one.module._buffers
        for key in {*buffers, *one.buffers}:
            before, now = one.buffers.get(key, MISSING), buffers.get(key, MISSING)
            written = isinstance(now, torch.Tensor) and key in one.writes and now._version != one.writes[key]
            if (now is not before or written) and f"{one.path}.{key}" not in self._changing:
                yield Change(one.path, key, before, now)
        for key in {*own, *one.own}:
            before, now = one.own.get(key, MISSING), own.get(key, MISSING)
            if self._is_other(key, before, now) and f"{one.path}.{key}" not in self._changing:
                yield Change(one.path, key, before, now)

    def _is_other(self, key: str, before: Any, now: Any) -> bool:
        """True if an attribute is another one now."""
        if before is now or (key in NO_STATE and not isinstance(now, CONSTANTS)):
            return False
        if before is MISSING:  # a container may be a cache of what has been computed
            return isinstance(now, (torch.Tensor, *CONSTANTS))
        if now is MISSING:
            return True
        known = self._deep.get(id(before))
        return _other(known[2] if known else digest(before, checked=False), now)


def check(settled: Sequence[Settled], layers: str, shared: bool, deep: bool = False) -> None:
    """Raise UserError if forwards of these ``layers`` have changed what must stay as it is. ``shared``: several ranks or
    lanes compute them; ``deep`` as in ``Settled.changed``."""
    for one in settled:
        if name := one.changed(deep):
            what = (
                "ranks and lanes that share micro-batches do so each for themselves; have one rank take them all, "
                "without lanes (pipeline.ranks, pipeline.groups, pipeline.lanes)"
                if shared
                else 'backwards that compute forwards again meet what later ones left; set pipeline.recompute = "off"'
            )
            raise UserError(f"a forward of {layers} has changed {name}, which the first ones did not: {what}")


def _other(before: Digest, now: Any) -> bool:
    return not before.equal(digest(now, checked=False))

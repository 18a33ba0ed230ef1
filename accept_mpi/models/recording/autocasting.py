"""``torch.autocast`` within a forward: a record notes the contexts that are open at each call, so that it is carried out in
them, whatever precision the job has around them."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch


class Autocast(NamedTuple):
    """A ``torch.autocast`` context."""

    kind: str
    """Of device."""
    dtype: torch.dtype
    enabled: bool


@contextmanager
def watched() -> Iterator[list[Autocast]]:
    """Within the context the list has the ``torch.autocast`` contexts that are open, from the outermost."""
    cls: Any = torch.amp.autocast_mode.autocast
    plain_enter, plain_exit = cls.__enter__, cls.__exit__
    open_ones: list[Autocast] = []

    def enter(self: Any) -> Any:
        open_ones.append(Autocast(self.device, self.fast_dtype, self._enabled))
        return plain_enter(self)

    def leave(self: Any, *error: Any) -> Any:
        open_ones.pop()
        return plain_exit(self, *error)

    cls.__enter__, cls.__exit__ = enter, leave
    try:
        yield open_ones
    finally:
        cls.__enter__, cls.__exit__ = plain_enter, plain_exit


@contextmanager
def within(contexts: Sequence[Autocast]) -> Iterator[None]:
    """Within the context these are open."""
    with ExitStack() as stack:
        for one in contexts:
            stack.enter_context(torch.autocast(one.kind, one.dtype, one.enabled))
        yield

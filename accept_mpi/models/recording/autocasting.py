"""``torch.autocast`` within a forward: a record notes the contexts that are open at each call, so that it is carried out in
them, whatever precision the job has around them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

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


class Opened:
    """The contexts that are open while calls are carried out. One that several calls have in common stays open from the
    first to the last: torch keeps the casts of parameters that are made in it."""

    def __init__(self) -> None:
        self._open: list[tuple[Autocast, torch.autocast]] = []

    def have(self, contexts: Sequence[Autocast]) -> None:
        """Have these contexts open, from the outermost, and no others."""
        same = 0
        while same < min(len(contexts), len(self._open)) and contexts[same] is self._open[same][0]:
            same += 1
        while len(self._open) > same:
            self._open.pop()[1].__exit__(None, None, None)
        for one in contexts[same:]:
            context = torch.autocast(one.kind, one.dtype, one.enabled)
            context.__enter__()
            self._open.append((one, context))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.have(())

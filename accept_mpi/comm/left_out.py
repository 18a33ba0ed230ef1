"""What coding leaves out of a group's gradients, which goes into the next ones (error feedback)."""

from typing import NamedTuple

import torch

from accept_mpi.codecs.coding import Coding
from accept_mpi.codecs.message import as_decoded


class _Coded(NamedTuple):
    """What coding has left out of a chunk in one step, in units of that step's gradients."""

    error: torch.Tensor
    before: torch.Tensor | None
    """What had been left out before, in units of the update; None if nothing."""
    taken: float
    """Factor of ``before`` in what was coded."""


class LeftOut:
    """What coding has left out so far of the chunks that a member sends. It is kept in units of the update, which are those
    of a step's gradients times the step's scale: where losses are (sum, count), steps differ in scale by any factor."""

    def __init__(self, coding: Coding) -> None:
        self._coding = coding
        self._left: dict[int, torch.Tensor] = {}
        """By chunk, in units of the update."""
        self._coded: dict[tuple[int, int], _Coded] = {}
        """Of steps whose scale is not known yet, by (step, chunk)."""

    def added(self, step: int, c: int, scale: float, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Values of chunk ``c`` together with what was left out of it before, and the same as its receiver will decode them.
        ``scale``: the step's, as far as it is known; ``settle`` keeps what this has not made up for, before the
        next step comes."""
        before = self._left.pop(c, None)
        taken = 1 / scale if before is not None and scale else 0.0
        whole = values + before * taken if before is not None and taken else values
        decoded = as_decoded(whole, self._coding)
        if decoded is None and taken:  # together they are too large
            taken, whole, decoded = 0.0, values, as_decoded(values, self._coding)
        if decoded is not None:
            self._coded[step, c] = _Coded(whole - decoded, before, taken)
            return whole, decoded
        if before is not None:
            self._left[c] = before
        return whole, whole.clone()

    def settle(self, step: int, c: int, scale: float) -> None:
        """Keep what was left out of a chunk in a step, whose ``scale`` is known now."""
        if (coded := self._coded.pop((step, c), None)) is None:
            return
        left, rest = coded.error * scale, 1 - scale * coded.taken
        if coded.before is not None and rest:
            left += coded.before * rest
        self._keep(c, left)

    def put_back(self, c: int, scale: float, values: torch.Tensor) -> None:
        """Keep for a later step what was decoded of a chunk in one of this ``scale``, and is in no update."""
        self._keep(c, values * scale)

    def _keep(self, c: int, left: torch.Tensor) -> None:
        before = self._left.get(c)
        self._left[c] = left if before is None else before + left

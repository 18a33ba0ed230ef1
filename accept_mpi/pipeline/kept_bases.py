"""Bases in which a stage's activations are sent on (``codecs.basis``), as part of its state: learned anew, a run would go on
otherwise than without a loss."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch

from accept_mpi.codecs.basis import NO_BASES, Bases, learns, packed, seen, unpacked, with_inverse
from accept_mpi.pipeline.kept_bytes import as_tensors, prefix, read_from

BASES = "bases"
"""What a stage's state calls them: "bases/<last layer's name>.@<first step>"."""

Values = Sequence[torch.Tensor | None]
Seen = list[torch.Tensor | None]


def _nobody(step: int, k: int, found: Seen) -> None:
    pass


class KeptBases:
    """The bases of a stage's outputs, by the step (from 0) from which on they are used; and what is seen for more.

    Several lanes may ``see`` at a time."""

    def __init__(self, layer: str = "", widths: Mapping[int, int] = MappingProxyType({})) -> None:
        """``layer``: the name of the stage's last one; ``widths``: of the outputs that have a basis, by position."""
        self.widths = widths
        self.tell: Callable[[int, int, Seen], None] = _nobody
        """Gets the step, the micro-batch and what it says of the bases, in the order of ``widths``."""
        self._prefix = prefix(BASES, layer)
        self._sets: dict[int, Bases] = {}

    def see(self, step: int, k: int, outputs: Values, gradients: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Look at a micro-batch in B, if its step is one to learn of. ``gradients``: outputs with what came for them."""
        if self.widths and learns(step):
            came = {id(out): gradient for out, gradient in gradients}
            self.tell(step, k, [self._look(n, outputs, came) for n in self.widths])

    def _look(self, n: int, outputs: Values, came: Mapping[int, torch.Tensor]) -> torch.Tensor | None:
        out, width = outputs[n] if n < len(outputs) else None, self.widths[n]
        if out is None or not out.is_floating_point() or not out.dim() or out.shape[-1] != width:
            return None
        return seen(out, came.get(id(out)), width)

    def add(self, step: int, new: Bases, now: int) -> None:
        """Use these from ``step`` on, and those before for all other tensors. ``now``: the step that ends; none before it is
        sent any more."""
        before = self._sets[max(self._sets)] if self._sets else NO_BASES
        in_use = max((first for first in self._sets if first <= now), default=0)
        self._sets = {first: bases for first, bases in self._sets.items() if first >= in_use}
        self._sets[step] = {**before, **new}

    def at(self, step: int) -> Bases:
        """Those with which a step's activations are sent."""
        return next((self._sets[first] for first in sorted(self._sets, reverse=True) if first <= step), NO_BASES)

    def state(self) -> dict[str, torch.Tensor]:
        """As named tensors."""
        return as_tensors(self._prefix, {step: packed(bases) for step, bases in self._sets.items()})

    def put(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take what ``state`` gave; those of another layer are passed over, as the model has been cut elsewhere. Raises
        UserError if they are damaged."""
        if self.widths:
            self._sets |= read_from(state, self._prefix, self._fitting)

    def _fitting(self, data: bytes) -> Bases:
        """Those that ``packed`` made bytes of, and that fit the outputs."""
        found = unpacked(data).items()
        return {n: with_inverse(basis) for n, basis in found if len(basis.mean) == self.widths.get(n)}

"""Norms of a stage's last gradients, as part of its state: where gradients are clipped and no stage waits, later steps need
them (``training.clipping``)."""

from collections.abc import Mapping

import msgspec
import torch

from accept_mpi.pipeline.kept_bytes import as_tensors, prefix, read_from

NORMS = "norms"
"""What a stage's state calls them: "norms/<last layer's name>.@<step>"."""

Norms = list[tuple[int, float, str]]
"""Positions of parameters in the model, the norms of their gradients, and what the gradients are of (torch's name)."""


class KeptNorms:
    """Those of the newest steps (from 0)."""

    def __init__(self, names: list[str] | None = None, most: int = 0) -> None:
        """``names``: those of the stage's layers; ``most``: steps to keep."""
        self._most = most
        self._prefix, self._layers = prefix(NORMS, names[-1] if names else ""), len(names or ())
        self.of: dict[int, Norms] = {}
        """By step."""

    def keep(self, step: int, norms: Norms) -> None:
        """Keep a step's, and those of the steps before it that are still needed."""
        self.of = {at: found for at, found in (self.of | {step: norms}).items() if step - self._most < at}

    def state(self) -> dict[str, torch.Tensor]:
        """As named tensors."""
        return as_tensors(self._prefix, {at: msgspec.msgpack.encode((self._layers, norms)) for at, norms in self.of.items()})

    def put(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take what ``state`` gave; those of other layers are passed over, as the model has been cut elsewhere. Raises
        UserError if they are damaged."""
        if self._most:
            found = read_from(state, self._prefix, lambda data: msgspec.msgpack.decode(data, type=tuple[int, Norms]))
            self.of |= {step: norms for step, (layers, norms) in found.items() if layers == self._layers}

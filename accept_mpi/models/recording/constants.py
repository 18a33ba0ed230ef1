"""The values of a record that are the same in every step: they depend on no input, and on none of the model's tensors."""

from typing import Any

import torch

from accept_mpi.models.recording.structure import mapped, tensors_in
from accept_mpi.models.recording.tape import DEVICE, Tape, Value


class Constants:
    """Slots of a tape whose values are constants."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self.slots: set[int] = set()
        self._values: dict[int, torch.Tensor] = {}
        """Values, as far as they have been computed: after the node before ``_computed``."""
        self._computed = 0

    def value(self, slot: int) -> torch.Tensor:
        """Value of a constant, after all that has been recorded."""

        def real(place: Any) -> Any:
            return self._values[place.slot] if isinstance(place, Value) else torch.device("cpu")

        with torch.device("cpu"):
            for node in self._tape.nodes[self._computed :]:
                if node.constant:
                    assert node.function is not None
                    args, kwargs = mapped((node.args, node.kwargs), real, (Value, type(DEVICE)))
                    self._values.update(zip(node.gives, tensors_in(node.function(*args, **kwargs)), strict=True))
        self._computed = len(self._tape.nodes)
        return self._values[slot]

    def is_used_as_it_is(self, slot: int) -> bool:
        """True if nothing is written to a constant once something else than a constant has been computed from it."""
        memory, used = self._tape.specs[slot].memory, False
        for node in self._tape.nodes:
            if used and memory in node.writes:
                return False
            used = used or (not node.constant and any(self._tape.specs[one].memory == memory for one in node.takes))
        return True

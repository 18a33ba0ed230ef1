"""Places on a tape: what stands on it for each tensor that a forward computes with."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from accept_mpi.models.recording.counting import place_of
from accept_mpi.models.recording.meta_model import MetaModel
from accept_mpi.models.recording.refusals import OF_ANOTHER, SPARSE, Foreign, Unrecordable, passed_by, where
from accept_mpi.models.recording.tape import COMPUTING, DEVICE, META, Spec, State, Tape, Value


class Places:
    """The places of a forward's tensors: slots for those it makes, names for those the model holds, others themselves."""

    def __init__(
        self, of: MetaModel, tape: Tape, failed: Callable[[Callable[[str], Unrecordable], str], Unrecordable]
    ) -> None:
        """``failed`` makes the error for what cannot be recorded."""
        self._of, self._tape, self._failed = of, tape, failed
        self._slots: dict[int, int] = {}
        """By the tensors' ids."""
        self._kept: list[torch.Tensor] = []
        """All tensors, by slot, so that their ids stay theirs."""
        self._memories: dict[int, int] = {}
        self._real: dict[int, torch.Tensor] = {}
        """Tensors with values that the forward uses though they are not the model's, by their stand-in's id."""
        self._stand_ins: dict[int, torch.Tensor] = {}

    def stand_in(self, tensor: Any) -> Any:
        """The tensor itself, or one on the meta device for it; that device for the one on which the model will compute.
        Raises Unrecordable, UserError."""
        if isinstance(tensor, torch.device):
            return META if tensor == COMPUTING else tensor
        if tensor.layout is not torch.strided:
            raise self._failed(Unrecordable, f"model.name: forward uses {SPARSE} ({where()})")
        if tensor.is_meta:
            return tensor
        new = self._of.own(tensor)
        if new is None and (new := self._stand_ins.get(id(tensor))) is None:
            new = self._stand_ins[id(tensor)] = torch.empty_like(tensor, device="meta")
            self._real[id(new)] = tensor
        return new

    def real(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """What a tensor stands for, which is not the model's; None if it stands for none."""
        return self._real.get(id(tensor))

    def reach(self, tensors: Iterable[torch.Tensor]) -> None:
        """Raise Unrecordable if one of these tensors stands for a parameter that is not reached through the model."""
        for tensor in tensors:
            if (real := self.real(tensor)) is not None:
                self._of.reached(real)

    def any_real(self, tensors: Sequence[torch.Tensor]) -> bool:
        """True if one of these tensors stands for one with values, or for a view of it."""
        real = {place_of(stand_in) for stand_in in self._stand_ins.values()} if tensors else set()
        return any(place_of(tensor) in real for tensor in tensors)

    def place(self, value: Any) -> Any:
        """What stands on the tape for a tensor or a device. Raises Unrecordable, UserError."""
        if isinstance(value, torch.device):
            return DEVICE if value.type == "meta" else value
        if (name := self._of.states.get(id(value))) is not None:
            return State(name)
        if (slot := self._slots.get(id(value))) is not None:
            return Value(slot)
        if (real := self.real(value)) is not None:
            return real
        if isinstance(value, nn.Parameter):
            raise passed_by(self._of.parameter_in(value)) or Foreign()
        raise self._failed(Unrecordable, OF_ANOTHER.format(where()))

    def taken(self, tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """Slots of those tensors that have one and are not the model's, each once."""
        own = [tensor for tensor in tensors if id(tensor) in self._slots and id(tensor) not in self._of.states]
        return tuple(dict.fromkeys(self._slots[id(tensor)] for tensor in own))

    def known(self, tensor: torch.Tensor) -> int:
        """Slot of a tensor; -1 if it has none."""
        return self._slots.get(id(tensor), -1)

    def slot(self, tensor: torch.Tensor) -> int:
        """Slot of a tensor; a new one for a new tensor."""
        found = self._slots.get(id(tensor))
        if found is None:
            found = self._slots[id(tensor)] = len(self._kept)
            self._kept.append(tensor)
            nbytes, offset = tensor.numel() * tensor.element_size(), int(tensor.storage_offset())
            self._tape.specs.append(Spec(self.memory(tensor), tensor.requires_grad, nbytes, tensor.stride(), offset))
        return found

    def memory(self, tensor: torch.Tensor) -> int:
        """Number of the memory in which a tensor lies."""
        return self._memories.setdefault(place_of(tensor), len(self._memories))

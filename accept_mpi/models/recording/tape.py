"""What the record of a forward consists of: nodes (calls), and the values that pass between them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from accept_mpi.models.recording.autocasting import Autocast
from accept_mpi.models.recording.structure import parts_of


class Value(NamedTuple):
    """Place of an argument that is a tensor computed before, or an input."""

    slot: int


class State(NamedTuple):
    """Place of an argument that is a parameter, a buffer or another tensor of the model, by its dotted name."""

    name: str


class ComputingDevice:
    """Place of an argument that is the device on which the model computes."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "ComputingDevice":
        return self


DEVICE = ComputingDevice()
META, COMPUTING = torch.device("meta"), torch.device("cpu")
WHERE: dict[Any, Any] = {
    vars(torch._C.TensorBase)[name].__get__: value
    for name, value in (("device", COMPUTING), ("is_cpu", True), ("is_cuda", False), ("is_meta", False))
}
"""What a forward learns of where its tensors are, so that it goes the way that it will go there."""


class Spec(NamedTuple):
    """A tensor of the record."""

    memory: int
    """Number of its memory; views of a tensor have its number."""
    grad: bool
    nbytes: int
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, eq=False)
class Node:
    """A call: of a leaf module (``module`` is its name), or of a function."""

    function: Callable[..., Any] | None
    module: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    takes: tuple[int, ...]
    """Slots of the tensors among the arguments."""
    gives: tuple[int, ...]
    """Slots of the tensors of the result, in order."""
    states: tuple[str, ...]
    """Names of the model's tensors that a function uses, or a leaf module has."""
    parameters: bool
    """True if one of these is a parameter, trained or frozen."""
    writes: frozenset[int]
    """Numbers of the memories that it writes to, its module's own included."""
    stays: bool
    """True if the call may have an effect apart from its result and ``writes``."""
    draws: bool
    """True if it draws random numbers."""
    constant: bool
    """True if it depends on no input and none of the model's tensors, and draws nothing."""
    grad: bool
    """Whether gradients are enabled."""
    autocast: tuple[Autocast, ...]
    """The forward's ``torch.autocast`` contexts that are open."""
    fixed: tuple[Any, ...] | None
    """Of a block: what of its result must be the same for all values (``fixed_in``)."""
    operations: float
    """Floating-point operations, as torch counts them."""

    def does(self) -> tuple[Any, str]:
        """What two records have in common if they compute the same."""
        return self.function, self.module


@dataclass
class Tape:
    """Record of a forward, for inputs of one shape, in one mode."""

    inputs: tuple[int, ...]
    """Slots of the inputs."""
    nodes: list[Node] = field(default_factory=list)
    specs: list[Spec] = field(default_factory=list)
    """Tensors, by slot."""
    output: Any = None
    """Structure of the result, with ``Value`` and ``State`` in it."""
    memory_of: dict[str, int] = field(default_factory=dict)
    """Number of the memory of each of the model's tensors, by its name (``Node.states``)."""

    @property
    def written(self) -> set[int]:
        """Numbers of the memories that nodes write to."""
        return {memory for node in self.nodes for memory in node.writes}

    @property
    def results(self) -> list[int]:
        """Slots of the result's tensors."""
        return list(dict.fromkeys(place.slot for place in parts_of(self.output, (Value,))))

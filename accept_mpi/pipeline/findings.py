"""What trials find out about a stage's layers before the first step."""

from dataclasses import dataclass, field

import torch
from torch import nn

from accept_mpi.pipeline.common_memory import CommonMemory
from accept_mpi.pipeline.settled import Changing


@dataclass
class Findings:
    """Reasons are half sentences; an empty one says that nothing was found."""

    alone: str = ""
    """Why one rank must compute all micro-batches."""
    in_turn: str = ""
    """Why several threads cannot compute micro-batches at a time."""
    one_forward: str = ""
    """Why several threads cannot compute forwards at a time."""
    unreplayed: str = ""
    """Why BatchNorm's running statistics cannot be replayed."""
    parted: str = ""
    """What a forward changes though layers of other stages have it, too."""
    partial: bool = False
    """A forward differentiates by what the stage is given, but would not get all of the derivative."""
    strange: list[nn.Parameter] = field(default_factory=list)
    """Parameters that a forward uses though no layer here has them."""
    made: set[str] = field(default_factory=set)
    """Names of buffers that the first forward creates."""
    written: set[str] = field(default_factory=set)
    """What a forward writes to, by its name in ``weight_versions.may_be_written``."""
    remembered: set[str] = field(default_factory=set)
    """Names of what forwards have modules remember for later ones (``remembered``)."""
    anew: set[str] = field(default_factory=set)
    """Names of switches that a first forward throws as it puts hooks on modules: both begin anew where a run goes on."""
    changing: Changing = field(default_factory=set)
    """What first forwards change."""
    forgets: list[str] = field(default_factory=list)
    """What forwards change and read, and no checkpoint can keep."""
    drawing: set[int] = field(default_factory=set)
    """Layers whose forwards draw random numbers, by index; one past the last stands for the loss."""
    draws_back: bool = False
    """Backwards draw random numbers."""
    norms_apart: set[str] = field(default_factory=set)
    """Names of BatchNorm layers whose inputs are contiguous in no memory format."""
    norms_take: dict[str, torch.dtype] = field(default_factory=dict)
    """Types of the inputs of BatchNorm layers, by name."""
    sparse: dict[int, torch.Tensor] = field(default_factory=dict)
    """Sparse gradients, by the parameter's place among the stage's."""
    memory: CommonMemory = field(default_factory=CommonMemory)
    """What inputs and outputs have in common in memory."""
    passed_by: set[str] = field(default_factory=set)
    """Parameters that a forward uses without calling modules with adapters."""

    def compute_in_turn(self, why: str) -> None:
        """One rank must compute all micro-batches, one after another, if there is a reason why."""
        self.alone, self.in_turn = self.alone or why, self.in_turn or why

    def take(self, other: "Findings") -> None:
        """Take over what a trial has found out. A reason that there is stays."""
        self.alone, self.in_turn = self.alone or other.alone, self.in_turn or other.in_turn
        self.unreplayed, self.parted = self.unreplayed or other.unreplayed, self.parted or other.parted
        self.one_forward = self.one_forward or other.one_forward or other.unreplayed
        self.forgets = self.forgets or other.forgets
        self.partial, self.draws_back = self.partial or other.partial, self.draws_back or other.draws_back
        self.memory.add(other.memory)
        sets = ("made", "written", "remembered", "anew", "changing", "drawing", "norms_apart", "passed_by")
        for name in (*sets, "norms_take", "sparse"):
            getattr(self, name).update(getattr(other, name))

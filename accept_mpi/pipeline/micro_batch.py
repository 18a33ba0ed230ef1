"""A micro-batch in a stage: its inputs, its outputs, and what is kept until its backward."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from accept_mpi import tree
from accept_mpi.codecs.tensors import Tensors
from accept_mpi.models.losses import Result
from accept_mpi.pipeline.graph_edges import Box
from accept_mpi.pipeline.weight_versions import Kept
from accept_mpi.tree import Tree

Key = tuple[int, int]  # step, micro-batch


@dataclass
class InFlight:
    """State of a micro-batch between its F and its B (or W)."""

    boxes: list[Box]
    outputs: list[torch.Tensor]
    weights: Kept
    whole: bool
    work: list[Any] = field(default_factory=list)
    again: "Inputs | None" = None
    """What arrived, if the backward computes the forward again."""


class Outputs(NamedTuple):
    """Results of F."""

    outputs: Tensors
    """Tensors for the next stage; empty on the last."""
    result: Result | None
    """Loss and accuracy on the last stage; None on others."""
    sound: bool = True
    """False if NaN or infinity is among what F has computed."""
    tree: Tree = tree.LONE
    """Tree of which the outputs are the tensors."""
    statistics: torch.Tensor | None = None
    """What other members of the group must know of BatchNorm (``running_statistics``); None without a group."""


class Inputs(NamedTuple):
    """Tensors that a stage takes for a micro-batch, and their tree."""

    tensors: Tensors
    tree: Tree

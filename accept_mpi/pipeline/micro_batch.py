"""What enters a stage with a micro-batch, what comes out, and what stays until its backward."""

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
    """A micro-batch between its F and its B (or W)."""

    boxes: list[Box]
    outputs: list[torch.Tensor]
    weights: Kept
    whole: bool
    work: list[Any] = field(default_factory=list)


class Outputs(NamedTuple):
    """What F gives."""

    outputs: Tensors
    """For the next stage; empty on the last."""
    result: Result | None
    """On the last stage."""
    suspect: int
    """1 + the first layer that made NaN or infinity out of finite values for this micro-batch; 0: none seen so far."""
    tree: Tree = tree.LONE
    """What the outputs are the tensors of."""


class Inputs(NamedTuple):
    """What a stage takes of a micro-batch."""

    tensors: Tensors
    tree: Tree

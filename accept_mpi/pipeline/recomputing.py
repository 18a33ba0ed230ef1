"""Backwards that compute their forwards again, so that a micro-batch in flight keeps only what arrived (Chen et al. 2016,
"Training deep nets with sublinear memory cost"; GPipe).

The second forward has the seeds and the weights of the first, so its graph is the same to the bit. What it does to
BatchNorm's running statistics is undone.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from accept_mpi import tree
from accept_mpi.codecs.tensors import Tensors
from accept_mpi.pipeline.micro_batch import Inputs
from accept_mpi.tree import Tree


class Recomputing:
    """What is kept of a stage's forwards."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        norms = [part for layer in layers for part in layer.modules() if isinstance(part, _NormBase)]
        self._statistics = [buffer for norm in norms for buffer in norm.buffers(recurse=False)]
        self._written: set[int] | None = None
        """Positions of inputs that a forward writes to; None before the first."""
        self._versions: list[int] = []

    def kept(self, inputs: Tensors, of: Tree | None) -> Inputs:
        """What a forward takes, before it does: copies of tensors to which it may write."""
        self._versions = [-1 if x is None else x._version for x in inputs]
        written = range(len(inputs)) if self._written is None else self._written
        copies = [
            x.detach().clone().requires_grad_(x.requires_grad) if n in written and x is not None else x
            for n, x in enumerate(inputs)
        ]
        return Inputs(tuple(copies), of or tree.packed(len(inputs)))

    def forget(self, inputs: Tensors, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """After a forward: its outputs without their graph."""
        now = [-1 if x is None else x._version for x in inputs]
        written = {n for n, (before, after) in enumerate(zip(self._versions, now, strict=True)) if before != after}
        self._written = written | (self._written or set())
        return [out.detach().requires_grad_(out.requires_grad) for out in outputs]

    @contextmanager
    def untouched(self, here: bool) -> Iterator[None]:
        """Within the context forwards leave BatchNorm's running statistics as they are; ``here``: unless someone else looks
        after them."""
        before = [buffer.clone() for buffer in self._statistics] if here else []
        try:
            yield
        finally:
            for buffer, value in zip(self._statistics, before, strict=False):
                buffer.data.copy_(value)  # graphs of other micro-batches refer to it

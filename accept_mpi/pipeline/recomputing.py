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

    def kept(self, inputs: Tensors, of: Tree | None) -> Inputs:
        """Copies of what a forward takes, before it does: it may write to it, and one may do what others do not."""
        copies = (None if x is None else _copy(x).requires_grad_(x.requires_grad) for x in inputs)
        return Inputs(tuple(copies), of or tree.packed(len(inputs)))

    def forget(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """After a forward: its outputs without their graph."""
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


def _copy(x: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, gaps included: kernels choose their order of summation by them."""
    extent = 1 + sum(stride * (size - 1) for size, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    return x.detach().as_strided((extent,), (1,)).clone().as_strided(x.shape, x.stride())

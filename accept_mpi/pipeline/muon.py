"""The optimizer Muon for matrices, with AdamW for all other parameters.

Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks" (https://kellerjordan.github.io/posts/muon/):
the momentum of a matrix is made orthogonal, so that an update moves all directions alike. It is scaled to the usual size of
AdamW's updates (Liu et al. 2025, "Muon is Scalable for LLM Training", arXiv 2502.16982, section 2.2), so that both have one
learning rate and one weight decay.

Torch's own Muon takes nothing but matrices, and computes in bfloat16, which is slow on CPUs without instructions for it.
"""

import inspect
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from accept_mpi.models.shared import TABLES

BUFFER = "momentum_buffer"
"""Name of the state of a matrix."""
_QUINTIC = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_USUAL = 0.2  # root of the mean square of AdamW's updates, in learning rates
_CONVOLUTION = nn.modules.conv._ConvNd


class Muon(torch.optim.AdamW):
    """Groups of parameters with "matrix" are updated by Muon, the others by AdamW. A convolution's kernels are a matrix of
    (outputs, inputs x kernel); the weight decay is decoupled."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        muon_momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        self._momentum = muon_momentum

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make one step. ``closure`` is not supported."""
        assert closure is None
        every = self.param_groups
        try:
            self.param_groups = [group for group in every if not group["matrix"]]
            inspect.unwrap(torch.optim.AdamW.step)(self)
        finally:
            self.param_groups = every
        for group in every:
            for parameter in group["params"] if group["matrix"] else ():
                if parameter.grad is not None:
                    self._turn(parameter, group["lr"], group["weight_decay"])

    def _turn(self, parameter: torch.Tensor, lr: float, weight_decay: float) -> None:
        """Update a matrix."""
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if not state:
            state[BUFFER] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        buffer = state[BUFFER].lerp_(gradient, 1 - self._momentum)
        update = orthogonal(gradient.lerp(buffer, self._momentum).flatten(1))  # Nesterov's momentum
        parameter.mul_(1 - lr * weight_decay)
        parameter.add_(update.view(parameter.shape), alpha=-lr * _USUAL * math.sqrt(max(update.shape)))


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """A matrix (m, n) of any size with its singular values moved near to 1, by Newton and Schulz's iteration."""
    a, b, c = _QUINTIC
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = wide / wide.norm().clamp(min=1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.mH
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if wide is not matrix else x).contiguous()


def matrices(layers: Sequence[nn.Module]) -> set[int]:
    """Ids of the parameters that are matrices which map one vector to another: weights of two dimensions that are no table
    of embeddings, and kernels of convolutions."""
    return {id(parameter) for layer in layers for module in layer.modules() for parameter in _matrices(module)}


def _matrices(module: nn.Module) -> Iterator[nn.Parameter]:
    if isinstance(module, TABLES):
        return
    for name, parameter in module.named_parameters(recurse=False):
        of_kernels = isinstance(module, _CONVOLUTION) and name == "weight"
        if of_kernels or (parameter.dim() == 2 and ("weight" in name or name.startswith("lora"))):
            yield parameter

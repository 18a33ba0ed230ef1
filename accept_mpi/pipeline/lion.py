"""The optimizer Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", arXiv 2302.06675, algorithm 2).
Torch does not have it."""

from collections.abc import Iterable
from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """Updates by the sign of a mean of the momentum and the gradient, all of the size of the learning rate; the weight decay
    is decoupled, as AdamW's."""

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make one step. ``closure`` is not supported."""
        assert closure is None
        for group in self.param_groups:
            one, two = group["betas"]
            for parameter in group["params"]:
                if (gradient := parameter.grad) is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                mean = state["exp_avg"]
                if parameter.is_complex():  # two real numbers each, as in torch's optimizers
                    parameter, gradient, mean = map(torch.view_as_real, (parameter, gradient, mean))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(torch.lerp(gradient, mean, one).sign_(), alpha=-group["lr"])
                mean.lerp_(gradient, 1 - two)

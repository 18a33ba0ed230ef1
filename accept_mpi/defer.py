"""Backward in two parts: input gradients now (B), weight gradients later (W), for the zero-bubble schedule.

The layers that are worth it, ``nn.Linear`` and ``nn.Conv*d``, get a forward that builds a small graph of its own; its
backward asks that graph for the input's gradient and leaves the weights' for ``DeferredWeights.run``. Both are computed by
the very kernels that autograd would use, so the results are the same to the bit. Everything else (norms, embeddings,
modules of other types) computes its weights' gradients within B.

Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_TYPES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_Work = tuple[torch.Tensor, torch.Tensor, list[nn.Parameter]]


class DeferredWeights:
    """Weight gradients that wait, gathered by backward passes under ``collect``."""

    def __init__(self, modules: list[nn.Module]) -> None:
        """Teach every suitable module below ``modules`` to defer."""
        self._anchor = torch.zeros((), requires_grad=True)
        self._waiting: list[_Work] = []
        for module in modules:
            for part in module.modules():
                if type(part) in _TYPES and not _is_hooked(part):
                    part.forward = _deferring(part, part.forward, self)

    @property
    def anchor(self) -> torch.Tensor:
        return self._anchor

    def put(self, work: _Work) -> None:
        self._waiting.append(work)

    def collect(self) -> list[_Work]:
        """What the backward just done has left to do."""
        waiting, self._waiting = self._waiting, []
        return waiting

    @staticmethod
    def run(work: list[_Work]) -> None:
        """W: accumulate the weight gradients that a backward left."""
        for output, gradient, parameters in work:
            torch.autograd.backward(output, gradient, inputs=parameters)


def _is_hooked(module: nn.Module) -> bool:
    """Whether its forward is not all there is to it (hooks, weight norm, tied or frozen parameters)."""
    hooked = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(hooked) or hasattr(module, "parametrizations")


def _deferring(module: nn.Module, forward: Callable[..., torch.Tensor], store: DeferredWeights) -> Callable[..., Any]:
    def deferred(x: torch.Tensor) -> torch.Tensor:
        parameters = [p for p in module.parameters(recurse=False) if p.requires_grad]
        if not parameters or not torch.is_grad_enabled():
            return forward(x)
        result: torch.Tensor = _InputGradientOnly.apply(x, store.anchor, forward, parameters, store)
        return result

    return deferred


class _InputGradientOnly(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        anchor: torch.Tensor,
        forward: Callable[..., torch.Tensor],
        parameters: list[nn.Parameter],
        store: DeferredWeights,
    ) -> torch.Tensor:
        with torch.enable_grad():
            inside = x.detach().requires_grad_(x.requires_grad)
            output = forward(inside)
        ctx.inside, ctx.output, ctx.parameters, ctx.store = inside, output, parameters, store
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        of_input = None
        if ctx.inside.requires_grad:
            (of_input,) = torch.autograd.grad(ctx.output, ctx.inside, gradient, retain_graph=True)
        ctx.store.put((ctx.output, gradient, ctx.parameters))
        ctx.output = ctx.inside = None
        return of_input, None, None, None, None

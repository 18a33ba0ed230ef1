"""Backward in two parts for the zero-bubble schedule: input gradients at once (B), weight gradients later (W).

The layers for which this pays, ``nn.Linear`` and ``nn.Conv*d``, get a forward whose backward computes the input's gradient
and leaves the weights' to ``DeferredWeights.run``: convolutions use torch's own function for both, linear layers a small
graph that runs backward twice. Both use the same kernels as autograd, so the results are the same to the bit. Everything
else (norms, embeddings, modules of other types) computes its weight gradients within B.

Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2.
"""

import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from accept_mpi.device.compute import here
from accept_mpi.models.graph import uses

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TYPES = (nn.Linear, *_CONVOLUTIONS)
_Work = Callable[[], None]


class _Now:
    """What is done with the stage now."""

    def __init__(self) -> None:
        self.on, self.forwarding = True, False
        self.waiting: list[_Work] = []
        self.used: set[int] = set()
        self.called: set[int] = set()
        """Modules that the last forward used, during a backward."""


class _NowInThread(_Now, threading.local):
    """What a thread does with the stage: one may compute F beside another's B."""


class DeferredWeights:
    """Weight gradients that wait for W. Backward passes put them here, ``collect`` takes them out."""

    def __init__(self, modules: list[nn.Module]) -> None:
        """Give every suitable module below ``modules`` a forward that can defer."""
        self._anchor = torch.zeros((), requires_grad=True)
        # A GPU's backwards run in a thread of autograd's, but one action at a time.
        self._now = _NowInThread() if here().backward_in_thread else _Now()
        self.looking = False
        """True on a trial stage: nothing defers, and modules that never may are found."""
        self._parts: list[nn.Module] = []
        self._never: set[int] = set()
        """Modules that never defer, since a forward uses their weights more than once: autograd adds up the gradients of all
        uses, and adds only the sum to what is there."""
        every = {id(part): part for module in modules for part in module.modules()}.values()
        owners = Counter(id(p) for part in every for p in part._parameters.values() if p is not None)
        for part in every:
            if isinstance(part.__dict__.get("forward"), _Deferred):
                del part.forward  # copied with the module, it would call the original
            if type(part) in _TYPES and not _is_hooked(part) and all(owners[id(p)] == 1 for p in part.parameters()):
                part.forward = _Deferred(part, len(self._parts), self)
                self._parts.append(part)

    def begin(self, on: bool, forward: bool = True) -> None:
        """Begin a forward, or a backward in which forwards may be computed again. ``on``: modules defer."""
        now = self._now
        now.on, now.forwarding = on, forward
        now.called = set() if forward else now.used.copy()
        now.used.clear()

    @property
    def forwarding(self) -> bool:
        """True during a forward of the stage in this thread."""
        return self._now.forwarding

    def use(self, number: int) -> bool:
        """True if a module's current forward defers. A module that is called twice in a forward never does."""
        # Neither does a module whose forward is computed again in backward (``torch.utils.checkpoint``).
        now = self._now
        if number in now.used or (self.looking and number in now.called):
            self._never.add(number)
        now.used.add(number)
        return now.on and not self.looking and number not in self._never

    def asked(self, number: int) -> None:
        """Note that a gradient passes through a module's forward. Within the stage's forward, a layer wants that gradient
        itself (``torch.autograd.grad``), and perhaps the weights' as well: the module must not defer."""
        if self.forwarding:
            self._never.add(number)

    def look(self, outputs: list[torch.Tensor]) -> None:
        """After a first forward that deferred nothing: exclude modules whose weights have other uses."""
        counts = Counter(id(node.variable) for node in uses(outputs) if hasattr(node, "variable"))
        for number, part in enumerate(self._parts):
            if any(counts[id(parameter)] > 1 for parameter in part._parameters.values()):
                self._never.add(number)

    @property
    def never(self) -> frozenset[int]:
        """Numbers of the modules that never defer."""
        return frozenset(self._never)

    def learn(self, never: frozenset[int]) -> None:
        """Take over what a trial, of copies of the same modules, has found."""
        self._never |= never

    @property
    def anchor(self) -> torch.Tensor:
        """Scalar that wants a gradient, so that autograd calls a module's backward even if its input wants none."""
        return self._anchor

    def put(self, work: _Work) -> None:
        """Leave work to W."""
        self._now.waiting.append(work)

    def collect(self) -> list[_Work]:
        """Take the work that the last backward left to W."""
        waiting, self._now.waiting = self._now.waiting, []
        return waiting

    def close(self) -> None:
        """Give modules their own forwards back: what is in a cycle with its module is not freed at once."""
        for part in self._parts:
            del part.forward
        self._parts = []

    @staticmethod
    def run(work: list[_Work]) -> None:
        """Accumulate the weight gradients that a backward left (W)."""
        for one in work:
            one()


def _is_hooked(module: nn.Module) -> bool:
    """True if a module does more than its type's forward (hooks, weight norm, a forward of its own)."""
    hooked = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(hooked) or "forward" in module.__dict__ or hasattr(module, "parametrizations")


def _own(module: nn.Module) -> list[nn.Parameter]:
    """Trained parameters of a module; none if something else has taken the place of one (a tensor computed in each forward,
    ``torch.func.functional_call``), since that needs its gradient in B."""
    found = []
    for name in ("weight", "bias"):
        parameter = getattr(module, name)
        if parameter is None:
            continue
        if not isinstance(parameter, nn.Parameter) or not parameter.is_leaf:
            return []
        if parameter.requires_grad:
            found.append(parameter)
    return found


class _Deferred:
    """A module's forward that defers weight gradients."""

    def __init__(self, module: nn.Module, number: int, store: DeferredWeights) -> None:
        self._module, self._number, self._store = module, number, store
        self._plain = module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        store, module = self._store, self._module
        parameters = _own(module)
        # torch.func's transforms (vmap, jacrev, ...) do not accept autograd functions such as ours.
        plain = torch._C._are_functorch_transforms_active() or not torch.is_grad_enabled()
        defers = parameters and not plain and len(args) == 1 and not kwargs
        result: torch.Tensor
        if not defers or not store.use(self._number):
            result = self._plain(*args, **kwargs)
            if defers and store.looking and result.requires_grad:
                result.register_hook(lambda _: store.asked(self._number))
            return result
        (x,) = args
        if _is_plain_convolution(module, x, parameters):
            result = _Convolution.apply(x, store.anchor, module, store)
        else:
            result = _InputGradientOnly.apply(x, store.anchor, self._plain, parameters, store)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Deferred":
        return self  # the copy's stage finds it and removes it


def _is_plain_convolution(module: nn.Module, x: torch.Tensor, parameters: list[nn.Parameter]) -> bool:
    return (
        isinstance(module, _CONVOLUTIONS)
        and module.padding_mode == "zeros"
        and isinstance(module.padding, tuple)
        and x.dim() == module.weight.dim()
        and not torch.is_autocast_enabled(x.device.type)
        and not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters)
    )


class _Convolution(torch.autograd.Function):
    """A convolution without an inner graph, which would cost 2 to 6 % of the time of MobileNetV2's layers."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, anchor: torch.Tensor, module: Any, store: DeferredWeights) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.module, ctx.store = module, store
        none = (0,) * len(module.stride)
        result: torch.Tensor = torch.convolution(
            x, module.weight, module.bias, module.stride, module.padding, module.dilation, False, none, module.groups
        )
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,), (x,) = gradients, ctx.saved_tensors
        of_input = None
        if ctx.needs_input_grad[0]:
            of_input = _convolution_backward(gradient, x, ctx.module, (True, False, False))[0]
        if not ctx.store.forwarding:
            ctx.store.put(partial(_weight_gradients, gradient, x, ctx.module))
        return of_input, None, None, None


def _convolution_backward(gradient: torch.Tensor, x: torch.Tensor, module: Any, wanted: tuple[bool, ...]) -> Any:
    """Gradients of a convolution's input, weight and bias, where ``wanted``, by the function that autograd calls."""
    sizes = None if module.bias is None else module.bias.shape
    return torch.ops.aten.convolution_backward(
        gradient, x, module.weight, sizes, module.stride, module.padding, module.dilation, False,
        (0,) * len(module.stride), module.groups, wanted,
    )  # fmt: skip


@torch.no_grad()
def _weight_gradients(gradient: torch.Tensor, x: torch.Tensor, module: Any) -> None:
    places = (module.weight, module.bias)
    wanted = (False, *(p is not None and p.requires_grad for p in places))
    for parameter, found in zip(places, _convolution_backward(gradient, x, module, wanted)[1:], strict=True):
        if parameter is None or not parameter.requires_grad:
            continue
        if parameter.grad is not None:
            parameter.grad.add_(found)
        else:  # in the parameter's layout, as autograd does
            parameter.grad = found if found.stride() == parameter.stride() else torch.empty_like(parameter).copy_(found)


class _InputGradientOnly(torch.autograd.Function):
    """A layer whose backward computes only its input's gradient, and keeps an inner graph for W."""

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
        if ctx.inside.requires_grad:  # it is linear in the gradient, whatever the input
            again = torch.is_grad_enabled()
            (of_input,) = torch.autograd.grad(ctx.output, ctx.inside, gradient, retain_graph=True, create_graph=again)
        if ctx.store.forwarding:  # a layer itself wants this gradient
            return of_input, None, None, None, None
        ctx.store.put(partial(_accumulate, ctx.output, gradient, ctx.parameters))
        ctx.output = ctx.inside = None
        return of_input, None, None, None, None


def _accumulate(output: torch.Tensor, gradient: torch.Tensor, parameters: list[nn.Parameter]) -> None:
    """Accumulate the gradients of those parameters that the micro-batch's forward has left to train."""
    if trained := [parameter for parameter in parameters if parameter.requires_grad]:
        torch.autograd.backward(output, gradient, inputs=trained)

"""Edges of a stage's autograd graph: where inputs enter it, and where gradients are given to its outputs."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from accept_mpi import tree
from accept_mpi.models.graph import uses
from accept_mpi.seeds import seed_all


class Box:
    """One input tensor of a micro-batch on its way into the graph, and its gradient on the way out."""

    def __init__(self, tensor: torch.Tensor | None) -> None:
        self.tensor = tensor
        self.wants_gradient = tensor is not None and tensor.requires_grad
        self.gradient: torch.Tensor | None = None

    def open(self, anchor: torch.Tensor) -> torch.Tensor:
        """Move the tensor into the graph; afterwards the box no longer holds it."""
        assert self.tensor is not None
        tensor: torch.Tensor = Enter.apply(anchor, self) if self.wants_gradient else self.tensor
        self.tensor = None
        return tensor


class Differentiating(TorchFunctionMode):
    """Within the context: sees whether ``torch.autograd.grad`` differentiates by an input of the stage what depends on
    another one, too. That may depend on the first in a stage before, where no derivative is taken."""

    found = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.autograd.grad:
            given = dict(zip(("outputs", "inputs"), args, strict=False)) | (kwargs or {})
            by = tree.leaves(given["inputs"])
            entered = {one.grad_fn for one in by if one.grad_fn is not None and _enters(one.grad_fn)}
            self.found |= bool(entered) and any(
                _enters(node) and node not in entered for node in uses(tree.leaves(given["outputs"]), by)
            )
        return func(*args, **(kwargs or {}))


def _enters(node: Any) -> bool:
    return node.name() == "EnterBackward"


class Seeded(torch.autograd.Function):
    """A scalar whose backward gives these outputs these gradients. (``torch.autograd.backward`` would, too, but it imports
    sympy to compare their shapes: 35 MB and a third of a second of CPU per process.)"""

    @staticmethod
    def forward(ctx: Any, gradients: list[torch.Tensor], *outputs: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        return None, *ctx.gradients


class Enter(torch.autograd.Function):
    """A stage's input as a non-leaf without a copy, so that a first layer may work in place as it may in the whole model."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, box: Box) -> torch.Tensor:
        ctx.box = box
        assert box.tensor is not None
        return box.tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.box.gradient = gradients[0]
        return None, None


def apart(gradients: list[torch.Tensor | None], parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Gradients of inputs in memory of their own. Autograd may have given a parameter the same (one that is added to a
    single sample, as a view), and the gradients of later micro-batches are added there while these wait to be sent."""
    grads = [p.grad for p in parameters if p.grad is not None] if gradients else []
    own = [grad.data_ptr() for grad in grads if grad.layout is torch.strided]

    def one(gradient: torch.Tensor | None) -> torch.Tensor | None:
        if gradient is None or gradient.layout is not torch.strided:
            return gradient
        memory = gradient.untyped_storage()
        begin, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes()
        return gradient.clone() if any(begin <= at < end for at in own) else gradient

    return list(map(one, gradients))


class Seeding(torch.autograd.Function):
    """A layer's outputs without a copy, whose backward first seeds the random numbers of the layer's backward."""

    @staticmethod
    def forward(ctx: Any, seed: int, *outputs: torch.Tensor) -> Any:
        ctx.seed = seed
        ctx.set_materialize_grads(False)
        return tuple(out.detach() for out in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        seed_all(ctx.seed)
        return None, *gradients


Telling = Callable[[int], None]


class Progress:
    """How far a backward has come: autograd takes what was computed last first."""

    def __init__(self) -> None:
        self.layers: Collection[int] = ()
        """Layers before which it tells."""
        self.tell: Telling | None = None
        """Called with such a layer once the backward of it and all later ones is over, if a gradient comes there."""

    def watch(self, layer: int, value: Any) -> None:
        """Look at the ``value`` that a layer is about to get."""
        nodes = [x.grad_fn for x in tree.leaves(value) if x.grad_fn is not None] if layer in self.layers else ()
        if nodes:
            newest = max(nodes, key=lambda node: node._sequence_nr())
            newest.register_prehook(lambda gradients: self.tell and self.tell(layer))


def seeded_backward(value: Any, seed: int) -> Any:
    """A layer's value in which the backward of the layer is seeded."""
    tensors = [x for x in tree.leaves(value) if x.requires_grad]
    if not tensors:
        return value
    made = dict(zip(map(id, tensors), Seeding.apply(seed, *tensors), strict=True))
    return tree.replace(value, lambda x: made.get(id(x), x))


def finite(values: Sequence[torch.Tensor]) -> bool:
    """True if all values are finite. Their sum is checked first, in one pass, and single values only if it is not finite."""
    for value in values:
        if value.is_floating_point() and value.element_size() == 1:
            value = value.detach().float()  # torch adds up no numbers of 8 bits
        if value.is_floating_point() and not torch.isfinite(value.detach().sum()) and not value.isfinite().all():
            return False
    return True


def cast_twice(outputs: Sequence[torch.Tensor]) -> bool:
    """True if a forward under autocast has used a parameter in lower precision more than once: torch kept the first cast for
    the next use."""
    casts = (node for node in uses(outputs) if node.name().startswith("ToCopy"))
    counts = Counter(node for node in casts if hasattr(node.next_functions[0][0], "variable"))
    return any(count > 1 for count in counts.values())

"""What an autograd graph uses."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn


def uses(outputs: Sequence[torch.Tensor], beside: Sequence[torch.Tensor] = ()) -> Iterator[Any]:
    """Nodes of the graph behind these tensors, each as often as others use it, but not those behind the tensors ``beside``.
    Leaves have a ``variable``."""
    seen = {one.grad_fn for one in beside}
    waiting = [out.grad_fn for out in outputs if out.grad_fn is not None and out.grad_fn not in seen]
    seen.update(waiting)
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is None:
                continue
            yield node
            if node not in seen:
                seen.add(node)
                waiting.append(node)


def parameters_behind(outputs: Sequence[torch.Tensor], beside: Sequence[torch.Tensor] = ()) -> list[nn.Parameter]:
    """The parameters that these tensors depend on otherwise than through the tensors ``beside``."""
    found = {id(leaf): leaf for node in uses(outputs, beside) if isinstance(leaf := _leaf(node), nn.Parameter)}
    through = {id(tensor) for tensor in beside}
    return [leaf for key, leaf in found.items() if key not in through]


def _leaf(node: Any) -> torch.Tensor | None:
    return getattr(node, "variable", None)

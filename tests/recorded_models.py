"""Models with forwards of their own, and how to compare them, cut anywhere, with themselves uncut."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from accept_mpi import tree
from accept_mpi.models.base import Chain
from accept_mpi.models.recording.recorded import RecordedModel
from accept_mpi.models.shared import uncuttable
from accept_mpi.pipeline.graph_edges import Box, Seeded

ANCHOR = torch.zeros((), requires_grad=True)


def recorded(make: Callable[[], nn.Module], value: Any, output: str = "", blocks: tuple[str, ...] = ()) -> Chain:
    """The chain of a model, which ``make`` makes under a seed. Raises UserError if it cannot be recorded."""

    def again() -> nn.Module:
        torch.manual_seed(7)
        return make()

    return RecordedModel(again, value, output, blocks).chain()


class Parts:
    """A chain's layers, run in stages that pass on tensors without their graph, as ranks do."""

    def __init__(self, chain: Chain, cuts: Sequence[int]) -> None:
        self.layers = chain.build_range(0, len(chain), 0)
        self.edges = [0, *cuts, len(chain)]

    def forward(self, value: Any) -> tuple[Any, list[tuple[list[Box], list[torch.Tensor]]]]:
        """The last layer's result, and each stage's inputs and outputs."""
        graph = []
        for start, stop in zip(self.edges, self.edges[1:], strict=False):
            tensors, of = tree.flatten(value)
            boxes = [Box(tensor.detach().requires_grad_(tensor.requires_grad)) for tensor in tensors]
            value = tree.unflatten(of, [box.open(ANCHOR) for box in boxes])
            for layer in self.layers[start:stop]:
                value = layer(value)
            graph.append((boxes, tree.leaves(value)))
        return value, graph

    def train(self, value: Any, loss: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        """Forward and backward; returns the loss."""
        result, graph = self.forward(value)
        found = loss(result)
        found.backward()
        for (_, outputs), (boxes, _) in zip(reversed(graph[:-1]), reversed(graph[1:]), strict=True):
            pairs = [(out, box.gradient) for out, box in zip(outputs, boxes, strict=True) if box.gradient is not None]
            if pairs:
                Seeded.apply([gradient for _, gradient in pairs], *(out for out, _ in pairs)).backward()
        return found.detach()

    def named(self, gradients: bool) -> dict[str, torch.Tensor | None]:
        """The model's state, or its parameters' gradients, by the model's names."""
        if gradients:
            return {name: p.grad for layer in self.layers for name, p in layer.named_parameters(remove_duplicate=False)}
        return {name: value for layer in self.layers for name, value in layer.state_dict().items()}


def check(
    make: Callable[[], nn.Module],
    values: Sequence[Any],
    loss: Callable[[Any], torch.Tensor],
    cuts: Callable[[int], Sequence[Sequence[int]]],
    output: str = "",
    blocks: tuple[str, ...] = (),
) -> Chain:
    """Check that loss, gradients, buffers and evaluation of a model in parts are those of the plain model, bit for bit."""
    chain = recorded(make, values[0], output, blocks)
    tied = uncuttable(chain.shared(), len(chain), False)
    for some in (one for one in cuts(len(chain)) if not tied & set(one)):
        torch.manual_seed(7)
        plain, parts = make(), Parts(chain, some)
        for value in values:
            torch.manual_seed(11)
            expected = loss(_select(_called(plain, value), output))
            expected.backward()
            torch.manual_seed(11)
            assert torch.equal(parts.train(value, loss), expected.detach()), some
        theirs = {name: p.grad for name, p in plain.named_parameters()}
        mine = parts.named(True)
        assert set(theirs) <= set(mine), set(theirs) - set(mine)
        for name, gradient in theirs.items():
            assert _same(mine[name], gradient), (name, some)
        state, own = plain.state_dict(), parts.named(False)
        assert set(own) == set(state), set(own) ^ set(state)
        assert all(torch.equal(own[name], value) for name, value in state.items()), some
        plain.eval()
        for layer in parts.layers:
            layer.eval()
        with torch.no_grad():
            for value in values:
                assert torch.equal(loss(_select(_called(plain, value), output)), loss(parts.forward(value)[0])), some
    return chain


def _called(model: nn.Module, value: Any) -> Any:
    if isinstance(value, dict):
        return model(**value)
    return model(*value) if isinstance(value, tuple) else model(value)


def _select(result: Any, output: str) -> Any:
    from accept_mpi.models.recording.output import select

    return select(result, output)


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is None if other is None else one is not None and torch.equal(one, other)

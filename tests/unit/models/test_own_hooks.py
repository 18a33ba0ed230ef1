"""Hooks that a forward itself puts on its model's modules do in layers what they do in one process, or the forward is not
recorded: one that changed what a linear layer gives was left out, silently."""

from typing import Any

import pytest
import torch
from recorded_models import check, recorded
from torch import nn

from accept_mpi.errors import UserError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.two.register_forward_hook(lambda module, args, result: result + 0.25)
        self.there, self.handle = False, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.three(torch.tanh(self.two(torch.tanh(self.one(x)))))


class ForItsOwnTime(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = self.two.register_forward_hook(lambda module, args, result: result * 0.5)
        two = self.one.register_forward_pre_hook(lambda module, args, kwargs: ((args[0] * 2,), kwargs), with_kwargs=True)
        found = super().forward(x)
        one.remove()
        two.remove()
        return found


class Notes(Net):
    """What its parts give, as those do that extract features."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept: list[torch.Tensor] = []
        handles = [part.register_forward_hook(lambda *given: kept.append(given[2])) for part in (self.one, self.two)]
        found = super().forward(x)
        for handle in handles:
            handle.remove()
        return found + kept[0] * kept[1].mean()


class TakesItselfAway(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def hook(module: nn.Module, args: Any, result: torch.Tensor) -> torch.Tensor:
            handle.remove()
            return result * 0.5

        handle = self.two.register_forward_hook(hook)
        return super().forward(x)


class AtFirst(Net):
    """As transformers has it, for models that give all hidden states."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.there:
            self.two.register_forward_hook(lambda module, args, result: result * 0.5)
            self.there = True
        return super().forward(x)


class Within(Net):
    """A part of the model does so."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(ForItsOwnTime(), nn.Tanh(), AtFirst())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.part(x))


@pytest.mark.parametrize("model", [ForItsOwnTime, Notes, TakesItselfAway, AtFirst, Within])
def test_recorded(model: type[nn.Module]) -> None:
    values = [torch.randn(4, 6), torch.randn(4, 6), torch.randn(3, 6)]
    chain = check(model, values, lambda y: y.square().mean(), lambda count: [[], list(range(1, count))])
    assert len(chain) >= 3


class MoreAndMore(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.two.register_forward_hook(lambda module, args, result: result * 0.5)
        return super().forward(x)


class BehindAnAttribute(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.handle is None:
            self.handle = self.two.register_forward_hook(lambda module, args, result: result * 0.5)
        return super().forward(x)


class BehindANewAttribute(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "hooks"):
            self.hooks = {"two": self.two.register_forward_hook(lambda module, args, result: result * 0.5)}
        return super().forward(x)


class OfGradients(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        handle = self.two.register_full_backward_pre_hook(lambda module, gradients: (gradients[0] * 0.5,))
        found = super().forward(x)
        handle.remove()
        return found


class TakesAway(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.two._forward_hooks.clear()
        return super().forward(x)


class OnAPart(Net):
    """Of a module that is recorded as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        handle = self.encoder.linear1.register_forward_hook(lambda module, args, result: result * 0.5)
        found = super().forward(self.encoder(x))
        handle.remove()
        return found


class HasAnotherForward(Net):
    """For its own time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        plain = self.two.forward
        self.two.forward = lambda given: 0.5 * plain(given)  # type: ignore[method-assign]
        found = super().forward(x)
        self.two.forward = plain  # type: ignore[method-assign]
        return found


class PutsAnotherForward(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "forward" not in vars(self.two):
            plain = self.two.forward
            self.two.forward = lambda given: 0.5 * plain(given)  # type: ignore[method-assign]
        return super().forward(x)


class Half(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * super().forward(x)


class OfAnotherClass(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.two.__class__ = Half
        return super().forward(x)


@pytest.mark.parametrize("model", [HasAnotherForward, PutsAnotherForward, OfAnotherClass])
def test_other_calls_are_not_recorded(model: type[nn.Module]) -> None:
    for _ in range(2):
        with pytest.raises(UserError, match=r"forward changes two.forward before it calls two"):
            recorded(model, torch.randn(4, 6))


@pytest.mark.parametrize("model", [MoreAndMore, BehindAnAttribute, BehindANewAttribute, OfGradients, TakesAway, OnAPart])
def test_not_recorded(model: type[nn.Module]) -> None:
    with pytest.raises(UserError, match=r"forward (sets|changes)"):
        recorded(model, torch.randn(4, 6))

"""A copy of a module is one of its own, also where functions in its attributes and hooks know it."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from accept_mpi.models.copies import copied


class Knowing(nn.Module):
    """Its functions know it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.norm, self.scale = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Parameter(torch.ones(3))
        self.how, self.kept = how, {}
        scale, norm = self.scale, self.norm

        def inner(x: torch.Tensor) -> torch.Tensor:
            self.kept["x"] = x
            return norm(self.linear(x)) * scale

        def outer(x: torch.Tensor) -> torch.Tensor:
            return inner(x)

        def given(x: torch.Tensor, parts: Any = (self.linear, [self.norm, self.scale])) -> torch.Tensor:
            self.kept["x"] = x
            return parts[1][0](parts[0](x)) * parts[1][1]

        functions: dict[str, Any] = {
            "attribute": inner,
            "list": [inner],
            "dict": {"f": (outer,)},
            "partial": functools.partial(lambda f, x: f(x), outer),
            "default": given,
            "hook": None,
        }
        self.function = functions[how]
        if how == "hook":
            self.linear.register_forward_hook(lambda module, x, output: norm(output) * self.scale)
            self.linear.register_forward_pre_hook(lambda module, x: self.kept.update(x=x[0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.function
        while isinstance(found, list | dict | tuple):
            found = next(iter(found.values() if isinstance(found, dict) else found))
        result: torch.Tensor = self.linear(x) if found is None else found(x)
        return result + 0 * self.kept["x"]


@pytest.mark.parametrize("how", ["attribute", "list", "dict", "partial", "default", "hook"])
def test_functions_know_the_copy(how: str) -> None:
    one = Knowing(how)
    (other,) = copied([one])
    other(torch.randn(4, 3)).sum().backward()
    assert all(parameter.grad is not None for parameter in other.parameters())
    assert all(parameter.grad is None for parameter in one.parameters())
    assert (int(one.norm.num_batches_tracked), int(other.norm.num_batches_tracked)) == (0, 1)
    assert not one.kept
    one(torch.randn(4, 3)).sum().backward()
    assert int(other.norm.num_batches_tracked) == 1


def test_parameters_that_are_there_already() -> None:
    """As a lane has them."""
    one = Knowing("attribute")
    memo: dict[int, Any] = {id(p): nn.Parameter(p.data) for p in one.parameters()}
    memo |= {id(buffer): buffer for buffer in one.buffers()}
    (other,) = copied([one], dict(memo))
    other(torch.randn(4, 3)).sum().backward()
    assert [id(p) for p in other.parameters()] == [id(memo[id(p)]) for p in one.parameters()]
    assert all(parameter.grad is None for parameter in one.parameters())
    assert int(one.norm.num_batches_tracked) == 1


def test_other_functions_stay_the_same() -> None:
    """What a class within a function refers to, as its hooks do, is not copied apart from it."""
    seen: dict[str, Any] = {}
    count = 0

    class Counting(nn.Module):
        def __init__(self, act: Callable[[torch.Tensor], torch.Tensor]) -> None:
            super().__init__()
            self.act = act
            self.register_forward_pre_hook(self.look)

        def look(self, module: nn.Module, x: Any) -> None:
            nonlocal count
            count += 1
            seen["x"] = x[0]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.act(seen["x"])

    def act(x: torch.Tensor) -> torch.Tensor:
        return x * count

    one = Counting(act)
    (other,) = copied([one])
    assert other.act is act
    assert torch.equal(other(torch.ones(2)), torch.ones(2))
    assert count == 1


def test_a_function_that_calls_itself() -> None:
    class Recursive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

            def again(x: torch.Tensor, depth: int = 0) -> torch.Tensor:
                return x if depth == 3 else again(x * self.weight, depth + 1)

            self.again = again

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.again(x)

    one = Recursive()
    (other,) = copied([one])
    other(torch.ones(())).backward()
    assert one.weight.grad is None
    assert float(other.weight.grad) == 3

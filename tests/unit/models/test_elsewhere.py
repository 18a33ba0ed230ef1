"""What forwards change outside of their model: in other Python modules than the model's, in classes, and in the functions
around those of its own class."""

import inspect
from collections.abc import Callable
from typing import Any

import elsewhere
import pytest
import torch
from elsewhere import Settings, by_default, masked, tabled
from probing import probe
from recorded_models import check, recorded
from torch import nn

from accept_mpi.errors import UserError
from accept_mpi.job_file import parse
from accept_mpi.models.base import Chain
from accept_mpi.models.layers import build_stage
from accept_mpi.models.untouched import untouched
from accept_mpi.pipeline.stage import Stage
from accept_mpi.profiling.outline import outline

JOB = parse('[model]\nname="m"\n[data]\nname="d"\n[train]\nsteps=9\n[output]\ndirectory="r"\n', "job")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.tanh(self.one(x)))


def ramped(forward: Callable[[Any, torch.Tensor], torch.Tensor]) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    count = 0

    def inner(self: Any, x: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return forward(self, x) * min(1.0, count / 10)

    return inner


class Decorated(Net):
    @ramped
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scores(x)


def within() -> nn.Module:
    notes = {"count": 0}

    class Within(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            notes["count"] += 1
            return self.scores(x) * min(1.0, notes["count"] / 10)

    return Within()


class OfAModule(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        elsewhere.calls += 1
        return self.scores(x) * min(1.0, elsewhere.calls / 10)


class UnderAKey(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        elsewhere.NOTES["calls"] += 1
        return self.scores(x) * min(1.0, elsewhere.NOTES["calls"] / 10)


class ByAFunction(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scores(x) * elsewhere.share()


class OfAClass(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Settings.calls += 1
        return self.scores(x) * min(1.0, elsewhere.Settings.calls / 10)


class OfAFunctionsOwn(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scores(x) * elsewhere.by_attribute()


class OfItsDefault(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scores(x) * by_default()


class OfItsOwnDefault(Net):
    def forward(self, x: torch.Tensor, calls: list[int] = [0]) -> torch.Tensor:  # noqa: B006
        calls[0] += 1
        return self.scores(x) * min(1.0, calls[0] / 10)


COUNTING = [
    (OfAFunctionsOwn, r"elsewhere\.by_attribute\.calls"),
    (OfItsDefault, r"test_elsewhere\.by_default\.notes"),
    (OfItsOwnDefault, r"forward\.calls"),
    (Decorated, r"forward\.count"),
    (within, r"forward\.notes"),
    (OfAModule, r"elsewhere\.calls"),
    (UnderAKey, r"elsewhere\.NOTES"),
    (ByAFunction, r"elsewhere\.NOTES"),
    (OfAClass, r"elsewhere\.Settings\.calls"),
]


@pytest.mark.parametrize(("make", "name"), COUNTING)
def test_what_is_counted_is_not_recorded(make: Callable[[], nn.Module], name: str) -> None:
    before = elsewhere.counted()
    with pytest.raises(UserError, match=f"forward sets {name}, a variable outside of the model"):
        recorded(make, torch.randn(2, 6))
    assert elsewhere.counted() == before


@pytest.mark.parametrize(("make", "name"), COUNTING)
def test_layers_that_count_together_are_not_parted(make: Callable[[], nn.Module], name: str) -> None:
    """A copy of the counter on each rank would count half of the calls."""

    def again() -> list[tuple[str, nn.Module]]:
        kind = type(make())
        return [("first", kind()), ("between", nn.Tanh()), ("last", kind())]

    def probed(stop: int) -> Stage:
        stage = Stage(build_stage(Chain(again(), again), 0, stop, 0), JOB, None, False)
        probe(stage, (torch.randn(3, 6),), None, lambda specs, of: (torch.ones(3, 6),))
        return stage

    before = elsewhere.counted()
    with pytest.raises(UserError, match=f"layers 0 and 2 have {name} in common, and a forward changes it"):
        probed(2)
    assert probed(3).found.alone
    assert elsewhere.counted() == before


class Masked(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(masked(self.one(x)))


class Tabled(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(tabled(self.one(x)))


class OfAFunction(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x) @ elsewhere.table(6))


class TabledByAClass(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x) * Settings.table(6))


KEEPING = [Masked, Tabled, OfAFunction, TabledByAClass]


@pytest.mark.parametrize("net", KEEPING)
def test_tables_are_not_those_of_a_record(net: type[nn.Module]) -> None:
    """They are without values, and the next forward found them."""
    elsewhere.forget()
    chain = check(
        net, [torch.randn(4, 6), torch.randn(3, 6)], lambda result: result.square().mean(), lambda count: [[], [1]]
    )
    assert len(chain) == 2


@pytest.mark.parametrize("net", KEEPING)
def test_tables_are_not_those_of_an_outline(net: type[nn.Module]) -> None:
    def again() -> list[tuple[str, nn.Module]]:
        return [("first", nn.Linear(6, 6)), ("last", net())]

    elsewhere.forget()
    chain, x = Chain(again(), again), torch.randn(3, 6)
    outline(chain, 0, (x,))
    assert nn.Sequential(*chain.build_range(0, 2, 0))(x).shape == (3, 6)


def test_a_method_that_a_function_elsewhere_has_made_is_untouched() -> None:
    net = Decorated()
    with untouched([net]):
        net(torch.randn(2, 6))
    assert inspect.getclosurevars(Decorated.forward).nonlocals["count"] == 0

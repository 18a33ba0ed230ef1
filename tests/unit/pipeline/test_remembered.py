"""What forwards leave in modules goes on with a stage's state: checkpoints, snapshots and other plans hold it."""

import copy
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from probing import probe
from torch import nn
from torch.nn import functional

from accept_mpi.errors import UserError
from accept_mpi.job_file import parse
from accept_mpi.models.layers import Layers
from accept_mpi.models.losses import Loss
from accept_mpi.pipeline.remembered import Remembered
from accept_mpi.pipeline.stage import Stage
from accept_mpi.pipeline.state import packed
from accept_mpi.recovery.layer_state import load, states

BASE = '[model]\nname="m"\n[data]\nname="d"\n[train]\nsteps=9\n[output]\ndirectory="r"\n'


class Meter:
    def __init__(self) -> None:
        self.total, self.parts = 0.0, [0]


class Counting(nn.Module):
    """Remembers in all ways that are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.text = 0, ""
        self.centre = torch.zeros(4)
        self.last: deque[Any] = deque(maxlen=2)
        self.seen: dict[str, Any] = {"n": 0, "deep": {"sum": torch.zeros(4)}}
        self.pair = (0, 0.0)
        self.kinds: set[int] = set()
        self.meter = Meter()
        self.alias = self.meter
        self.register_buffer("quiet", torch.zeros(4), persistent=False)
        self.random = torch.Generator().manual_seed(5)
        self.array, self.sums = np.zeros(4, np.float32), [torch.zeros(4)]

    def forward(self, x: torch.Tensor) -> Any:
        x = x + torch.randn(4, generator=self.random)
        self.array = self.array * np.float32(0.9) + x.detach().numpy().mean(0)
        self.sums[0] += torch.from_numpy(self.array)
        x = x - self.sums[0]
        mean = x.detach().mean(0)
        self.calls += 1
        self.text += "x"
        self.centre = 0.9 * self.centre + 0.1 * mean
        self.last.append((self.calls, mean.clone()))
        self.seen["n"] += 1
        self.seen["deep"]["sum"] = self.seen["deep"]["sum"] + mean
        self.pair = (self.pair[0] + 1, self.pair[1] + 0.5)
        self.kinds.add(self.calls)
        self.meter.total += 0.25
        self.meter.parts.append(self.calls)
        self.quiet.mul_(0.5).add_(mean)
        scale = (self.calls + len(self.text) + self.seen["n"] + sum(self.pair) + len(self.kinds)) / 9
        scale += self.alias.total + len(self.meter.parts) + sum(n for n, _ in self.last)
        return (x - self.centre - self.quiet - self.seen["deep"]["sum"] - sum(one for _, one in self.last)) * scale


class Centred(nn.Module):
    """A loss that counts, and keeps a buffer that ``state_dict()`` has and one that it has not."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(4))
        self.register_buffer("quiet", torch.zeros(4), persistent=False)
        self.register_buffer("weights", torch.ones(4))
        self.calls = 0

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.centre = self.centre * 0.9 + output.detach().mean(0) * 0.1
        self.quiet += 1
        return functional.cross_entropy((output - self.centre) * self.weights, target) * self.calls / (1 + self.quiet.sum())


def made(layers: list[nn.Module], loss: nn.Module | Loss, more: tuple[str, ...] = ()) -> Stage:
    own = Layers(0, ["a", "b"], copy.deepcopy(layers))
    stage = Stage(own, parse(BASE, "job", list(more)), loss if isinstance(loss, Loss) else Loss("own", loss), False)
    probe(stage, (torch.randn(3, 4),), torch.tensor([0, 1, 2]), lambda specs, of: ())
    return stage


def trained(stage: Stage, steps: range) -> list[float]:
    found = []
    for step in steps:
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        out = stage.forward(step, 0, (x,), target=torch.tensor([0, 1, 2]))
        assert out.result is not None
        found.append(out.result.loss)
        stage.backward(step, 0, ())
        if stage.in_flight:
            stage.weight_gradient(step, 0)
        stage.update(0.1, 0)
        stage.drained()
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_another_stage_goes_on_where_one_ended(schedule: str) -> None:
    layers, more = [nn.Linear(4, 4), Counting()], (f"pipeline.schedule={schedule}",)
    whole = trained(made(layers, Centred(), more), range(6))
    first = made(layers, Centred(), more)
    assert not first.found.forgets
    begun = trained(first, range(3))
    second = made(layers, Centred(), more)
    load(second, states(first), parse(BASE, "job").train.optimizer)
    assert second.layers[1].alias is second.layers[1].meter
    assert begun + trained(second, range(3, 6)) == whole


def test_a_loss_begins_where_its_run_begins() -> None:
    """A rank whose loss has been trained with goes back to a time before the first snapshot."""
    layers, loss = [nn.Linear(4, 4), nn.Tanh()], Loss("own", Centred())
    whole = trained(made(layers, loss), range(4))
    assert trained(made(layers, loss), range(4)) == whole


def test_constants_of_a_loss_are_not_kept() -> None:
    """Whoever changes them means it."""
    stage = made([nn.Linear(4, 4), nn.Tanh()], Centred())
    assert stage.remembered.names == {"the loss.calls", "the loss.centre", "the loss.quiet"}


class Late(nn.Module):
    """Changes things in the third forward, without having counted: no trial sees it."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.centre, self.slope, self.shown = nn.Linear(4, 4), None, 1.0, None

    def forward(self, x: torch.Tensor, *target: torch.Tensor) -> Any:
        """Also a loss, which changes itself."""
        self.shown = x.detach()
        y = self.factor * self.slope * (x if target else self.linear(x))
        y = y if self.centre is None else y - self.centre
        if hasattr(self, "pairs"):
            y = y * self.pairs[1]["by"]
        if torch.is_grad_enabled() and int(1e4 * x.flatten()[0].abs()) in TIMES:
            self.centre, self.slope, self.factor = x.detach().mean(0), 0.5, 0.25
            self.pairs = (torch.zeros(2), {"by": 0.5})
            self.linear.weight.requires_grad_(False)
        return functional.cross_entropy(y, *target) if target else y


TIMES: set[int] = set()


@pytest.fixture
def times() -> Iterator[Callable[[nn.Module, int], None]]:
    """Have forwards of a first layer that passes its input on change things when this step's comes."""

    def at(step: int) -> None:
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        TIMES.add(int(1e4 * x.flatten()[0].abs()))

    yield at
    TIMES.clear()


def test_what_forwards_make_late_is_kept(times: Callable[[int], None]) -> None:
    """A new attribute, a tensor in a constant's place, a frozen parameter."""
    times(2)
    layers, loss = [Late(), nn.Linear(4, 4)], nn.CrossEntropyLoss()
    layers[0].linear.weight.data.copy_(torch.eye(4))
    whole = trained(made(layers, loss), range(8))
    first = made(layers, loss)
    begun = trained(first, range(4))
    assert first.remembered.late() == {"a.centre", "a.slope", "a.factor", "a.pairs"}
    assert "remembered/a.linear.weight.requires_grad" in first.remembered.state()
    second = made(layers, loss)
    load(second, states(first), parse(BASE, "job").train.optimizer)
    assert begun + trained(second, range(4, 8)) == whole
    assert second.remembered.state().keys() == first.remembered.state().keys()


def test_what_evaluations_make_is_not_kept(times: Callable[[int], None]) -> None:
    stage = made([Late(), nn.Linear(4, 4)], nn.CrossEntropyLoss())
    with stage.evaluating():
        stage.layers[0].maps = torch.zeros(4)
    assert not stage.remembered.late()


class Filling(nn.Module):
    """Has from the first what it changes in the third forward: a tensor that it replaces, others that it writes to, a list,
    a dictionary, and what these hold."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.shown = nn.Linear(4, 4), torch.zeros(4)
        self.centre, self.sums = torch.zeros(4), torch.ones(4)
        self.factors, self.by = [1.0], {"a": [1.0], "t": torch.ones(4)}
        self.register_buffer("quiet", torch.ones(4), persistent=False)

    def forward(self, x: torch.Tensor, *target: torch.Tensor) -> Any:
        """Also a loss."""
        self.shown = x.detach()
        if torch.is_grad_enabled() and int(1e4 * x.flatten()[0].abs()) in TIMES:
            self.centre = x.detach().mean(0)
            self.sums.mul_(0.5)
            self.factors.append(0.5)
            self.by["a"].append(0.25)
            self.by["t"] = x.detach().std(0)
            self.quiet *= 2
        y = (x if target else self.linear(x)) * self.sums * sum(self.factors) * sum(self.by["a"]) * self.by["t"]
        y = y * self.quiet - self.centre
        return functional.cross_entropy(y, *target) if target else y


CHANGED = {"centre", "sums", "factors", "by", "quiet"}


def test_what_forwards_fill_late_is_kept(times: Callable[[int], None]) -> None:
    """A run that was resumed went on with what there was at first, without a word."""
    times(2)
    layers, loss = [Filling(), nn.Linear(4, 4)], nn.CrossEntropyLoss()
    layers[0].linear.weight.data.copy_(torch.eye(4))
    layers[0].linear.bias.data.zero_()
    whole = trained(made(layers, loss), range(8))
    first = made(layers, loss)
    assert not first.remembered.late()
    begun = trained(first, range(4))
    assert first.remembered.late() == {f"a.{name}" for name in CHANGED}
    second = made(layers, loss)
    load(second, states(first), parse(BASE, "job").train.optimizer)
    assert begun + trained(second, range(4, 8)) == whole
    assert second.remembered.state().keys() == first.remembered.state().keys()


@pytest.mark.parametrize(("kind", "changed"), [(Late, {"centre", "slope", "factor", "pairs"}), (Filling, CHANGED)])
def test_a_loss_that_changes_late(kind: type[nn.Module], changed: set[str], times: Callable[[int], None]) -> None:
    """Another plan's stage has the same loss, which keeps what it changed, too, and begins with what it had at first."""
    layers, loss = [nn.Identity(), nn.Linear(4, 4)], Loss("own", kind().requires_grad_(False))
    layers[1].weight.data.copy_(torch.eye(4))
    layers[1].bias.data.zero_()
    times(0)
    first = made(layers, loss)
    whole = trained(first, range(6))
    kept = {key for key in first.remembered.state() if key.startswith("loss/")}
    assert kept == {f"loss/b.{name}" for name in changed}
    snapshot = states(first)
    second = made(layers, loss)
    assert not second.remembered.state()
    load(second, snapshot, parse(BASE, "job").train.optimizer)
    assert {key for key in second.remembered.state() if key.startswith("loss/")} == kept
    assert trained(made(layers, loss), range(6)) == whole


class Handle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts: list[Any] = [0, print]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.parts[0] += 1
        return x * self.parts[0]


def test_what_cannot_be_kept_is_told() -> None:
    stage = made([nn.Linear(4, 4), Handle()], nn.CrossEntropyLoss())
    assert stage.found.forgets == ["b.parts"]
    assert not stage.remembered.state()


class Turning(nn.Module):
    """Remembers numbers that no file can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = torch.zeros(4, dtype=torch.complex128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.turned = self.turned + x.detach().sum(0)
        return x + self.turned.real.float()


def test_numbers_that_no_file_can_hold_are_told() -> None:
    """Not by a bug's traceback in the first checkpoint."""
    assert made([nn.Linear(4, 4), Turning()], nn.CrossEntropyLoss()).found.forgets == ["b.turned"]
    layer = nn.Linear(4, 4)
    layer.register_buffer("angles", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(UserError, match=r'"angles" of its state_dict\(\) is or holds a tensor of complex128, which no file'):
        made([layer, nn.Tanh()], nn.CrossEntropyLoss())


@pytest.mark.parametrize("name", ["forward", "linear", "weight", "_compiled_call_impl", "_buffers", "method", "meter"])
def test_what_means_something_else_is_not_put(name: str) -> None:
    """A checkpoint of another program may name anything."""
    module = Counting()
    module.weight, module.linear = nn.Parameter(torch.zeros(2)), nn.Linear(2, 2)
    module.method = lambda: 5
    made_of = Remembered([("b", module)])
    before = dict(vars(module))
    made_of.put({f"remembered/b.{name}": packed(7)})
    assert vars(module) == before
    made_of.put({"remembered/b.slope": packed(7), "remembered/b.weight.requires_grad": packed(False)})
    assert module.slope == 7
    assert not module.weight.requires_grad


def test_only_what_is_remembered_can_be_put() -> None:
    """A checkpoint of another program may name anything."""
    module = Counting()
    names = Remembered([("b", module)], ["b.calls", "b.gone.calls", "c.calls"])
    module.calls = 7
    state = names.state()
    assert list(state) == ["remembered/b.calls"]
    names.put({"remembered/b.forward": state["remembered/b.calls"], "remembered/b.calls": state["remembered/b.calls"]})
    assert (module.calls, "forward" in vars(module)) == (7, False)
    with pytest.raises(UserError, match="cannot be read"):
        names.put({"remembered/b.calls": state["remembered/b.calls"][:-3]})


class Half(nn.Module):
    """One of two parts of a module that a record has cut."""

    def __init__(self, buffer: torch.Tensor, other: torch.Tensor, counts: bool) -> None:
        super().__init__()
        self.register_buffer("count", buffer, persistent=False)
        self.shown, self.counts, self.zero = other, counts, other

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.counts:
            self.count += 1
            return x
        self.shown = self.shown + x.detach().mean(0)
        return x * self.count + self.shown + self.zero


def test_what_parts_share_they_share_again() -> None:
    """A buffer that one of them writes and the other reads; but not what was only the same at first."""

    def stage() -> Stage:
        count, zero = torch.zeros(()), torch.zeros(4)
        torch.manual_seed(2)
        layers = [nn.Linear(4, 4), Half(count, zero, True), Half(count, zero, False)]
        made = Stage(Layers(0, ["a", "b", "c"], layers), parse(BASE, "job", []), Loss("own", Centred()), False)
        probe(made, (torch.randn(3, 4),), torch.tensor([0, 1, 2]), lambda specs, of: ())
        return made

    whole, first, second = trained(stage(), range(6)), stage(), stage()
    begun = trained(first, range(3))
    load(second, states(first), parse(BASE, "job").train.optimizer)
    assert second.layers[1].count is second.layers[2].count
    assert not second.layers[2].zero.any()
    assert begun + trained(second, range(3, 6)) == whole

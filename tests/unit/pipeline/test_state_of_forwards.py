"""State that a forward changes and the next one reads, in whatever way: one rank must compute the micro-batches in turn."""

import array
import copy
import decimal
import itertools
from collections import Counter, defaultdict
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
from accept_mpi.models.losses import Loss, find_loss
from accept_mpi.pipeline.stage import Stage
from accept_mpi.pipeline.trials import trial_of

BASE = '[model]\nname="m"\n[data]\nname="d"\n[train]\nsteps=1\n[output]\ndirectory="r"\n'


class ByData(nn.Module):
    """Torch does not count what is written to a tensor's ``data``."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.ones(4))

    def forward(self, x: torch.Tensor) -> Any:
        self.centre.data.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x * self.centre


class OwnNorm(nn.Module):
    """Nor what ``batch_norm`` writes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.batch_norm(x, self.mean, self.var, training=self.training)  # type: ignore[arg-type]


class Renormalized(nn.BatchNorm1d):
    """Reads its running statistics in training."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.running_var is not None
        return super().forward(x) * self.running_var


class Warm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * min(1.0, self.calls / 3)


class Moving(nn.Module):
    """State in an attribute that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.centre = torch.zeros(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.centre = 0.9 * self.centre + 0.1 * x.detach().mean(0)
        return x - self.centre


class Evaluated(nn.Module):
    """An attribute that training changes and only an evaluation reads."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x - self.mean
        self.mean = x.detach().mean(0)
        return x - x.mean(0)


class InPlace(nn.Module):
    """A tensor that is no buffer, in a list, and is written to."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = [torch.zeros(4)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sums[0].add_(x.detach().mean(0))
        return x - self.sums[0]


class Hidden(nn.Module):
    """A recurrent layer whose state goes on from one micro-batch to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(4, 4)
        self.hidden: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, c = self.cell(x, self.hidden)
        self.hidden = (h.detach(), c.detach())
        return h  # type: ignore[no-any-return]


class Previous(nn.Module):
    """A number that is the same after two forwards of the same inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.spread = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x / self.spread
        self.spread = float(x.detach().std())
        return out


class Most(nn.Module):
    """A whole number, the largest or smallest so far, which the same inputs do not change again."""

    def __init__(self, smallest: bool = False) -> None:
        super().__init__()
        self.smallest, self.most = smallest, 100 if smallest else 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = int(10 * x.detach().abs().max()) + 1
        self.most = min(self.most, size) if self.smallest else max(self.most, size)
        return x / self.most


class Long(nn.Module):
    """A table that is made anew if it is too short, and its length."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.length, self.shown = torch.arange(2.0), 2, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.shown = int(10 * x.detach().abs().max())
        if x.shape[1] > self.length:
            self.length = x.shape[1]
            self.table = torch.arange(float(self.length))
        return x + self.table[: x.shape[1]]


class OfGradients(nn.Module):
    """Reads in a forward what the backward before it has left."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 1.0
        self.register_full_backward_hook(self.keep)

    def keep(self, module: Any, given: Any, gradients: Any) -> None:
        self.size = 0.9 * self.size + float(gradients[0].abs().mean())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.size


class Dividing(nn.Module):
    """Divides gradients by their moving size, which no forward reads."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.linear, self.size, self.in_place = nn.Linear(4, 4), torch.ones(()), in_place
        self.register_full_backward_hook(self.divide)

    def divide(self, module: Any, given: Any, gradients: Any) -> Any:
        if self.in_place:
            self.size.add_(gradients[0].abs().mean())
        else:
            self.size = self.size + gradients[0].abs().mean()
        return tuple(gradient / self.size for gradient in given)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Noticing(nn.Module):
    """Leaves gradients for whoever looks at them."""

    seen: torch.Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.register_full_backward_hook(self.notice)

    def notice(self, module: Any, given: Any, gradients: Any) -> None:
        self.seen = gradients[0].detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class OfStatistics(nn.Module):
    """Beside a norm, whose running statistics evaluations read."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.BatchNorm1d(4), Evaluated()

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(self.norm(x))


class InNumPy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean = np.zeros(4, np.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().numpy().mean(0)
        return x - torch.from_numpy(self.mean)


class Threshold(nn.Module):
    """Compares with what moves. A comparison takes NaN, too, and gives none."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.least, self.scale = how, torch.zeros(4), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.detach().mean(0)
        if self.how == "number":
            found = x / max(0.1, self.scale)
            self.scale = float(mean.abs().max())
            return found
        found = x * (x > self.least)
        if self.how == "in place":
            self.least.lerp_(mean, 0.2)
        else:
            self.least = self.least.lerp(mean, 0.2) if self.how == "moving" else mean
        return found


class EvaluatedMean(Evaluated):
    """The same with a mean that moves."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x - self.mean
        self.mean = self.mean.lerp(x.detach().mean(0), 0.1)
        return x


class ByDataAndShowing(ByData):
    """What it gives changes from forward to forward, but not by what it leaves for whoever looks at it."""

    def forward(self, x: torch.Tensor) -> Any:
        self.seen = x.detach() * 2
        return super().forward(x)


class Drawing(nn.Module):
    """Has a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.random = torch.Generator().manual_seed(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn(4, generator=self.random)


class Collecting(nn.Module):
    """Leaves a list of what it computed, as models do for who wants to see their attention."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = [x * 2, (x * 3,)]
        self.most = float(x.detach().max())
        return x


class Cached(nn.Module):
    """Makes a number in its first forward."""

    scale: float | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scale is None:
            self.scale = x.shape[-1] ** -0.5
        return x * self.scale


class Showing(nn.Module):
    """Leaves what it computed for whoever looks at it, and does not read it."""

    seen: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x.detach() * 2
        self.shape = tuple(x.shape)
        return x


class Scaled(nn.Module):
    """Makes an attribute anew before it reads it, as torch's older ``weight_norm`` does."""

    def __init__(self) -> None:
        super().__init__()
        self.raw = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight = self.raw * 2
        return x @ self.weight


class Table(nn.Module):
    """Makes a table in its first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.arange(4.0)
        return x + self.table


class Centred(nn.Module):
    """A loss with state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = functional.cross_entropy(output - self.centre, target)
        self.centre = self.centre * 0.9 + output.detach().mean(0) * 0.1
        return loss


def probed(layer: nn.Module, loss: Any = None) -> Stage:
    layers = Layers(0, ["a", "b"], [nn.Linear(4, 4), layer])
    found = Stage(layers, parse(BASE, "job"), Loss("own", loss) if loss else find_loss("cross_entropy"), False)
    probe(found, (torch.randn(3, 4),), torch.tensor([0, 1, 2]), lambda specs, of: ())
    return found


@pytest.mark.parametrize(
    ("layer", "reason", "remembers"),
    [
        (ByData(), 'a forward changes the buffer "b.centre"', []),
        (ByDataAndShowing(), 'a forward changes the buffer "b.centre"', []),
        (OwnNorm(), 'a forward changes the buffer "b.mean"', []),
        (Renormalized(4), 'a forward reads running statistics of "b"', []),
        (Warm(), 'a forward changes "b.calls"', ["b.calls"]),
        (Moving(), 'a forward changes "b.centre"', ["b.centre"]),
        (Evaluated(), 'a forward changes "b.mean"', ["b.mean"]),
        (EvaluatedMean(), 'a forward changes "b.mean"', ["b.mean"]),
        (Threshold("moving"), 'a forward changes "b.least"', ["b.least"]),
        (Threshold("in place"), 'a forward changes "b.least"', ["b.least"]),
        (Threshold("the last"), 'a forward changes "b.least"', ["b.least"]),
        (Threshold("number"), 'a forward changes "b.scale"', ["b.scale"]),
        (InPlace(), 'a forward changes "b.sums"', ["b.sums"]),
        (Hidden(), 'a forward changes "b.hidden"', ["b.hidden"]),
        (Previous(), 'a forward changes "b.spread"', ["b.spread"]),
        (Most(), 'a forward changes "b.most"', ["b.most"]),
        (Most(smallest=True), 'a forward changes "b.most"', ["b.most"]),
        (OfGradients(), 'a forward changes "b.size"', ["b.size"]),
        (Dividing(False), 'a forward changes "b.size"', ["b.size"]),
        (Dividing(True), 'a forward changes "b.size"', ["b.size"]),
        (OfStatistics(), 'a forward changes "b.inner.mean"', ["b.inner.mean"]),
        (InNumPy(), 'a forward changes "b.mean"', ["b.mean"]),
        (Drawing(), 'a forward changes "b.random"', ["b.random"]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_it_is_found(layer: nn.Module, reason: str, remembers: list[str]) -> None:
    stage = probed(layer)
    assert reason in stage.found.alone
    assert stage.found.in_turn
    assert (sorted(stage.remembered.names), stage.found.forgets) == (remembers, [])
    with pytest.raises(UserError, match="compute forwards again"):
        stage.compute_again()


class Slotted:
    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0


class Counts(nn.Module):
    """Counts its forwards, in something of this kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        start: dict[str, Any] = {
            "slots": Slotted, "array": lambda: array.array("d", [0]), "bytes": lambda: bytearray(1), "complex": complex,
            "decimal": decimal.Decimal, "key": dict, "counter": Counter, "default": lambda: defaultdict(int),
            "iterator": lambda: iter(range(1_000_000)),
        }  # fmt: skip
        self.count = start[kind]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "slots":
            self.count.n += 1
            now = self.count.n
        elif self.kind in ("array", "bytes"):
            self.count[0] += 1
            now = self.count[0]
        elif self.kind in ("complex", "decimal"):
            self.count += 1
            now = float(self.count.real)
        elif self.kind == "iterator":
            now = next(self.count)
        else:
            self.count["forwards"] = self.count.get("forwards", 0) + 1
            now = self.count["forwards"]
        return x * min(1.0, now / 3)


@pytest.mark.parametrize(
    "kind",
    ["slots", "array", "bytes", "complex", "decimal", "key", "counter", "default", "iterator"],
)
def test_a_count_of_any_kind_is_found(kind: str) -> None:
    """A key that the first forward makes may be what a cache has; it is not if the next one changes its value."""
    stage = probed(Counts(kind))
    assert 'a forward changes "b.count"' in stage.found.alone
    assert stage.found.in_turn


@pytest.mark.parametrize("layer", [Warm(), Moving(), Previous()], ids=lambda layer: type(layer).__name__)
def test_it_is_found_whatever_the_last_batch_has(layer: nn.Module) -> None:
    """A trial that goes on with another number of samples: its attributes hold NaN by then."""
    layers = Layers(0, ["a", "b"], [nn.Linear(4, 4), layer])
    stage = Stage(layers, parse(BASE, "job"), find_loss("cross_entropy"), False)
    with trial_of(stage) as trial:
        for size in (3, 2):
            trial.probe((torch.randn(size, 4),), torch.arange(size), lambda specs, of: ())
    assert stage.found.alone
    assert stage.found.in_turn
    assert stage.remembered.names


@pytest.mark.parametrize(
    "layer", [nn.BatchNorm1d(4), Showing(), Table(), Long(), nn.Dropout(), Scaled(), Collecting(), Cached(), Noticing()]
)
def test_what_nobody_reads_may_be_left(layer: nn.Module) -> None:
    stage = probed(layer)
    assert (stage.found.alone, stage.found.in_turn, stage.found.forgets) == ("", "", [])
    stage.compute_again()


def test_zero_bubble_s_own_forwards_are_no_state() -> None:
    layers = Layers(0, ["a", "b"], [nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Dropout())])
    stage = Stage(layers, parse(BASE, "job", ["pipeline.schedule=zero-bubble"]), find_loss("cross_entropy"), False)
    probe(stage, (torch.randn(3, 4),), torch.tensor([0, 1, 2]), lambda specs, of: ())
    assert (stage.found.alone, stage.found.in_turn, stage.found.forgets) == ("", "", [])


def test_a_loss_has_state_too() -> None:
    stage = probed(nn.ReLU(), Centred())
    assert 'changes the buffer "the loss.centre"' in stage.found.alone
    assert (stage.remembered.names, stage.found.forgets) == ({"the loss.centre"}, [])


@pytest.mark.parametrize("layer", [ByData(), Renormalized(4)], ids=lambda layer: type(layer).__name__)
def test_a_backward_uses_what_its_forward_saw(layer: nn.Module) -> None:
    """Two micro-batches in flight: without memory of its own the first one's graph had the state after the second."""
    plain = nn.Sequential(nn.Linear(4, 4), layer)
    stage = Stage(Layers(0, ["a", "b"], [*copy.deepcopy(plain)]), parse(BASE, "job"), None, False)
    one, two = torch.randn(3, 4), torch.randn(3, 4)
    probe(stage, (one,), None, lambda specs, of: (torch.ones(3, 4),))
    for k, x in enumerate((one, two)):
        stage.forward(0, k, (x,))
    for k in range(2):
        stage.backward(0, k, (torch.ones(3, 4),))
    for x in (one, two):
        plain(x).sum().backward()
    for parameter, expected in zip(stage.parameters, plain.parameters(), strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, expected.grad)  # type: ignore[arg-type]
    for name, buffer in plain[1].named_buffers():
        assert torch.equal(stage.layers[1].get_buffer(name), buffer)


class Noise(torch.autograd.Function):
    """Adds noise to gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] + torch.randn_like(gradients[0])


class Noisy(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return Noise.apply(x)


def test_random_numbers_of_a_backward_do_not_depend_on_the_cuts() -> None:
    layers = [nn.Linear(4, 4), Noisy(), nn.Linear(4, 4), Noisy(), nn.Linear(4, 4)]
    x, ones = torch.randn(3, 4), torch.ones(3, 4)
    found = []
    for cuts in ([0, 5], [0, 2, 5], [0, 3, 4, 5]):
        given, stages = (x,), []
        for first, last in itertools.pairwise(cuts):
            own = Layers(first, list("abcde"[first:last]), copy.deepcopy(layers[first:last]))
            stage = Stage(own, parse(BASE, "job"), None, False)
            probe(stage, given, None, lambda specs, of: (ones,))
            (out,) = stage.forward(2, 1, given).outputs
            given = (out.detach().requires_grad_(),)
            stages.append(stage)
        gradient: Any = ones
        for stage in reversed(stages):
            (gradient,) = stage.backward(2, 1, (gradient,)) or (None,)
        found.append([p.grad for stage in stages for p in stage.parameters])
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))


class Whole(nn.Module):
    """A norm that is called twice, or for what is not contiguous, or whose statistics its owner moves."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.norm, self.how = nn.BatchNorm1d(4), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "twice":
            return self.norm(self.norm(x))  # type: ignore[no-any-return]
        if self.how == "turned":
            return self.norm(x.t().contiguous().t())  # type: ignore[no-any-return]
        mean, var = self.norm.running_mean, self.norm.running_var
        return functional.batch_norm(x, mean, var, training=self.training)


class Slow(nn.BatchNorm1d):
    """Has a rate of its own, and counts nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.running_mean is not None
        with torch.no_grad():
            self.running_mean.mul_(0.99).add_(x.mean(0), alpha=0.01)
        return x - x.mean(0)


class Named(nn.BatchNorm1d):
    """Torch's, and an activation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(super().forward(x))


def doubled() -> nn.Module:
    """A hook beside torch's own."""

    def double(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        assert isinstance(module.running_var, torch.Tensor)
        module.running_var.data.mul_(2)

    norm = nn.BatchNorm1d(4)
    norm.register_forward_hook(double)
    return norm


def uncounted() -> nn.Module:
    norm = nn.BatchNorm1d(4)
    norm.num_batches_tracked = None
    return norm


def unmoved() -> nn.Module:
    norm = nn.BatchNorm1d(4)
    norm.running_mean = norm.running_var = None
    return norm


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (nn.BatchNorm1d(4), ""),
        (Named(4), ""),
        (nn.BatchNorm1d(4, momentum=None), ""),
        (Whole("twice"), 'layer "b.norm" is used twice in a forward'),
        (Whole("owner"), 'layer "b.norm" computes its running statistics in a way of its own'),
        (Slow(4), 'layer "b" computes its running statistics in a way of its own'),
        (doubled(), 'layer "b" computes its running statistics in a way of its own'),
        (uncounted(), 'layer "b" has no num_batches_tracked'),
        (unmoved(), 'layer "b" has no running_mean'),
        (Whole("turned"), ""),
    ],
    ids=["torch", "named", "average", "twice", "owner", "slow", "doubled", "uncounted", "unmoved", "turned"],
)
def test_statistics_that_cannot_be_replayed(layer: nn.Module, reason: str) -> None:
    """Neither a group nor lanes compute such layers; one rank does, also twice."""
    stage = probed(layer)
    assert (stage.found.unreplayed, stage.found.one_forward) == (reason, reason)
    stage.compute_again()
    if reason:
        with pytest.raises(UserError, match=reason):
            stage.join_group()
    else:
        stage.join_group()


def test_usual_norms_cost_no_more_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor memory, where a trial goes on with other sizes."""
    made: list[int] = []
    forward = Stage.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        made.append(1)
        return forward(*args, **kwargs)

    monkeypatch.setattr(Stage, "forward", counted)
    layers = Layers(0, ["a", "b"], [nn.Linear(4, 4), nn.BatchNorm1d(4)])
    stage = Stage(layers, parse(BASE, "job"), find_loss("cross_entropy"), False)
    counts = []
    with trial_of(stage) as trial:
        for size in (4, 3, 2):
            made.clear()
            trial.probe((torch.randn(size, 4),), torch.arange(size), lambda specs, of: ())
            counts.append(len(made))
    assert len(set(counts)) == 1, counts

"""What a forward's Python may do is done as in the plain model, bit for bit, wherever it is cut; what a record cannot do
again is refused."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from recorded_models import check, recorded
from recorded_nets import Listing
from torch import nn
from torch.autograd import Variable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from accept_mpi.errors import UserError


def every_cut(count: int) -> list[list[int]]:
    return [[], *([n] for n in range(1, count)), list(range(1, count))]


def loss(result: Any) -> torch.Tensor:
    return result.float().square().mean()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 6)


class Begins(Net):
    """Makes a state of the type of whatever parameter comes first, as language models do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.b(self.a(x))
        weight = next(self.parameters())
        state = weight.new_zeros(len(x), 8) + weight.new_full((8,), 2.0, dtype=torch.float32) * weight.new_ones(8)
        return self.c(torch.tanh(first + state))


def test_what_is_made_of_a_parameter_s_type_is_no_use_of_it() -> None:
    """Layers between could not be parted: they had a parameter in common."""
    chain = check(Begins, [torch.randn(4, 6), torch.randn(3, 6)], loss, every_cut)
    assert not chain.shared()


class OfVariables(Net):
    """As code from before torch 0.4 makes its states: ``Variable`` is a ``detach``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = Variable(torch.zeros(len(x), 8))
        for _ in range(2):
            state = torch.tanh(self.a(x) + self.b(state))
        return self.c(state + Variable(state) * Variable(torch.ones(8), requires_grad=False))


def test_variables_are_detached() -> None:
    """They were taken for tensors of an earlier forward."""
    check(OfVariables, [torch.randn(4, 6), torch.randn(3, 6)], loss, every_cut)
    assert type(Variable(torch.zeros(2))) is torch.Tensor


@torch.jit.script
def scripted_gelu(x: torch.Tensor):  # type: ignore[no-untyped-def]
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


class Scripted(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(scripted_gelu(self.b(scripted_gelu(self.a(x)))))


class WrittenConstant(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        window, places, two = torch.zeros(4), torch.arange(3), torch.empty(6).fill_(2.0)
        window[1:] = 1
        first = float(window.sum())
        window.mul_(2)
        places += 1
        x = self.b(torch.tanh(self.a(x)) * first * float(window.view(2, 2).sum()))
        for place in places.tolist():
            x = x + place
        return self.c(torch.tanh(x)) * float(two[0])


class OfInitialWeights(Net):
    """Numbers from initial weights, and drawn after layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.order = self.b.weight.norm().item(), torch.randperm(8).tolist()
        self.mask = {"b": self.b.weight.detach().abs() > 0.1}
        self.noise = [torch.randn(8) for _ in range(2)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.a(x))[:, self.order] / self.norm + self.noise[0]
        return self.c(torch.tanh(F.linear(x, self.b.weight * self.mask["b"], self.b.bias)) * self.noise[1])


class Autocasts(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = torch.tanh(self.b(torch.tanh(self.a(x))))
        return self.c(x.float())


class CastsOnce(Net):
    """Torch casts a parameter once for all its uses in a context, and adds up their gradients in bfloat16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = torch.tanh(self.b(torch.tanh(self.a(x))))
            with torch.autocast("cpu", enabled=False):
                x = F.layer_norm(x.float(), (8,))
            x = torch.tanh(self.b(x))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = torch.tanh(F.linear(x, self.b.weight))
        return self.c(x.float())


class KnowsItsDevice(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        if x.device.type == "cpu":
            x = x * 2
        if not x.is_cpu or x.is_cuda or x.is_meta:
            x = x * 3
        x = self.b(torch.tanh(x)) + torch.arange(8, device=x.device)
        return self.c(x.to(x.device) + torch.ones(8, device=torch.device("cpu")))


class NamesItsDevice(Net):
    """As scripts do that say device = "cuda" if torch.cuda.is_available() else "cpu"."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        start = torch.zeros(len(x), 8, device="cpu")
        start[:, 0] = 1
        x = self.a(x.to("cpu")) + start.to("cpu", torch.float32)
        return self.c(torch.tanh(self.b(torch.tanh(x)).to(device="cpu")).cpu())


class Parametrized(Net):
    def __init__(self) -> None:
        super().__init__()
        self.b = nn.utils.parametrizations.weight_norm(self.b)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(F.linear(torch.tanh(self.a(x)), self.b.weight, self.b.bias))
        return self.c(torch.tanh(x @ self.b.weight))


class Gamma(Net):
    """A draw that two layers use."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        drawn = torch._standard_gamma(torch.full((8,), 2.0)) if self.training else 1.0
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)) * drawn)) * drawn)


class Noisy(nn.Module):
    """Without parameters, and of an input without a gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5, self.training)


class DrawsInAModule(Net):
    """What a module draws, two layers use."""

    def __init__(self) -> None:
        super().__init__()
        self.noisy, self.rectified = Noisy(), nn.RReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.rectified(self.noisy(x))
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x))))) * x


class ComputesAgain(Net):
    """In backward; what is computed so trains only if something that it is given does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(checkpoint(lambda x: self.c(torch.tanh(self.a(x))), x, use_reentrant=True))
        return checkpoint(lambda x: self.c(F.dropout(torch.tanh(self.b(x)), 0.3, self.training)), x, use_reentrant=True)


class ChangesWhatItHasGiven(Net):
    """Lists and arrays that functions have been given: sizes, numbers, places."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, sizes = self.a(x), [1, 1]
        for n in range(2):
            sizes[n] = x.size(n)
            x = x + torch.arange(float(x.size(n))).view(sizes) / 10
            sizes[n] = 1
        numbers, places, array = [1.0] * 8, [0, 1], np.ones(8, np.float32)
        x = x * torch.tensor(numbers) * torch.tensor(array) + x[:, places].sum(1, keepdim=True)
        read = torch.tensor(numbers)
        numbers[0], places[0], array[1] = 3.0, 5, 2.0
        x = self.b(torch.tanh(x)) * torch.tensor(numbers) * torch.tensor(array) + x[:, places].sum(1, keepdim=True)
        return self.c(torch.tanh(x) * float(read.sum()))


class TakesWhatIsFirst(nn.Module):
    """Takes a number out of the list that it is given."""

    def forward(self, x: torch.Tensor, numbers: list[float]) -> torch.Tensor:
        return x * numbers.pop(0)


class GivesAList(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = TakesWhatIsFirst(), TakesWhatIsFirst()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        numbers = [2.0, 3.0, 5.0]
        x = self.second(self.b(self.first(torch.tanh(self.a(x)), numbers)), numbers)
        return self.c(torch.tanh(x)) * len(numbers)


class WritesIntoAnArray(Net):
    """By a tensor that shares its memory."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shared = torch.as_tensor(np.ones(8, np.float32))
        shared *= 2
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)) * shared)))


class HooksLate(Net):
    """What a hook gets is the sum over all uses of a value, earlier ones too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        used = self.a(x)
        x = self.c(torch.tanh(self.b(used)))
        if used.requires_grad:
            used.register_hook(lambda gradient: gradient / 2)
        return x * used[:, :6]


class ReadsAnArray(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x))))) * float(np.asarray(torch.arange(4.0)).sum())


class DifferentiatesInEvaluation(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            inside = self.a(x).detach().requires_grad_()
            (slope,) = torch.autograd.grad(inside.square().sum(), inside)
        return self.c(torch.tanh(self.b(slope)))


@pytest.mark.parametrize(
    "model",
    [
        Scripted,
        WrittenConstant,
        OfInitialWeights,
        Autocasts,
        CastsOnce,
        KnowsItsDevice,
        NamesItsDevice,
        Parametrized,
        Gamma,
        DrawsInAModule,
        ComputesAgain,
        ReadsAnArray,
        HooksLate,
        ChangesWhatItHasGiven,
        WritesIntoAnArray,
        GivesAList,
    ],
)
def test_equal_to_the_plain_model(model: type[nn.Module]) -> None:
    torch.manual_seed(3)
    chain = check(model, [torch.randn(4, 6), torch.randn(4, 6), torch.randn(3, 6)], loss, every_cut)
    assert len(chain) >= 2


def test_a_parameter_as_a_part_of_the_result() -> None:
    """One of another layer, and one that no call uses."""

    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = nn.Parameter(torch.tensor(0.5))
            self.register_buffer("table", torch.ones(3))

        def forward(self, x: torch.Tensor) -> Any:
            return self.c(torch.tanh(self.b(self.a(x)))), [self.a.weight, self.temperature], self.table

    def total(result: Any) -> torch.Tensor:
        return loss(result[0]) * result[1][1].exp() + loss(result[1][0]) + loss(result[2])

    assert len(check(Model, [torch.randn(4, 6), torch.randn(3, 6)], total, every_cut)) == 3


def test_autocast_that_is_off_within_one_that_is_on() -> None:
    class Off(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.b(torch.tanh(self.a(x)))
            with torch.autocast("cpu", enabled=False):
                return self.c(x.float())

    x = torch.randn(4, 6)
    torch.manual_seed(7)
    plain = Off()
    layers = recorded(Off, x).build_range(0, 3, 0)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # as training does, but recording does not
        value: Any = x
        for layer in layers:
            value = layer(value)
        expected = plain(x)
    assert value.dtype == expected.dtype == torch.float32
    assert torch.equal(value, expected)


def test_a_compiled_model() -> None:
    with pytest.raises(UserError, match=r"^model.name: the model has been compiled by torch\.jit\.script"):
        recorded(lambda: torch.jit.script(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))), torch.randn(4, 6))


def test_gradients_in_evaluation() -> None:
    x = torch.randn(4, 6)
    layers = recorded(DifferentiatesInEvaluation, x).build_range(0, 3, 0)
    torch.manual_seed(7)
    plain = DifferentiatesInEvaluation().eval()
    with torch.no_grad():
        value: Any = x
        for layer in layers:
            value = layer.eval()(value)
        assert torch.equal(value, plain(x))


class InLists(nn.Module):
    """Parameters and buffers that the forward finds in a list and in a function, or by a view."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.a, self.norm, self.b, self.what = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), what
        self.scale = nn.Parameter(torch.tensor(2.0))
        mean = self.norm.running_mean
        self.row = self.norm.get_buffer("running_mean").view(1, 8)
        self.kept: list[Any] = [self.b.weight, self.scale, mean, lambda: mean]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.a(x))
        if self.what == "written":
            with torch.no_grad():
                self.kept[1].mul_(1.1)
        weight, scale, mean, function = self.kept
        x = {
            "weight": lambda: x @ weight,
            "written": lambda: x * scale,
            "made": lambda: x * weight.new_ones(8) * weight.shape[0],
            "mean": lambda: x + 5 * mean,
            "function": lambda: x + 5 * function(),
            "view": lambda: x + 5 * self.row,
        }[self.what]()
        return self.b(x)


@pytest.mark.parametrize("what", ["weight", "written", "made", "mean", "function", "view"])
def test_what_lists_and_functions_hold_is_the_models(what: str) -> None:
    """A buffer, as training changes it, had its first values, and parameters left the model whole. What looks at a buffer by
    a view was computed before the buffer was written to."""
    check(partial(InLists, what), [torch.randn(4, 6) + n for n in range(3)], loss, every_cut)


def test_modules_in_a_list_whose_parameters_are_the_models() -> None:
    """A forward that calls them was taken for one with strange parameters, and refused."""
    chain = check(Listing, [torch.randn(4, 6) + n for n in range(3)], loss, every_cut)
    assert len(chain) > 3


class ViewInAList(nn.Module):
    def __init__(self, written: bool) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.register_buffer("fixed", torch.arange(8.0))
        self.kept = [self.norm.get_buffer("running_mean").view(1, 8), self.get_buffer("fixed")[None]]
        self.written = written

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.norm(self.a(x)) + self.kept[0 if self.written else 1])


def test_a_list_holds_a_view_of_a_buffer() -> None:
    """Its values were those from before training, also where the forward writes to the buffer."""
    check(partial(ViewInAList, False), [torch.randn(4, 6) + n for n in range(3)], loss, every_cut)
    with pytest.raises(UserError, match=r"forward writes to norm\.running_mean, and uses it by a view"):
        recorded(partial(ViewInAList, True), torch.randn(4, 6))


def counts_in_a_list(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.steps[0] += 1
    return self.a(x) * self.steps[0]


def counts_in_an_object(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.config.inner.step += 1
    return self.a(x)


def collects(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.extra_losses.append(x.mean())
    return self.a(x)


def own_generator(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.a(x @ torch.randn(6, 6, generator=torch.Generator().manual_seed(7)))


def seeds(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return self.a(x @ torch.randn(6, 6))


def reads_a_draw(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.a(x) * torch.distributions.Gamma(2.0, 1.0).sample().item()


def writes_to_a_plain_tensor(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.tables[0].add_(1)
    return self.a(x) * self.tables[0]


def writes_to_a_view_of_it(self: Any, x: torch.Tensor) -> torch.Tensor:
    row = self.tables[0][1:2]
    row.add_(1)
    return self.a(x) * self.tables[0]


def masks_a_gradient(self: Any, x: torch.Tensor) -> torch.Tensor:
    mask, x = (x[:, :1] > 0).float(), self.a(x)
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient * mask)
    return x


def scales_a_gradient(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = self.a(x)
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient * self.scale)
    return x


def looks_at_a_weight(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.a(x) @ self.tables[1].abs()


def reads_a_weight(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.a(x) * self.tables[1].tolist()[0][0]


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (reads_a_weight, r"uses b\.weight through a list.*test_python_in_forward\.py, line"),
        (looks_at_a_weight, r"uses b\.weight through a list.*test_python_in_forward\.py, line"),
        (counts_in_a_list, "forward sets steps of the model"),
        (counts_in_an_object, "forward sets config of the model"),
        (collects, "forward sets extra_losses of the model"),
        (own_generator, r"a generator of its own, .*test_python_in_forward\.py, line"),
        (seeds, r"forward seeds torch's random numbers, .*test_python_in_forward\.py, line"),
        (reads_a_draw, "depends on the values of its data"),
        (writes_to_a_plain_tensor, "no buffer of the model"),
        (scales_a_gradient, "forward puts a hook on a tensor that refers to another tensor"),
        (masks_a_gradient, "forward puts a hook on a tensor that refers to another tensor"),
        (writes_to_a_view_of_it, "no buffer of the model"),
    ],
)
def test_what_a_record_cannot_do_again(forward: Callable[[Any, torch.Tensor], torch.Tensor], message: str) -> None:
    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.steps, self.extra_losses = [0], list[torch.Tensor]()
            self.config = SimpleNamespace(inner=SimpleNamespace(step=0))
            self.tables = [torch.zeros(8), self.b.weight.detach()]
            self.register_buffer("scale", torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.c(self.b(forward(self, x)))

    with pytest.raises(UserError, match=message):
        recorded(Model, torch.randn(4, 6))


def test_state_under_other_names_is_refused() -> None:
    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_state_dict_post_hook(lambda _, state, *more: state.update(other=state.pop("a.weight")))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.c(self.b(self.a(x)))

    with pytest.raises(UserError, match=r'state_dict\(\) has "other", which is no name of a parameter or buffer'):
        recorded(Model, torch.randn(4, 6)).build_range(0, 1, 0)


class TiedAndOtherwiseInEvaluation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(9, 8), nn.Linear(8, 9, bias=False)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.words.weight = self.head.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.words(x)
        for layer in self.layers:
            x = torch.tanh(layer(x)) if self.training else torch.tanh(layer(x)).clone() * 2
        return self.head(x)


def test_a_tied_model_that_computes_otherwise_in_evaluation() -> None:
    values = [torch.randint(0, 9, (4, 6)) for _ in range(2)]
    assert len(check(TiedAndOtherwiseInEvaluation, values, loss, every_cut)) == 5


class SaysThatItNeedsAGradient(Net):
    """As transformers' models of sound do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.log1p(x.square())
        if self.training:
            x.requires_grad = True
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


def test_a_tensor_that_is_said_to_need_a_gradient() -> None:
    check(SaysThatItNeedsAGradient, [torch.randn(4, 6)], loss, every_cut)


class Sloping(nn.Module):
    """Its result's derivative by what it is given counts, as in networks that know an equation."""

    def __init__(self, of_input: bool) -> None:
        super().__init__()
        self.of_input = of_input
        self.first, self.net = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3), nn.Tanh())
        self.last = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.clone() if self.of_input else self.first(x).detach()
            x.requires_grad_(True)
            found = self.net(x)
            (slope,) = torch.autograd.grad(found.sum(), x, create_graph=True)
        return self.last(found + slope.norm(dim=1, keepdim=True))


class Stepping(nn.Module):
    """Takes a step of gradient descent within its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            weight = self.first.weight
            loss = self.second(torch.tanh(F.linear(x, weight))).square().mean()
            (gradient,) = torch.autograd.grad(loss, (weight,), create_graph=True)
        return self.last(self.second(torch.tanh(F.linear(x, weight - 0.1 * gradient))))


@pytest.mark.parametrize(("make", "layers"), [(partial(Sloping, True), 2), (partial(Sloping, False), 3), (Stepping, 4)])
def test_derivatives_are_taken_in_one_layer(make: Callable[[], nn.Module], layers: int) -> None:
    """They could be cut apart from what they are taken of and by, and what they are taken by did not want a gradient."""
    assert len(check(make, [torch.randn(4, 6), torch.randn(4, 6)], loss, every_cut)) == layers

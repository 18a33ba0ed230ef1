"""What a forward does around its calls, without a trace in them, is done as in the plain model, or refused in a sentence."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.utils.prune
from recorded_models import check, recorded
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from accept_mpi.errors import UserError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 6)
        self.other, self.drop, self.norm = nn.Linear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8)


def every_cut(count: int) -> list[list[int]]:
    return [[], *([n] for n in range(1, count)), list(range(1, count))]


def loss(result: Any) -> torch.Tensor:
    return result.float().square().mean()


def other_weights(self: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.func.functional_call(self.b, dict(self.other.named_parameters()), (x,))


def weight_for_a_while(self: Any, x: torch.Tensor) -> torch.Tensor:
    before, self.b.weight = self.b.weight, self.other.weight
    x = self.b(x)
    self.b.weight = before
    return x


def mode_for_a_while(self: Any, x: torch.Tensor) -> torch.Tensor:
    training = self.norm.training
    x = self.norm.eval()(x)
    self.norm.train(training)
    return x


def setting_for_a_while(self: Any, x: torch.Tensor) -> torch.Tensor:
    before, self.drop.p = self.drop.p, 0.0
    x = self.drop(x)
    self.drop.p = before
    return x


def without_gradients_of_weights(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.other.requires_grad_(False)
    x = self.other(x)
    self.other.requires_grad_(True)
    return x


def the_same_draws_twice(self: Any, x: torch.Tensor) -> torch.Tensor:
    before = torch.get_rng_state()
    x = self.drop(x)
    torch.set_rng_state(before)
    return x - self.drop(x)


def forgotten_draws(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng():
        return self.drop(x)


def lossy_saving(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.round(), lambda tensor: tensor):
        return self.b(x)


def kernels(self: Any, x: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(x[None], x[None], x[None])[0]


def default_dtype(self: Any, x: torch.Tensor) -> torch.Tensor:
    torch.set_default_dtype(torch.float64)
    try:
        return (x + torch.full((8,), 0.1)).float()
    finally:
        torch.set_default_dtype(torch.float32)


def weights_once(self: Any, x: torch.Tensor) -> torch.Tensor:
    with nn.utils.parametrize.cached():
        return self.b(x)


def catches(self: Any, x: torch.Tensor) -> torch.Tensor:
    try:
        return x * x.mean().item()
    except Exception:
        return x


def catches_what_torch_raises(self: Any, x: torch.Tensor) -> torch.Tensor:
    try:
        return x * (x > 0).nonzero().shape[0]
    except NotImplementedError:
        return x


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (weights_once, "sets whether parametrized weights are kept around a call"),
        (catches, r"depends on the values of its data \(item\(\) of a tensor\)"),
        (catches_what_torch_raises, r"depends on the values of its data \(nonzero\(\) of a tensor\)"),
        (other_weights, r"changes b\.weight before it calls b,"),
        (weight_for_a_while, r"changes b\.weight before it calls b,"),
        (mode_for_a_while, r"changes norm\.training before it calls norm,"),
        (setting_for_a_while, r"changes drop\.p before it calls drop,"),
        (without_gradients_of_weights, r"says whether other\.weight requires a gradient,"),
        (the_same_draws_twice, "seeds torch's random numbers"),
        (forgotten_draws, "seeds torch's random numbers"),
        (lossy_saving, "sets hooks of what autograd saves around a call"),
        (kernels, "sets which kernels attention takes around a call"),
        (default_dtype, "sets torch's default dtype around a call"),
    ],
)
def test_what_a_record_would_leave_out(what: Callable[[Any, torch.Tensor], torch.Tensor], message: str) -> None:
    class Model(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.c(torch.tanh(self.b(what(self, self.a(x)))))

    with pytest.raises(UserError, match=rf"{message}.*test_around_calls\.py, line"):
        recorded(Model, torch.randn(4, 6))


class Inner(nn.Module):
    """Has a part that it calls with other weights than its own, and one that it calls as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(self.one, dict(self.other.named_parameters()), (torch.tanh(self.one(x)),))


def test_a_module_that_does_so_stays_whole() -> None:
    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.c(torch.tanh(self.b(self.inner(self.a(x)))))

    chain = check(Model, [torch.randn(4, 6), torch.randn(3, 6)], loss, every_cut)
    assert chain.undivided == ["inner"]


class Scaling(nn.Module):
    """Gives a number beside a tensor: ``of`` the values."""

    def __init__(self, of: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.of, self.weight = of, nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> Any:
        return x * self.weight, self.of(x)


@pytest.mark.parametrize(
    ("of", "seen"),
    [
        (lambda x: x.abs().max().item(), True),
        (lambda x: bool((x > 0.05).any()), True),
        (lambda x: bool((x > 9).any()), False),
    ],
)
def test_constants_of_a_block_that_depend_on_values(of: Callable[[torch.Tensor], Any], seen: bool) -> None:
    """Mostly ``seen`` by trying several values, else at the latest by the layers."""

    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.scaling = Scaling(of)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x, scale = self.scaling(self.a(x))
            return self.c(torch.tanh(self.b(x)) * scale)

    x = torch.full((4, 6), 99.0)
    if seen:
        with pytest.raises(UserError, match="what Scaling gives has other shapes, types or constants for other values"):
            recorded(Model, x)
        return
    layers = recorded(Model, x).build_range(0, 4, 0)
    with pytest.raises(UserError, match=r"model.blocks: scaling gives other constants .* for other values \(.*, now "):
        nn.Sequential(*layers)(x)


class Widening(nn.Module):
    """Of more bits where values are large."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.double() if x.abs().max() > 4 else x


def test_dtypes_of_a_block_that_depend_on_values() -> None:
    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.widening = Widening()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.widening(self.a(x) * 9)
            return self.c(torch.tanh(self.b(x.float()))) * (2 if x.dtype == torch.float64 else 1)

    layers = recorded(Model, torch.ones(4, 6)).build_range(0, 3, 0)
    message = r"widening gives other dtypes for other values \(torch.float32, now torch.float64\)"
    with pytest.raises(UserError, match=message):
        nn.Sequential(*layers)(torch.full((4, 6), 9.0))


def test_what_forward_uses_for_other_shapes_only() -> None:
    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            length, x = len(x), self.c(self.b(self.a(x)))
            return x * self.scale if length > 4 else x

    layers = recorded(Model, torch.ones(4, 6)).build_range(0, 3, 0)
    with pytest.raises(UserError, match=r"for inputs of this shape forward uses scale, which it does not use there"):
        nn.Sequential(*layers)(torch.ones(5, 6))


@pytest.mark.parametrize("after", [True, False])
def test_a_module_that_forward_calls_for_other_shapes_only(after: bool) -> None:
    """It is in the layer of what the model has in front of it, where most forwards call it."""

    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.long = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            length, x = len(x), x if after or len(x) < 5 else self.long(x)
            x = self.c(self.b(self.a(x)))
            return self.long(x) if after and length > 4 else x

    chain, x = recorded(Model, torch.ones(4, 6)), torch.rand(5, 6)
    layers = nn.Sequential(*chain.build_range(0, 3, 0))
    assert [len(part.long.weight) for part in layers if hasattr(part, "long")] == [6]
    if after:
        model = Model()
        model.load_state_dict({name.partition(".")[2]: value for name, value in layers.state_dict().items()})
        assert torch.equal(layers(x), model(x))
    else:
        with pytest.raises(UserError, match=r"for inputs of this shape forward uses long, which it does not use there"):
            layers(x)


@functools.lru_cache
def table(size: int) -> torch.Tensor:
    return torch.triu(torch.ones(size, size))


class Remembering(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ table(8)


def test_what_functions_remember_is_not_what_a_record_was_made_with() -> None:
    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.remembering = Remembering()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.c(torch.tanh(self.b(self.remembering(self.a(x))) @ table(9)[1:, 1:]))

    table.cache_clear()
    check(Model, [torch.randn(4, 6), torch.randn(3, 6)], loss, every_cut)
    assert not table(8).is_meta


def test_modules_made_in_forward() -> None:
    """With buffers, and around the model's own modules."""

    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.steps = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.steps[:3](x)
            x = nn.Sequential(self.a, nn.BatchNorm1d(8, affine=False), self.b, nn.Tanh(), self.c)(self.steps(x))
            return nn.CrossEntropyLoss(weight=torch.arange(1.0, 7.0))(x, torch.arange(len(x)))

    check(Model, [torch.randn(4, 6), torch.randn(3, 6)], loss, every_cut)


def test_distributions() -> None:
    """Their checks of values are left out."""

    class Model(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.a(x)
            drawn = torch.distributions.Normal(x, F.softplus(self.b(x)))
            return self.c(torch.tanh(drawn.rsample())) + drawn.log_prob(x).mean()

    torch.manual_seed(3)
    model = Model()
    layers = recorded(Model, torch.randn(4, 6)).build_range(0, 3, 0)
    assert len(layers) == 3
    assert torch.distributions.Distribution._validate_args
    with pytest.raises(ValueError, match="constraint"):
        model(torch.full((4, 6), float("nan")))


def weight_norm(layer: nn.Module) -> nn.Module:
    return nn.utils.weight_norm(layer)


def pruned(layer: nn.Module) -> nn.Module:
    return nn.utils.prune.l1_unstructured(layer, "weight", 0.5)


@pytest.mark.parametrize("change", [weight_norm, nn.utils.spectral_norm, pruned])
@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_weights_that_hooks_compute(change: Callable[[nn.Module], nn.Module]) -> None:
    class Model(Net):
        reads = False

        def __init__(self) -> None:
            super().__init__()
            self.b, self.other = change(self.b), change(self.other)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.other(torch.tanh(self.b(torch.tanh(self.b(self.a(x))))))
            return self.c(torch.tanh(x)) + (self.b.weight.sum() if self.reads else 0.0)

    assert len(check(Model, [torch.randn(4, 6), torch.randn(3, 6)], loss, every_cut)) >= 4
    Model.reads = True
    with pytest.raises(UserError, match=r"uses b\.weight, which the module that has it makes anew in each call"):
        recorded(Model, torch.randn(4, 6))


class Carrying(nn.Module):
    """Keeps a plain tensor from one call to the next: two layers that call it would each have their own."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.zeros(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = 0.9 * self.kept + x.detach().mean(0)
        return x - self.kept


def test_a_plain_tensor_that_a_module_carries_on() -> None:
    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.carrying = Carrying()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.c(self.carrying(self.b(self.carrying(self.a(x)))))

    with pytest.raises(UserError, match=r"sets carrying\.kept of the model|changes carrying\.kept before it calls"):
        recorded(Model, torch.randn(4, 6))


class Counting(nn.Module):
    """Stays whole, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.calls * (1 if x.sum() > -1e9 else 2)


def test_a_block_with_state_that_is_called_twice() -> None:
    """On two ranks there were two counters."""

    class Model(Net):
        twice = False

        def __init__(self) -> None:
            super().__init__()
            self.counting = Counting()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.b(self.counting(self.a(x)))
            return self.c(self.counting(x) if self.twice else x)

    assert recorded(Model, torch.randn(4, 6)).undivided == ["counting"]
    Model.twice = True
    with pytest.raises(UserError, match=r"counting stays whole, changes calls and is called twice"):
        recorded(Model, torch.randn(4, 6))


def test_the_type_of_a_tensor_is_that_on_the_cpu() -> None:
    class Model(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.b(self.a(x))
            return self.c(x * 2 if x.type() == "torch.FloatTensor" else x)

    check(Model, [torch.randn(4, 6)], loss, every_cut)


class OtherOrder(Net):
    """Uses its parameters in another order in evaluation, and some only there or in training."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.a(x))
        for layer in (self.b, self.other) if self.training else (self.other, self.b):
            x = torch.tanh(layer(x))
        return self.c(x) if self.training else x


def test_cut_only_where_training_and_evaluation_can_both_be_cut() -> None:
    assert len(check(OtherOrder, [torch.randn(4, 6), torch.randn(3, 6)], loss, every_cut)) == 3


class EndsEarly(Net):
    """In evaluation, without its last layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.a(x))
        return self.c(torch.tanh(self.other(torch.tanh(self.b(x))))) if self.training else x


def test_layers_of_which_evaluation_does_nothing() -> None:
    assert len(check(EndsEarly, [torch.randn(4, 6), torch.randn(3, 6)], loss, every_cut)) == 4


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (lambda x: x[x > 0].mean(), r"depends on the values of its data \(__getitem__\(\) of a tensor\)"),
        (lambda x: F.one_hot((x[:, 0] > 0).long()), r"depends on the values of its data \(one_hot\(\) of a tensor\)"),
        (lambda x: torch.unique(x > 0).sum(), r"torch does not say what unique\(\) gives without the values"),
    ],
)
def test_shapes_that_depend_on_values(what: Callable[[torch.Tensor], torch.Tensor], message: str) -> None:
    """In torch's own words that was three sentences about its kernels."""

    class Model(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.c(self.b(self.a(x))) + what(x).float().mean()

    with pytest.raises(UserError, match=rf"{message}.*test_around_calls\.py, line"):
        recorded(Model, torch.randn(4, 6))


def test_a_compiled_part() -> None:
    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.part = torch.jit.script(nn.Sequential(nn.Linear(8, 8)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.c(self.part(self.a(x)))

    with pytest.raises(UserError, match=r"^model.name: part, a part of the model, has been compiled by torch\.jit\.script"):
        recorded(Model, torch.randn(4, 6))

"""Models with forwards of their own equal themselves uncut, wherever they are cut; what cannot be recorded is refused."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from recorded_models import Parts, check, recorded
from recorded_nets import Language, Mixture, UNet
from torch import nn

from accept_mpi import tree
from accept_mpi.errors import UserError
from accept_mpi.profiling.outline import Outline, outline


def every_cut(count: int) -> list[list[int]]:
    """No cut, each single cut, and all cuts at once."""
    return [[], *([n] for n in range(1, count)), list(range(1, count))]


def images(*sizes: int) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(size, 3, 16, 16) for size in sizes]


def mean_square(result: Any) -> torch.Tensor:
    return result.float().square().mean()


class Shares(nn.Module):
    """One module called twice, tied weights, parameters that nothing uses, a module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.middle = nn.Linear(6, 6)
        self.last = nn.Linear(6, 6)
        self.last.weight = self.first.weight
        self.alias = self.middle
        self.unused = nn.Linear(2, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.middle(x))
        x = self.middle(x) + x
        x[:, 0] = x[:, 1].detach() * 2
        return self.last(x)


class Scaled(torch.autograd.Function):
    """Passes on, but its gradient is tripled."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 3.0


class Odd(nn.Module):
    """Functions with gradients of their own, parts without gradients, hooks, views, a module made on the fly."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.plain = torch.arange(8.0)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = Scaled.apply(self.one(x)) + self.plain
        with torch.no_grad():
            size = self.two(x).abs().amax(dim=1, keepdim=True)
        x = self.two(x / (size + 1))
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 2)
        half = x.view(len(x), 2, 4)[:, 0]
        x = nn.Softplus()(self.three(x)) + half + torch.tensor([1.0, 2.0, 3.0, 4.0])
        return x, y.float().mean(dim=1)


def dropping() -> Language:
    return Language(tied=False, dropout=0.1)


def untied() -> Language:
    return Language(tied=False)


def test_unet_with_skips() -> None:
    chain = check(UNet, images(4, 4, 3), mean_square, every_cut)
    assert len(chain) >= 6


@pytest.mark.parametrize("masked", [True, False])
def test_masks_keywords_and_dropout(masked: bool) -> None:
    torch.manual_seed(2)
    values = []
    for size in (4, 2):
        value = {"ids": torch.randint(20, (size, 12))}
        if masked:
            value["mask"] = (torch.arange(12) < torch.randint(6, 13, (size, 1))).long()
        values.append(value)
    chain = check(dropping, values, lambda result: mean_square(result["logits"]), every_cut)
    assert len(chain) >= 8
    if masked:  # the mask crosses as it was given, not as it is used
        torch.manual_seed(7)
        layers = chain.build_range(0, len(chain), 0)
        value: Any = values[0]
        for layer in layers[:-1]:
            value = layer(value)
            assert sum(t.numel() for t in value[1:] if not t.is_floating_point()) <= 2 * 4 * 12


class OwnLoss(nn.Module):
    """Gives its loss as it is, not as a part of something."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.linear(x), labels)


def test_a_loss_as_a_lone_tensor() -> None:
    value = {"x": torch.randn(5, 4), "labels": torch.tensor([0, 1, 2, 0, 1])}
    chain = recorded(OwnLoss, value, output="loss")
    found: Any = value
    for layer in chain.build_range(0, len(chain), 0):
        found = layer(found)
    assert found.shape == ()
    with pytest.raises(UserError, match='the model gives no tensors under "logits", but a Tensor'):
        recorded(OwnLoss, value, output="logits")


def test_an_outline_for_another_size_records_the_model_alone() -> None:
    """What counts an outline's operations and memory had hooked into what was recorded, and counted it."""
    small, large = (torch.randint(20, (size, 12), generator=torch.Generator().manual_seed(1)) for size in (2, 6))

    def drawn(first: torch.Tensor) -> Outline:
        chain = recorded(Language, {"ids": first}, output="logits")
        for ids in (first, large):
            tensors, of = tree.flatten({"ids": ids})
            found = outline(chain, 0, tuple(tensors), of=of, samples=len(ids))
        return found

    first = drawn(large)
    again = drawn(small)
    assert [layer.operations for layer in again.layers] == [layer.operations for layer in first.layers]
    assert [layer.saved_bytes for layer in again.layers] == [layer.saved_bytes for layer in first.layers]


def test_shared_and_unused_state() -> None:
    chain = check(Shares, [torch.randn(5, 6), torch.randn(5, 6)], mean_square, every_cut)
    assert any(not one.constant for one in chain.shared())
    for one in chain.shared():
        names = one.text.partition("(")[2].partition(")")[0].split(", ")
        assert len(names) == len(set(names)), one.text  # one of the model's own had its name twice


class _Changing(nn.Module):
    """Layers around tensors of the model's own that its forward changes, and reads before or after."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("steps", torch.zeros(()))


class _Warming(_Changing):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.steps += 1
        x = self.two(torch.tanh(self.one(x)))
        return self.three(x * torch.clamp(self.steps / 10, max=1.0))


class _ReadsBefore(_Changing):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.steps * 0.5
        x = self.one(x)
        self.steps.add_(1)
        return self.three(self.two(x) * before)


class _Normalizes(_Changing):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6, affine=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return self.three(self.two(torch.relu(self.one(x)))) + x


class _Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.calls


class _Counts(_Changing):
    def __init__(self) -> None:
        super().__init__()
        self.counter = _Counter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.counter(x)
        return self.three(self.two(torch.relu(self.one(x)))) + x


class _Averages(_Changing):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("var", torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.batch_norm(x, self.mean, self.var, training=self.training)
        return self.three(self.two(torch.relu(self.one(x)))) + x * self.mean


class _Within(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("var", torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.batch_norm(x, self.mean, self.var, None, None, self.training)


class _AveragesWithin(_Changing):
    def __init__(self) -> None:
        super().__init__()
        self.norm = _Within()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return self.three(self.two(torch.relu(self.one(x)))) + x


@pytest.mark.parametrize("model", [_Warming, _ReadsBefore, _Normalizes, _Counts, _Averages, _AveragesWithin])
def test_state_that_a_forward_changes(model: type[nn.Module]) -> None:
    """What is made from such state, or changes it, was taken for made from the inputs alone: computed at the wrong time, or
    in several layers."""
    torch.manual_seed(3)
    chain = check(model, [torch.randn(4, 6), torch.randn(4, 6), torch.randn(3, 6)], mean_square, every_cut)
    assert len(chain) >= 2
    assert not any(one.constant for one in chain.shared())  # a layer's copy would not change when another one's does


def test_functions_of_its_own() -> None:
    values = [(torch.randn(5, 8), torch.ones(5, 3, dtype=torch.int64))] * 2
    check(Odd, values, lambda result: mean_square(result[0]) + result[1].sum(), every_cut)


def test_part_of_the_result() -> None:
    value = {"ids": torch.randint(20, (2, 12))}
    check(untied, [value], mean_square, lambda count: [[], [count // 2]], output="hidden")
    with pytest.raises(UserError, match='no tensors under "logit", but "logits", "hidden"'):
        recorded(untied, value, "logit")


class _Refused(nn.Module):
    def __init__(self, what: Callable[..., Any]) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.calls = 0
        self.what = [what]

    def forward(self, x: torch.Tensor) -> Any:
        return self.two(self.what[0](self, self.one(x)))


def _branch(model: Any, x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        return x
    return -x


def _counts(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.calls += 1
    return x


def _python_random(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x * (2 if random.random() < 0.5 else 1)


def _new_module(model: Any, x: torch.Tensor) -> torch.Tensor:
    return nn.Linear(4, 4)(x)


def _assigns(model: Any, x: torch.Tensor) -> torch.Tensor:
    x.data = x.data * 2
    return x


def _vmap(model: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.vmap(lambda row: row * 2)(x)


REFUSED: list[tuple[Callable[..., Any], str]] = [
    (_branch, r"depends on the values of its data \(bool\(\) of a tensor\).*test_recording.py, line \d+"),
    (_counts, "forward sets calls of the model"),
    (_python_random, "Python's or NumPy's random numbers"),
    (_new_module, r"a parameter that is no part of the model.*test_recording.py, line \d+"),
    (_assigns, r"sets an attribute of a tensor.*test_recording.py, line \d+"),
    (_vmap, "torch.func"),
]


@pytest.mark.parametrize(("what", "message"), REFUSED, ids=[what.__name__ for what, _ in REFUSED])
def test_refused(what: Callable[..., Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        recorded(lambda: _Refused(what), torch.randn(3, 4))


def test_constants_may_be_read() -> None:
    def steps(model: Any, x: torch.Tensor) -> torch.Tensor:
        for factor in torch.linspace(1, 2, 3).tolist():
            x = x * factor
        return x if bool(torch.tensor(True)) else -x

    check(lambda: _Refused(steps), [torch.randn(3, 4)], mean_square, every_cut)


def test_recording_leaves_nothing_behind() -> None:
    call, apply = nn.Module.__call__, torch.autograd.Function.__dict__["apply"]
    with pytest.raises(UserError):
        recorded(lambda: _Refused(_branch), torch.randn(3, 4))
    assert nn.Module.__call__ is call
    assert torch.autograd.Function.__dict__["apply"] is apply


def _names(chain: Any) -> Sequence[str]:
    return list(chain.names)


def test_names_are_those_of_parts() -> None:
    assert _names(recorded(UNet, images(2)[0]))[0] == "down-0-conv"


@pytest.mark.parametrize("blocks", [("layers",), ("layers.*",), ("layers.[01]", "layers.2")])
def test_blocks_may_depend_on_values(blocks: tuple[str, ...]) -> None:
    chain = check(Mixture, images(6, 3), mean_square, every_cut, blocks=blocks)
    assert len(chain) == 5


def test_modules_that_cannot_be_recorded_stay_whole() -> None:
    """And all of their kind, in all layers."""
    chain = check(Mixture, images(6, 3), mean_square, every_cut)
    assert chain.undivided == ["layers.*"]
    assert len(chain) == 5
    assert recorded(UNet, images(2)[0]).undivided == []
    with pytest.raises(UserError, match='"layer" matches nothing in the model'):
        recorded(Mixture, images(4)[0], blocks=("layer",))


class _Evaluated(nn.Module):
    """Depends on values in evaluation only."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.two(self.one(x))
        return x if self.training or x.sum() > 0 else -x


def test_what_depends_on_values_in_evaluation_only() -> None:
    chain = check(lambda: nn.ModuleList([_Outer(_Evaluated(), 8)])[0], [torch.randn(3, 8)], mean_square, every_cut)
    assert chain.undivided == ["part"]


def test_a_mistake_of_the_model_is_reported_as_it_is() -> None:
    """Not as that of a module that was tried as a whole."""
    with pytest.raises(UserError, match=r"reduction dim, but got \[3, 4\] X \[8, 8\].*recording.py, line"):
        recorded(lambda: _Outer(_Evaluated(), 4), torch.randn(3, 4))


class _Block(nn.Module):
    """Calls ``what`` for its forward."""

    def __init__(self, what: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.one, self.what = nn.Linear(4, 4), what

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.what(x)


_GIVEN: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: x,
    lambda x: x[:, 1:3],
    lambda x: x.detach() + (1.0 if x.sum() > 9 else 0.0),
    lambda x: x * (1.0 if x.sum() > 9 else 3.0),
]


@pytest.mark.parametrize("what", _GIVEN)
def test_what_blocks_pass_on(what: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Their argument itself, a view of it, tensors without and with a gradient; they are written to later."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.block = nn.Linear(4, 4), _Block(what)
            self.last = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            y = self.block(x)
            y.mul_(2)
            return self.last(x) + y.sum()

    check(Model, [torch.randn(5, 4), torch.randn(2, 4)], mean_square, every_cut, blocks=("block",))


def test_blocks_take_tensors_and_constants() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part, self.last = _Block(lambda x: x), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.part({"of a type of its own": _Block, "x": x}))

    with pytest.raises(UserError, match="part is to stay whole, but takes a type, which cannot be recorded"):
        recorded(Outer, torch.ones(3, 4), blocks=("part",))


@pytest.mark.parametrize(
    ("what", "message"),
    [(lambda x: x.mul_(2), "a block writes to its arguments"), (lambda x: x.missing, "has no attribute 'missing'")],
)
def test_blocks_that_cannot_be_recorded(what: Callable[[torch.Tensor], torch.Tensor], message: str) -> None:
    with pytest.raises(UserError, match=message):
        recorded(lambda: _Outer(_Block(what)), torch.ones(3, 4), blocks=("part",))


class _Outer(nn.Module):
    def __init__(self, part: nn.Module, width: int = 4) -> None:
        super().__init__()
        self.part, self.last = part, nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.part(x + 1))


def test_modules_without_parts_may_depend_on_values() -> None:
    def turned(x: torch.Tensor) -> torch.Tensor:
        chosen = (x[:, 0] > 0).nonzero().squeeze(1)
        return x.index_fill(0, chosen, 2.0) * (3 if x.sum() > 0 else 1)

    class Turn(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return turned(x)

    check(lambda: _Outer(Turn()), [torch.randn(5, 4), torch.randn(2, 4)], mean_square, every_cut)


class _Recurrent(nn.Module):
    """Does not take lengths of zero, nor tensors without values."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GRU(4, 4, batch_first=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.inner(packed)[0], batch_first=True, total_length=x.shape[1])[0]


def test_blocks_that_take_lengths() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.recurrent, self.last = nn.Embedding(9, 4), _Recurrent(), nn.Linear(4, 3)

        def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            return self.last(self.recurrent(self.words(ids), lengths))

    values = [{"ids": torch.randint(9, (3, 5)), "lengths": torch.tensor([2, 5, 1])} for _ in range(2)]
    assert check(Model, values, mean_square, every_cut).undivided == ["recurrent"]


def test_blocks_whose_shapes_depend_on_values() -> None:
    chain = recorded(lambda: _Outer(_Block(lambda x: x[x[:, 0] < 9])), torch.ones(3, 4), blocks=("part",))
    layers = chain.build_range(0, len(chain), 0)
    value = torch.ones(3, 4)
    value[1] = 10
    with pytest.raises(UserError, match=r"model.blocks: part gives other shapes for other values \(3 x 4, now 2 x 4\)"):
        nn.Sequential(*layers)(value)


class Recurrent(nn.Module):
    """A layer of torch's own that keeps its parameters in a list, too, and a state that is made in each forward."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.lstm = (OwnLSTM if own else nn.LSTM)(4, 6, 2, batch_first=True)
        self.last = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> Any:
        weight = next(self.parameters())
        self.lstm.flatten_parameters()  # looks at the types in its list
        found, _ = self.lstm(x, (weight.new_zeros(2, len(x), 6), weight.new_zeros(2, len(x), 6)))
        return self.last(found[:, -1])


class OwnLSTM(nn.LSTM):
    pass


@pytest.mark.parametrize("own", [False, True])
def test_recurrent_layers(own: bool) -> None:
    value = torch.randn(5, 7, 4)
    chain = recorded(lambda: Recurrent(own), value)
    torch.manual_seed(7)
    plain = Recurrent(own)(value)
    assert torch.equal(Parts(chain, [1]).forward(value)[0], plain)


def test_a_dict_that_the_only_argument_gets_whole() -> None:
    """A key that is not the argument's name was told as torch's complaint about a dict."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(4, 3)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.one(images)

    with pytest.raises(UserError, match=r'its only argument, "images", is given all of .*since nothing there has that name'):
        recorded(Model, {"pixels": torch.randn(2, 4)})

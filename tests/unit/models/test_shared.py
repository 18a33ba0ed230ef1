"""What layers share is found, survives building, and is not parted; layers are made anew, never copied."""

import gc
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accept_mpi import models
from accept_mpi.errors import UserError
from accept_mpi.job import Job
from accept_mpi.job_file import parse
from accept_mpi.models import as_chain, entries_of
from accept_mpi.models.base import Chain
from accept_mpi.models.layers import build_layers, build_stage
from accept_mpi.models.shared import Shared, uncuttable
from accept_mpi.pipeline.stage import Stage
from accept_mpi.planning.job_plan import plan_from_job
from accept_mpi.profiling.outline import outline

TOKENS = torch.zeros(2, 3, dtype=torch.int64)


class Head(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T


class Masked(nn.Module):
    """Has a table that it may write to."""

    def __init__(self, table: torch.Tensor, writes: str = "") -> None:
        super().__init__()
        self.register_buffer("table", table)
        self.linear, self.writes = nn.Linear(4, 4), writes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.writes == "in place":
            self.table.add_(1)
        if self.writes == "unseen":
            self.table.data.add_(1)
        if self.writes == "anew":
            self.table = self.table + 1
        if self.writes == "larger":
            self.table = torch.ones(self.table.shape[0] + 1)
        return self.linear(x) * self.table[-1]


def of(function: Callable[[], Any]) -> Chain:
    """A chain as ``models.load`` makes one."""

    def make() -> Any:
        torch.manual_seed(3)
        return entries_of(function())

    return Chain(make(), make)


def tied() -> nn.Sequential:
    embedding = nn.Embedding(9, 4)
    return nn.Sequential(embedding, nn.Linear(4, 4), nn.Tanh(), Head(embedding.weight), nn.Linear(9, 3))


def tied_by_functions() -> list[Any]:
    embedding = nn.Embedding(9, 4)
    return [lambda: embedding, nn.Linear(4, 4), nn.Tanh(), lambda: Head(embedding.weight), lambda: nn.Linear(9, 3)]


def tied_by_memory() -> nn.Sequential:
    model = tied()
    model[3] = Head(nn.Parameter(model[0].weight.data))
    return model


def tied_by_data() -> nn.Sequential:
    model = tied()
    model[3] = Head(nn.Parameter(torch.zeros(9, 4)))
    model[3].weight.data = model[0].weight.data
    return model


def tied_by_view() -> nn.Sequential:
    model = tied()
    model[3] = Head(nn.Parameter(model[0].weight.data.view(4, 9).t()[1:]))
    return model


def tied_by_what_one_leaves() -> list[Any]:
    left: list[nn.Embedding] = []

    def first() -> nn.Module:
        left.append(nn.Embedding(9, 4))
        return left[0]

    return [first, nn.ReLU, nn.ReLU, lambda: Head(left[0].weight), lambda: nn.Linear(9, 3)]


@pytest.mark.parametrize(
    "function", [tied, tied_by_functions, tied_by_memory, tied_by_data, tied_by_view, tied_by_what_one_leaves]
)
def test_what_is_shared_is_found(function: Callable[[], Any]) -> None:
    (one,) = of(function).shared()
    assert (one.first, one.last, one.constant) == (0, 3, False)
    assert one.text == 'layers 0 "0" and 3 "3" share a parameter (0.weight, 3.weight)'
    assert uncuttable([one], 5, False) == {1, 2, 3}


def test_a_layer_that_comes_twice_and_modules_within() -> None:
    def twice() -> nn.Sequential:
        linear, relu, norm = nn.Linear(2, 2), nn.ReLU(), nn.BatchNorm1d(2)
        return nn.Sequential(linear, relu, linear, relu, norm, nn.Sequential(norm), nn.Linear(2, 2))

    shared = of(twice).shared()
    assert [(one.first, one.last, one.text.partition("share ")[2], one.tied) for one in shared] == [
        (0, 2, "a parameter (0.weight, 2.weight)", True),
        (0, 2, "a parameter (0.bias, 2.bias)", True),
        (4, 5, "a parameter (4.weight, 5.0.weight)", True),
        (4, 5, "a parameter (4.bias, 5.0.bias)", True),
        (4, 5, "a buffer (4.running_mean, 5.0.running_mean) and 2 more", False),
    ]
    assert uncuttable(shared, 7, True) == {5}
    assert uncuttable(shared, 7, False) == {1, 2, 5}


def test_what_is_not_shared() -> None:
    """Of one memory, but other parts of it; layers that are equal; made anew by each function."""

    def flat() -> list[Any]:
        values = torch.randn(2, 4)
        return [
            Head(nn.Parameter(values[:1])),
            Head(nn.Parameter(values[1:])),
            lambda: nn.Linear(1, 1),
            nn.Linear,
            nn.ReLU(),
        ]

    assert of(lambda: flat()[:3]).shared() == ()
    assert models.load("cnn", {}, 0).shared() == ()


def test_norms_statistics_are_trained_unless_they_are_frozen() -> None:
    def norms(frozen: bool) -> list[nn.Module]:
        norm = nn.BatchNorm1d(2, affine=False).train(not frozen)
        return [norm, nn.ReLU(), norm]

    assert not of(lambda: norms(False)).shared()[0].constant
    (one,) = of(lambda: norms(True)).shared()
    assert one.constant
    assert not uncuttable([one], 3, False)


@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_what_spectral_norms_iterate_is_trained(norm: Callable[..., nn.Module]) -> None:
    """Even where its weights are frozen or tied."""

    def twice() -> nn.Sequential:
        layer = norm(nn.Linear(4, 4))
        return nn.Sequential(nn.Linear(4, 4), layer, nn.Tanh(), layer, nn.Linear(4, 4))

    chain = of(twice)
    assert uncuttable(chain.shared(), 5, ties=True) == {2, 3}
    assert [stage.start for stage in plan_from_job(job("pipeline.cuts=even"), 5, 2, chain.shared).stages] in ([0, 1], [0, 4])


def test_found_without_holding_the_model_or_filling_it() -> None:
    """Layers made by functions are looked at one after another, and their weights take no time to draw."""
    alive: list[weakref.ref[nn.Module]] = []
    most, drawn = 0, []

    class Layer(nn.Linear):
        def reset_parameters(self) -> None:
            super().reset_parameters()
            drawn.append(bool(self.weight.any()))

    def layer() -> nn.Module:
        nonlocal most
        made = Layer(64, 64)
        with torch.no_grad():
            made.weight.fill_(0.0)
        made.reset_parameters()
        alive.append(weakref.ref(made))
        gc.collect()
        most = max(most, sum(one() is not None for one in alive))
        return made

    assert of(lambda: [layer] * 6).shared() == ()
    assert most <= 2
    assert len(drawn) == 12
    assert not any(drawn[1::2])


def test_layers_that_need_their_values_are_looked_at_with_them() -> None:
    def layer(weight: torch.Tensor) -> nn.Module:
        made = nn.Linear(4, 4)
        if not 0 < made.weight.detach().abs().max() <= 0.5:
            raise ValueError("no weights")
        made.weight = weight
        return made

    def needing() -> list[Any]:
        weight = nn.Parameter(torch.zeros(4, 4))
        return [lambda: layer(weight), nn.ReLU, lambda: layer(weight)]

    assert [(one.first, one.last) for one in of(needing).shared()] == [(0, 2)]


@pytest.mark.parametrize("function", [tied, tied_by_functions])
def test_layers_of_one_range_share_and_are_new_each_time(function: Callable[[], Any]) -> None:
    chain = of(function)
    first = chain.build_range(0, 5, 0)
    assert first[0].weight is first[3].weight
    begun = first[0].weight.detach().clone()
    with torch.no_grad():
        first[0].weight.zero_()
    second = chain.build_range(0, 4, 0)
    assert second[0].weight is second[3].weight
    assert torch.equal(second[0].weight, begun)
    # What a piece has trained is not found in another piece of the same generation.
    with torch.no_grad():
        second[0].weight.zero_()
    alone, rest = chain.build(3, 0), chain.build_range(0, 2, 0)
    assert torch.equal(alone.weight, begun)
    assert rest[0].weight is not alone.weight
    assert torch.equal(rest[0].weight, begun)
    assert torch.equal(chain.whole(0)[3].weight, begun)


def test_pieces_that_share_nothing_come_from_one_call() -> None:
    calls = 0

    def model() -> nn.Sequential:
        nonlocal calls
        calls += 1
        table, relu = torch.ones(4), nn.ReLU()
        return nn.Sequential(*(Masked(table) for _ in range(4)), relu, nn.Linear(4, 4))

    chain = of(model)
    for layer in range(6):
        chain.build(layer, 0)
    assert calls == 1
    chain.build_range(0, 2, 0)
    chain.build_range(2, 6, 0)
    assert calls == 2
    chain.build(5, 0)
    chain.release()
    chain.build(0, 0)
    assert calls == 4


def test_a_layer_may_resize_its_buffers() -> None:
    """As observers of quantization do."""
    chain = of(lambda: nn.Sequential(nn.Linear(4, 4), Masked(torch.ones(4))))
    for _ in range(2):
        chain.build(1, 0).get_buffer("table").resize_(8)


def test_what_is_left_over_is_let_go() -> None:
    alive: list[weakref.ref[nn.Module]] = []

    def model() -> nn.Sequential:
        layers = [nn.Linear(4, 4) for _ in range(6)]
        alive.extend(weakref.ref(layer) for layer in layers)
        return nn.Sequential(*layers)

    chain = of(model)
    stage = build_stage(chain, 2, 4, 0)
    gc.collect()
    assert [layer() is not None for layer in alive[:6]] == [False, False, True, True, False, False]
    assert len(alive) == 6
    assert stage.names == ["2", "3"]


def test_hooks_and_parametrizations_survive() -> None:
    seen: list[str] = []

    def model() -> nn.Sequential:
        linear, normed, old = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        linear.weight.register_hook(lambda gradient: seen.append("parameter") or gradient * 0)
        linear.register_forward_hook(lambda *_: seen.append("module"))
        nn.utils.parametrizations.weight_norm(normed)
        with pytest.warns(FutureWarning):
            nn.utils.weight_norm(old)
        return nn.Sequential(linear, normed, nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)), old)

    chain = of(model)
    for _ in range(2):
        seen.clear()
        built = nn.Sequential(*chain.build_range(0, 4, 0))
        built(torch.ones(2, 4)).sum().backward()
        assert seen == ["module", "parameter"]
        assert not built[0].weight.grad.any()
        assert built[1].parametrizations.weight.original0.grad is not None
        assert built[3].weight_g.grad is not None
    found = outline(chain, 0, (torch.zeros(3, 4),))
    assert [layer.parameters for layer in found.layers] == [20, 24, 20, 24]


@pytest.mark.parametrize("kind", ["layer", "parameter", "memory"])
def test_a_function_that_gives_the_same_again(kind: str) -> None:
    linear, weight = nn.Linear(2, 2), nn.Parameter(torch.zeros(2, 2))

    def model() -> list[nn.Module]:
        if kind == "layer":
            return [nn.ReLU(), linear]
        return [nn.ReLU(), Head(weight if kind == "parameter" else nn.Parameter(weight.data))]

    chain = of(model)
    chain.build(1, 0)
    with pytest.raises(UserError, match=r"the function gives the same 1\.weight whenever it is called, .* or clone it"):
        chain.build(1, 0)


def test_a_function_may_know_what_nobody_trains() -> None:
    """One activation for ever, and one table, as long as nobody has written to it."""
    relu, table, pretrained, frozen = nn.ReLU(), torch.ones(4), torch.ones(5, 4), nn.Linear(4, 4).requires_grad_(False)

    @cache
    def mask() -> torch.Tensor:
        return torch.ones(4)

    chain = of(lambda: [nn.Embedding.from_pretrained(pretrained), relu, Masked(table), lambda: Masked(mask()), frozen])
    first = chain.build_range(0, 5, 0)
    first[1].register_forward_hook(lambda *_: None)
    second = chain.build_range(0, 5, 0)
    assert not second[1]._forward_hooks
    assert torch.equal(second[4](torch.ones(2, 4)), frozen(torch.ones(2, 4)))
    outline(chain, 0, (TOKENS,))
    assert not mask().is_meta
    chain.build_range(0, 5, 0)
    table.add_(1)
    with pytest.raises(UserError, match=r"the same 2\.table"):
        chain.build_range(0, 5, 0)


def test_a_function_that_gives_other_layers_again() -> None:
    grown: list[nn.Module] = []

    def model() -> list[nn.Module]:
        grown.append(nn.ReLU())
        return list(grown)

    chain = of(model)
    chain.build(0, 0)
    with pytest.raises(UserError, match=r"gives other layers when it is called again: 2 \(0, 1\) instead of 1 \(0\)"):
        chain.build(0, 0)


@pytest.mark.parametrize("function", [lambda: [nn.LazyLinear(3)], lambda: [lambda: nn.Sequential(nn.LazyBatchNorm1d())]])
def test_layers_without_a_shape(function: Callable[[], Any]) -> None:
    for ask in (lambda chain: chain.build(0, 0), lambda chain: chain.shared(), lambda chain: chain.abstract(0, 0)):
        with pytest.raises(UserError, match=r'layer 0 "0" has parameters without a shape yet \(Lazy.*run the model once on'):
            ask(of(function))


def test_an_outline_knows_what_is_shared_and_leaves_nothing_behind() -> None:
    for function in (tied, tied_by_functions):
        chain = of(function)
        found = outline(chain, 0, (TOKENS,))
        assert found.shared == chain.shared() != ()
        assert [layer.parameters for layer in found.layers] == [36, 20, 0, 36, 30]
        built = chain.build_range(0, 5, 0)
        assert built[0].weight is built[3].weight
        assert not any(parameter.is_meta for layer in built for parameter in layer.parameters())
    other = of(
        lambda: [nn.Embedding(9, 4), nn.Linear(4, 4), nn.Tanh(), Head(nn.Parameter(torch.zeros(9, 4))), nn.Linear(9, 3)]
    )
    assert outline(other, 0, (TOKENS,)).key != found.key


def test_an_outline_keeps_modes() -> None:
    chain = of(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).eval()))
    assert [chain.abstract(layer, 0).training for layer in (0, 1)] == [True, False]


# -- what nobody trains may be parted, as long as nobody writes to it ----------------------------------------------------


def masked(writes: str) -> list[nn.Module]:
    table = torch.ones(1)
    return [Masked(table, writes), nn.ReLU(), Masked(table)]


@pytest.mark.parametrize("writes", ["", "larger"])
def test_a_table_may_be_shared_by_stages(writes: str) -> None:
    chain = of(lambda: masked(writes))
    assert [one.constant for one in chain.shared()] == [True]
    layers = build_stage(chain, 0, 2, 0)
    for _ in range(3):
        layers.modules[0](torch.ones(2, 4))


@pytest.mark.parametrize("writes", ["in place", "unseen", "anew"])
def test_who_writes_to_a_shared_table_must_not_be_parted(writes: str) -> None:
    chain = of(lambda: masked(writes))
    (layer,) = build_stage(chain, 0, 1, 0).modules
    with pytest.raises(UserError, match=r'layers 0 "0" and 2 "2" share a buffer \(0\.table, 2\.table\) and write to it'):
        layer(torch.ones(2, 4))
    whole = build_stage(chain, 0, 3, 0).modules
    whole[0](torch.ones(2, 4))


# -- in one stage, what lies on one memory stays there -------------------------------------------------------------------


class Looking(nn.Module):
    """Has a weight of another layer's among its buffers."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight.data)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.conv2d(x, self.weight)


def convolutions(kind: str) -> nn.Sequential:
    first, last = nn.Conv2d(4, 4, 2), nn.Conv2d(4, 4, 2)
    if kind == "data":
        last.weight.data = first.weight.data
    if kind == "parameter":
        last.weight = nn.Parameter(first.weight.data)
    if kind == "view":
        last.weight = nn.Parameter(first.weight.data[:2])
        last.bias = None
    return nn.Sequential(first, nn.BatchNorm2d(4), Looking(first.weight) if kind == "buffer" else last)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "1f1b-async"])
@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("kind", ["data", "parameter", "buffer"])
def test_one_stage_trains_one_memory(kind: str, channels_last: bool, schedule: str) -> None:
    model = convolutions(kind)
    whole = job(f"pipeline.schedule={schedule}", "train.optimizer.momentum=0.9", "train.optimizer.weight_decay=0.1")
    chain = Chain(entries_of(model), lambda: entries_of(model))
    plain = convolutions(kind)
    plain.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(plain.parameters(), whole.lr, momentum=0.9, weight_decay=0.1)
    stage = Stage(build_layers(chain, 0, 3, 0), whole, None, channels_last)
    for step in range(3):
        x = torch.randn(2, 4, 4, 4)
        inputs = x.contiguous(memory_format=torch.channels_last) if channels_last else x
        out = stage.forward(step, 0, (inputs,), step).outputs
        stage.backward(step, 0, tuple(torch.ones_like(value) for value in out))
        if schedule == "zero-bubble":
            stage.weight_gradient(step, 0)
        stage.update(whole.lr, step)
        plain(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, theirs = stage.weights(), plain.state_dict()
    assert torch.equal(weights["0.weight"], weights["2.weight"])
    for name, value in theirs.items():
        torch.testing.assert_close(weights[name], value)


def test_parts_of_one_memory_cannot_be_laid_out_anew() -> None:
    model = convolutions("view")
    chain = Chain(entries_of(model), lambda: entries_of(model))
    with pytest.raises(UserError, match=r'one memory, .* train\.memory_format = "contiguous"'):
        Stage(build_layers(chain, 0, 3, 0), job(), None, True)


# -- cuts ----------------------------------------------------------------------------------------------------------------

JOB = """
[model]
name = "m"
[data]
name = "d"
[train]
steps = 1
[output]
directory = "r"
"""
TIE = Shared(0, 3, 'layers 0 "a" and 3 "d" share a parameter (a.weight, d.weight)')


def job(*changes: str) -> Job:
    return parse(JOB, "job", changes)


@pytest.mark.parametrize(
    ("cuts", "layers", "size", "message"),
    [
        ("[1]", 6, 2, "so no cut may part them, as 1 does; cuts that keep such layers together are 4, 5, or "),
        ("[4]", 5, 2, "as 4 does"),
        ("even", 6, 4, r"are 4, 5 \(for 3 ranks at most: pipeline\.ranks\)"),
        ("[3]", 4, 2, r"no cut keeps such layers together, so one rank must hold the model \(pipeline\.cuts = \[\]"),
        ("[2]", 60, 2, r"are 4, 5, 6, 7, 8, 9, 10, 11, \.\.\., or"),
    ],
)
def test_given_cuts_that_part_what_is_shared(cuts: str, layers: int, size: int, message: str) -> None:
    ties = [TIE, Shared(3, 4, "others")] if layers == 5 else [TIE]
    with pytest.raises(UserError, match=message):
        plan_from_job(job(f"pipeline.cuts={cuts}"), layers, size, lambda: ties)


def test_given_cuts_that_part_uses_of_a_tied_parameter() -> None:
    """They were told to part what layers have in common, where only some cuts are impossible, or only with one schedule."""
    tied = Shared(0, 4, "layers 0, 2 and 4 share a parameter", places=((0, "a"), (2, "b"), (4, "c")), tied=True)
    message = (
        "share a parameter, of which only the first may be in another stage, so layer 3 may not begin one; possible cuts"
    )
    with pytest.raises(UserError, match=message + r" are 1, 2, 5, or"):
        plan_from_job(job("pipeline.cuts=[3]"), 6, 2, lambda: [tied])
    with pytest.raises(UserError, match=r'no cut may part them with pipeline\.schedule = "1f1b-async", as 1 does'):
        plan_from_job(job("pipeline.cuts=[1]", "pipeline.schedule=1f1b-async"), 6, 2, lambda: [tied])


def test_given_cuts_that_keep_it_together() -> None:
    assert len(plan_from_job(job("pipeline.cuts=[4]"), 6, 2, lambda: [TIE]).stages) == 2
    assert len(plan_from_job(job("pipeline.cuts=even"), 8, 2, lambda: [TIE, Shared(0, 7, "", True)]).stages) == 2
    assert [stage.start for stage in plan_from_job(job("pipeline.cuts=even"), 6, 2, lambda: [TIE]).stages] == [0, 4]
    assert [stage.start for stage in plan_from_job(job("pipeline.cuts=even"), 6, 3, lambda: [TIE]).stages] == [0, 4, 5]

    def nobody_asks() -> list[Shared]:
        raise AssertionError

    assert len(plan_from_job(job(), 6, 1, nobody_asks).stages) == 1
    assert len(plan_from_job(job("pipeline.cuts=[]", "pipeline.ranks=[1]"), 6, 3, nobody_asks).stages) == 1


class Tied(nn.Module):
    """A table that is also the head, and a linear module that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.linear, self.other, self.head = (
            nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 9, bias=False)
        )  # fmt: skip
        self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.linear(self.other(self.linear(self.words(x)).tanh())))


def tied_in_a_sequence() -> nn.Sequential:
    net = Tied()
    return nn.Sequential(net.words, net.linear, nn.Tanh(), net.other, net.linear, net.head)


@pytest.mark.parametrize("name", ["Tied", "tied_in_a_sequence"])
def test_uses_that_share_a_cast_are_not_parted(name: str) -> None:
    """Autocast casts a parameter once, and adds up the gradients of its uses in bfloat16. A table is not cast."""
    for precision in ("float32", "bf16"):
        chain = models.chain_of(job(f"model.name=test_shared:{name}", f"train.precision={precision}"), lambda: TOKENS)
        biased = [n for n in range(len(chain)) if any(p.shape == (8,) for p in chain.abstract(n, 0).parameters())]
        together = frozenset(range(biased[0] + 1, biased[-1] + 1))
        assert len(together) > 1
        assert uncuttable(chain.shared(), len(chain), True) == (together if precision == "bf16" else frozenset())


def test_parts_are_called_by_their_names_in_the_model() -> None:
    """Those of a model with a forward of its own had the layer's name twice."""
    text = models.chain_of(job("model.name=test_shared:Tied"), lambda: TOKENS).shared()[0].text
    called = text[text.index("(") + 1 : text.index(")")].split(", ")
    assert set(called) <= dict(Tied().named_parameters(remove_duplicate=False)).keys()


def test_a_model_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "made.py").write_text(
        "from torch import nn\nfrom accept_mpi.models import load\n"
        "def zoo():\n    return load('cnn', {'width': 4}, 0)\n"
        "def twice(n=2):\n    linear = nn.Linear(n, n)\n    return [('a', linear), ('b', nn.ReLU), ('c', linear)]\n"
    )
    monkeypatch.chdir(tmp_path)
    zoo = models.load("made:zoo", {}, 0)
    assert zoo.shared() == ()
    theirs = models.load("cnn", {"width": 4}, 0).whole(5).state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in zoo.whole(5).state_dict().items())
    chain = models.load("made:twice", {"n": 3}, 0)
    assert chain.shared()[0].text == 'layers 0 "a" and 2 "c" share a parameter (a.weight, c.weight) and 1 more'
    one, other = (nn.Sequential(*chain.build_range(0, 3, 0)).state_dict() for _ in range(2))
    assert list(one) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert list(as_chain([("x", nn.Linear(1, 1))]).whole().state_dict()) == ["x.weight", "x.bias"]


def test_a_layer_that_torch_has_compiled() -> None:
    """Torch's copy of it has parameters that no optimizer takes."""
    compiled = torch.jit.script(nn.Sequential(nn.Linear(6, 6), nn.ReLU()))
    for layer, which in ((compiled, 'layer 1 "1"'), (nn.Sequential(compiled), 'a part of layer 1 "1",')):
        with pytest.raises(UserError, match=rf"^model\.name: .*{which} has been compiled by torch\.jit"):
            Chain([("0", nn.Linear(6, 6)), ("1", layer)], lambda: []).build_range(0, 2, 0)

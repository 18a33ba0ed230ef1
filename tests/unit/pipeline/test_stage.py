"""One stage's compute: boundaries, versions of weights, deferred weight gradients, and where infinities come from."""

import gc
import weakref
from typing import Any

import pytest
import torch
from probing import probe
from torch import nn

from accept_mpi.codecs.tensors import TensorSpec
from accept_mpi.errors import UserError
from accept_mpi.job_file import parse
from accept_mpi.models import as_chain
from accept_mpi.models.layers import Layers, build_layers
from accept_mpi.models.losses import Loss, find_loss
from accept_mpi.pipeline.graph_edges import finite
from accept_mpi.pipeline.lane_stage import lane_of
from accept_mpi.pipeline.stage import Stage
from accept_mpi.pipeline.trials import trial_of
from accept_mpi.pipeline.weight_versions import Weights

cross_entropy = find_loss("cross_entropy")

BASE = '[model]\nname="m"\n[data]\nname="d"\n[train]\nsteps=1\n[output]\ndirectory="r"\n'


def make(layers: list[nn.Module], schedule: str = "1f1b", last: bool = False) -> Stage:
    job = parse(BASE, "job", [f"pipeline.schedule={schedule}"])
    built = Layers(0, [str(i) for i in range(len(layers))], layers)
    return Stage(built, job, cross_entropy if last else None, built.likes_channels_last[0])


def received(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def test_a_first_layer_may_work_in_place() -> None:
    """nn.ReLU(inplace=True) at the head of a stage: an error on a leaf, as in the plain model here."""
    stage = make([nn.ReLU(inplace=True), nn.Linear(3, 2)])
    x = received(4, 3)
    expected = x.detach().clone().requires_grad_()
    nn.functional.linear(expected.relu(), *stage.parameters).sum().backward()
    out = stage.forward(0, 0, (x,)).outputs
    (gradient,) = stage.backward(0, 0, (torch.ones_like(out[0]),))
    assert torch.equal(gradient, expected.grad)


@pytest.mark.parametrize("delay", [0, 1])
def test_weights_are_kept_as_long_as_a_forward_may_ask_for_them(delay: int) -> None:
    """Of other versions the memory is free; those of micro-batches in flight are shown to their B."""
    parameter, frozen = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.full((2,), -1.0), requires_grad=False)
    weights = Weights([parameter, frozen], True, delay=delay)

    def shown() -> float:
        assert frozen.tolist() == [-1.0, -1.0]
        return parameter[1].item()

    total = 0
    for segment in range(2):
        begun = total
        for version in range(5):
            weights.begin(version - delay)
            assert shown() == max(total - delay, 0)
            kept = weights.end(version - delay)
            assert shown() == total
            met = weights.meet(kept)
            assert shown() == max(total - delay, 0)
            weights.leave(met, kept)
            assert shown() == total == begun + version
            weights.before_update()
            assert weights._versions is not None
            assert len(weights._versions) == 1
            weights.updated[0].data += 1
            weights.publish(version + 1)
            total += 1
            assert shown() == total
        weights.restart()
        before, newest = weights.last_two()
        assert (before[0].tolist(), newest[0].tolist()) == ([total - delay] * 2, [total] * 2), segment


class Position(nn.Module):
    """Its parameter's gradient is a view of its input's, if there is a single sample."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.position.unsqueeze(0)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "1f1b-async"])
def test_what_is_sent_back_has_memory_of_its_own(schedule: str) -> None:
    """A micro-batch's gradient waits to be sent while those of later ones are added to the parameters', and then scaled."""
    stage = make([Position()], schedule)
    sent = []
    for k in range(2):
        stage.forward(0, k, (received(1, 3),))
        sent += stage.backward(0, k, (torch.full((1, 3), 1.0 + k),))
        if schedule == "zero-bubble":
            stage.weight_gradient(0, k)
    stage.update(0.1, 0, 0.5)
    assert [gradient.tolist() for gradient in sent if gradient is not None] == [[[1.0] * 3], [[2.0] * 3]]


def test_weight_stashing_keeps_the_weights_of_each_forward() -> None:
    """Assigning p.data would fail here: the graph of micro-batch 0 must use the weights from before the update."""
    stage = make([nn.Linear(3, 3, bias=False)], "1f1b-async")
    x = received(2, 3)
    before = stage.parameters[0].detach().clone()
    stage.forward(0, 0, (x,), version=0)
    stage.parameters[0].grad = torch.ones(3, 3)
    stage.update(0.1, version=0)
    stage.forward(0, 1, (x,), version=1)
    (first,) = stage.backward(0, 0, (torch.ones(2, 3),))
    assert torch.equal(first, torch.ones(2, 3) @ before)
    (second,) = stage.backward(0, 1, (torch.ones(2, 3),))
    assert torch.equal(second, torch.ones(2, 3) @ stage.parameters[0].detach())
    assert not torch.equal(first, second)
    stage.drained()


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cells = kind(3, 3, num_layers=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cells(x)[0]


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_layers_keep_the_weights_of_each_forward(kind: type[nn.RNNBase]) -> None:
    """torch's compute with a list of their parameters, which they make anew where others have taken their places."""
    stage = make([Recurrent(kind)], "1f1b-async")
    x = received(4, 2, 3)

    def plain() -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.func.functional_call(like, dict(zip(names, map(torch.clone, stage.parameters), strict=True)), x)
        return out.detach(), torch.autograd.grad(out.sum(), x)[0]

    like = Recurrent(kind)
    names = [name for name, _ in like.named_parameters()]
    expected = plain()
    first = stage.forward(0, 0, (x,), version=0).outputs[0]
    for parameter in stage.parameters:
        parameter.grad = torch.ones_like(parameter)
    stage.update(0.1, version=0)
    second = stage.forward(0, 1, (x,), version=1).outputs[0]
    assert torch.equal(first, expected[0])
    assert torch.equal(stage.backward(0, 0, (torch.ones(4, 2, 3),))[0], expected[1])
    assert torch.equal(second, plain()[0])
    assert torch.equal(stage.backward(0, 1, (torch.ones(4, 2, 3),))[0], plain()[1])
    stage.drained()


@pytest.mark.parametrize(
    "layers",
    [
        lambda: [nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6, bias=False)],
        lambda: [nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, groups=8), nn.BatchNorm2d(8)],
    ],
    ids=["linear", "convolution"],
)
def test_deferred_weight_gradients_are_the_same_bits(layers) -> None:
    shape = (4, 6) if isinstance(layers()[0], nn.Linear) else (4, 3, 8, 8)
    torch.manual_seed(0)
    x, results = torch.randn(shape), []
    for schedule, whole in (("1f1b", False), ("zero-bubble", False), ("zero-bubble", True)):
        torch.manual_seed(1)
        stage = make(layers(), schedule)
        found = []
        for k in range(3):  # the third in any case as a whole: what is put off and what is not go into one sum
            mine = x.clone().requires_grad_()
            out = stage.forward(0, k, (mine,), whole=whole or k == 2).outputs[0]
            torch.manual_seed(2 + k)
            found += stage.backward(0, k, (torch.randn_like(out),))
            if schedule == "zero-bubble" and not whole and k < 2:
                weights = [p for p in stage.parameters if p.dim() > 1]
                assert k or all(p.grad is None for p in weights), "B must leave the weights' gradients to W"
                stage.weight_gradient(0, k)
        results.append([*found, *(p.grad for p in stage.parameters)])
        assert all(p.grad is None or p.grad.stride() == p.stride() for p in stage.parameters)
        stage.drained()
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_layers_that_are_not_plain_defer_too_or_not_at_all() -> None:
    """Other paddings have a graph of their own; a hook on a weight is called once; what is frozen stays without gradient."""

    def layers() -> list[nn.Module]:
        found = [
            nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), nn.Conv2d(4, 4, 3, padding="same"), nn.Conv2d(4, 4, 1),
            nn.Conv2d(4, 4, 3, stride=2, dilation=2, padding=2, bias=False),
        ]  # fmt: skip
        found[2].weight.requires_grad_(False)
        return found

    results = []
    for schedule in ("1f1b", "zero-bubble"):
        torch.manual_seed(1)
        stage = make(layers(), schedule)
        calls: list[int] = []
        stage.parameters[-1].register_hook(lambda gradient, calls=calls: calls.append(1))
        out = stage.forward(0, 0, (torch.arange(4 * 3 * 64.0).reshape(4, 3, 8, 8).requires_grad_(),)).outputs[0]
        found = stage.backward(0, 0, (torch.ones_like(out),))
        if schedule == "zero-bubble":
            assert stage.layers[1].weight.grad is None
            assert stage.layers[2].bias.grad is None
            stage.weight_gradient(0, 0)
        assert calls == [1]
        results.append([*found, *(p.grad for p in stage.parameters if p.grad is not None)])
        assert stage.layers[2].weight.grad is None
    assert len(results[0]) == 1 + 6
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


class Twice(nn.Module):
    def __init__(self, times: int) -> None:
        super().__init__()
        self.linear, self.other, self.times = nn.Linear(3, 3), nn.Linear(3, 3), times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = self.linear(x).tanh()
        return self.other(x)


@pytest.mark.parametrize(("times", "precision", "possible"), [(1, "bf16", True), (2, "float32", True), (2, "bf16", False)])
def test_lanes_do_not_share_casts_of_parameters(times: int, precision: str, possible: bool) -> None:
    """Torch keeps them for all threads, so whether a lane cast a parameter again for a second use depended on the others."""
    job = parse(BASE, "job", [f"train.precision={precision}"])
    stage = Stage(Layers(0, ["0"], [Twice(times)]), job, None, False)
    probe(stage, (received(4, 3),), None, lambda given, _: tuple(torch.ones(4, 3, dtype=one.dtype) for one in given))
    assert (not stage.found.one_forward) == possible
    stage.join_group()
    for one, keeps in ((stage, True), (lane_of(stage), precision == "float32")):
        with one.runner.precise():
            assert torch.is_autocast_cache_enabled() == keeps


def test_a_probe_finds_what_norms_take() -> None:
    """A group replays what their running statistics become, which depends on that."""
    layers = [nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)), nn.BatchNorm1d(3)]
    stage = Stage(Layers(0, ["0", "1"], layers), parse(BASE, "job", ["train.precision=bf16"]), None, False)
    probe(stage, (received(4, 3),), None, lambda outputs, _: tuple(torch.ones(4, 3, dtype=one.dtype) for one in outputs))
    assert stage.found.norms_take == {"0.0": torch.float32, "1": torch.bfloat16}
    assert not any(module._forward_pre_hooks for layer in layers for module in layer.modules())


class Named(nn.Module):
    """A norm that is given its input by name, as it lies after a transposition."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(input=x.transpose(1, 2))


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_what_norms_take_by_name_is_seen_and_replayed(kind: torch.dtype) -> None:
    stage, plain = make([Named()]), Named()
    x = (torch.randn(4, 5, 3) * 3 + 1).to(kind)
    probe(stage, (x,), None, lambda outputs, _: tuple(map(torch.ones_like, outputs)))
    stage.join_group()
    assert stage.statistics is not None
    for k in range(8):
        x = (torch.randn(4, 5, 3) * 3 + 1).to(kind)
        plain(x)
        out = stage.forward(0, k, (x.clone(),))
        assert out.statistics is not None
        stage.statistics.replay([out.statistics])
    for mine, theirs in zip(stage.layers[0].norm.buffers(), plain.norm.buffers(), strict=True):
        assert torch.equal(mine, theirs)
    assert stage.found.norms_take == {"0.norm": kind}


def test_probe_leaves_no_trace() -> None:
    stage = make([nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 5)], last=True)
    before = {k: v.clone() for layer in stage.layers for k, v in layer.state_dict().items()}
    x = TensorSpec.of(torch.randn(2, 3, 8, 8, requires_grad=True)).zeros()
    specs = probe(stage, (x,), torch.tensor([0, 1]), lambda specs, of: ())
    assert specs[0].shape == (2, 3, 8, 8)
    after = {k: v for layer in stage.layers for k, v in layer.state_dict().items()}
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert all(p.grad is None for p in stage.parameters)
    stage.drained()


def test_tuples_pass_and_unused_inputs_have_no_gradient() -> None:
    class Second(nn.Module):
        def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            return pair[1] * 2

    stage = make([Second()])
    stage.forward(0, 0, (received(2), received(2)))
    first, second = stage.backward(0, 0, (torch.ones(2),))
    assert first is None
    assert second is not None
    assert second.tolist() == [2.0, 2.0]


class Counting(nn.Module):
    """Scales by how often it was called, which a buffer counts."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        if not late:
            self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "calls"):
            self.register_buffer("calls", torch.zeros(()))
        self.calls += 1
        return x * self.weight * self.calls


@pytest.mark.parametrize("late", [(False, False), (True, False), (False, True), (True, True)])
def test_buffers_that_forwards_write_to_are_kept_for_each_micro_batch(late: tuple[bool, bool]) -> None:
    """Also if a forward makes them, which gives those after them other positions."""
    stage = make([Counting(one) for one in late])
    x, (one, two) = received(2, 3), (torch.ones(2, 3), torch.ones(2, 3))
    with trial_of(stage) as trial:
        for _ in range(2):
            trial.probe((x,), None, lambda specs, of: (one,))
    stage.forward(0, 0, (x,))
    stage.forward(0, 1, (x,))
    (first,) = stage.backward(0, 0, (one,))
    (second,) = stage.backward(0, 1, (two,))
    assert torch.equal(first, torch.full((2, 3), 1.0))
    assert torch.equal(second, torch.full((2, 3), 4.0))


def test_a_parameter_used_twice_is_stashed_once() -> None:
    shared = nn.Linear(2, 2)
    stage = make([nn.Sequential(shared, shared)], "1f1b-async")
    assert len(stage.parameters) == 2
    stage.forward(0, 0, (received(1, 2),))
    stage.backward(0, 0, (torch.ones(1, 2),))
    assert stage.parameters[0].grad is not None


def test_layers_that_cannot_be_built() -> None:
    with pytest.raises(UserError, match='layer 1 "bad" cannot be built: ZeroDivisionError'):
        build_layers(as_chain([("good", lambda: nn.ReLU()), ("bad", lambda: 1 / 0)]), 0, 2, 0)
    with pytest.raises(UserError, match='layer 0 "0" is a int'):
        build_layers(as_chain([lambda: 3, nn.ReLU()]), 0, 1, 0)


@pytest.mark.parametrize(
    ("name", "target", "message"),
    [
        (
            "cross_entropy",
            torch.tensor([0, 1, 3]),
            r"outputs \(3, 3\) float32 and targets \(3,\) int64; it wants .*3 is out",
        ),
        ("cross_entropy", torch.zeros(3), r"targets \(3,\) float32; it wants scores \(..., n\) and int64 classes"),
        ("cross_entropy", torch.tensor([0, 1]), r"targets \(2,\) int64; it wants"),
        (
            "mse",
            torch.zeros(3, dtype=torch.int64),
            r'"mse" cannot take .*targets \(3,\) int64: ValueError: the shapes differ',
        ),
        ("torch:sub", torch.zeros(3, 3), "it gives 9 values instead of the mean over samples"),
    ],
)
def test_targets_that_a_loss_cannot_take(name: str, target: torch.Tensor, message: str) -> None:
    with pytest.raises(UserError, match=f"^train.loss: .*{message}"):
        find_loss(name)(torch.zeros(3, 3), target, 3, setting_up=True)


def test_scores_for_each_pixel_have_a_loss_that_takes_them() -> None:
    """Its name was not to be found in the sentence that refused them."""
    output, target = torch.zeros(2, 3, 4, 5), torch.zeros(2, 4, 5, dtype=torch.int64)
    with pytest.raises(
        UserError, match=r'int64 classes .*, and "torch.nn:CrossEntropyLoss" takes scores \(samples, n, ...\)'
    ):
        find_loss("cross_entropy")(output, target, 2, setting_up=True)
    assert find_loss("torch.nn:CrossEntropyLoss")(output, target, 2, setting_up=True).value > 0


def test_a_loss_without_a_gradient_is_refused() -> None:
    """Unless nothing is trained, nothing counts, or it is an evaluation."""

    def run(value: Any, frozen: bool = False) -> None:
        layer = nn.Linear(3, 2).requires_grad_(not frozen)
        job = parse(BASE, "job")
        stage = Stage(Layers(0, ["0"], [layer]), job, Loss("own", lambda output, target: value(output)), False)
        with stage.evaluating():
            stage.evaluate((torch.zeros(4, 3),), torch.zeros(4))
        stage.forward(0, 0, (torch.zeros(4, 3),), target=torch.zeros(4))
        stage.backward(0, 0, ())

    run(torch.Tensor.mean)
    run(torch.Tensor.mean, frozen=True)
    run(lambda output: (torch.zeros(()), 0))
    for detached in (lambda output: output.detach().mean(), lambda output: (output.sum().detach(), 4)):
        with pytest.raises(UserError, match=r'^train.loss: "own" gives a loss without a gradient'):
            run(detached)


class Freezing(nn.Linear):
    """Freezes itself in its first forward, or begins to want gradients in it."""

    def __init__(self, frozen: bool) -> None:
        super().__init__(3, 2)
        self.requires_grad_(frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.requires_grad_(not self.weight.requires_grad if self.training else self.weight.requires_grad)
        return super().forward(x)


@pytest.mark.parametrize("schedule", ["1f1b", "1f1b-async", "1f1b-delayed"])
@pytest.mark.parametrize("frozen", [False, True])
def test_forwards_that_freeze_parameters(schedule: str, frozen: bool) -> None:
    """An evaluation failed where weights have versions."""
    stage = make([nn.Linear(3, 3), Freezing(frozen)], schedule, last=True)
    target, trained = torch.tensor([0, 1]), len(stage.trained)
    stage.forward(0, 0, (received(2, 3),), target=target)
    stage.backward(0, 0, ())
    stage.update(0.1, 0)
    stage.drained()
    with stage.evaluating():
        stage.evaluate((received(2, 3),), target)
    assert len(stage.trained) == trained == (4 if frozen else 2)


def test_losses_are_torchs() -> None:
    output, target = torch.randn(4, 3), torch.randn(4, 3)
    assert torch.equal(find_loss("mse")(output, target, 4).value, nn.functional.mse_loss(output, target))
    classes = torch.tensor([0, 2, 1, -100])
    found = find_loss("cross_entropy")(output, classes, 4)
    assert torch.equal(found.value, nn.functional.cross_entropy(output, classes))
    assert found.count == 3


def test_values_of_8_bits_are_looked_at() -> None:
    """Torch adds up none of them."""
    values = torch.tensor([1.0, -2.0, 448.0] * 4)
    for kind in (torch.float8_e4m3fn, torch.float8_e5m2):
        assert finite([values.to(kind)])
        assert not finite([torch.cat([values, torch.tensor([torch.nan])]).to(kind)])


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "1f1b-async", "1f1b-delayed"])
def test_a_closed_stage_holds_no_memory(schedule: str) -> None:
    """Before the next one is built from it, on a device that has no room for two."""
    stage = make([nn.Linear(3, 3), nn.BatchNorm1d(3)], schedule)
    probe(stage, (received(2, 3),), None, lambda specs, of: (torch.ones(2, 3),))
    stage.join_group()
    gone = [weakref.ref(one) for one in (*stage.parameters, *stage.layers[1].buffers(), *stage._weights.updated)]
    gc.disable()  # it comes late
    try:
        stage.close()
        assert [one() for one in gone] == [None] * len(gone)
    finally:
        gc.enable()

"""Functions that refer to their own module, or to one around it: what they do in a trial or a lane happens to copies."""

import weakref
from typing import Any

import pytest
import torch
from probing import probe
from torch import nn
from torch.nn.utils import prune

from accept_mpi.errors import UserError
from accept_mpi.job_file import parse
from accept_mpi.models.base import Chain
from accept_mpi.models.layers import Layers, build_stage
from accept_mpi.models.losses import Loss
from accept_mpi.pipeline.lane_stage import lane_of
from accept_mpi.pipeline.stage import Stage

JOB = parse('[model]\nname="m"\n[data]\nname="d"\n[train]\nsteps=9\n[output]\ndirectory="r"\n', "job")


class Notes:
    def __init__(self) -> None:
        self.calls = 0


class Warming(nn.Module):
    """Scales what a part gives by the number of forwards, which a hook of the part counts."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0
        self.notes: list[int] = []
        around, notes = self, Notes()
        parts, weak = {"module": self}, weakref.ref(self)

        def buffer(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            around.seen += 1
            return output * around.seen

        def attribute(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            def count() -> None:
                around.calls += 1

            count()
            return output * around.calls

        def default(module: nn.Module, inputs: Any, output: torch.Tensor, around: Any = around) -> torch.Tensor:
            around.calls += 1
            return output * around.calls

        def contained(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            parts["module"].calls += 1  # type: ignore[operator]
            return output * parts["module"].calls

        def weakly(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            here: Any = weak()
            here.calls += 1
            return output * here.calls

        def listed(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            around.notes.append(len(around.notes))
            return output * len(around.notes)

        def in_object(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            notes.calls += 1
            return output * notes.calls

        hooks = {one.__name__: one for one in (buffer, attribute, default, contained, weakly, listed, in_object)}
        self.inner.register_forward_hook(hooks[kind])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


def chain_of(make: Any) -> Chain:
    return Chain(make(), make)


def probed(chain: Chain, start: int, stop: int) -> Stage:
    stage = Stage(build_stage(chain, start, stop, 0), JOB, None, False)
    probe(stage, (torch.randn(3, 4),), None, lambda specs, of: (torch.ones(3, 4),))
    return stage


@pytest.mark.parametrize("kind", ["buffer", "attribute", "default", "contained", "weakly", "listed", "in_object"])
def test_what_hooks_count_in_their_module(kind: str) -> None:
    """Training begins with what the model's function gave, and one rank computes all forwards."""
    stage = probed(chain_of(lambda: [("l0", Warming(kind))]), 0, 1)
    torch.manual_seed(0)
    x = torch.randn(3, 4)
    layer: Any = stage.layers[0]
    first = stage.forward(0, 0, (x,)).outputs[0]
    assert torch.equal(first, nn.functional.linear(x, layer.inner.weight, layer.inner.bias))
    assert stage.found.alone
    assert stage.found.in_turn
    assert stage.found.forgets == (["l0.inner._forward_hooks.0.notes"] if kind == "in_object" else [])


def counting(net: nn.Sequential) -> Any:
    def count(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        net.calls += 1  # type: ignore[operator]
        return output * net.calls

    return count


def around(hooks: tuple[int, ...]) -> Chain:
    """Layers with hooks that count in what is around them all."""

    def make() -> Any:
        net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        net.calls = 0  # type: ignore[assignment]
        for n in hooks:
            net[n].register_forward_hook(counting(net))
        return list(net.named_children())

    return chain_of(make)


def test_what_hooks_count_around_their_module() -> None:
    stage = probed(around((0,)), 0, 2)
    assert stage.found.alone == "a forward changes 0._forward_hooks.0.net"
    assert stage.found.forgets == ["0._forward_hooks.0.net"]
    with pytest.raises(UserError, match=r"layers 0 and 2 have _forward_hooks\.0\.net in common, and a forward changes it"):
        probed(around((0, 2)), 0, 2)
    assert not probed(around((0, 2)), 0, 3).found.parted


def test_hooks_that_only_read_what_is_around_them() -> None:
    def make() -> Any:
        net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        net.scale = 2.0  # type: ignore[assignment]
        for layer in net:
            layer.register_forward_hook(lambda module, inputs, output: output * net.scale)
            layer.register_forward_hook(lambda module, inputs, output: setattr(net, "shown", output.detach()))
        return list(net.named_children())

    stage = probed(chain_of(make), 0, 2)
    assert (stage.found.alone, stage.found.in_turn, stage.found.forgets) == ("", "", [])


def test_a_hook_that_takes_itself_away() -> None:
    """It does so in the first forward of training, not of the trial."""

    def make() -> Any:
        layer = nn.Linear(4, 4)
        handle = layer.register_forward_hook(lambda module, inputs, output: handle.remove() or output + 1)
        return [("l0", layer)]

    stage = probed(chain_of(make), 0, 1)
    layer: Any = stage.layers[0]
    assert len(layer._forward_hooks) == 1
    x = torch.randn(3, 4)
    assert torch.equal(stage.forward(0, 0, (x,)).outputs[0], nn.functional.linear(x, layer.weight, layer.bias) + 1)
    assert not layer._forward_hooks


def test_what_a_loss_counts_in_a_module() -> None:
    """A teacher, say."""
    teacher: Any = nn.Linear(4, 4)
    teacher.calls = 0

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        teacher.calls += 1
        return ((output - teacher(target).detach()) ** 2).mean() * teacher.calls

    stage = Stage(build_stage(chain_of(lambda: [("l0", nn.Linear(4, 4))]), 0, 1, 0, loss), JOB, Loss("own", loss), False)
    probe(stage, (torch.randn(3, 4),), torch.randn(3, 4), lambda specs, of: ())
    assert teacher.calls == 0
    assert stage.found.alone == "a forward changes the loss.teacher"


class Gated(nn.Module):
    """Has a function that uses its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.tensor([0.5, 1.0, 2.0, 4.0]))
        self.act = lambda x: torch.tanh(x * self.gate)
        self.acts = {"act": (self.act,)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(x) + self.acts["act"][0](x)


def test_a_lane_has_the_gradients_of_what_its_functions_use() -> None:
    stage = probed(chain_of(lambda: [("l0", Gated())]), 0, 1)
    stage.join_group()
    lane = lane_of(stage)
    x, gradient = torch.randn(3, 4), torch.randn(3, 4)
    for one in (lane, stage):
        one.forward(0, 0, (x,))
        one.backward(0, 0, (gradient,))
        if one is lane:
            assert stage.exchange_gradients() == [None]
    (found,), (wanted,) = lane.exchange_gradients(), stage.exchange_gradients()
    assert found is not None
    assert wanted is not None
    assert torch.equal(found, wanted)


def test_pruned_layers_are_told_in_words_of_ours() -> None:
    """Torch's are of a protocol."""
    layers = [nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh())]
    prune.l1_unstructured(layers[1][0], "weight", 0.5)
    loss = Loss("own", nn.CrossEntropyLoss())
    stage = Stage(
        Layers(0, ["a", "b"], layers), JOB, loss, False, lambda: Layers(0, ["a", "b"], [nn.Linear(4, 4), layers[1]])
    )
    probe(stage, (torch.randn(3, 4),), torch.tensor([0, 1, 2]), lambda specs, of: ())
    assert stage.found.in_turn.startswith(
        'layer "b" has a tensor that is computed from others, "b.0.weight" (as torch.nn.utils.prune'
    )
    with pytest.raises(UserError, match=r"pipeline.lanes: layers 0 to 1: layer .b. has a tensor"):
        stage.take_turns()

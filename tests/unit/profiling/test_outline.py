"""Outlines: what the meta device says is what the real layers do."""

import pytest
import torch
from torch import nn

from accept_mpi import models
from accept_mpi.codecs.message import HEADER_BYTES
from accept_mpi.codecs.tensors import TensorSpec
from accept_mpi.errors import UserError
from accept_mpi.job_file import parse
from accept_mpi.models import as_chain
from accept_mpi.models.layers import build_layers
from accept_mpi.models.shared import uncuttable
from accept_mpi.pipeline.stage import Stage
from accept_mpi.profiling.outline import Outline, Outliner, outline, outline_of
from accept_mpi.users_code import call_layer

MODELS = {
    "cnn": ({"width": 8}, torch.zeros(3, 3, 8, 8)),
    "mobilenetv2": ({"width": 0.25}, torch.zeros(3, 3, 32, 32)),
    "resnet18": ({}, torch.zeros(3, 3, 32, 32)),
    "gpt": ({"layers": 2, "width": 32, "heads": 2, "context": 16}, torch.zeros(3, 16, dtype=torch.int64)),
}


class _NeedsValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * (1.0 if float(x.sum()) > 1e9 else 2.0)


@pytest.mark.parametrize("name", MODELS)
def test_shapes_and_sizes_are_the_real_ones(name: str) -> None:
    args, inputs = MODELS[name]
    chain = models.load(name, args, 0)
    found = outline(chain, 0, (inputs,))
    assert found.samples == 3
    assert found.channels_last == (name != "gpt")
    if found.channels_last:
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    values: tuple[torch.Tensor, ...] = (inputs,)
    for index, layer in enumerate(found.layers):
        assert layer.inputs == tuple(TensorSpec.of(value) for value in values)
        module = chain.build(index, 0)
        if found.channels_last:
            module.to(memory_format=torch.channels_last)
        assert layer.parameters == sum(p.numel() for p in module.parameters())
        result = module(values[0] if len(values) == 1 else values)
        values = tuple(
            v.detach().requires_grad_(v.requires_grad) for v in (result if isinstance(result, tuple) else (result,))
        )


@pytest.mark.parametrize("name", ["cnn", "gpt"])
def test_memory_held_is_what_a_real_forward_holds(name: str) -> None:
    """The meta device and the real one agree on all layers together; alone, a layer holds its input, too."""
    args, inputs = MODELS[name]
    chain = models.load(name, args, 0)
    found = outline(chain, 0, (inputs,))
    seen: dict[int, int] = {}
    whole = chain.whole(0)
    if found.channels_last:
        whole.to(memory_format=torch.channels_last)
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    own = {t.untyped_storage()._cdata for t in (*whole.parameters(), *whole.buffers())}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        kept = whole(inputs)
    assert kept is not None
    assert sum(layer.saved_bytes for layer in found.layers) == pytest.approx(sum(seen.values()), rel=0.08)


def test_a_layer_that_needs_values_is_run_for_real() -> None:
    chain = as_chain(nn.Sequential(nn.Linear(2, 4), _NeedsValues(), nn.Linear(4, 3)))
    before = {name: value.clone() for name, value in chain.whole(0).state_dict().items()}
    found = outline(chain, 0, (torch.zeros(5, 2),))
    assert [layer.inputs[0].shape for layer in found.layers] == [(5, 2), (5, 4), (5, 4)]
    assert found.layers[1].operations == 2 * 5 * 4 * 4
    for name, value in chain.whole(0).state_dict().items():
        assert torch.equal(value, before[name])


def test_meta_and_real_agree() -> None:
    args, inputs = MODELS["cnn"]
    chain = models.load("cnn", args, 0)
    given = inputs.contiguous(memory_format=torch.channels_last)
    abstract, real = (Outliner(chain, 0, True, abstract=kind).outline(given, len(given)) for kind in (True, False))
    for one, other in zip(abstract.layers, real.layers, strict=True):
        assert (one.inputs, one.parameters, one.operations) == (other.inputs, other.parameters, other.operations)
    assert abstract.key == Outline(abstract.samples, abstract.names, abstract.layers, True).key
    assert abstract.key != outline(chain, 0, (inputs[:2],)).key


def test_a_layer_that_does_not_fit_the_one_before() -> None:
    chain = as_chain(nn.Sequential(nn.Linear(2, 4), nn.Linear(3, 3)))
    with pytest.raises(UserError, match=r'layer 1 "1" cannot take what the layer before gives \(\(5, 4\) float32\)'):
        outline(chain, 0, (torch.zeros(5, 2),))


class Viewing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.size(0), -1)


def test_a_view_of_images_that_lie_in_another_order() -> None:
    given = torch.zeros(5, 3, 6, 6).contiguous(memory_format=torch.channels_last)
    with pytest.raises(UserError, match=r'write reshape for view, or set train\.memory_format = "contiguous"'):
        call_layer(1, "1", Viewing(), given, setting_up=True)


def test_frozen_layers_send_no_gradient() -> None:
    first = nn.Linear(2, 4)
    first.requires_grad_(False)
    found = outline(as_chain([first, nn.Linear(4, 3), nn.Linear(3, 3)]), 0, (torch.zeros(5, 2),))
    assert [layer.inputs[0].grad for layer in found.layers] == [False, False, True]


def test_bf16_crosses_as_bf16_and_has_times_of_its_own() -> None:
    """The outline has training's autocast: a stage's outputs are what it says, and so are bytes of messages."""
    chain = as_chain([nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3)])
    text = '[model]\nname="m"\n[data]\nname="d"\n[train]\nsteps=1\n{}\n[output]\ndirectory="r"\n'
    jobs = [parse(text.format(more), "job") for more in ("", 'precision = "bf16"')]
    single, half = (outline_of(chain, job, (torch.zeros(5, 4),)) for job in jobs)
    stages = [Stage(build_layers(chain, 0, last, 0), jobs[1], None, False) for last in (1, 2)]
    for last, stage in enumerate(stages, 1):
        given = stage.forward(0, 0, (torch.zeros(5, 4),)).outputs
        assert half.layers[last].inputs == tuple(TensorSpec.of(x) for x in given)
    assert [layer.inputs[0].dtype for layer in half.layers[:2]] == ["float32", "bfloat16"]
    assert half.crossing(1) == (5 * 8, 2 * 5 * 8, HEADER_BYTES)
    plain = as_chain([nn.ReLU(), nn.ReLU()])  # which nothing is cast for
    assert len({outline_of(plain, job, (torch.zeros(5, 4),)).key for job in jobs}) == 2
    assert single == outline(chain, 0, (torch.zeros(5, 4),))


class Giving(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(4, 4), kind
        self.register_buffer("table", torch.zeros(5, 4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.linear(x)
        if self.kind == "chunks":
            return h.chunk(2, 1)
        return h, {"view": h.t(), "twice": h, "buffer": self.table, "copy": h.clone()}[self.kind]


class Passing(nn.Module):
    def forward(self, given: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return given


class Writing(nn.Module):
    def forward(self, given: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        h, more = given
        more += 1.0
        return h


PARTED = {"view": {1, 2}, "buffer": {1, 2}, "twice": set(), "chunks": set(), "copy": set()}
"""Of each kind of ``Giving``, where no cut may be. One tensor that is given twice crosses once."""


@pytest.mark.parametrize("kind", PARTED)
def test_what_a_later_layer_writes_into_is_not_cut_off_from_its_other_views(kind: str) -> None:
    """Automatic cuts parted them, which the deployment then refused."""
    chain = as_chain([Giving(kind), Passing(), Writing(), nn.Linear(2 if kind == "chunks" else 4, 3)])
    assert uncuttable(outline(chain, 0, (torch.zeros(5, 4),)).shared, len(chain), True) == PARTED[kind]

"""Backwards that compute their forwards again begin with what these began with."""

import copy

import torch
from probing import probe
from torch import nn

from accept_mpi.job_file import parse
from accept_mpi.models.layers import Layers
from accept_mpi.pipeline.recomputing import Recomputing
from accept_mpi.pipeline.stage import Stage
from accept_mpi.seeds import forward_seed, seed_all

BASE = '[model]\nname="m"\n[data]\nname="d"\n[train]\nsteps=1\n[output]\ndirectory="r"\n'


class Sometimes(nn.Module):
    """Writes into what it is given, for some micro-batches, as blocks that are skipped at random do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.rand(()) > 0.5:
            x.mul_(2)
        return torch.tanh(self.linear(x))


def test_what_only_some_forwards_write_into() -> None:
    """Gradients were those of values that had been doubled twice."""
    torch.manual_seed(0)
    plain = Sometimes()
    stage = Stage(Layers(0, ["a"], [copy.deepcopy(plain)]), parse(BASE, "job"), None, False)
    ones, inputs = torch.ones(3, 4), [torch.randn(3, 4, requires_grad=True) for _ in range(8)]
    probe(stage, (inputs[0].detach().clone().requires_grad_(),), None, lambda specs, of: (ones,))
    stage.compute_again()
    for k, x in enumerate(inputs):
        stage.forward(0, k, (x.detach().clone().requires_grad_(),))
    for k, x in enumerate(inputs):
        (gradient,) = stage.backward(0, k, (ones,))
        seed_all(forward_seed(stage.job.train.seed, 0, k, 0))
        plain(x * 1).sum().backward()
        assert torch.equal(gradient, x.grad)  # type: ignore[arg-type]
    for parameter, other in zip(stage.parameters, plain.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad)  # type: ignore[arg-type]


def test_copies_lie_in_memory_like_what_arrived() -> None:
    """Kernels choose their order of summation by that."""
    part = torch.randn(3, 8).chunk(2, 1)[1]
    given = part, part.expand(2, 3, 4), torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.empty(0, 3)
    kept = Recomputing([]).kept(given, None).tensors
    for one, other in zip(kept, given, strict=True):
        assert one is not None
        assert one.stride() == other.stride()
        assert torch.equal(one, other)
        assert one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr() or not other.numel()

"""Weight gradients that wait for W: with whatever modules do with their layers, they are to the bit what autograd gives."""

from collections.abc import Callable

import pytest
import torch
from probing import probe
from test_stage import make, received
from torch import nn
from torch.func import functional_call
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

WIDTH = 5


class Odd(nn.Module):
    """Uses a linear layer, and another one, as a function says."""

    def __init__(self, uses: Callable[["Odd", torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.conv = nn.Conv1d(1, 1, 3, padding=1)
        self.uses = uses

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.uses(self, x)


def penalty(odd: Odd, x: torch.Tensor) -> torch.Tensor:
    """The gradient of an output by its input is part of the result."""
    x = x if x.requires_grad else x.detach().requires_grad_()
    out = odd.linear(x).tanh()
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return odd.other(out + slope)


def by_own_gradient(odd: Odd, x: torch.Tensor) -> torch.Tensor:
    """The gradient of an output by the weights is part of the result."""
    out = odd.linear(x).tanh()
    (slope,) = torch.autograd.grad(out.sum(), odd.linear.weight, create_graph=True)
    return odd.other(out @ slope)


def now_and_then(odd: Odd, x: torch.Tensor) -> torch.Tensor:
    """A part of the batch takes no gradient."""
    with torch.no_grad():
        target = odd.linear(x)
    return odd.other((odd.linear(x) - target).sin())


def in_low_precision(odd: Odd, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return odd.linear(x).tanh().float() + odd.conv(x[:, None])[:, 0].float()


USES: dict[str, Callable[[Odd, torch.Tensor], torch.Tensor]] = {
    "once": lambda odd, x: odd.other(odd.linear(x).tanh()),
    "twice": lambda odd, x: odd.other(odd.linear(odd.linear(x).tanh()).tanh()),
    "thrice": lambda odd, x: odd.conv(odd.conv(odd.conv(x[:, None]).tanh()).tanh())[:, 0],
    "by name": lambda odd, x: odd.other(input=odd.linear(input=x).tanh()),
    "without a batch": lambda odd, x: torch.stack([odd.conv(row[None])[0] for row in x[:1]]) + odd.linear(x[0]) + x,
    "one row": lambda odd, x: odd.conv(x[:1])[0] + odd.linear(x[0]).tanh() + x,
    "its weight elsewhere": lambda odd, x: odd.linear(x).tanh() @ odd.linear.weight + odd.other(x),
    "its bias elsewhere": lambda odd, x: odd.linear(x).tanh() * odd.linear.bias + odd.other(x),
    "vmap": lambda odd, x: torch.vmap(odd.linear)(x).tanh() + odd.other(x),
    "another weight": lambda odd, x: functional_call(odd.linear, {"weight": odd.other.weight.tanh()}, x) + odd.linear(x),
    "checkpoint": lambda odd, x: odd.other(checkpoint(lambda y: odd.linear(y).tanh(), x, use_reentrant=False)),
    "frozen here": lambda odd, x: odd.other(x) + odd.linear.requires_grad_(not x.sum() > 0)(x).tanh(),
    "not used": lambda odd, x: odd.other(x) if x.sum() > 0 else odd.linear(x),
    "penalty": penalty,
    "by own gradient": by_own_gradient,
    "now and then": now_and_then,
    "in low precision": in_low_precision,
}


def plain(odd: Odd) -> None:
    """As it is."""


def tied(odd: Odd) -> None:
    odd.other.weight = odd.linear.weight


def hooked(odd: Odd) -> None:
    odd.linear.register_forward_hook(lambda module, given, out: out * module.weight.sum())


def normed(odd: Odd) -> None:
    weight_norm(odd.linear)


def of_its_own(odd: Odd) -> None:
    forward = odd.linear.forward
    odd.linear.forward = lambda x: forward(x) * odd.linear.weight.sum()  # type: ignore[method-assign]


def transposed(odd: Odd) -> None:
    odd.linear.weight = nn.Parameter(odd.linear.weight.detach().t().contiguous().t())


def weights_hook(odd: Odd) -> None:
    odd.conv.weight.register_hook(lambda gradient: gradient * 2)
    odd.linear.weight.register_hook(lambda gradient: gradient * 2)


CASES = [("as it is", name, plain, USES[name]) for name in USES]
CASES += [(made.__name__, name, made, USES[name]) for made in (tied, hooked, normed, of_its_own, transposed, weights_hook)
          for name in ("once", "thrice")]  # fmt: skip


@pytest.mark.parametrize(("made", "uses"), [case[2:] for case in CASES], ids=[f"{a}-{b}" for a, b, *_ in CASES])
def test_the_same_bits_as_without(made: Callable[[Odd], None], uses: Callable[[Odd, torch.Tensor], torch.Tensor]) -> None:
    """Three micro-batches of two steps, their W behind the next F, on layers that a trial has looked at, as in a run."""
    results = []
    for schedule in ("1f1b", "zero-bubble"):
        torch.manual_seed(3)
        layers = [Odd(uses), nn.Linear(WIDTH, WIDTH)]
        made(layers[0])
        stage = make(layers, schedule)
        probe(stage, (received(4, WIDTH),), None, lambda outputs, _: tuple(map(torch.ones_like, outputs)))
        found = []
        for step in range(2):
            waiting = -1
            for k in range(3):
                x = (torch.randn(4, WIDTH) + (k - 1)).requires_grad_()
                out = stage.forward(step, k, (x,), version=step).outputs[0]
                if waiting >= 0 and (step, waiting) in stage.in_flight:
                    stage.weight_gradient(step, waiting)
                found += [out.detach().clone(), *stage.backward(step, k, (torch.randn_like(out),))]
                waiting = k
            if (step, waiting) in stage.in_flight:
                stage.weight_gradient(step, waiting)
            found += [p.grad.clone() if p.grad is not None else torch.zeros(()) for p in stage.parameters]
            stage.update(0.1, step)
        stage.drained()
        results.append([*found, *(p.detach().clone() for p in stage.parameters)])
    one, other = results
    assert len(one) == len(other)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))

"""Bases of activations: what crosses comes back, with errors where they matter least."""

import numpy as np
import pytest
import torch

from accept_mpi.codecs.basis import Basis, Learner, packed, unpacked, width_of
from accept_mpi.codecs.coding import parse
from accept_mpi.codecs.message import Label, aligned, buffer_bytes, decode, describe, encode
from accept_mpi.codecs.tensors import TensorSpec
from accept_mpi.errors import ProtocolError
from accept_mpi.tree import LONE

WIDTH, ROWS = 32, 512
CODING = parse("entropy:3+basis", False)


def rows(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Correlated activations (n, t, width) far from zero, and gradients that heed some directions more than others."""
    rng = torch.Generator().manual_seed(seed)
    fixed = torch.Generator().manual_seed(99)
    mix, heed = (torch.randn(WIDTH, WIDTH, generator=fixed) for _ in range(2))
    sizes = torch.logspace(0, -2, WIDTH)
    x = torch.randn(ROWS, WIDTH, generator=rng) * sizes @ mix + 3
    g = torch.randn(ROWS, WIDTH, generator=rng) * sizes @ heed
    return x.view(8, -1, WIDTH).requires_grad_(), g.view(8, -1, WIDTH)


def learned() -> tuple[Learner, dict[int, Basis]]:
    learner = Learner()
    for seed in range(4):
        x, g = rows(seed)
        learner.look(8, (TensorSpec.of(x),), (x.detach().view(-1),))
        learner.look_back(8, (g,))
    return learner, learner.due(12)


def sent(x: torch.Tensor, bases: dict[int, Basis], new: dict[int, Basis], known: dict[int, Basis]) -> torch.Tensor:
    """What arrives of activations that are sent with these bases, of which some are new; ``known``: by who receives."""
    specs = (TensorSpec.of(x),)
    description = describe(specs, LONE, new) if new else b""
    buffer = aligned(buffer_bytes(specs, CODING, description))
    flat = (specs[0].flatten(x),)
    label = Label(0, 0, 1, 0, len(x))
    header = encode(label, specs, flat, buffer, CODING, now=lambda: 0.0, description=description, bases=bases)
    found = decode({len(x): specs}, buffer[: 64 + header.length], CODING, bases=known).tensors[0]
    assert found is not None
    return found.detach()


def test_components_are_turned_back() -> None:
    basis = learned()[1][0]
    x = rows(5)[0].detach()
    assert torch.allclose(basis.returned(basis.turned(x.view(-1))).view_as(x), x, atol=0.02)
    (again,) = unpacked(packed({3: basis})).items()
    assert again[0] == 3
    assert again[1].back.equal(basis.back)
    assert again[1].mean.equal(basis.mean)
    for damaged in (b"", b"\xff", packed({3: basis})[:-1], packed({3: basis._replace(mean=basis.mean[:-1])})):
        with pytest.raises(ProtocolError, match="bases cannot be read"):
            unpacked(damaged)


def test_errors_are_where_they_matter_least() -> None:
    """Weighted by the gradients, they are a third of those without a basis, in as many bytes; without weights, too."""
    learner, new = learned()
    known: dict[int, Basis] = {}
    x, g = rows(7)
    weights = g.reshape(-1, WIDTH).T @ g.reshape(-1, WIDTH)

    def errors(found: torch.Tensor) -> tuple[float, float]:
        e = (found - x.detach()).reshape(-1, WIDTH)
        return float((e @ weights * e).sum()), float(e.square().sum())

    plain = errors(sent(x, {}, {}, {}))
    first = errors(sent(x, learner.bases, new, known))
    assert known.keys() == {0}
    assert errors(sent(x, learner.bases, {}, known)) == first
    assert first[0] < plain[0] / 3
    assert first[1] < plain[1] / 2


def test_what_is_not_finite_comes_uncoded() -> None:
    learner, new = learned()
    known: dict[int, Basis] = {}
    x = rows(7)[0].detach().clone()
    x[0, 0, 0] = torch.inf
    assert sent(x, learner.bases, new, known).equal(x)
    assert known.keys() == {0}


def test_half_precision() -> None:
    learner, new = learned()
    x = rows(7)[0].detach().bfloat16()
    found = sent(x, learner.bases, new, {})
    assert found.dtype == torch.bfloat16
    assert float((found - x).square().mean() / x.float().var()) < 0.02


def test_one_step_is_learned_of_and_only_if_its_gradients_came() -> None:
    x, g = rows(0)
    specs, flat = (TensorSpec.of(x),), (x.detach().view(-1),)
    learner = Learner()
    learner.look(9, specs, flat)
    learner.look_back(9, (g,))
    assert not learner.due(100)
    learner.look(40, specs, flat)
    learner.look(40, specs, flat)
    learner.look_back(40, (g,))
    assert not learner.due(43)
    assert not learner.due(44)
    learner.look(72, specs, flat)
    learner.look_back(72, (g,))
    assert not learner.due(75)
    assert learner.due(76).keys() == {0}
    assert not learner.due(77)
    constant = TensorSpec.of(x.detach())  # no gradient will come
    learner.look(104, (constant,), flat)
    assert learner.due(108).keys() == {0}
    learner.look(136, specs, (flat[0] * np.inf,))
    learner.look_back(136, (g,))
    assert not learner.due(140)


@pytest.mark.parametrize(
    ("tensor", "width"),
    [
        (torch.zeros(8, 16, 64), 64), (torch.zeros(16, 64), 64), (torch.zeros(7, 64), 0), (torch.zeros(64), 0),
        (torch.zeros(99, 8), 0), (torch.zeros(4096, 1025), 0), (torch.zeros(64, 64).T, 0),
        (torch.zeros(64, 64, dtype=torch.int64), 0),
        (torch.zeros(8, 32, 8, 32).contiguous(memory_format=torch.channels_last), 0), (torch.zeros(1, 64).expand(64, 64), 0),
    ],
)  # fmt: skip
def test_rows_that_have_a_basis(tensor: torch.Tensor, width: int) -> None:
    assert width_of(TensorSpec.of(tensor)) == width


def test_names() -> None:
    assert parse("entropy:2.5+basis", False).basis
    for name, gradients, why in (("entropy:3+basis", True, "for activations"), ("uniform:4+basis", False, "unknown codec")):
        with pytest.raises(ValueError, match=why):
            parse(name, gradients)

"""Bases of activations: what crosses comes back, with errors where they matter least."""

import numpy as np
import pytest
import torch

from accept_mpi.codecs.basis import NO_BASES, Bases, Basis, basis_of, packed, seen, unpacked, width_of, with_inverse
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


def learned() -> dict[int, Basis]:
    found = basis_of(sum(seen(*rows(seed), WIDTH) for seed in range(4)))
    assert found is not None
    return {0: found}


def sent(x: torch.Tensor, bases: Bases, new: Bases | None, known: dict[int, Basis]) -> torch.Tensor:
    """What arrives of activations that are sent with these bases. ``new``: what the message
    tells of; ``known``: by who receives."""
    specs = (TensorSpec.of(x),)
    description = b"" if new is None else describe(specs, LONE, new)
    buffer = aligned(buffer_bytes(specs, CODING, description))
    flat = (specs[0].flatten(x),)
    label = Label(0, 0, 1, 0, len(x))
    header = encode(label, specs, flat, buffer, CODING, now=lambda: 0.0, description=description, bases=bases)
    found = decode({len(x): specs}, buffer[: 64 + header.length], CODING, bases=known).tensors[0]
    assert found is not None
    return found.detach()


def test_components_are_turned_back() -> None:
    basis = learned()[0]
    x = rows(5)[0].detach()
    assert torch.allclose(basis.returned(basis.turned(x.view(-1))).view_as(x), x, atol=0.02)
    (again,) = unpacked(packed({3: basis})).items()
    assert again[0] == 3
    assert again[1].back.equal(basis.back)
    assert again[1].mean.equal(basis.mean)
    assert with_inverse(again[1]).to.equal(basis.to)
    for damaged in (b"", b"\xff", packed({3: basis})[:-1], packed({3: basis._replace(mean=basis.mean[:-1])})):
        with pytest.raises(ProtocolError, match="bases cannot be read"):
            unpacked(damaged)


def test_errors_are_where_they_matter_least() -> None:
    """Weighted by the gradients, they are a third of those without a basis, in as many bytes; without weights, too."""
    bases = learned()
    known: dict[int, Basis] = {}
    x, g = rows(7)
    weights = g.reshape(-1, WIDTH).T @ g.reshape(-1, WIDTH)

    def errors(found: torch.Tensor) -> tuple[float, float]:
        e = (found - x.detach()).reshape(-1, WIDTH)
        return float((e @ weights * e).sum()), float(e.square().sum())

    plain = errors(sent(x, NO_BASES, None, {}))
    first = errors(sent(x, bases, bases, known))
    assert known.keys() == {0}
    assert errors(sent(x, bases, None, known)) == first
    assert first[0] < plain[0] / 3
    assert first[1] < plain[1] / 2
    assert errors(sent(x, NO_BASES, NO_BASES, known)) == plain  # from here on without
    assert not known


def test_what_is_not_finite_comes_uncoded() -> None:
    bases = learned()
    known: dict[int, Basis] = {}
    x = rows(7)[0].detach().clone()
    x[0, 0, 0] = torch.inf
    assert sent(x, bases, bases, known).equal(x)
    assert known.keys() == {0}


def test_half_precision() -> None:
    bases = learned()
    x = rows(7)[0].detach().bfloat16()
    found = sent(x, bases, bases, {})
    assert found.dtype == torch.bfloat16
    assert float((found - x).square().mean() / x.float().var()) < 0.02


def test_half_precision_stays_within_its_range() -> None:
    """Where errors would carry values beyond it, and components are larger than any of them."""
    mask = torch.zeros(ROWS, WIDTH)
    mask[ROWS // 2 :] = -65504
    x = mask.half()
    noise = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    basis = basis_of(seen(mask + noise, noise, WIDTH))
    assert basis is not None
    found = sent(x, {0: basis}, {0: basis}, {})
    assert found.isfinite().all()
    assert float((found.float() - mask).abs().max()) < 1000


def test_what_tells_of_no_basis() -> None:
    x, g = rows(0)
    assert basis_of(seen(x.double() * 1e154, g.double(), WIDTH)) is None
    assert basis_of(seen(x.double() * 1e100, g.double(), WIDTH)) is None
    assert basis_of(seen(x * np.inf, g, WIDTH)) is None
    alike = basis_of(seen(x, None, WIDTH))  # no gradient came: all directions are alike
    assert alike is not None
    assert torch.allclose(alike.back.T @ alike.back, torch.eye(WIDTH) * alike.back.square().sum(0), atol=1e-2)
    with pytest.raises(ProtocolError, match="no inverse"):
        with_inverse(Basis(torch.zeros(WIDTH), torch.zeros(WIDTH, WIDTH)))


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

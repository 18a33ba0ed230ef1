"""A basis for activations: what crosses is turned into components that are uncorrelated, and of which errors matter alike.

Of rows x of a tensor (its last dimension) that who sends them has seen in one step, the covariance is C, and of the
gradients that came back for them it is M. y = U' S (x - mean) with S = M ** (1/4) and S C S = U diag U'. An entropy code
with one step for all components then spends bits where variance times importance is (reverse water-filling: Cover and
Thomas, chapter 10). The fourth root stands between no importance at all and all of it (M ** (1/2)), which overrates it: what
one step's gradients say is of that step. Components lie one after the other, so that each block of values
(``kernels.blocks``) is of one.

Who sends learns a basis of one step in 32 (``training.basis_learning``), and keeps it with its stage's state; it
comes in front of the first message that uses it.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

import msgspec
import torch

from accept_mpi.codecs.tensors import Specs, TensorSpec
from accept_mpi.errors import ProtocolError

_EVERY, _FIRST = 32, 8
_LEAST, _MOST = 16, 1024  # components
_FLOOR = 0.01  # of the mean importance, that all components have


class Basis(NamedTuple):
    """Components of rows of ``width`` values: y = ``to`` (x - ``mean``), x = ``back`` y + ``mean``."""

    mean: torch.Tensor
    """(width,) float32."""
    back: torch.Tensor
    """(width, width) float32, of float16's precision."""
    to: torch.Tensor | None = None
    """(width, width) float32; None where values arrive."""

    def turned(self, flat: torch.Tensor) -> torch.Tensor:
        """Components of rows of values (1-D float32), one component after the other."""
        assert self.to is not None
        return (self.to @ (flat.view(-1, len(self.mean)) - self.mean).T).view(-1)

    def returned(self, flat: torch.Tensor) -> torch.Tensor:
        """The rows of which these are the components."""
        return (self.back @ flat.view(len(self.mean), -1)).T.add(self.mean).reshape(-1)


Bases = Mapping[int, Basis]
"""Bases of a message's tensors, by position."""
NO_BASES: Bases = MappingProxyType({})


def no_bases(step: int) -> Bases:
    """Those of what needs none."""
    return NO_BASES


@lru_cache(maxsize=1024)
def width_of(spec: TensorSpec) -> int:
    """Components of a tensor's rows; 0 if it has none that are worth a basis."""
    if spec.dtype == "absent" or not spec.torch_dtype.is_floating_point or len(spec.shape) < 2:
        return 0
    width = spec.shape[-1]
    dense = spec.sent_shape == spec.shape and spec.stride == spec.sent_stride and spec.stride[-1] == 1
    in_order = list(spec.stride) == sorted(spec.stride, reverse=True)
    return width if dense and in_order and _LEAST <= width <= _MOST and 8 * spec.numel >= width * width else 0


def widths_of(agreed: Iterable[Specs]) -> dict[int, int]:
    """Components of a message's tensors, by position, where there are any. ``agreed``: specs of all usual messages."""
    found: dict[int, int] = {}
    for specs in agreed:
        found |= {n: width for n, spec in enumerate(specs) if (width := width_of(spec))}
    return found


def packed(bases: Bases) -> bytes:
    """Bases as bytes."""
    return msgspec.msgpack.encode(
        {n: (one.mean.numpy().tobytes(), one.back.half().numpy().tobytes()) for n, one in bases.items()}
    )


def unpacked(data: bytes) -> dict[int, Basis]:
    """What ``packed`` made bytes of. Raises ProtocolError."""
    try:
        found = {}
        for n, (mean, back) in msgspec.msgpack.decode(data, type=dict[int, tuple[bytes, bytes]]).items():
            width = len(mean) // 4
            turns = torch.frombuffer(bytearray(back), dtype=torch.float16).view(width, width).float()
            found[n] = Basis(torch.frombuffer(bytearray(mean), dtype=torch.float32), turns)
            if not (turns.isfinite().all() and found[n].mean.isfinite().all()):
                raise ValueError("they are not finite")
        return found
    except (msgspec.DecodeError, ValueError, RuntimeError) as error:
        raise ProtocolError(f"a message's bases cannot be read: {error}") from error


def learns(step: int) -> bool:
    """True for steps (from 0) of which bases are learned: one soon after the beginning, and then one in many."""
    return step % _EVERY == _FIRST


def seen(values: torch.Tensor, gradient: torch.Tensor | None, width: int) -> torch.Tensor:
    """What a micro-batch says of a basis: (2 width + 2, width) float64, which add up over micro-batches. ``values``,
    ``gradient``: of the same shape, rows of ``width``."""
    found = torch.zeros(2 * width + 2, width, dtype=torch.float64)
    rows = values.detach().reshape(-1, width).to("cpu", torch.float64)
    torch.mm(rows.T, rows, out=found[:width])
    if gradient is not None:
        back = gradient.detach().reshape(-1, width).to("cpu", torch.float64)
        torch.mm(back.T, back, out=found[width : 2 * width])
    torch.sum(rows, 0, out=found[2 * width])
    found[-1] = len(rows)
    return found


def basis_of(sums: torch.Tensor) -> Basis | None:
    """The basis that sums of ``seen`` tell of; None if they are not finite, or too large to reckon with."""
    width = sums.shape[1]
    rows = sums[-1, 0]
    mean = sums[-2] / rows
    covariance = sums[:width] / rows - torch.outer(mean, mean)
    importance = sums[width : 2 * width]
    trace = float(importance.trace())
    importance = importance * (width / trace) if trace > 0 else torch.zeros_like(importance)
    importance.diagonal().add_(_FLOOR)
    if not (covariance.isfinite().all() and importance.isfinite().all()):
        return None
    try:
        values, vectors = torch.linalg.eigh(importance)
        root, inverse = ((vectors * values**power) @ vectors.T for power in (0.25, -0.25))
        back = (inverse @ torch.linalg.eigh(root @ covariance @ root)[1]).half().float()
    except torch.linalg.LinAlgError:  # float64's range does not do
        return None
    mean = mean.float()
    return with_inverse(Basis(mean, back)) if back.isfinite().all() and mean.isfinite().all() else None


def with_inverse(basis: Basis) -> Basis:
    """The basis as who sends needs it. Raises ProtocolError if there is no inverse."""
    try:
        return basis._replace(to=torch.linalg.inv(basis.back.double()).float())
    except RuntimeError as error:
        raise ProtocolError(f"a basis has no inverse: {error}") from error

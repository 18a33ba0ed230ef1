"""A basis for activations: what crosses is turned into components that are uncorrelated, and of which errors matter alike.

Of rows x of a tensor (its last dimension) that who sends them has seen in one step, the covariance is C, and of the
gradients that came back for them it is M. y = U' S (x - mean) with S = M ** (1/4) and S C S = U diag U'. An entropy code
with one step for all components then spends bits where variance times importance is (reverse water-filling: Cover and
Thomas, chapter 10). The fourth root stands between no importance at all and all of it (M ** (1/2)), which overrates it: what
one step's gradients say is of that step. Components lie one after the other, so that each block of values
(``kernels.blocks``) is of one.

Who sends learns a basis of one step in ``_EVERY``, and sends it in front of the first message that uses it. Nothing else
has to be kept at both ends; what is lost with a rank is learned anew.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec
import torch

from accept_mpi.codecs.tensors import Specs, Tensors, TensorSpec
from accept_mpi.errors import ProtocolError

_EVERY, _FIRST = 32, 8
_LATER = 4  # steps after which all gradients of a step have come, in an asynchronous schedule, too
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


@lru_cache(maxsize=1024)
def width_of(spec: TensorSpec) -> int:
    """Components of a tensor's rows; 0 if it has none that are worth a basis."""
    if spec.dtype == "absent" or not spec.torch_dtype.is_floating_point or len(spec.shape) < 2:
        return 0
    width = spec.shape[-1]
    dense = spec.sent_shape == spec.shape and spec.stride == spec.sent_stride and spec.stride[-1] == 1
    in_order = list(spec.stride) == sorted(spec.stride, reverse=True)
    return width if dense and in_order and _LEAST <= width <= _MOST and 8 * spec.numel >= width * width else 0


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
        return found
    except (msgspec.DecodeError, ValueError, RuntimeError) as error:
        raise ProtocolError(f"a message's bases cannot be read: {error}") from error


class _Seen:
    """Sums over the rows of a step."""

    def __init__(self, width: int) -> None:
        self.rows = self.returned = 0
        self.sum = torch.zeros(width, dtype=torch.float64)
        self.squares, self.gradients = (torch.zeros(width, width, dtype=torch.float64) for _ in range(2))

    def basis(self) -> Basis | None:
        """None if there is nothing to tell of."""
        mean = self.sum / self.rows
        covariance = self.squares / self.rows - torch.outer(mean, mean)
        trace, width = float(self.gradients.trace()), len(mean)
        importance = self.gradients * (width / trace) if trace > 0 else torch.zeros_like(self.gradients)
        importance.diagonal().add_(_FLOOR)
        if not (covariance.isfinite().all() and importance.isfinite().all()):
            return None
        values, vectors = torch.linalg.eigh(importance)
        root, inverse = ((vectors * values**power) @ vectors.T for power in (0.25, -0.25))
        turns = torch.linalg.eigh(root @ covariance @ root)[1]
        back = (inverse @ turns).half().float()
        return Basis(mean.float(), back, (turns.T @ root).float().contiguous()) if back.isfinite().all() else None


class Learner:
    """Learns the bases of a channel's activations, where they are sent."""

    def __init__(self) -> None:
        self.bases: dict[int, Basis] = {}
        """Those in use."""
        self._step = -1
        self._seen: dict[int, _Seen] = {}
        self._wanting: list[int] = []
        """Positions of the tensors for which gradients come."""

    def look(self, step: int, specs: Specs, flat: Tensors) -> None:
        """See the activations (1-D) of a micro-batch in training."""
        if step % _EVERY != _FIRST:
            return
        if step != self._step:
            self._step, self._seen = step, {}
        self._wanting = [n for n, spec in enumerate(specs) if spec.grad]
        for n, (spec, values) in enumerate(zip(specs, flat, strict=True)):
            if values is None or not (width := width_of(spec)):
                continue
            if n not in self._seen:
                self._seen[n] = _Seen(width)
            if len((seen := self._seen[n]).sum) == width:
                rows = values.view(-1, width).double()
                seen.rows += len(rows)
                seen.sum += rows.sum(0)
                seen.squares += rows.T @ rows

    def look_back(self, step: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """See the gradients that came for a micro-batch."""
        for n, gradient in zip(self._wanting, gradients, strict=False) if step == self._step else ():
            if (seen := self._seen.get(n)) is not None and gradient is not None and gradient.shape[-1] == len(seen.sum):
                rows = gradient.detach().reshape(-1, len(seen.sum)).double()
                seen.returned += len(rows)
                seen.gradients += rows.T @ rows

    def due(self, step: int) -> dict[int, Basis]:
        """The bases that are new from this step on."""
        if self._step < 0 or step < self._step + _LATER:
            return {}
        seen, self._seen, self._step = self._seen, {}, -1
        complete = {n: one for n, one in seen.items() if one.rows == one.returned or n not in self._wanting}
        found = {n: basis for n, one in complete.items() if (basis := one.basis()) is not None}
        self.bases |= found
        return found

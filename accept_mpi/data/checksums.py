"""Checksums of what a data set gives, which two hosts with the same data have alike.

Whole numbers are compared by their bits. Floating-point numbers that a data set computes differ in their last bits between
kinds of processors, so of them a random projection is compared instead, to within a tolerance.
"""

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from xxhash import xxh3_64

from accept_mpi.users_code import taken_apart

_TOLERANCE = 1e-3
_BLOCK, _SHIFT = 1 << 16, 7919
_Floats = npt.NDArray[np.float64]


class Checksum(NamedTuple):
    """Checksum of one value."""

    digest: int
    """Of the value's tree, of the shapes and dtypes of its tensors, of whole numbers, and of where others are not finite."""
    projection: float
    """All finite floating-point numbers, each times a random weight, added up and divided by their norm."""
    norm: float

    def matches(self, other: "Checksum") -> bool:
        """True if both are of the same value, floating-point numbers up to rounding."""
        return (
            self.digest == other.digest
            and math.isclose(self.norm, other.norm, rel_tol=_TOLERANCE)
            and abs(self.projection - other.projection) <= _TOLERANCE
        )


def checksum(value: Any) -> Checksum:
    """Checksum of a value that a data set gave. Raises UserError for what is no tree of tensors."""
    digest = xxh3_64()
    tensors, of = taken_apart(-1, "", value)
    digest.update(of)
    floats: list[_Floats] = []
    for tensor in map(torch.Tensor.detach, tensors):
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        if not tensor.is_floating_point():
            digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
            continue
        for part in tensor.cpu().reshape(-1).split(_BLOCK):
            numbers = part.double().numpy()
            if not (finite := np.isfinite(numbers)).all():
                kinds = np.where(finite, 0, np.where(np.isnan(numbers), 2, np.sign(numbers)))
                digest.update(kinds.astype(np.int8).tobytes())
                numbers = np.where(finite, numbers, 0.0)
            floats.append(numbers)
    return Checksum(digest.intdigest(), *_projected(floats))


def same(mine: dict[int, Checksum], others: dict[int, Checksum]) -> bool:
    """True if all of ``mine`` match those of ``others`` under the same keys."""
    return all(one.matches(others[k]) for k, one in mine.items())


def _projected(blocks: list[_Floats]) -> tuple[float, float]:
    """Projection and norm of numbers that come in blocks."""
    most = max((float(np.abs(block).max(initial=0.0)) for block in blocks), default=0.0)
    if not most:
        return 0.0, 0.0
    along = square = 0.0
    for number, block in enumerate(blocks):
        begin = number * _SHIFT % _BLOCK
        scaled = block / most  # squares would overflow
        along += float(scaled @ _weights()[begin : begin + len(block)])
        square += float(scaled @ scaled)
    return along / math.sqrt(square), most * math.sqrt(square)


@cache
def _weights() -> _Floats:
    """Random weights, the same everywhere, for a block that begins anywhere in the first half. No two are alike, so that
    numbers that have changed places show."""
    weights = np.random.Generator(np.random.Philox(0)).uniform(-math.sqrt(3), math.sqrt(3), _BLOCK)
    return np.tile(weights, 2)

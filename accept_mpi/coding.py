"""Codecs by name: what is done to a floating-point tensor's values on the wire.

``none``: as they are. ``bf16``, ``fp16``: half the bytes. ``uniform:B``: B = 1..8 bits a value in groups of 64 that share a
zero point and a scale (kernels/uniform.py); ``uniform:B/G`` sets the group, 0 for the whole tensor; ``+sr`` rounds
stochastically (unbiased; the default for gradients, AccEPT), ``+nr`` to nearest (the default for activations).
"""

import re
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from accept_mpi.imports import nearest

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Kind = Literal["none", "bf16", "fp16", "uniform"]
KINDS: tuple[Kind, ...] = ("none", "bf16", "fp16", "uniform")
_EXAMPLES = "none, bf16, fp16, uniform:4, uniform:2/256+sr"


class Coding(msgspec.Struct, frozen=True):
    """A codec with its options."""

    kind: Kind = "none"
    bits: int = 0
    group: int = 0
    stochastic: bool = False

    @property
    def number(self) -> int:
        """How headers call it."""
        return KINDS.index(self.kind)

    def nbytes(self, values: int) -> int:
        """Bytes that ``encode`` writes for ``values`` values."""
        if self.kind != "uniform":
            return 2 * values
        from accept_mpi.kernels.uniform import encoded_bytes

        return encoded_bytes(values, self.bits, self.group)

    def encode(self, x: Floats, out: Bytes, key: int) -> bool:
        """Code ``x`` (1-D float32) into ``out``; False where it cannot be coded: not finite, or too large.

        ``key``: 64 bits that decide stochastic rounding.
        """
        if self.kind == "bf16":
            from accept_mpi.kernels import half as kernels

            kernels.to_bf16(x.view(np.uint32), out.view(np.uint16))
            return True
        if self.kind == "fp16":
            half = out.view(np.float16)
            with np.errstate(over="ignore"):
                np.copyto(half, x, casting="same_kind")
            return bool(np.isfinite(half).all())
        from accept_mpi.kernels import uniform

        return uniform.encode(x, self.bits, self.group, out, key if self.stochastic else None) == uniform.CODED

    def decode(self, data: Bytes, x: Floats) -> None:
        """The values that ``encode`` wrote, into ``x``."""
        if self.kind == "bf16":
            from accept_mpi.kernels import half as kernels

            kernels.from_bf16(data.view(np.uint16), x.view(np.uint32))
        elif self.kind == "fp16":
            np.copyto(x, data.view(np.float16))
        else:
            from accept_mpi.kernels import uniform

            uniform.decode(data, self.bits, self.group, x)


NONE = Coding()


def parse(text: str, gradients: bool) -> Coding:
    """A codec from its name. Raises ValueError with a sentence."""
    if text in ("none", "bf16", "fp16"):
        return Coding(text)  # type: ignore[arg-type]
    found = re.fullmatch(r"uniform:(\d+)(?:/(\d+))?(\+sr|\+nr)?", text)
    if not found:
        raise ValueError(f'unknown codec "{text}"{nearest(text.partition(":")[0], list(KINDS))} (examples: {_EXAMPLES})')
    bits, group = int(found[1]), int(found[2]) if found[2] else 64
    if not 1 <= bits <= 8:
        raise ValueError(f'codec "{text}": 1 to 8 bits, not {bits}')
    if group and (group < 8 or group > 16384 or group & (group - 1)):
        raise ValueError(
            f'codec "{text}": a group is a power of two from 8 to 16384, or 0 for the whole tensor, not {group}'
        )
    stochastic = gradients if found[3] is None else found[3] == "+sr"
    return Coding("uniform", bits, group, stochastic)


def prepare(codings: list[Coding]) -> None:
    """Compile what these codecs need, before any clock starts."""
    kinds = {coding.kind for coding in codings}
    if "uniform" in kinds:
        import accept_mpi.kernels.uniform  # compiles as it is imported
    if "bf16" in kinds:
        import accept_mpi.kernels.half  # noqa: F401  # the same

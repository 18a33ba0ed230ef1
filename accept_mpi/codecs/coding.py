"""Codecs by name: how a floating-point tensor's values are coded on the wire.

``none``: not at all. ``bf16``, ``fp16``: in half the bytes; ``fp16`` with a power of two for each tensor (``_shift``).
``uniform:B``: in B = 1..8 bits per value, in groups of 64 that share a zero point and a scale (kernels/uniform.py);
``uniform:B/G`` sets the group size, 0 for the whole tensor; ``+sr`` rounds stochastically (unbiased; the default for
gradients, AccEPT), ``+nr`` to nearest (the default for activations).
``mbq:B``, ``mbq:B/G``: in B = 1..4 bits per value by multi-bit quantization (kernels/mbq.py). ``entropy:R``: in R = 1.5..10
bits per value, all included, such as 4.5, by uniform quantization and an entropy code (kernels/entropy.py); rounding as in
``uniform``. ``entropy:R+basis``, of activations: the same, of components in a basis that is learned (``codecs.basis``).
"""

import math
import re
from collections.abc import Iterable
from functools import cache
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from accept_mpi.kernels.cache import compiled
from accept_mpi.registry import nearest

Bytes = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]
CodecKind = Literal["none", "bf16", "fp16", "uniform", "mbq", "entropy"]
KINDS: tuple[CodecKind, ...] = ("none", "bf16", "fp16", "uniform", "mbq", "entropy")
_EXAMPLES = "none, bf16, fp16, uniform:4, uniform:2/256+sr, mbq:2, entropy:4.5"
_MODULES = {"bf16": ("half",), "uniform": ("uniform", "uniform_decoder"), "mbq": ("mbq",), "entropy": ("entropy",)}
"""Modules of kernels: the first one encodes, the last one decodes."""
_BITS = {"uniform": (1, 8), "mbq": (1, 4), "entropy": (1.5, 10)}
_SHIFT_BYTES = 2  # behind the values of fp16
_LARGEST_EXPONENT = 15  # of numbers below 2 ** 15, half of what fp16 can hold
_MOST_SHIFT = 126  # 2 ** 127 is the largest factor of single precision


class Coding(msgspec.Struct, frozen=True):
    """A codec with its options."""

    kind: CodecKind = "none"
    bits: float = 0
    """Per value; whole numbers except for ``entropy``."""
    group: int = 0
    """Values that share parameters; 0: the whole tensor."""
    stochastic: bool = False
    """True: round stochastically, without bias."""
    basis: bool = False
    """True: code components in a basis that is learned, which comes with the first message that uses it."""

    @property
    def number(self) -> int:
        """Number of the codec in message headers."""
        return KINDS.index(self.kind)

    def nbytes(self, values: int) -> int:
        """Bytes that ``encode`` writes for ``values`` values."""
        if self.kind in ("bf16", "fp16"):
            return 2 * values + (_SHIFT_BYTES if self.kind == "fp16" else 0)
        return _kernels(self.kind, 0).encoded_bytes(values, self.bits, self.group)

    def encode(self, x: F32, out: Bytes, key: int) -> bool:
        """Code ``x`` (1-D float32) into ``out``; False if it cannot be coded: not finite (but for bf16, which
        has infinities), or too large.

        ``key``: 64 bits that determine stochastic rounding.
        """
        if self.kind == "bf16":
            return bool(_kernels("bf16", 0).to_bf16(x.view(np.uint32), out.view(np.uint16)))
        if self.kind == "fp16":
            half, shift = out[:-_SHIFT_BYTES].view(np.float16), _shift(x)
            with np.errstate(over="ignore"):
                np.copyto(half, x * np.float32(2.0**shift) if shift else x, casting="same_kind")
            out[-_SHIFT_BYTES:].view(np.int16)[:] = shift
            return bool(np.isfinite(half).all())
        kernels = _kernels(self.kind, 0)
        if self.stochastic:
            return kernels.encode(x, self.bits, self.group, out, key) == kernels.CODED
        return kernels.encode(x, self.bits, self.group, out) == kernels.CODED

    def decode(self, data: Bytes, x: F32) -> None:
        """Decode the values that ``encode`` wrote into ``x`` (1-D float32)."""
        if self.kind == "bf16":
            _kernels("bf16", -1).from_bf16(data.view(np.uint16), x.view(np.uint32))
        elif self.kind == "fp16":
            np.copyto(x, data[:-_SHIFT_BYTES].view(np.float16))
            if shift := min(max(int(data[-_SHIFT_BYTES:].view(np.int16)[0]), 0), _MOST_SHIFT):
                x *= np.float32(2.0**-shift)
        else:
            _kernels(self.kind, -1).decode(data, self.bits, self.group, x)


NONE = Coding()


def _shift(x: F32) -> int:
    """Powers of two by which fp16 multiplies values that are all below 1, so that the largest is near its own largest: else
    what is below 6e-8, as many gradients are, would be lost."""
    most = float(max(x.max(), -x.min()))
    return min(_LARGEST_EXPONENT - math.frexp(most)[1], _MOST_SHIFT) if 0.0 < most < 1.0 else 0


def parse(text: str, gradients: bool) -> Coding:
    """Codec with this name; ``gradients`` sets the default rounding. Raises ValueError with a sentence."""
    if text in ("none", "bf16", "fp16"):
        return Coding(text)  # type: ignore[arg-type]
    found = re.fullmatch(r"(uniform|mbq|entropy):(\d+(?:\.\d+)?)(?:/(\d+))?(\+sr|\+nr)?(\+basis)?", text)
    kind, digits, size, rounding, basis = found.groups() if found else ("", "", None, None, None)
    if not found or (size is not None if kind == "entropy" else "." in digits or basis):
        kind = text.partition(":")[0]
        hint = "" if kind in KINDS else nearest(kind, list(KINDS))
        raise ValueError(f'unknown codec "{text}"{hint} (examples: {_EXAMPLES})')
    bits: float = float(digits) if kind == "entropy" else int(digits)
    group = 0 if kind == "entropy" else int(size) if size else 64
    least, most = _BITS[kind]
    if not least <= bits <= most:
        raise ValueError(f'codec "{text}": {least} to {most} bits, not {digits}')
    if group and (group < 8 or group > 16384 or group & (group - 1)):
        raise ValueError(
            f'codec "{text}": a group is a power of two from 8 to 16384, or 0 for the whole tensor, not {group}'
        )
    if kind == "mbq" and rounding:
        raise ValueError(f'codec "{text}": mbq always takes the nearest level, without {rounding}')
    if basis and gradients:
        raise ValueError(f'codec "{text}": a basis is for activations')
    stochastic = kind != "mbq" and (gradients if rounding is None else rounding == "+sr")
    return Coding(kind, bits, group, stochastic, bool(basis))  # type: ignore[arg-type]


def _kernels(kind: CodecKind, which: int) -> Any:
    return compiled(_MODULES[kind][which])


def kernels_of(codings: Iterable[Coding]) -> list[str]:
    """Modules of kernels (``kernels.cache``) that these codecs need."""
    return sorted({module for coding in codings for module in _MODULES.get(coding.kind, ())})


@cache
def bits_of(name: str) -> float:
    """Bits per value that a codec takes, side information included."""
    coding = parse(name, False)
    return 32.0 if coding.kind == "none" else 8 * coding.nbytes(1 << 16) / (1 << 16)

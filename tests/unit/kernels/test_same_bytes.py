"""Machines of any kind code equal values as equal bytes, and decode them to equal values, since a cluster may be of several
kinds. The digests below are those of x86-64 and of 64-bit ARM."""

import hashlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from accept_mpi.kernels.cache import compiled
from accept_mpi.kernels.groups import CODED

KEY = 12345678901234567
CASES = {
    "uniform": ("uniform", "uniform_decoder", range(1, 9), (0, 256), ((None,), (KEY,)), "8970ce758d486e27"),
    "mbq": ("mbq", "mbq", range(1, 5), (0, 256), ((),), "914b56e012664bc5"),
    "entropy": ("entropy", "entropy", (1.5, 2.0, 2.5, 3.5, 4.5, 6.0), (0,), ((None,), (KEY,)), "dd86fbf4aff2493b"),
}
"""Modules that encode and decode, bits, groups, more arguments (a key) and digest, by codec."""


def values() -> Iterator[npt.NDArray[np.float32]]:
    """Made of Philox's integers and single operations, which are the same on all machines."""
    for count in (1, 7, 300, 16_385):
        drawn = np.random.Generator(np.random.Philox(count)).integers(0, 1 << 24, count)
        even = (drawn.astype(np.float32) / np.float32(1 << 22)) - np.float32(2)
        holes = even.copy()
        holes[::3] = 0
        yield from (even, holes, even * even * even, even * np.float32(1e-39))


@pytest.mark.parametrize("codec", CASES)
def test_bytes_and_values(codec: str) -> None:
    encoder, decoder, rates, groups, keys, expected = CASES[codec]
    coder, decode = compiled(encoder), compiled(decoder).decode
    digest = hashlib.sha256()
    for plain in values():
        for bits in rates:
            for group in groups:
                for key in keys:
                    nbytes = coder.encoded_bytes(plain.size, bits, group)
                    coded = np.zeros(-(-nbytes // 4), np.uint32).view(np.uint8)[:nbytes]
                    found = np.empty_like(plain)
                    assert coder.encode(plain, bits, group, coded, *key) == CODED
                    decode(coded, bits, group, found)
                    digest.update(coded.tobytes() + found.tobytes())
    assert digest.hexdigest()[:16] == expected

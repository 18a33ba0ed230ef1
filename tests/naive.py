"""Naive references for the kernels: slow, plain, obviously right. Tests compare against them."""

import numpy as np


def checksum(data: np.ndarray) -> int:
    """See ``kernels/checksum.py``: plain and weighted sums of 32-bit words, modulo 2^64."""
    raw = data.tobytes()
    mask = (1 << 64) - 1
    plain = weighted = 0
    whole = len(raw) & ~3
    for i in range(0, whole, 4):
        word = int.from_bytes(raw[i : i + 4], "little")
        plain = (plain + word) & mask
        weighted = (weighted + word * (i // 4 + 1)) & mask
    total = weighted ^ (plain << 29) & mask ^ plain >> 35
    total += int.from_bytes(raw[whole:], "little") * (whole // 4 + 1)
    return (total ^ len(raw) * 0x9E3779B97F4A7C15) & mask

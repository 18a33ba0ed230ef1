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


def to_bfloat16(value: float, up: bool) -> np.float32:
    """``value`` (a float32) in bfloat16, rounded towards plus or minus infinity."""
    bits = int(np.float32(value).view(np.uint32))
    negative = bits >> 31 == 1
    if negative != up:  # away from zero
        bits += 0xFFFF
    return np.uint32(bits & 0xFFFF0000).view(np.float32)


def order(value: np.float32) -> tuple[float, bool]:
    """Numbers in order, -0.0 before 0.0."""
    return float(value), not np.signbit(value)


def random_float(number: int, key: int) -> np.float32:
    """The uniform number that stochastic rounding adds to value ``number``: see ``_round_stochastically``."""
    mask = 0xFFFFFFFF
    h = ((number + key) & mask) * 0x9E3779B1 & mask
    h = (h ^ h >> 15) ^ (key >> 32)
    h = h * 0x85EBCA77 & mask
    h = (h ^ h >> 13) * 0xC2B2AE3D & mask
    return np.float32(h >> 8) * np.float32(1 / (1 << 24))


def uniform(x: np.ndarray, bits: int, group: int, key: int | None = None) -> tuple[bytes, np.ndarray]:
    """What ``kernels/uniform.py`` writes for finite ``x`` and what it reads back, value by value."""
    levels, words, codes, back = (1 << bits) - 1, [], [], []
    size = group or max(len(x), 1)
    for begin in range(0, len(x), size):
        part = x[begin : begin + size]
        least, most = min(part, key=order), max(part, key=order)
        zero = to_bfloat16(least, up=False)
        scale = to_bfloat16((most - zero) * (np.float32(1) / np.float32(levels)), up=True)
        if scale < np.float32(1.1754943508222875e-38):
            scale = np.float32(0)
        inverse = np.float32(1) / scale if scale > 0 else np.float32(0)
        words.append(int(zero.view(np.uint32)) | int(scale.view(np.uint32)) >> 16)
        for i, value in enumerate(part):
            add = np.float32(0.5) if key is None else random_float(begin + i, key)
            codes.append(int(min((value - zero) * inverse + add, np.float32(levels))))
            back.append(zero + scale * np.float32(codes[-1]))
    packed = b""
    for begin in range(0, len(codes), 16384):
        block = codes[begin : begin + 16384]
        block += [0] * (-len(block) % 8)
        shift = 0
        for width in (8, 4, 2, 1):
            if bits & width:
                h = len(block) * width // 8
                plane = [0] * h
                for i, code in enumerate(block):
                    plane[i % h] |= (code >> shift & (1 << width) - 1) << width * (i // h)
                packed += bytes(plane)
                shift += width
    return np.array(words, np.uint32).tobytes() + packed, np.array(back, np.float32)

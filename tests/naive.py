"""Naive references for the kernels: slow, plain, obviously right. Tests compare against them."""

import itertools

import numpy as np


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


def random_bits(number: int, key: int) -> int:
    """16 bits of a hash for value ``number``; two values share one, half each."""
    block, place = divmod(number, 16384)
    half, place = divmod(place, 8192)
    return whole_hash(16384 * block + place + key, key >> 32) >> 16 * half & 0xFFFF


def whole_hash(number: int, key: int) -> int:
    """32 bits of a hash."""
    mask = 0xFFFFFFFF
    h = (number & mask) * 0x9E3779B1 & mask
    h = (h ^ h >> 15) ^ key
    h = h * 0x85EBCA77 & mask
    h = (h ^ h >> 13) * 0xC2B2AE3D & mask
    return h ^ h >> 16


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
            level = (value - zero) * inverse
            if key is None:
                codes.append(int(min(level + np.float32(0.5), np.float32(levels))))
            else:
                fixed = int(min(level * np.float32(65536) + np.float32(0.5), np.float32(65536 * levels)))
                codes.append((fixed + random_bits(begin + i, key)) >> 16)
            back.append(zero + scale * np.float32(codes[-1]))
    packed = pack(codes, bits)
    return np.array(words, np.uint32).tobytes() + packed, np.array(back, np.float32)


def nearest_bfloat16(value: np.float32) -> np.float32:
    """``value`` in bfloat16, ties to even."""
    bits = int(np.float32(value).view(np.uint32))
    bits += 0x7FFF + (bits >> 16 & 1)
    return np.uint32(bits & 0xFFFF0000).view(np.float32)


def pack(codes: list[int], bits: int) -> bytes:
    """See ``kernels/packing.py``."""
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
    return packed


def mbq_levels(fit: list[np.float32]) -> list[tuple[np.float32, tuple[int, ...]]]:
    """All values that center and scales reach, in rising order, each with its signs."""
    levels = [(fit[0], (1,))]
    for scale in fit[1:]:
        levels = [(v - scale, (*s, -1)) for v, s in levels] + [(v + scale, (*s, 1)) for v, s in levels]
    return sorted(levels, key=lambda level: (level[0], level[1][::-1]))  # of equal ones, that with the smaller code first


def mbq(x: np.ndarray, bits: int, group: int) -> tuple[bytes, np.ndarray]:
    """What ``kernels/mbq.py`` writes for finite ``x`` and what it reads back, group by group."""
    words, ranks, back = [], [], []
    size = group or max(len(x), 1)
    f32 = np.float32
    for begin in range(0, len(x), size):
        part = x[begin : begin + size]
        least, extent = min(part), max(part) - min(part)
        scale, step = (f32(65535) / extent, extent / f32(65535)) if extent > f32(1e-30) else (f32(0), f32(0))
        v = [int((value - least) * scale) for value in part]
        # Greedily.
        fit, middle, r = [], 0, v
        for _ in range(bits + 1):
            r = [abs(value - middle) for value in r]
            fit.append(f32(sum(r) * (1 / len(v))))
            middle = int(fit[-1] + f32(0.5))
        # Alternating.
        for _ in range(2):
            levels = mbq_levels(fit)
            thresholds = [int((a[0] + b[0]) * f32(0.5)) for a, b in itertools.pairwise(levels)]
            nearest = [sum(value > t for t in thresholds) for value in v]
            numbers = [nearest.count(q) for q in range(len(levels))]
            sums = [sum(value for value, n in zip(v, nearest, strict=True) if n == q) for q in range(len(levels))]
            distances = [s - n * float(level[0]) for s, n, level in zip(sums, numbers, levels, strict=True)]
            for _ in range(2):
                for k in range(bits + 1):
                    error = 0.0
                    for d, (_, signs) in zip(distances, levels, strict=True):
                        error += signs[k] * d
                    move = error * (1 / len(v))
                    fit[k] = f32(fit[k] + move)
                    distances = [
                        d - signs[k] * (n * move) for d, n, (_, signs) in zip(distances, numbers, levels, strict=True)
                    ]
        fit[0] = least + (fit[0] + f32(0.5)) * step
        fit = [nearest_bfloat16(value if k == 0 else abs(value) * step) for k, value in enumerate(fit)]
        words += [int(value.view(np.uint32)) >> 16 for value in fit]
        values = [level[0] for level in mbq_levels(fit)]
        thresholds = [(a + b) * f32(0.5) for a, b in itertools.pairwise(values)]
        ranks += [sum(bool(value > t) for t in thresholds) for value in part]
        back += [values[rank] for rank in ranks[begin:]]
    return np.array(words, np.uint16).tobytes() + pack(ranks, bits), np.array(back, np.float32)


def entropy(data: bytes, count: int) -> np.ndarray:
    """The ``count`` values that ``kernels/entropy.py`` has coded in ``data``."""
    step, offset = np.frombuffer(data[:8], np.float32)
    states = np.frombuffer(data[8:40], np.uint32).tolist()
    number, key = np.frombuffer(data[40:48], np.uint32).tolist()
    classes, dithered, at = [0] * -(-count // 64), data[48] >> 4, 49
    if (of := data[48] & 15) > 1:
        classes = [data[at + b // 4] >> 2 * (b % 4) & 3 for b in range(len(classes))]
        at += -(-len(classes) // 4)
    eighths = [256, 279, 304, 332, 362, 395, 431, 470]
    tables = []
    for _ in range(of):
        first, last = data[at], data[at + 1]
        table = data[at + 2 : at + 3 + last - first]
        at += 2 + len(table)
        weights = {first + n: eighths[(b - 1) % 8] << (b - 1) // 8 for n, b in enumerate(table) if b}
        total = sum(weights.values())
        frequencies = {s: max(1, w * 4096 // total) for s, w in weights.items()}
        best = max(frequencies, key=lambda s: (frequencies[s], -s))
        frequencies[best] += 4096 - sum(frequencies.values())
        tables.append((frequencies, [s for s, f in frequencies.items() for _ in range(f)]))
    at += at % 2

    def refilled(state: int) -> int:
        nonlocal at
        if state >= 1 << 16:
            return state
        at += 2
        return state << 16 | int.from_bytes(data[at - 2 : at], "little")

    values = []
    for n in range(count):
        state, (frequencies, slots) = states[n % 8], tables[classes[n // 64]]
        symbol = slots[state % 4096]
        below = sum(f for s, f in frequencies.items() if s < symbol)
        state = refilled(frequencies[symbol] * (state // 4096) + state % 4096 - below)
        size = abs(symbol - 35)
        if size >= 16:  # half octaves from 16 on: 16 to 23, 24 to 31, 32 to 47, ...
            plain = 3 + (size - 16) // 2
            size = (2 + size % 2 << plain) + state % (1 << plain)
            state = refilled(state >> plain)
        states[n % 8] = state
        level = np.float32(size if symbol > 35 else -size)
        if dithered >> classes[n // 64] & 1:
            level += np.float32(0.5) - np.float32((whole_hash(n + number, key) >> 8) / 2**24)
        values.append(offset + step * level)
    return np.array(values, np.float32)

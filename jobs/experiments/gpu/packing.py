"""Packing by ``uniform`` on the GPU, in torch's operations, against the kernels on the host: the same bytes, and how long?

Prints the milliseconds until a message's bytes are in the host's memory, and what of it the computing thread is held up for.

    PYTHONPATH=. python jobs/experiments/gpu/packing.py
"""

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from accept_mpi.kernels.cache import compiled

from accept_mpi.codecs.coding import Coding, parse
from accept_mpi.codecs.message import aligned

_KERNELS = compiled("uniform")
BLOCK, PAIR, WEYL, WORD = _KERNELS.BLOCK, _KERNELS.PAIR, int(_KERNELS.WEYL), 0xFFFFFFFF
ROUNDS = 15


def pack(x: torch.Tensor, coding: Coding, key: int) -> torch.Tensor:
    """What ``kernels.uniform.encode`` writes for the values ``x`` (1-D float32, on any device), and a last byte that is 1 if
    they cannot be coded. Groups of a power of two that divides a block."""
    bits, group = int(coding.bits), coding.group
    top = (1 << bits) - 1
    padded = -(-x.numel() // group) * group
    whole = torch.cat([x, x[-1:].expand(padded - x.numel())]) if padded > x.numel() else x  # the last value again
    words = whole.view(torch.int32).view(-1, group)
    keys = words ^ (words >> 31 & 0x7FFFFFFF)
    least, most = keys.amin(1), keys.amax(1)
    bad = (most > 0x7F7FFFFF) | (least < -0x7F800000)
    below = least >> 31
    low = ((least ^ (below & 0x7FFFFFFF)) + (below & 0xFFFF)) & -0x10000
    high = (most ^ (most >> 31 & 0x7FFFFFFF)).view(torch.float32)
    zero = low.view(torch.float32)
    span = (high - zero) * float(np.float32(1) / np.float32(top))
    rounded = (span.view(torch.int32) + 0xFFFF) & -0x10000
    bad |= (rounded >= 0x7F800000) | (rounded < 0)
    rounded = torch.where(rounded < 0x00800000, 0, rounded)
    scale = rounded.view(torch.float32)
    inverse = torch.where(scale > 0, 1.0 / scale, 0.0)
    bad |= zero + scale * top > float(np.finfo(np.float32).max)
    quotient = (whole.view(-1, group) - zero[:, None]) * inverse[:, None]
    if coding.stochastic:
        number = torch.arange(x.numel(), device=x.device)
        begin, inside = number // BLOCK * BLOCK, number % BLOCK
        product = (begin + (key & WORD) + (inside & PAIR - 1)) * WEYL & WORD
        h = (product ^ product >> 15) ^ key >> 32
        h = h * 0x85EBCA77 & WORD
        h = (h ^ h >> 13) * 0xC2B2AE3D & WORD
        drawn = ((h ^ h >> 16) >> torch.where(inside & PAIR > 0, 16, 0) & 0xFFFF).int()
        fixed = torch.clamp(quotient.view(-1)[: x.numel()] * 65536.0 + 0.5, max=top * 65536.0).int()
        codes = (fixed + drawn >> 16).to(torch.uint8)
    else:
        codes = torch.clamp(quotient + 0.5, max=float(top)).to(torch.uint8).view(-1)[: x.numel()]
    full = x.numel() // BLOCK * BLOCK
    parts = [(low | rounded >> 16).view(torch.uint8)]
    parts += [_planes(codes[:full].view(-1, BLOCK), bits)] if full else []
    if rest := codes[full:].numel():
        tail = torch.zeros(1, -(-rest // 8) * 8, dtype=torch.uint8, device=x.device)
        tail[0, :rest] = codes[full:]
        parts.append(_planes(tail, bits))
    return torch.cat([*parts, bad.any().view(1).to(torch.uint8)])


def _planes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes (blocks, n) as bit planes (kernels/packing.py), flat."""
    n, planes = codes.shape[1], []
    if bits == 8:
        return codes.reshape(-1)
    for width in (4, 2, 1):
        if bits & width:
            of = 8 // width
            streams = (codes & ((1 << width) - 1)).view(codes.shape[0], of, n // of)
            plane = streams[:, 0]
            for stream in range(1, of):
                plane = plane | streams[:, stream] << stream * width
            planes.append(plane)
            codes = codes >> width
    return torch.cat(planes, 1).reshape(-1)


def on_host(x: torch.Tensor, coding: Coding, key: int) -> np.ndarray:
    out = aligned(coding.nbytes(x.numel()))
    assert coding.encode(x.numpy(), out, key)
    return out


def check(device: str) -> None:
    """The same bytes for many lengths, widths and values; what cannot be coded is told."""
    generator = torch.Generator().manual_seed(1)
    count = 0
    for name in ("1", "2", "3", "4/128", "5", "7+sr", "8", "4+sr", "2+sr", "6/16384"):
        coding = parse(f"uniform:{name}", False)
        for size in (8, 64, 100, 16384, 16391, 50001):
            for scale in (1e-42, 1e-30, 1.0, 1e30):
                x = torch.randn(size, generator=generator) * scale
                x[::7] = 0.0
                x[3::50] *= -0.0
                key = 0x0123456789ABCDEF ^ count
                found = pack(x.to(device), coding, key).cpu().numpy()
                expected = np.append(on_host(x, coding, key), 0)
                assert np.array_equal(found, expected), (name, size, scale)
                count += 1
        for value in (float("nan"), float("inf"), -float("inf")):
            x = torch.randn(1000, generator=generator)
            x[517] = value
            assert pack(x.to(device), coding, 5)[-1] == 1
    print(f"{device}: {count} tensors packed to the bytes of the host's kernels")


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    check(device)
    if device == "cpu":
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("codec        MiB   copy, then host: ms, held up   GPU packs, then copy: ms, held up")
    for name in ("uniform:8", "uniform:4", "uniform:4+sr", "uniform:2"):
        coding = parse(name, False)
        for mib in (0.25, 1, 4, 16):
            x = torch.randn(int(mib * 2**18), device="cuda")
            host = torch.empty(x.shape, pin_memory=True)
            packed = torch.empty(coding.nbytes(x.numel()) + 1, dtype=torch.uint8, pin_memory=True)
            out = aligned(coding.nbytes(x.numel()))

            def copied(x: torch.Tensor = x, host: torch.Tensor = host) -> None:
                host.copy_(x, non_blocking=True)

            def coded(coding: Coding = coding, host: torch.Tensor = host, out: np.ndarray = out) -> None:
                coding.encode(host.numpy(), out, 3)

            def packing(x: torch.Tensor = x, coding: Coding = coding, packed: torch.Tensor = packed) -> None:
                packed.copy_(pack(x, coding, 3), non_blocking=True)

            a, b = timed(copied, coded), timed(packing, lambda: None)
            print(f"{name:12s} {mib:4} {a[0]:15.3f} {a[1]:12.3f} {b[0]:22.3f} {b[1]:12.3f}", flush=True)


def timed(begin: Callable[[], None], then: Callable[[], None]) -> tuple[float, float]:
    """Milliseconds until both are done, and until ``begin`` gives back its thread; medians."""
    took = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        begin()
        handed = time.perf_counter() - began
        torch.cuda.synchronize()
        then()
        took.append((1e3 * (time.perf_counter() - began), 1e3 * handed))
    return tuple(map(statistics.median, zip(*took[3:], strict=True)))


if __name__ == "__main__":
    main()

"""``accept_mpi bench codec``: speed of each codec, relative to a memcpy of the same array in the same run, and its error.

Rates are GB/s of float32 input (encode) and output (decode) on one thread. Memcpy, encoding and decoding are timed in turn,
each over several calls after a warm-up call. A ratio is the median over repeats of memcpy's time divided by the codec's.
Errors are relative squared errors, sum (x - y)^2 / sum x^2.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from accept_mpi.codecs.coding import F32, Coding, kernels_of, parse
from accept_mpi.errors import UserError
from accept_mpi.kernels.cache import compiled

_CODECS = ("bf16", "fp16", "uniform:8", "uniform:4", "uniform:4/256", "uniform:4/256+sr", "uniform:3", "uniform:2",
           "uniform:2/256", "uniform:2+sr", "uniform:1", "uniform:2/0", "mbq:4", "mbq:2", "mbq:2/256", "mbq:1",
           "mbq:2/0", "entropy:4.5", "entropy:4.5+sr", "entropy:2.5")  # fmt: skip
_SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)  # bytes of float32
_ERROR_VALUES = 1 << 18


def main(options: argparse.Namespace) -> int:
    """Measure and print a table, or JSON with ``--json``."""
    try:
        codecs = [parse(name, False) for name in options.codecs or _CODECS]
    except ValueError as error:
        raise UserError(f"bench codec: {error}") from error
    if any(codec.kind == "none" for codec in codecs):
        raise UserError('bench codec: "none" codes nothing; name codecs such as bf16 or uniform:4')
    began = time.perf_counter()
    for module in kernels_of(codecs):
        compiled(module)
    seconds = time.perf_counter() - began
    try:
        rows = [_row(name, size, options.repeats) for size in options.sizes or _SIZES for name in options.codecs or _CODECS]
    except MemoryError as error:
        raise UserError("bench codec: out of memory; take smaller --sizes") from error
    if options.json:
        print(json.dumps({"compile_s": seconds, "rows": rows}))
        return 0
    print(f"kernels compiled or loaded in {seconds:.1f} s")
    print(f"{'':>10} {'codec':<18}{'bits':>6}{'encode':>16}{'decode':>16}   relative squared error")
    print(f"{'':>10} {'':<18}{'':>6}{'GB/s':>8}{'ratio':>8}{'GB/s':>8}{'ratio':>8}    normal post-ReLU heavy tail")
    for row in rows:
        errors = "".join(f"{error:>10.2g}" for error in row["errors"].values())
        rates = f"{row['encode_gbs']:8.1f}{row['encode_ratio']:8.2f}{row['decode_gbs']:8.1f}{row['decode_ratio']:8.2f}"
        print(f"{row['nbytes'] >> 10:>6} KiB {row['codec']:<18}{row['bits']:>6.2f}{rates}{errors}")
    return 0


def _row(name: str, nbytes: int, repeats: int) -> dict[str, Any]:
    coding = parse(name, False)
    rng = np.random.default_rng(0)
    x = rng.standard_normal(nbytes // 4, dtype=np.float32)
    y = np.empty_like(x)
    out = np.empty(coding.nbytes(x.size), np.uint8)
    calls = max(4, (1 << 20) // nbytes)
    copy = _timer(lambda: np.copyto(y, x), calls)
    encode = _timer(lambda: coding.encode(x, out, 1), calls)
    decode = _timer(lambda: coding.decode(out, y), calls)
    times = [(copy(), encode(), decode()) for _ in range(repeats)]
    return {
        "codec": name,
        "nbytes": nbytes,
        "bits": 8 * out.size / x.size,
        "encode_gbs": nbytes / statistics.median(t[1] for t in times) / 1e9,
        "encode_ratio": statistics.median(t[0] / t[1] for t in times),
        "decode_gbs": nbytes / statistics.median(t[2] for t in times) / 1e9,
        "decode_ratio": statistics.median(t[0] / t[2] for t in times),
        "errors": {kind: _error(coding, values) for kind, values in _samples(rng).items()},
    }


def _samples(rng: np.random.Generator) -> dict[str, F32]:
    normal = rng.standard_normal(_ERROR_VALUES, dtype=np.float32)
    heavy = rng.standard_t(3, _ERROR_VALUES).astype(np.float32)
    return {"normal": normal, "post-ReLU": np.maximum(normal, 0), "heavy-tailed": heavy}


def _error(coding: Coding, x: F32) -> float:
    out, y = np.empty(coding.nbytes(x.size), np.uint8), np.empty_like(x)
    coding.encode(x, out, 1)
    coding.decode(out, y)
    return float(np.square(x - y, dtype=np.float64).sum() / np.square(x, dtype=np.float64).sum())


def _timer(call: Callable[[], object], calls: int) -> Callable[[], float]:
    """A function that measures ``call``: mean seconds over ``calls`` calls after a warm-up call."""

    def run() -> float:
        call()
        began = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - began) / calls

    return run

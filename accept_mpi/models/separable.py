"""Whether a loss of several samples is what the losses of each of them make: if not, results depend on what is in a
micro-batch together."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch

from accept_mpi import tree
from accept_mpi.seeds import kept, state

_MOST = 8
"""Samples that are looked at."""
_TOLERANCE = 1e-3


def separable(judge: Callable[[Any, Any, int], tuple[float, float]], output: Any, target: Any, samples: int) -> bool:
    """False if the mean loss of some samples is another one than the losses of each make. ``judge(output, target, n)``: sum
    and count of n samples; ``output``, ``target``: of ``samples`` samples, along dimension 0. True where that cannot be
    told: of a single sample, of random losses, of one that does not take a single sample."""
    count = min(samples, _MOST)
    if count < 2 or not any(_rows(leaf, samples) for leaf in tree.leaves(output)):
        return True

    def of(begin: int, end: int) -> tuple[float, float]:
        some = [
            tree.replace(one, lambda x: x[begin:end].detach().clone() if _rows(x, samples) else x.detach().clone())
            for one in (output, target)
        ]
        return judge(some[0], some[1], end - begin)

    try:
        with kept(), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of deviations of single samples and the like
            before = state()
            whole = of(0, count)
            each = [of(n, n + 1) for n in range(count)]
            if state() != before:
                return True
    except Exception:
        return True
    sums, counts = (sum(values) for values in zip(*each, strict=True))
    if not math.isfinite(whole[0]) or not whole[1]:
        return True
    return math.isclose(whole[0], sums, rel_tol=_TOLERANCE, abs_tol=1e-5) and math.isclose(
        whole[1], counts, rel_tol=_TOLERANCE
    )


def _rows(tensor: torch.Tensor, samples: int) -> bool:
    return tensor.dim() > 0 and len(tensor) == samples

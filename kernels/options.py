"""The one place for Numba's options.

``nogil``: kernels run on the data-plane thread while another thread computes. No ``fastmath``: results must not depend on
the CPU. The error model is NumPy's, since a test for division by zero prevents vectorization. Signatures are explicit, so
that kernels compile when their module is imported, before any clock starts. ``cache`` is True while ``cache.compiled``
imports them.
"""

from typing import Any

import numpy as np

NJIT: dict[str, Any] = {
    "nogil": True, "cache": False, "boundscheck": False, "error_model": "numpy", "no_cfunc_wrapper": True,
}  # fmt: skip
INNER = NJIT | {"no_cpython_wrapper": True}
"""Of kernels that only other kernels call: what Python would need to call them takes time to compile."""

U = np.uint64
"""Of indices and lengths: one that is known not to be negative needs no test for wrapping around, and loops over it are
vectorized. Slices would do as well, but each takes 0.05 s to compile."""

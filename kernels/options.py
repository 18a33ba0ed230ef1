"""The one place for Numba's options.

``nogil``: kernels run on the data-plane thread beside the computing one. No disk cache: ranks that start together on an
empty one can crash each other (numba#4807); explicit signatures compile at import instead, before any clock starts.
No ``fastmath``: results must not depend on the CPU. The error
model is NumPy's, since a test for division by zero stops vectorization.
"""

from typing import Any

NJIT: dict[str, Any] = {"nogil": True, "cache": False, "boundscheck": False, "error_model": "numpy"}

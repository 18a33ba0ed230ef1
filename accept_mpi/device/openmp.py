"""How long OpenMP's threads, which compute a layer together, keep a core busy while they wait for each other.

Nothing here may import torch, whose OpenMP library reads the setting as it is loaded.
"""

import os
import platform

_SPINS = 3000
"""Turns of libgomp's waiting loop, some 0.1 ms. Its own choice, 300,000, is longer than the kernel's time slices."""


def wait_briefly() -> None:
    """Have torch's threads, once it is imported, sleep soon where one of them is not running. On x86-64, unless the user has
    said how they are to wait. Why: ``device/README.md``."""
    if platform.machine() == "x86_64" and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(_SPINS))

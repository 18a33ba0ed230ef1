"""Random bits that are hashed from a value's number, for stochastic rounding."""

import numba as nb
import numpy as np
from accept_mpi.kernels.options import INNER

WEYL = np.uint32(0x9E3779B1)  # factor of a value's number: the next number's product takes only an addition


@nb.njit("uint32(uint32, uint32)", **INNER)
def random_bits(product, key):  # type: ignore[no-untyped-def]
    """Hash a value's number times ``WEYL`` to 32 random bits: two more rounds of multiply and shift, with ``key`` mixed
    in."""
    h = np.uint32(np.uint32(product ^ np.uint32(product >> np.uint32(15))) ^ key)
    h = np.uint32(h * np.uint32(0x85EBCA77))
    h = np.uint32(h ^ np.uint32(h >> np.uint32(13)))
    h = np.uint32(h * np.uint32(0xC2B2AE3D))
    return np.uint32(h ^ np.uint32(h >> np.uint32(16)))

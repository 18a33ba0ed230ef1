"""Numba kernels on NumPy arrays. Imports as ``accept_mpi.kernels``; each has a naive reference in ``tests/naive.py``."""

from accept_mpi.kernels.checksum import checksum

__all__ = ["checksum"]

"""Numba kernels on NumPy arrays. Imports as ``accept_mpi.kernels``; each has a naive reference in ``tests/naive.py``."""

"""Numba kernels on NumPy arrays, imported as ``accept_mpi.kernels``. Each has a naive reference in ``tests/naive.py``."""

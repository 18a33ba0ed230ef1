"""Arrays in an HDF5 file, read row by row as they are asked for."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from accept_mpi.data.base import Indices
from accept_mpi.errors import UserError
from accept_mpi.imports import nearest
from accept_mpi.seeds import ORDER, mix

_NARROW = {np.dtype("float64"): np.float32}


class Hdf5Dataset:
    """Rows of two data sets of one file: x as stored (float64 as float32), y likewise (integers as int64)."""

    def __init__(self, path: Path, x: str, y: str, rows: Indices) -> None:
        self._path, self._x, self._y, self._rows = path, x, y, rows
        self._file: h5py.File | None = None

    def __len__(self) -> int:
        return len(self._rows)

    def inputs(self, indices: Indices, seed: int | None = None) -> torch.Tensor:
        return self._read(self._x, indices)

    def targets(self, indices: Indices) -> torch.Tensor:
        read = self._read(self._y, indices)
        return read if read.is_floating_point() else read.long()

    def _read(self, name: str, indices: Indices) -> torch.Tensor:
        if self._file is None:
            self._file = h5py.File(self._path, "r")
        rows, back = np.unique(self._rows[indices], return_inverse=True)  # h5py wants rows once each, in order
        try:
            values = self._file[name][rows][back]
        except OSError as error:
            raise UserError(f"data: cannot read {name} of {self._path}: {error}") from error
        try:
            return torch.from_numpy(values.astype(_NARROW.get(values.dtype, values.dtype)))
        except TypeError as error:
            raise UserError(f'data.args: "{name}" of {self._path} holds {values.dtype}, not numbers') from error


def hdf5(
    path: str,
    x: str = "x",
    y: str = "y",
    test_x: str | None = None,
    test_y: str | None = None,
    test_fraction: float = 0.2,
) -> tuple[Hdf5Dataset, Hdf5Dataset]:
    """Training and test rows of the file's data sets ``x`` (n, ...) and ``y`` (n, ...).

    The test set is ``test_x`` and ``test_y`` where given, else a fixed shuffle's last ``test_fraction``. Raises UserError
    for a missing, truncated or mismatched file.
    """
    if (test_x is None) != (test_y is None):
        raise ValueError("test_x and test_y go together")
    file = Path(path)
    total = _rows(file, x, y)
    if test_x is not None and test_y is not None:
        held = _rows(file, test_x, test_y)
        return Hdf5Dataset(file, x, y, np.arange(total)), Hdf5Dataset(file, test_x, test_y, np.arange(held))
    if not 0 < test_fraction < 1:
        raise ValueError(f"test_fraction must lie between 0 and 1, got {test_fraction}")
    order = np.random.default_rng(mix(ORDER, 0)).permutation(total)
    keep = total - max(1, round(total * test_fraction))
    return Hdf5Dataset(file, x, y, order[:keep]), Hdf5Dataset(file, x, y, order[keep:])


def _rows(path: Path, x: str, y: str) -> int:
    if not path.is_file():
        raise UserError(f"data.args: there is no file {path}")
    try:
        with h5py.File(path, "r") as file:
            names: list[str] = []
            file.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
            for name in (x, y):
                if name.strip("/") not in names:
                    raise UserError(
                        f'data.args: {path} has no data set "{name}"{nearest(name, names)} (it has: {", ".join(names)})'
                    )
            lengths: list[Any] = [len(file[name]) for name in (x, y)]
    except OSError as error:
        raise UserError(f"data.args: {path} is not a whole HDF5 file: {error}") from error
    if lengths[0] != lengths[1]:
        raise UserError(f'data.args: {path}: "{x}" holds {lengths[0]} rows and "{y}" {lengths[1]}')
    return int(lengths[0])

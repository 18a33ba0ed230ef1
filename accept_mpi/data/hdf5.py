"""Arrays in an HDF5 file, read row by row on demand."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from accept_mpi.data.arrays import DTYPES, check_fits, dtype_of, tensor_of
from accept_mpi.data.base import Indices
from accept_mpi.errors import UserError
from accept_mpi.files.hdf5 import Damaged, held_here, open_file, within
from accept_mpi.files.regular import is_regular
from accept_mpi.files.start_directory import from_start
from accept_mpi.registry import nearest
from accept_mpi.seeds import ORDER, mix

_MOST_ROWS = 100_000_000
_MOST_ROW, _MOST_CHUNK = 1 << 30, 1 << 28  # bytes
_PART = 1 << 20  # values checked at a time


class Hdf5Dataset:
    """Rows of two data sets of one file, converted as by ``arrays.tensor_of`` or to the dtypes asked for; whole numbers and
    booleans in y become int64."""

    targets_anywhere = True

    def __init__(self, path: Path, x: str, y: str, rows: Indices, dtypes: Sequence[str | None] = (None, None)) -> None:
        self._path, self._x, self._y, self._rows = path, x, y, rows
        self._dtypes = [np.dtype(name) if name else None for name in dtypes]
        self._file: h5py.File | None = None

    def __len__(self) -> int:
        return len(self._rows)

    def inputs(self, indices: Indices, seed: int | None = None) -> torch.Tensor:
        return self._read(self._x, indices, self._dtypes[0])

    def targets(self, indices: Indices) -> torch.Tensor:
        read = self._read(self._y, indices, self._dtypes[1])
        whole = not read.is_floating_point() and not read.is_complex()
        return read.long() if whole and self._dtypes[1] is None else read

    def _read(self, name: str, indices: Indices, asked: np.dtype[Any] | None) -> torch.Tensor:
        rows, back = np.unique(self._rows[indices], return_inverse=True)  # h5py needs distinct rows in increasing order
        try:
            if self._file is None:
                self._file = open_file(self._path)
            return tensor_of(self._file[name][rows][back], asked)
        except (OSError, RuntimeError, KeyError) as error:
            raise UserError(f"data: cannot read {name} of {self._path}: {error}") from error
        except (TypeError, ValueError) as error:
            raise UserError(f'data.args: "{name}" of {self._path} {error}') from error


def hdf5(
    path: str,
    x: str = "x",
    y: str = "y",
    test_x: str | None = None,
    test_y: str | None = None,
    test_fraction: float = 0.2,
    x_dtype: str | None = None,
    y_dtype: str | None = None,
) -> tuple[Hdf5Dataset, Hdf5Dataset]:
    """Training and test rows of the file's data sets ``x`` (n, ...) and ``y`` (n, ...).

    The test set is ``test_x`` and ``test_y`` if given, else the last ``test_fraction`` of a fixed shuffle. ``x_dtype`` and
    ``y_dtype`` (from ``arrays.DTYPES``) replace the dtypes that ``arrays.tensor_of`` would choose. Raises UserError for a
    missing, truncated or mismatched file, and for one that holds no numbers or refers to other files.
    """
    for key, asked in (("x_dtype", x_dtype), ("y_dtype", y_dtype)):
        if asked is not None and asked not in DTYPES:
            raise ValueError(f"{key} must be one of {', '.join(DTYPES)}, got {asked!r}")
    dtypes = (x_dtype, y_dtype)
    if (test_x is None) != (test_y is None):
        raise ValueError("test_x and test_y go together")
    file = from_start(path)
    total = _rows(file, x, y)
    if test_x is not None and test_y is not None:
        held = _rows(file, test_x, test_y)
        train = Hdf5Dataset(file, x, y, np.arange(total), dtypes)
        return train, Hdf5Dataset(file, test_x, test_y, np.arange(held), dtypes)
    if not 0 < test_fraction < 1:
        raise ValueError(f"test_fraction must lie between 0 and 1, got {test_fraction}")
    order = np.random.default_rng(mix(ORDER, 0)).permutation(total)
    keep = total - max(1, round(total * test_fraction))
    parts = [Hdf5Dataset(file, x, y, rows, dtypes) for rows in (order[:keep], order[keep:])]
    return parts[0], parts[1]


def _rows(path: Path, x: str, y: str) -> int:
    """Number of rows of ``x`` and of ``y``, which must be equal. Raises UserError, also if they are not numbers."""
    if not is_regular(path):
        raise UserError(f"data.args: there is no file {path}")
    try:
        with open_file(path) as file:
            names: list[str] = []
            file.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
            for name in (x, y):
                if name.strip("/") not in names and not isinstance(within(file, name), h5py.Dataset):
                    raise UserError(
                        f'data.args: {path} has no data set "{name}"{nearest(name, names)} (it has: {", ".join(names)})'
                    )
            lengths = [_check(file[name], f'data.args: "{name}" of {path}') for name in (x, y)]
    except (OSError, RuntimeError, KeyError) as error:
        raise UserError(
            f"data.args: {path} is not a whole HDF5 file: {getattr(error, 'strerror', None) or error}"
        ) from error
    if lengths[0] != lengths[1]:
        raise UserError(f'data.args: {path}: "{x}" holds {lengths[0]} rows and "{y}" {lengths[1]}')
    return lengths[0]


def _check(found: h5py.Dataset, what: str) -> int:
    """Number of rows of a data set that can be read row by row as numbers. Raises UserError with a sentence that begins with
    ``what``."""
    try:
        held_here(found, found.name)
    except Damaged as error:
        raise UserError(f"{what}: {error}; copy it into this one") from error
    try:
        dtype_of(found.dtype)
        if not found.shape:
            raise ValueError("is not an array of rows")
        rows = int(found.shape[0])
        if rows > _MOST_ROWS:
            raise ValueError(f"has {rows} rows; at most {_MOST_ROWS}")
        if rows and found.size // rows * found.dtype.itemsize > _MOST_ROW:
            raise ValueError(f"has rows of {found.size // rows * found.dtype.itemsize} bytes; at most {_MOST_ROW}")
        if found.chunks and math.prod(found.chunks) * found.dtype.itemsize > _MOST_CHUNK and found.compression:
            raise ValueError(f"is compressed in pieces of more than {_MOST_CHUNK} bytes")
        if found.dtype.kind == "u" and found.dtype.itemsize == 8:
            for begin in range(0, rows, part := max(1, _PART * rows // max(1, found.size))):
                check_fits(found[begin : begin + part])
    except (TypeError, ValueError) as error:
        raise UserError(f"{what} {error}") from error
    return rows

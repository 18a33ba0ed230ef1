"""scikit-learn's digits: 1,797 real scans of handwritten digits, 8 x 8 pixels, shipped with scikit-learn."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from accept_mpi.data.base import ArrayDataset
from accept_mpi.data.split import split


def digits(size: int = 8, channels: int = 3, test_fraction: float = 0.2) -> tuple[ArrayDataset, ArrayDataset]:
    """Training and test set of digits as (channels, size, size) float32 in [-1, 1], and their classes, 0..9.

    Images are enlarged bilinearly; the grey channel is repeated. The split depends on nothing but ``test_fraction``.
    """
    pixels, target = _scans()
    x = torch.from_numpy(pixels).float().reshape(-1, 1, 8, 8) / 8 - 1
    if size != 8:
        x = torch.nn.functional.interpolate(x, size=(size, size), mode="bilinear", align_corners=False)
    x = x.expand(-1, channels, -1, -1).contiguous()
    return split(ArrayDataset(x, torch.from_numpy(target).long()), test_fraction)


def _scans() -> tuple[np.ndarray, np.ndarray]:
    """Pixels (scans, 64) from 0 to 16 and classes (scans,), from scikit-learn's file: importing scikit-learn takes a second
    of CPU and 72 MB."""
    package = find_spec("sklearn")
    for folder in (package and package.submodule_search_locations) or ():
        path = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if path.is_file():
            rows = np.loadtxt(path, delimiter=",")
            return rows[:, :64], rows[:, 64].astype(np.int64)
    from sklearn.datasets import load_digits

    scans = load_digits()
    return scans.data, scans.target

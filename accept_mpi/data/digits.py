"""scikit-learn's digits: 1,797 real scans of handwritten digits, 8 x 8 pixels, shipped inside the package."""

import torch

from accept_mpi.data.base import ArrayDataset
from accept_mpi.data.split import split


def digits(size: int = 8, channels: int = 3, test_fraction: float = 0.2) -> tuple[ArrayDataset, ArrayDataset]:
    """Training and test set of digits as (channels, size, size) float32 in [-1, 1], and their class, 0..9.

    Enlarged bilinearly; the grey channel is repeated. The split is fixed: it depends on nothing but ``test_fraction``.
    """
    from sklearn.datasets import load_digits  # seconds to import; only the ranks that read data pay

    scans = load_digits()
    x = torch.from_numpy(scans.images).float()[:, None] / 8 - 1
    if size != 8:
        x = torch.nn.functional.interpolate(x, size=(size, size), mode="bilinear", align_corners=False)
    x = x.expand(-1, channels, -1, -1).contiguous()
    return split(ArrayDataset(x, torch.from_numpy(scans.target).long()), test_fraction)

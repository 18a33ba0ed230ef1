"""One fixed way to split a data set in memory into training and test samples."""

import numpy as np
import torch

from accept_mpi.data.base import ArrayDataset
from accept_mpi.seeds import ORDER, mix


def split(data: ArrayDataset, test_fraction: float) -> tuple[ArrayDataset, ArrayDataset]:
    """Shuffle with a fixed seed and use the last ``test_fraction`` of the samples as the test set."""
    if not 0 < test_fraction < 1:
        raise ValueError(f"test_fraction must lie between 0 and 1, got {test_fraction}")
    order = torch.from_numpy(np.random.default_rng(mix(ORDER, 0)).permutation(len(data)))
    held = max(1, round(len(data) * test_fraction))
    return ArrayDataset(data.x[order[:-held]], data.y[order[:-held]]), ArrayDataset(
        data.x[order[-held:]], data.y[order[-held:]]
    )

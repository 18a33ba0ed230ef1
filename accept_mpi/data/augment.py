"""Random crops and flips that depend only on a seed and a sample's index, not on how samples are batched."""

import numpy as np
import numpy.typing as npt

from accept_mpi.data.base import Indices
from accept_mpi.seeds import mix

_PAD = 4


def crop_and_flip(images: npt.NDArray[np.uint8], indices: Indices, seed: int) -> npt.NDArray[np.uint8]:
    """Shift each image (n, channels, h, w) by up to 4 pixels each way over a black border, and mirror half of the images."""
    n, _, h, w = images.shape
    padded = np.pad(images, ((0, 0), (0, 0), (_PAD, _PAD), (_PAD, _PAD)))
    result = np.empty_like(images)
    for i in range(n):
        bits = mix(seed, int(indices[i]))
        down, right, mirror = bits % (2 * _PAD + 1), (bits >> 16) % (2 * _PAD + 1), bits >> 63
        image = padded[i, :, down : down + h, right : right + w]
        result[i] = image[:, :, ::-1] if mirror else image
    return result

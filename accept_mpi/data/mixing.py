"""Mixup (Zhang et al. 2018) and CutMix (Yun et al. 2019): each sample of a micro-batch is mixed with the one before it.

What is mixed with what depends on the seed and the samples alone, so the first stage (inputs) and the last one (targets)
draw the same. As in torchvision's ``v2.MixUp`` and ``v2.CutMix``: the partner is the batch rolled by one, and targets become
probabilities.
"""

from typing import Any

import numpy as np
import torch

from accept_mpi import tree
from accept_mpi.data.base import Dataset, Indices, Samples, Together, Wrapper, classes_of, fetch, gives_targets
from accept_mpi.errors import UserError
from accept_mpi.job import Mix
from accept_mpi.seeds import AUGMENT, mix


class Mixed(Together, Wrapper):
    """A training set whose samples are mixed."""

    def __init__(self, data: Dataset, how: Mix) -> None:
        self.inside, self._how, self.classes = data, how, classes_of(data)

    def __len__(self) -> int:
        return len(self.inside)

    def samples(self, indices: Indices, seed: int | None, inputs: bool, targets: bool) -> Samples:
        """Inputs and targets, as far as they are wanted; targets are probabilities (samples, classes). Raises UserError for
        samples that cannot be mixed."""
        found = fetch(self.inside, indices, seed, inputs, targets)
        draw = np.random.Generator(np.random.Philox(mix(AUGMENT, seed or 0, *indices.tolist())))
        how = self._how
        cuts = how.cutmix > 0 and (how.mixup == 0 or draw.random() < 0.5)
        parameter = how.cutmix if cuts else how.mixup
        share = float(draw.beta(parameter, parameter)) if parameter else 1.0
        middle = draw.random(2)
        x = found.inputs
        if inputs and not (isinstance(x, torch.Tensor) and x.is_floating_point()):
            raise UserError(f"train.mix: inputs must be one floating-point tensor, the data set gives {tree.describe(x)}")
        if cuts:
            if inputs and x.dim() != 4:
                raise UserError(f"train.mix: CutMix wants images (samples, channels, height, width), not {tree.describe(x)}")
            size = self._size(indices, seed) if x is None else x.shape[-2:]
            box, share = _box(size, share, middle)
            if inputs:
                other = x.roll(1, 0)
                x = x.clone()
                x[:, :, box[0] : box[1], box[2] : box[3]] = other[:, :, box[0] : box[1], box[2] : box[3]]
        elif inputs:
            x = _blended(x, share)
        return Samples(x, self._mixed(found.targets, share) if targets else None)

    def _mixed(self, target: Any, share: float) -> torch.Tensor:
        if not isinstance(target, torch.Tensor) or target.is_floating_point() or target.dim() != 1:
            raise UserError(f"train.mix: targets must be classes (samples,), the data set gives {tree.describe(target)}")
        if strange := [one for one in target.tolist() if not 0 <= one < self._how.classes]:
            raise UserError(f"train.mix: classes = {self._how.classes}, but there is a target {strange[0]}")
        whole = torch.nn.functional.one_hot(target.long(), self._how.classes).float()
        return _blended(whole, share)

    def _size(self, indices: Indices, seed: int | None) -> tuple[int, int]:
        """Height and width of the images, where only targets are wanted. A user's own kind may pad a micro-batch to its
        largest image."""
        some = indices[:1] if gives_targets(self.inside) else indices
        height, width = fetch(self.inside, some, seed, True, False).inputs.shape[-2:]
        return int(height), int(width)


def unmixed(data: Dataset) -> Dataset:
    """The data set without this, as an evaluation's is."""
    return data.inside if isinstance(data, Mixed) else data


def _blended(values: torch.Tensor, share: float) -> torch.Tensor:
    """``share`` of each sample, and the rest of the one before it."""
    return values.roll(1, 0).mul_(1 - share).add_(values.mul(share))


def _box(size: Any, share: float, middle: Any) -> tuple[tuple[int, int, int, int], float]:
    """Rows and columns (first, last + 1) of the box that is replaced, and the share of the image that stays."""
    height, width = int(size[0]), int(size[1])
    row, column = int(middle[0] * height), int(middle[1] * width)
    half = 0.5 * (1.0 - share) ** 0.5
    tall, wide = int(half * height), int(half * width)
    top, bottom = max(row - tall, 0), min(row + tall, height)
    left, right = max(column - wide, 0), min(column + wide, width)
    return (top, bottom, left, right), 1.0 - (bottom - top) * (right - left) / (height * width)

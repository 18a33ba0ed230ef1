"""What a data set owes the pipeline: its length, inputs for the first stage, targets for the last, by sample index.

A host needs a data set only where its stage uses it: the first stage asks for inputs, the last for targets, the stages
between for neither. So the two are asked for apart, and loading one must not need the other where that can be helped.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

Indices = npt.NDArray[np.int64]
Tensors = torch.Tensor | tuple[torch.Tensor, ...]


@runtime_checkable
class Dataset(Protocol):
    """A map-style data set, read in whole micro-batches."""

    def __len__(self) -> int:
        """Number of samples."""

    def inputs(self, indices: Indices, seed: int | None = None) -> Tensors:
        """Inputs of these samples, stacked along dimension 0.

        ``seed`` (None at evaluation) is all that random augmentation may depend on, together with the sample's index.
        """

    def targets(self, indices: Indices) -> torch.Tensor:
        """Targets of these samples, stacked along dimension 0."""


class ArrayDataset:
    """Two tensors in memory: ``x`` of shape (n, ...) and ``y`` of shape (n, ...)."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        if len(x) != len(y):
            raise ValueError(f"x holds {len(x)} samples and y {len(y)}")
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def inputs(self, indices: Indices, seed: int | None = None) -> torch.Tensor:
        return self.x[torch.from_numpy(indices)]

    def targets(self, indices: Indices) -> torch.Tensor:
        return self.y[torch.from_numpy(indices)]


class MapDataset:
    """A torch-style map data set (``len`` and ``[i] -> (x, y)``) made into ours."""

    def __init__(self, items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def inputs(self, indices: Indices, seed: int | None = None) -> Tensors:
        samples = [self.items[int(i)][0] for i in indices]
        if isinstance(samples[0], tuple):
            return tuple(torch.stack([torch.as_tensor(part) for part in parts]) for parts in zip(*samples, strict=True))
        return torch.stack([torch.as_tensor(x) for x in samples])

    def targets(self, indices: Indices) -> torch.Tensor:
        return torch.stack([torch.as_tensor(self.items[int(i)][1]) for i in indices])


Loader = Callable[..., tuple[Any, Any]]


def adapt(data: object) -> Dataset:
    """A user's data set as ours: already one, a pair of tensors or arrays ``(x, y)``, or torch's map style.

    Raises TypeError with a sentence where it is none of these.
    """
    if isinstance(data, Dataset):
        return data
    if isinstance(data, Sequence) and len(data) == 2 and all(isinstance(d, torch.Tensor | np.ndarray) for d in data):
        return ArrayDataset(torch.as_tensor(data[0]), torch.as_tensor(data[1]))
    if hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        return MapDataset(data)
    raise TypeError(f"expected a data set with __len__ and __getitem__, or a pair (x, y), got {type(data).__name__}")

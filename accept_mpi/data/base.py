"""What a data set owes the pipeline: its length, inputs for the first stage, targets for the last, by sample index.

A host needs a data set only where its stage uses it: the first stage asks for inputs, the last for targets, the stages
between for neither. So the two are asked for apart, and loading one must not need the other where that can be helped.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from accept_mpi.errors import UserError

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
    """A torch-style map data set (``len`` and ``[i] -> (x, y)``) made into ours. Raises UserError for other samples."""

    def __init__(self, items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def inputs(self, indices: Indices, seed: int | None = None) -> Tensors:
        samples = [self._sample(i)[0] for i in indices.tolist()]
        if not isinstance(samples[0], tuple):
            return _stack(samples, "x")
        if len({len(sample) if isinstance(sample, tuple) else -1 for sample in samples}) > 1:
            raise UserError("data.name: the x of some samples is a tuple of other length than that of others")
        return tuple(_stack(parts, f"x[{place}]") for place, parts in enumerate(zip(*samples, strict=True)))

    def targets(self, indices: Indices) -> torch.Tensor:
        return _stack([self._sample(i)[1] for i in indices.tolist()], "y")

    def _sample(self, index: int) -> Any:
        sample = self.items[index]
        if not isinstance(sample, tuple | list) or len(sample) != 2:
            of = f" of {len(sample)}" if isinstance(sample, tuple | list) else ""
            raise UserError(f"data.name: sample {index} must be a pair (x, y), got a {type(sample).__name__}{of}")
        return sample


def _stack(values: Sequence[Any], what: str) -> torch.Tensor:
    try:
        return torch.stack([torch.as_tensor(value) for value in values])
    except (RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"data.name: the {what} of samples must be tensors or arrays of one shape: {reason}") from error


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

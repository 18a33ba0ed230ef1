"""The interface between data sets and the pipeline: length, inputs for the first stage, targets for the last, by sample
index.

A host needs a data set only where its stage uses it: the first stage asks for inputs, the last for targets, the stages
between for neither. So inputs and targets can be asked for separately, and loading one should not need the other.

Random augmentation may concern both. So torch's, NumPy's and Python's generators are seeded for each sample by epoch and
index before a torch-style data set is asked for it, and one call gives x and y; first and last stage, on two ranks, make the
same call.
"""

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from accept_mpi import tree
from accept_mpi.data.arrays import check_fits, dtype_of, tensor_of, torch_has
from accept_mpi.errors import UserError, one_line
from accept_mpi.seeds import AUGMENT, mix, seed_all
from accept_mpi.users_code import RAISED, blame, taken_apart

Indices = npt.NDArray[np.int64]
Rows = torch.Tensor | npt.NDArray[Any]


@runtime_checkable
class Dataset(Protocol):
    """A map-style data set, read in whole micro-batches."""

    def __len__(self) -> int:
        """Number of samples."""

    def inputs(self, indices: Indices, seed: int | None = None) -> Any:
        """Inputs of these samples, stacked along dimension 0: a tensor, or a tuple, list or dict of tensors.

        Random augmentation may depend only on ``seed`` (None in evaluation) and a sample's index.
        """

    def targets(self, indices: Indices) -> Any:
        """Targets of these samples, stacked along dimension 0."""


class Together:
    """Base of data sets one call of which gives inputs and targets."""

    targets_anywhere = True

    def samples(self, indices: Indices, seed: int | None, inputs: bool, targets: bool) -> "Samples":
        """Inputs and targets of these samples, as far as they are wanted."""
        raise NotImplementedError

    def inputs(self, indices: Indices, seed: int | None = None) -> Any:
        """As in ``Dataset``."""
        return self.samples(indices, seed, True, False).inputs

    def targets(self, indices: Indices, seed: int | None = None) -> Any:
        """As in ``Dataset``."""
        return self.samples(indices, seed, False, True).targets


class Wrapper:
    """Base of data sets that are made of another one."""

    inside: Any
    """The other one."""


class Samples(NamedTuple):
    """Inputs and targets of a micro-batch."""

    inputs: Any
    """May be None if only targets were asked for."""
    targets: Any
    """May be None if only inputs were asked for."""


def fetch(data: Dataset, indices: Indices, seed: int | None, inputs: bool, targets: bool) -> Samples:
    """Inputs and targets of these samples, as far as they are wanted. ``seed`` determines random numbers; None in
    evaluation, where they are always the same.

    Raises UsersBug for exceptions in the user's data set, UserError for samples that do not fit together.
    """
    try:
        if isinstance(data, Together):
            return data.samples(indices, seed, inputs, targets)
        own = mix(AUGMENT, EVALUATION if seed is None else seed, *indices[:1].tolist())
        seed_all(own)
        x = data.inputs(indices, seed) if inputs else None
        seed_all(own)
        return Samples(x, data.targets(indices) if targets else None)
    except RAISED as error:
        blame(error, f"the data set, asked for samples {_some(indices)},")


def begin_epoch(data: Dataset, epoch: int, seed: int) -> None:
    """Call a user's data set's ``set_epoch``, if it has one, as the loops of other libraries do. ``seed`` determines random
    numbers. Raises UsersBug for exceptions in it."""
    if isinstance(data, Wrapper) and callable(tell := getattr(_innermost(data), "set_epoch", None)):
        seed_all(seed)
        try:
            tell(epoch)
        except RAISED as error:
            blame(error, f"the data set's set_epoch({epoch})")


def _innermost(data: Any) -> Any:
    """The data set that all others are made of."""
    while isinstance(data, Wrapper):
        data = data.inside
    return data


def gives_targets(data: Dataset | None) -> bool:
    """True if the first stage may ask for targets, too, and compare them with the last one's. Users' own kinds need not have
    them there, or may take long for them."""
    return bool(getattr(data, "targets_anywhere", False))


def classes_of(data: Dataset) -> list[str]:
    """Names of the classes of a data set, in the order of their numbers, as its ``classes`` says (torchvision's have that,
    too); empty if it does not."""
    with contextlib.suppress(Exception):  # it may be a user's own code
        names = getattr(_innermost(data), "classes", ())
        if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names):
            return [os.fsencode(name).decode(errors="replace") for name in names]  # folders' names may be any bytes
    return []


def _some(indices: Indices) -> str:
    shown = ", ".join(map(str, indices[:4].tolist()))
    return f"{shown}, ..." if len(indices) > 4 else shown


class ArrayDataset:
    """Data set of two tensors or arrays, ``x`` (n, ...) and ``y`` (n, ...). Arrays may be mapped files, larger than memory:
    rows are converted when they are asked for. Raises TypeError or ValueError with a sentence for what is no numbers."""

    targets_anywhere = True

    def __init__(self, x: Rows, y: Rows) -> None:
        if len(x) != len(y):
            raise ValueError(f"x holds {len(x)} samples and y {len(y)}")
        self.x, self.y = _numbers(x), _numbers(y)

    def __len__(self) -> int:
        return len(self.x)

    def inputs(self, indices: Indices, seed: int | None = None) -> torch.Tensor:
        return _rows(self.x, indices)

    def targets(self, indices: Indices) -> torch.Tensor:
        return _rows(self.y, indices)


def _numbers(values: Rows) -> Rows:
    """Tensor or array as it can be indexed. Raises TypeError or ValueError with a sentence."""
    if isinstance(values, torch.Tensor):
        return torch_has(values)
    dtype_of(values.dtype)
    if values.dtype.kind == "u" and values.dtype.itemsize == 8:
        check_fits(values)
    return values


def _rows(values: Rows, indices: Indices) -> torch.Tensor:
    if isinstance(values, torch.Tensor):
        return values[torch.from_numpy(indices)]
    return tensor_of(values[indices], floats=False)


class OwnDataset(Wrapper):
    """Adapter for a data set of the user's own kind, which may write to the indices that it gets, and give a buffer that it
    uses again or a view of what it holds."""

    def __init__(self, data: Dataset) -> None:
        self.inside = data

    def __len__(self) -> int:
        return len(self.inside)

    def inputs(self, indices: Indices, seed: int | None = None) -> Any:
        return _own(self.inside.inputs(indices.copy(), seed))

    def targets(self, indices: Indices) -> Any:
        return _own(self.inside.targets(indices.copy()))


def _own(value: Any) -> Any:
    """The same value, with tensors of its own. Raises UserError for what is no tree of tensors."""
    tensors, of = taken_apart(-1, "", value)
    return tree.unflatten(of, [torch_has(tensor.detach().clone()) for tensor in tensors])


class MapDataset(Together, Wrapper):
    """Adapter for a torch-style map data set (``len`` and ``[i] -> (x, y)``, or -> a dict with the target in it). Raises
    UserError for other samples."""

    def __init__(self, items: Any, whole: bool = False) -> None:
        """``whole``: the model gets the target of a dict, too, since it computes the loss."""
        self.inside, self._whole = items, whole

    def __len__(self) -> int:
        return len(self.inside)

    def samples(self, indices: Indices, seed: int | None = None, inputs: bool = True, targets: bool = True) -> Samples:
        """Inputs and targets, as far as they are wanted, from one call per sample."""
        pairs = []
        for i in indices.tolist():
            seed_all(mix(AUGMENT, EVALUATION if seed is None else seed, i))
            pairs.append(self._sample(i))
        x, y = zip(*pairs, strict=True)
        return Samples(_stack(x, "x") if inputs else None, _stack(y, "y") if targets else None)

    def _sample(self, index: int) -> Any:
        sample = self.inside[index]
        if isinstance(sample, Mapping) and (name := next((one for one in TARGETS if one in sample), None)):
            inputs = {key: value for key, value in sample.items() if key != name or self._whole}
            return inputs, sample[name]
        if not isinstance(sample, tuple | list) or len(sample) != 2:
            of = f" of {len(sample)}" if isinstance(sample, tuple | list) else ""
            raise UserError(
                f"data.name: sample {index} must be a pair (x, y), or a dict with its target under one of "
                f"{', '.join(TARGETS)}; got a {type(sample).__name__}{of}"
            )
        return sample


def _tensor(value: Any) -> torch.Tensor:
    """Tensor from an array of any byte order and width, or from a number. Raises TypeError or ValueError for anything
    else."""
    if isinstance(value, np.ndarray | np.generic):
        return tensor_of(np.asarray(value), floats=False)
    if value is None or isinstance(value, str | bytes):
        raise TypeError(f"{one_line(repr(value), 60)} is none of these, and is to be left out")
    return torch_has(torch.as_tensor(value))


def _is_sample(value: Any) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, tuple | list) and len(value) == 2)


def _stack(values: Sequence[Any], what: str) -> Any:
    try:
        return tree.stack(values, _tensor)
    except (RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"data.name: the {what} of samples must be tensors or arrays of one shape: {reason}") from error


TARGETS = ("labels", "label", "targets", "target")
"""Names under which a sample that is a dict may have its target."""
EVALUATION = 0
"""Used in place of a seed in evaluation."""

Loader = Callable[..., tuple[Any, Any]]


def adapt(data: object, whole: bool = False) -> Dataset:
    """A user's data set as a ``Dataset``: it may be one, a pair of tensors or arrays ``(x, y)``, or of torch's map style.
    ``whole``: the model gets the targets of samples that are dicts, too.

    Raises TypeError with a sentence if it is none of these.
    """
    if isinstance(data, type):
        raise TypeError(f"got the class {data.__name__}: give an instance of it")
    if hasattr(data, "targets_anywhere") and isinstance(data, Dataset):
        return data  # built-in
    if isinstance(data, Dataset) and callable(data.inputs) and callable(data.targets):
        return OwnDataset(data)
    if isinstance(data, Mapping | str):
        raise TypeError(
            f"expected a data set with __len__ and __getitem__ by number, or a pair (x, y), got a {type(data).__name__}"
        )
    if isinstance(data, DataLoader):
        raise TypeError("got a DataLoader: give its dataset, since batches and their order are the job's")
    if isinstance(data, IterableDataset):
        raise TypeError("expected a data set with __len__ and __getitem__: samples of an IterableDataset have no numbers")
    if isinstance(data, Sequence) and len(data) == 2 and all(isinstance(d, torch.Tensor | np.ndarray) for d in data):
        return ArrayDataset(data[0], data[1])
    if type(data) is TensorDataset and len(data.tensors) == 2:  # draws no random numbers, and its samples are rows
        return ArrayDataset(*data.tensors)
    if isinstance(data, tuple | list) and len(data) == 2 and not all(map(_is_sample, data)):
        kinds = " and a ".join(type(one).__name__ for one in data)
        raise TypeError(f"a pair (x, y) must be of tensors or arrays, got a {kinds}")
    if hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        return MapDataset(data, whole)
    raise TypeError(f"expected a data set with __len__ and __getitem__, or a pair (x, y), got {type(data).__name__}")

"""Conversion of arrays to tensors: any byte order, any width of integers, of floating-point and of complex numbers."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_WIDER: dict[np.dtype[Any], np.dtype[Any]] = {
    np.dtype(np.uint16): np.dtype(np.int32),
    np.dtype(np.uint32): np.dtype(np.int64),
}
"""Wider types that replace those for which torch has no arithmetic."""
DTYPES = ("float32", "float64", "int64", "int32", "int16", "int8", "uint8", "bool")
"""Names of the dtypes that a user may ask for."""


def dtype_of(found: np.dtype[Any], floats: bool = True) -> np.dtype[Any]:
    """Dtype of the tensor that an array of dtype ``found`` becomes, in this machine's byte order.

    Floating-point numbers become float32, or, if ``floats`` is False, keep a dtype that torch has and else become float64;
    complex ones likewise, of twice the size. uint16 becomes int32, uint32 and uint64 become int64; other dtypes stay. Raises
    TypeError with a sentence for anything but numbers (texts, records).
    """
    plain = found.newbyteorder("=")
    if plain.kind not in "biufc":
        raise TypeError(f"holds {found}, not numbers")
    if plain.kind in "fc":
        single, double = (np.float32, np.float64) if plain.kind == "f" else (np.complex64, np.complex128)
        return np.dtype(single) if floats else np.dtype(double) if plain.itemsize > np.dtype(double).itemsize else plain
    if plain == np.uint64:
        return np.dtype(np.int64)
    wider: np.dtype[Any] = _WIDER.get(plain, np.dtype(plain.str))
    return wider


def tensor_of(values: npt.NDArray[Any], asked: np.dtype[Any] | None = None, floats: bool = True) -> torch.Tensor:
    """Tensor from an array, of dtype ``asked`` or by default as in ``dtype_of``. Raises TypeError or ValueError with a
    sentence."""
    wanted = asked if asked is not None else dtype_of(values.dtype, floats)
    if values.dtype.kind == "c" and wanted.kind != "c":
        raise ValueError(f"holds {values.dtype}, complex numbers, which {wanted} cannot hold")
    narrow = not np.can_cast(values.dtype, wanted)
    if narrow and wanted.kind in "iu":
        check_fits(values, wanted)
    with np.errstate(over="ignore"):
        plain = np.ascontiguousarray(values, wanted).reshape(values.shape)
    if narrow:
        lost = values[plain != values if wanted.kind in "iub" else np.isinf(plain) & np.isfinite(values)]
        if lost.size:
            raise ValueError(f"holds {lost[0].item()}, which {wanted} cannot hold")
    return torch.from_numpy(plain if plain.flags.writeable else plain.copy())


def check_fits(values: npt.NDArray[Any], wanted: npt.DTypeLike = np.int64) -> None:
    """Raise ValueError with a sentence if a number is outside of what whole numbers of dtype ``wanted`` can be."""
    limits = np.iinfo(np.dtype(wanted))
    for end in (values.min().item(), values.max().item()) if values.size else ():
        if not limits.min <= end <= limits.max:  # nor if it is NaN
            raise ValueError(f"holds {end}, which {limits.dtype} cannot hold")


def torch_has(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or in a wider dtype if torch has no arithmetic in its own. Raises ValueError with a sentence for
    numbers that are too large."""
    return tensor_of(tensor.numpy()) if tensor.dtype in (torch.uint16, torch.uint32, torch.uint64) else tensor

"""Calls into code that is the user's: layers, losses, data sets. What goes wrong there is shown as the user's own traceback.

A mistake that shows itself while shapes are found, before the first step, is one sentence where it is the shapes that do not
fit. Everything else is a bug of the user's, and he needs its file and line.
"""

import re
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn

from accept_mpi import tree
from accept_mpi.errors import OutOfMemory, UserError, UsersBug

_PACKAGE = str(Path(__file__).parent)
_LIBRARIES = tuple(str(Path(str(module.__file__)).parent) for module in (torch, np))
_SHAPES = re.compile(
    r"shapes? .*cannot be multiplied|size mismatch|size of tensor|sizes? .*must match|shape .* is invalid"
    r"|invalid for input of size|expected .*(input|dimension|channel|tensor|dtype|type)|same (dtype|shape)|normalized_shape"
    r"|cannot be broadcast|dimension out of range|index out of range|out of bounds|more than 1 value per channel"
    r"|not implemented for|must be (tensor|divisible)|argument 'input'|embed dim|sequence length|but got|equation",
    re.IGNORECASE,
)
_MEMORY = re.compile(
    r"can't allocate memory|cannot allocate memory|not enough memory|out of memory|std::bad_alloc", re.IGNORECASE
)


def call_layer(index: int, name: str, layer: nn.Module, value: Any, setting_up: bool = False) -> Any:
    """What a layer gives. ``setting_up``: the first forward of all, which finds the shapes.

    Raises UserError where a layer cannot take ``value`` then, UsersBug for all else that goes wrong in it.
    """
    try:
        return layer(value)
    except Exception as error:
        if setting_up and does_not_fit(error):
            source = "what the layer before gives" if index else "what the data set gives"
            given = f"({tree.describe(value)}){'' if index else _hint(value)}"
            raise UserError(
                f'layer {index} "{name}" cannot take {source} {given}: {in_words(error)}{_place(error)}'
            ) from error
        blame(error, f'layer {index} "{name}"')


def _hint(value: Any) -> str:
    """What may be wrong with inputs of a model."""
    tensors = tree.leaves(value)
    if tensors and not any(one.is_floating_point() for one in tensors):
        return '; for layers that want floats, data.args of "hdf5" take x_dtype = "float32"'
    return ""


def taken_apart(index: int, name: str, value: Any) -> tuple[list[torch.Tensor], tree.Tree]:
    """The tensors of what a layer gives (-1: the data set), and the tree. Raises UserError for what cannot cross to another
    stage."""
    try:
        return tree.flatten(value)
    except tree.NotATree as error:
        who = f'layer {index} "{name}"' if index >= 0 else "the data set"
        raise UserError(
            f"{who} gives {error}, which cannot cross to another stage; tensors, arrays, numbers, text, None, and tuples, "
            "lists, dicts, named tuples and dataclasses of them can"
        ) from error


def blame(error: Exception, where: str) -> NoReturn:
    """Raise what a user is to see of an exception in his own code: ``where`` it was, and its traceback without our
    frames."""
    if isinstance(error, UserError | UsersBug):
        raise error
    kind = OutOfMemory if lacks_memory(error) else UsersBug
    what = "ran out of memory" if kind is OutOfMemory else "raised"
    frames = error.with_traceback(_from_users_code(error.__traceback__))
    raise kind(f"{where} {what}:\n{''.join(traceback.format_exception(frames))}".rstrip()) from None


def lacks_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and _MEMORY.search(str(error)) is not None
    )


def in_words(error: BaseException) -> str:
    """ "ValueError: what it says", on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _from_users_code(found: TracebackType | None) -> TracebackType | None:
    """A traceback from its first frame on that is neither ours nor a library's; all of it where there is none."""
    whole = found
    while found is not None:
        if not found.tb_frame.f_code.co_filename.startswith((_PACKAGE, *_LIBRARIES)):
            return found
        found = found.tb_next
    return whole


def does_not_fit(error: Exception) -> bool:
    """Whether torch complains of what it was given."""
    if isinstance(error, TypeError | IndexError | ValueError | RuntimeError) and not lacks_memory(error):
        return _innermost(error) is None or _SHAPES.search(str(error)) is not None
    return False


def _place(error: Exception) -> str:
    """Where in the user's code that was, if it was there."""
    frame = _innermost(error)
    return f" ({Path(frame.filename).name}, line {frame.lineno}, in {frame.name})" if frame else ""


def _innermost(error: Exception) -> traceback.FrameSummary | None:
    """The last frame that is the user's."""
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((_PACKAGE, *_LIBRARIES))
    ]
    return own[-1] if own else None

"""Calls into the user's code: layers, losses and data sets.

An exception there is a bug of the user's, who needs its file and line: it is shown with the traceback of the user's own
frames. Only inputs that do not fit, found before the first step while shapes are determined, are reported in one sentence.
"""

import contextlib
import os
import re
import sys
import sysconfig
import traceback
from functools import cache
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn
from xxhash import xxh3_64_hexdigest

from accept_mpi import tree
from accept_mpi.errors import OutOfMemory, UserError, UsersBug
from accept_mpi.files.regular import read_regular

_PACKAGE = str(Path(__file__).parent)
_LIBRARIES = tuple(str(Path(str(module.__file__)).parent) for module in (torch, np))
_INSTALLED = ("site-packages", "dist-packages")
_NOT_THE_USERS = ("__main__", "sitecustomize", "usercustomize")
_MOST_BYTES = 16 << 20  # of a file of code
_SHAPES = re.compile(
    r"shapes? .*cannot be multiplied|size mismatch|size of tensor|sizes? .*must match|shape .* is invalid"
    r"|invalid for input of size|expected .*(input|dimension|channel|tensor|dtype|type)|same (dtype|shape)|normalized_shape"
    r"|cannot be broadcast|dimension out of range|index out of range|out of bounds|more than 1 value per channel"
    r"|not implemented for|must be (tensor|divisible)|argument 'input'|embed dim|sequence length|but got|equation|view size",
    re.IGNORECASE,
)
_VIEW = "view size is not compatible"
_VIEWS = '; images are in channels_last format here, so write reshape for view, or set train.memory_format = "contiguous"'
_MEMORY = re.compile(
    r"can't allocate memory|cannot allocate memory|not enough memory|out of memory|std::bad_alloc", re.IGNORECASE
)


def sources() -> dict[str, str]:
    """Checksums of the files of all modules that are imported now, by the modules' names: the user's, and this package's.
    Libraries are left out."""
    found = {}
    for name, module in list(sys.modules.items()):
        file = vars(module).get("__file__") if isinstance(module, ModuleType) else None  # not getattr: some load lazily
        own = name.partition(".")[0] == "accept_mpi"
        if isinstance(file, str) and file.endswith(".py") and name not in _NOT_THE_USERS and (own or not _is_library(file)):
            with contextlib.suppress(OSError):
                found[name] = _sum_of(file)
    return found


@cache
def _is_library(file: str) -> bool:
    return file.startswith(_folders()) or any(f"{os.sep}{name}{os.sep}" in file for name in _INSTALLED)


@cache
def _folders() -> tuple[str, ...]:
    """Where libraries are, Python's own among them."""
    return (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), *_LIBRARIES)


@cache  # what is imported stays as it is, even if somebody changes the file
def _sum_of(file: str) -> str:
    return xxh3_64_hexdigest(read_regular(file, _MOST_BYTES))


RAISED = (Exception, SystemExit)
"""What a user's code may raise; the second by ``sys.exit``, which would end one rank without a word."""


def call_layer(index: int, name: str, layer: nn.Module, value: Any, setting_up: bool = False) -> Any:
    """Output of a layer. ``setting_up``: this is the first forward, which determines the shapes.

    Raises UserError if the layer cannot take ``value`` while ``setting_up``, UsersBug for any other exception in it.
    """
    try:
        return layer(value)
    except RAISED as error:
        if setting_up and does_not_fit(error):
            source = "what the layer before gives" if index else "what the data set gives"
            given = f"({tree.describe(value)}){'' if index else _hint(value)}{_VIEWS if _VIEW in str(error) else ''}"
            raise UserError(
                f'layer {index} "{name}" cannot take {source} {given}: {in_words(error)}{_place(error)}'
            ) from error
        blame(error, f'layer {index} "{name}"')


def _hint(value: Any) -> str:
    """Hint at a likely cause if a model cannot take its inputs, or an empty string."""
    tensors = tree.leaves(value)
    if tensors and not any(one.is_floating_point() for one in tensors):
        return '; layers that want floats get them from x.float() in a data set of your own, x_dtype = "float32" in "hdf5"'
    return ""


def taken_apart(index: int, name: str, value: Any) -> tuple[list[torch.Tensor], tree.Tree]:
    """Tensors and tree of a layer's output, or of the data set's (``index`` -1). Raises UserError if it cannot cross to
    another stage."""
    try:
        return tree.flatten(value)
    except tree.NotATree as error:
        who = f'layer {index} "{name}"' if index >= 0 else "the data set"
        raise UserError(
            f"{who} gives {error}, which cannot cross to another stage; tensors, arrays, numbers, text, None, and tuples, "
            "lists, dicts, named tuples and dataclasses of them can"
        ) from error


def blame(error: BaseException, where: str) -> NoReturn:
    """Raise UsersBug or OutOfMemory for an exception in the user's code, with ``where`` it happened and a traceback without
    this package's frames. UserError and UsersBug are raised as they are."""
    if isinstance(error, UserError | UsersBug):
        raise error
    kind = OutOfMemory if lacks_memory(error) else UsersBug
    what = "ran out of memory" if kind is OutOfMemory else "raised"
    frames = error.with_traceback(_from_users_code(error.__traceback__))
    raise kind(f"{where} {what}:\n{''.join(traceback.format_exception(frames))}".rstrip()) from None


def lacks_memory(error: BaseException) -> bool:
    """True if an exception means that memory ran out."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and _MEMORY.search(str(error)) is not None
    )


def in_words(error: BaseException) -> str:
    """Type and message of an exception on one line: "ValueError: what it says"."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _from_users_code(found: TracebackType | None) -> TracebackType | None:
    """Traceback from the first frame that is neither this package's nor a library's; the whole traceback if there is
    none."""
    whole = found
    while found is not None:
        if not found.tb_frame.f_code.co_filename.startswith((_PACKAGE, *_LIBRARIES)):
            return found
        found = found.tb_next
    return whole


def does_not_fit(error: BaseException) -> bool:
    """True if an exception means that the input has an unsuitable shape or type."""
    if isinstance(error, TypeError | IndexError | ValueError | RuntimeError) and not lacks_memory(error):
        return _innermost(error) is None or _SHAPES.search(str(error)) is not None
    return False


def _place(error: BaseException) -> str:
    """Place in the user's code where an exception was raised, in brackets; empty if there is none."""
    frame = _innermost(error)
    return f" ({Path(frame.filename).name}, line {frame.lineno}, in {frame.name})" if frame else ""


def _innermost(error: BaseException) -> traceback.FrameSummary | None:
    """Last frame of an exception that is in the user's code; None if there is none."""
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((_PACKAGE, *_LIBRARIES))
    ]
    return own[-1] if own else None

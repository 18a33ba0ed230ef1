"""Why a forward cannot be recorded, in a sentence, and where in its code."""

import contextlib
import re
import sys
from pathlib import Path

import torch

from accept_mpi.errors import UserError

READS_DATA = (
    "model.name: forward depends on the values of its data ({}() of a tensor), so it cannot be recorded ({}): what depends "
    "on them must be in a module within the model, which then stays whole"
)
TRANSFORMS = (
    "model.name: forward uses a transform of torch.func, which cannot be recorded unless it is within a module without "
    "parts ({})"
)
_FOREIGN = (
    "model.name: forward uses a parameter that is no part of the model ({}): make it in __init__, and keep modules in an "
    "nn.ModuleList, not in a list of Python's"
)
_PASSED_BY = (
    "model.name: forward uses {} through a list, a function or the like, where no update would reach it: use the parameter "
    "itself ({})"
)
VIEWED = (
    "model.name: forward writes to {}, and uses it by a view that it finds in a list, a function or the like, where what is "
    "written would not show: use the buffer itself"
)
OF_ANOTHER = (
    "model.name: forward uses a tensor whose origin cannot be recorded ({}): perhaps one that an earlier forward has kept "
    "in a cache; make it in each forward, or in __init__ as a buffer"
)
_VARIES = (
    "model.name: what {} gives has other shapes, types or constants for other values of its data, so what follows cannot be "
    "recorded ({}): put both into a module within the model, which then stays whole"
)
SPARSE = "a sparse tensor, which can be neither recorded nor kept in a checkpoint: use it dense (to_dense())"
_NO_KERNEL = ("Meta kernel", "register_meta")
_OWN = (str(Path(__file__).parent), str(Path(torch.__file__).parent), contextlib.__file__)


class Unrecordable(UserError):
    """A forward that cannot be recorded; the message says why, with file and line."""

    within = ""
    """Name of the module in whose forward that is found out, if that module may be recorded as a whole instead."""


class Varies(Exception):
    """What a module that is to stay whole gives is not alike for other values (``structure.fixed_in``); the message is the
    module's class."""


class Foreign(Unrecordable):
    """A forward that uses a parameter which no optimizer gets."""

    def __init__(self) -> None:
        super().__init__(_FOREIGN.format(where()))


def passed_by(name: str) -> Unrecordable | None:
    """The error for a parameter of the model that the forward does not reach through the model; None without a name."""
    return Unrecordable(_PASSED_BY.format(name, where())) if name else None


class ReadsData(Unrecordable):
    """A forward that depends on the values of its data."""


class ResultVaries(ReadsData):
    """A module that would have to stay whole, and cannot, since more of what it gives than values depends on values."""


def is_for_want_of_values(error: BaseException) -> bool:
    """True for what torch raises where a tensor has no values."""
    text = str(error)
    meta = re.search(r"\bmeta (\w+ )?tensor", text.lower())
    return not isinstance(error, UserError) and (meta is not None or any(one in text for one in _NO_KERNEL))


def without_values(error: BaseException, function: str, at: str) -> tuple[type[Unrecordable], str]:
    """What to say of an exception where tensors have no values, which torch's ``function`` has raised last."""
    text = " ".join(str(error).split())
    if isinstance(error, Varies):
        return ResultVaries, _VARIES.format(text, at)
    if "Meta kernel" in text:  # of some functions torch does not know, of others nobody can
        said = f"torch does not say what {function}() gives without the values of its data"
        return ReadsData, f"model.name: the forward cannot be recorded: {said} ({at})"
    if is_for_want_of_values(error):
        return ReadsData, READS_DATA.format(function, at)
    return Unrecordable, f"model.name: the forward cannot be recorded: {type(error).__name__}: {text} ({at})"


def where() -> str:
    """File and line of the model's code that is running."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OWN):
        frame = frame.f_back  # type: ignore[assignment]
    return f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}" if frame else "unknown place"


def innermost(error: BaseException) -> str:
    """File and line of the model's code that has raised an exception."""
    found, at = error.__traceback__, "unknown place"
    while found is not None:
        name = found.tb_frame.f_code.co_filename
        if not name.startswith(_OWN):
            at = f"{Path(name).name}, line {found.tb_lineno}"
        found = found.tb_next
    return at

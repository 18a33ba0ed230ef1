"""File and line of a model's code, for what is said of it."""

import contextlib
import sys
from pathlib import Path

import torch

_OWN = (str(Path(__file__).parent), str(Path(torch.__file__).parent), contextlib.__file__)


def where() -> str:
    """Of the code that is running."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OWN):
        frame = frame.f_back  # type: ignore[assignment]
    return f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}" if frame else "unknown place"


def innermost(error: Exception) -> str:
    """Of the code that has raised an exception."""
    found, at = error.__traceback__, "unknown place"
    while found is not None:
        name = found.tb_frame.f_code.co_filename
        if not name.startswith(_OWN):
            at = f"{Path(name).name}, line {found.tb_lineno}"
        found = found.tb_next
    return at

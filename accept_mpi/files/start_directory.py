"""Paths from the directory in which this process began: the user's code may change to another one."""

import os
from pathlib import Path

try:
    _START = os.getcwd()
except OSError:  # it has been removed
    _START = ""


def from_start(path: str | Path) -> Path:
    """The place of a path that the job or the command line names, which may begin with ``~``."""
    return Path(_START, os.path.expanduser(path))


def near(path: Path) -> Path:
    """A path as one writes it where the run began: without that directory, if it lies in it."""
    return path.relative_to(_START) if _START and path.is_relative_to(_START) else path

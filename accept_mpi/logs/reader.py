"""Opens logs for reading, be they finished, growing, or left behind by a killed run."""

import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py

from accept_mpi.errors import UserError
from accept_mpi.files.hdf5 import is_followed, number_in, open_file, open_followed, open_still, text_in
from accept_mpi.files.regular import is_regular
from accept_mpi.logs.format import (
    FORMAT,
    VERSION,
    check_log,
)

_LOOKS, _BETWEEN_LOOKS = 5, 0.05  # at a log that does not change; seconds
_MOST_SECONDS = 20.0


def log_in(path: str | os.PathLike[str]) -> Path:
    """The log itself, or that of a run's directory."""
    return Path(path) / "log.h5" if os.path.isdir(path) else Path(path)


def open_log(path: str | os.PathLike[str]) -> h5py.File:
    """Open a log, or that of a run's directory, for reading, be it finished, growing, or left behind by a killed run;
    ``logs.format`` has its layout.

    Raises UserError if there is no such file, it is damaged, or it is not a log of a version known here.
    """
    path = log_in(path)
    try:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, ValueError):
            os.stat(path)
    except OSError as error:  # such as a folder on the way that this user may not enter
        raise UserError(f"{path}: cannot read the log: {error.strerror}") from error
    if not is_regular(path):
        raise UserError(f"{path}: there is no such log file")
    try:
        if not is_followed(path):
            return _checked(path, open_file)
        _wait_until_whole(path)
        return open_followed(path)
    except OSError as error:
        raise UserError(f"{path}: not a readable HDF5 file ({error.strerror or error})") from error


def _wait_until_whole(path: str | os.PathLike[str]) -> None:
    """Validate a log that may be growing. It may only look damaged because its writer is in the middle of a flush; so it is
    looked at again while it changes. Raises UserError if it is damaged."""
    until, unchanged = time.monotonic() + _MOST_SECONDS, 0
    while True:
        before = os.stat(path)
        try:
            _checked(path, open_still).close()
            return
        except UserError:
            time.sleep(_BETWEEN_LOOKS)
            now = os.stat(path)
            same = (now.st_size, now.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
            unchanged = unchanged + 1 if same else 0
            if unchanged == _LOOKS or time.monotonic() > until:
                raise


def _checked(path: str | os.PathLike[str], opened: Callable[[str | os.PathLike[str]], h5py.File]) -> h5py.File:
    """Open and validate a log. Raises UserError if it is not a valid log, OSError if it is not an HDF5 file."""
    file = opened(path)
    try:
        if "format" not in file.attrs or text_in(file, "format") != FORMAT:
            raise UserError(f"{path}: an HDF5 file, but not a log of accept-mpi")
        if (found := number_in(file, "version")) != VERSION:
            raise UserError(f"{path}: log layout version {found}; this program reads version {VERSION}")
        check_log(file)
    except UserError:
        file.close()
        raise
    except Exception as error:  # h5py raises many kinds of exceptions on a damaged file
        file.close()
        raise UserError(f"{path}: a damaged log: {error}") from error
    return file


def read_facts(file: h5py.File) -> dict[str, Any]:
    """The facts of a run as a dict, with its ``job`` and ``plan`` (both decoded) added."""
    facts: dict[str, Any] = json.loads(file.attrs["facts"])
    return facts | {"job": json.loads(file.attrs["job"]), "plan": json.loads(file.attrs["plan"])}

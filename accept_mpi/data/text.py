"""Character text from files, in windows of a fixed context."""

import codecs
import io
import logging
import os
import sysconfig
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from accept_mpi.data.base import Indices
from accept_mpi.errors import UserError, one_line
from accept_mpi.files.regular import open_regular
from accept_mpi.files.start_directory import from_start

log = logging.getLogger(__name__)

_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # before UTF-16, whose mark it begins with
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
"""Byte order marks, and the encodings that they announce."""
_SNIFFED = 8192  # bytes: a NUL within them marks a binary file, as in git
_CHARACTERS = 0x110000
_SKIPPED = frozenset({"site-packages", "test", "tests", "__pycache__", "idlelib", "lib2to3"})
"""Installed packages, tests and tools among the standard library's sources."""


class TextDataset:
    """Windows of a text that do not overlap: inputs (context,) and targets, the same window one character later, int64."""

    targets_anywhere = True

    def __init__(self, tokens: npt.NDArray[Any], context: int, vocabulary: int) -> None:
        self.tokens, self.context = tokens, context
        self.vocabulary = vocabulary
        """Number of symbols in training and test set together, which a model must know at least."""

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.context)

    def inputs(self, indices: Indices, seed: int | None = None) -> torch.Tensor:
        return self._windows(indices, 0)

    def targets(self, indices: Indices) -> torch.Tensor:
        return self._windows(indices, 1)

    def _windows(self, indices: Indices, shift: int) -> torch.Tensor:
        places = indices[:, None] * self.context + np.arange(self.context) + shift
        return torch.from_numpy(self.tokens[places].astype(np.int64))


def text(
    path: str | None = None,
    context: int = 128,
    test_fraction: float = 0.1,
    vocabulary: int | str = 128,
    limit: int = 4_000_000,
    encoding: str | None = None,
) -> tuple[TextDataset, TextDataset]:
    """Training and test set from the characters of a file, or of all text files below a directory in order of their names,
    at most ``limit`` of them. Line ends of any kind are one character.

    A file's encoding is that of its byte order mark, else ``encoding``, else UTF-8. Raises UserError, naming the file, if it
    cannot be decoded. In a directory, files and folders whose names begin with a dot are ignored, and so are binary files (a
    NUL in their first 8 KiB, which neither a mark nor ``encoding`` explains), with a warning.

    Without a path, the text is the sources of Python's standard library on this machine. A character's symbol is its code;
    codes beyond ``vocabulary`` become the last symbol, so that the vocabulary does not depend on the text. With "auto", it
    is the character's place among those that occur, in the order of their codes. The test set is the end of the text.
    """
    if vocabulary != "auto" and not (_whole(vocabulary) and 1 <= vocabulary <= _CHARACTERS):  # type: ignore[operator]
        raise ValueError(f'vocabulary must be a whole number from 1 to {_CHARACTERS} or "auto", got {vocabulary!r}')
    if not (_whole(context) and context >= 1 and _whole(limit) and limit >= 1 and 0 < test_fraction < 1):
        raise ValueError("expected context >= 1, limit >= 1 and 0 < test_fraction < 1")
    if path is not None:
        codes = _read(source := from_start(path), limit, encoding, "", frozenset())
    else:
        codes = _read(source := Path(sysconfig.get_paths()["stdlib"]), limit, encoding, ".py", _SKIPPED)
    if vocabulary == "auto":
        there, tokens = np.unique(codes, return_inverse=True)
        symbols = len(there)
    else:
        tokens = np.minimum(codes, int(vocabulary) - 1)
        symbols = int(tokens.max(initial=0)) + 1
    tokens = tokens.astype(np.uint8 if symbols <= 256 else np.int32)
    held = int(len(tokens) * test_fraction)
    cut = len(tokens) - held
    train, test = (TextDataset(part, context, symbols) for part in (tokens[:cut], tokens[cut:]))
    if not len(train) or not len(test):
        raise UserError(f"data.args: {source} has {len(tokens)} characters, too few for a context of {context}")
    return train, test


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _read(source: Path, limit: int, encoding: str | None, suffix: str, skipped: Set[str]) -> npt.NDArray[np.uint32]:
    """Codes of at most ``limit`` characters; ``suffix`` and ``skipped`` as in ``_listing``."""
    if source.is_file():
        files, alone = iter([source]), True
    elif source.is_dir():
        files, alone = _listing(source, suffix, skipped), False
    else:
        raise UserError(f"data.args: there is no file or directory {source}")
    if encoding is not None:
        _check(encoding)
    parts: list[str] = []
    length, other = 0, []
    for file in files:
        if (part := _characters(file, limit - length, encoding, alone)) is None:
            other.append(file)
            continue
        parts.append(part)
        length += len(part)
        if length >= limit:
            break
    if other:
        log.warning("%s: %d files are no text and left out (%s, ...)", source, len(other), one_line(str(other[0])))
    return np.frombuffer("".join(parts).encode("utf-32-le", "surrogatepass"), np.uint32)


def _listing(source: Path, suffix: str, skipped: Set[str]) -> Iterator[Path]:
    """Yield the files below a directory whose names end with ``suffix``, in order of their names. Hidden files and folders
    are skipped, and those that are called one of ``skipped``: what lies in them is not even looked at."""
    try:
        entries = sorted(os.scandir(source), key=lambda entry: entry.name)
    except PermissionError:
        return
    for entry in entries:
        if entry.name.startswith(".") or entry.name in skipped:
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _listing(source / entry.name, suffix, skipped)
        elif entry.name.endswith(suffix) and entry.is_file():
            yield source / entry.name


def _check(encoding: str) -> None:
    """Raise ValueError unless ``encoding`` is a text encoding that Python knows."""
    try:
        b"".decode(encoding)
        known = codecs.lookup(encoding).name not in ("idna", "punycode", "undefined")
    except (LookupError, ValueError, TypeError):
        known = False
    if not known:
        raise ValueError(f'encoding must be one that Python knows, such as "utf-8" or "latin-1", got {encoding!r}')


def _characters(file: Path, most: int, encoding: str | None, alone: bool) -> str | None:
    """First ``most`` characters of a file; None for a binary file, unless it was asked for ``alone``. Raises UserError."""
    try:
        with open_regular(file) as raw:
            head = raw.read(_SNIFFED)
            marked = next((name for mark, name in _MARKS if head.startswith(mark)), None)
            if not (marked or alone) and b"\0" in head and b"\0" not in "a".encode(encoding or "utf-8"):
                return None
            raw.seek(0)
            with io.TextIOWrapper(raw, encoding=marked or encoding or "utf-8", newline=None) as stream:
                return stream.read(most + 1).removeprefix("\ufeff")[:most]
    except UnicodeError as error:
        what = marked.removesuffix("-sig").upper() if marked else encoding or "UTF-8"
        raise UserError(
            f"data.args: {file} cannot be read as {what} text ({error}); give its encoding, such as "
            f'encoding = "latin-1", or take the file away'
        ) from error
    except OSError as error:
        raise UserError(f"data.args: cannot read {file}: {error.strerror}") from error


def check_vocabulary(data: Any, model: str, args: dict[str, Any]) -> None:
    """Raise UserError if a text has more symbols than a job's model knows, as far as that is known: for the zoo's models and
    for users' models that take a ``vocabulary``."""
    needed, known = getattr(data, "vocabulary", None), args.get("vocabulary", 128 if model == "gpt" else None)
    if isinstance(needed, int) and isinstance(known, int) and known < needed:
        raise UserError(f"model.args: vocabulary = {known}, but the text has {needed} symbols: it must be {needed} or more")

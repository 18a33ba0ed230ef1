"""Character text from files, in windows of a fixed context."""

import sysconfig
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from accept_mpi.data.base import Indices
from accept_mpi.errors import UserError


class TextDataset:
    """Windows of a text that do not overlap: inputs (context,) and targets, the same one character on, int64."""

    def __init__(self, tokens: npt.NDArray[np.uint8], context: int) -> None:
        self.tokens, self.context = tokens, context

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
    vocabulary: int = 128,
    limit: int = 4_000_000,
) -> tuple[TextDataset, TextDataset]:
    """Characters of a file, or of all text files below a directory in order of their names, ``limit`` at most.

    Without a path: the sources of Python's standard library on this machine. A character is its ASCII code; those beyond
    ``vocabulary`` become its last symbol, so that the vocabulary does not depend on the text. The test set is the end.
    """
    if not 1 <= vocabulary <= 256 or context < 1 or not 0 < test_fraction < 1:
        raise ValueError("expected 1 <= vocabulary <= 256, context >= 1 and 0 < test_fraction < 1")
    source = Path(path) if path is not None else Path(sysconfig.get_paths()["stdlib"])
    characters = _read(source, limit, "*" if path is not None else "*.py")
    codes = np.frombuffer(characters.encode("utf-32-le"), np.uint32)
    tokens = np.minimum(codes, vocabulary - 1).astype(np.uint8)
    held = int(len(tokens) * test_fraction)
    train, test = TextDataset(tokens[: len(tokens) - held], context), TextDataset(tokens[len(tokens) - held :], context)
    if not len(train) or not len(test):
        raise UserError(f"data.args: {source} has {len(tokens)} characters, too few for a context of {context}")
    return train, test


def _read(source: Path, limit: int, pattern: str) -> str:
    if source.is_file():
        files = [source]
    elif source.is_dir():
        skipped = {"site-packages", "test", "tests", "__pycache__", "idlelib", "lib2to3"}
        files = sorted(f for f in source.rglob(pattern) if not skipped & set(f.relative_to(source).parts) and f.is_file())
    else:
        raise UserError(f"data.args: there is no file or directory {source}")
    parts, length = [], 0
    for file in files:
        try:
            part = file.read_text("utf-8")
        except UnicodeDecodeError:
            continue  # not text
        except OSError as error:
            raise UserError(f"data.args: cannot read {file}: {error.strerror}") from error
        parts.append(part[: limit - length])
        length += len(parts[-1])
        if length >= limit:
            break
    return "".join(parts)

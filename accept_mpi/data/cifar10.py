"""CIFAR-10 (Krizhevsky 2009) from its binary version on disk: the archive itself, or the folder that it unpacks to."""

import gzip
import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from accept_mpi.data.augment import crop_and_flip
from accept_mpi.data.base import Indices
from accept_mpi.errors import UserError
from accept_mpi.files.regular import is_regular, open_regular, read_regular
from accept_mpi.files.start_directory import from_start

_RECORD = 1 + 3 * 32 * 32
_TRAIN = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
_TEST = ("test_batch.bin",)
_MOST, _MOST_UNPACKED = 64 << 20, 512 << 20  # limits in bytes: of a file (29 MiB each), of an unpacked archive (175 MiB)
_MOST_MEMBERS = 1000
_MEAN = np.array([0.4914, 0.4822, 0.4465], np.float32)[:, None, None]
_STD = np.array([0.2470, 0.2435, 0.2616], np.float32)[:, None, None]


class Cifar10:
    """Images (3, 32, 32) float32, each channel with mean 0 and standard deviation 1 over the training set; classes int64."""

    targets_anywhere = True

    def __init__(self, records: npt.NDArray[np.uint8], augment: bool) -> None:
        self._records, self._augment = records, augment

    def __len__(self) -> int:
        return len(self._records)

    def inputs(self, indices: Indices, seed: int | None = None) -> torch.Tensor:
        images = self._records[indices, 1:].reshape(-1, 3, 32, 32)
        if self._augment and seed is not None:
            images = crop_and_flip(images, indices, seed)
        return torch.from_numpy((images.astype(np.float32) / 255 - _MEAN) / _STD)

    def targets(self, indices: Indices) -> torch.Tensor:
        return torch.from_numpy(self._records[indices, 0].astype(np.int64))


def cifar10(path: str, augment: bool = True) -> tuple[Cifar10, Cifar10]:
    """Training and test set from ``cifar-10-binary.tar.gz`` or the folder that holds its .bin files.

    Training images are randomly cropped and mirrored unless ``augment`` is False. Raises UserError for missing or truncated
    files.
    """
    files = _read(from_start(path))
    train, test = (
        np.frombuffer(b"".join(files[name] for name in names), np.uint8).reshape(-1, _RECORD) for names in (_TRAIN, _TEST)
    )
    return Cifar10(train, augment), Cifar10(test, False)


def _read(path: Path) -> dict[str, bytes]:
    """Contents of all files, by name. Raises UserError unless they consist of whole records of ten classes."""
    if path.is_dir():
        folders = [path, path / "cifar-10-batches-bin"]
        folder = next((f for f in folders if (f / _TRAIN[0]).exists()), path)
        files = {}
        for name in (*_TRAIN, *_TEST):
            try:
                files[name] = read_regular(folder / name, _MOST)
            except OSError as error:
                raise UserError(f"data.args: cannot read {folder / name}: {error.strerror}") from error
    elif is_regular(path):
        files = _from_archive(path)
    else:
        raise UserError(f"data.args: there is no file or directory {path}")
    for name, data in files.items():
        if len(data) % _RECORD or not data:
            raise UserError(
                f"data.args: {path}: {name} is truncated: {len(data)} bytes is no whole number of {_RECORD}-byte records"
            )
        if (label := max(data[::_RECORD])) > 9:
            raise UserError(
                f"data.args: {path}: {name} has a class {label}; expected 0 to 9, the binary version of CIFAR-10"
            )
    return files


def _from_archive(path: Path) -> dict[str, bytes]:
    """Contents of the archive's plain files with the expected names. Anything else in it is ignored, links too."""
    found: dict[str, bytes] = {}
    names = (*_TRAIN, *_TEST)
    try:
        with open_regular(path) as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            bounded: Any = _Bounded(gzip.GzipFile(fileobj=raw) if packed else raw)
            with tarfile.open(fileobj=bounded, mode="r:") as archive:
                for number, member in enumerate(archive):
                    if number > _MOST_MEMBERS:
                        raise tarfile.ReadError(f"it has more than {_MOST_MEMBERS} members")
                    name = Path(member.name).name
                    if name in found or name not in names or member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
                        continue
                    if member.size > _MOST:
                        raise tarfile.ReadError(f"{name} has {member.size} bytes; at most {_MOST}")
                    if file := archive.extractfile(member):
                        found[name] = file.read()
                    if len(found) == len(names):
                        break
    except (tarfile.TarError, zlib.error, EOFError, OSError, ValueError, OverflowError) as error:
        raise UserError(f"data.args: {path} is damaged or truncated: {error}") from error
    if missing := [name for name in names if name not in found]:
        raise UserError(f"data.args: {path} holds no {missing[0]}; expected the binary version of CIFAR-10")
    return found


class _Bounded:
    """A file that refuses to read more than an archive of CIFAR-10 can hold: a few bytes of an archive may announce
    gigabytes."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.tell = file.tell

    def read(self, size: int) -> bytes:
        if size > _MOST or self.tell() + size > _MOST_UNPACKED:
            raise tarfile.ReadError(f"it unpacks to more than {_MOST_UNPACKED} bytes")
        data: bytes = self._file.read(size)
        return data

    def seek(self, at: int) -> int:
        if at > _MOST_UNPACKED:
            raise tarfile.ReadError(f"it unpacks to more than {_MOST_UNPACKED} bytes")
        return int(self._file.seek(at))

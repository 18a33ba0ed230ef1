"""CIFAR-10 (Krizhevsky 2009) from its binary version on disk: the archive as it is, or the folder in it."""

import tarfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from accept_mpi.data.augment import crop_and_flip
from accept_mpi.data.base import Indices
from accept_mpi.errors import UserError

_RECORD = 1 + 3 * 32 * 32
_TRAIN = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
_TEST = ("test_batch.bin",)
_MEAN = np.array([0.4914, 0.4822, 0.4465], np.float32)[:, None, None]
_STD = np.array([0.2470, 0.2435, 0.2616], np.float32)[:, None, None]


class Cifar10:
    """Images (3, 32, 32) float32, each channel with mean 0 and deviation 1 over the training set; classes int64."""

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

    Training images are randomly cropped and mirrored unless ``augment`` is false. Raises UserError for missing or truncated
    files.
    """
    train, test = (_read(Path(path), names) for names in (_TRAIN, _TEST))
    return Cifar10(train, augment), Cifar10(test, False)


def _read(path: Path, names: tuple[str, ...]) -> npt.NDArray[np.uint8]:
    if path.is_dir():
        folders = [path, path / "cifar-10-batches-bin"]
        folder = next((f for f in folders if (f / names[0]).is_file()), path)
        files = {}
        for name in names:
            try:
                files[name] = (folder / name).read_bytes()
            except OSError as error:
                raise UserError(f"data.args: cannot read {folder / name}: {error.strerror}") from error
    elif path.is_file():
        files = _from_archive(path, names)
    else:
        raise UserError(f"data.args: there is no file or directory {path}")
    for name, data in files.items():
        if len(data) % _RECORD or not data:
            raise UserError(
                f"data.args: {path}: {name} is truncated: {len(data)} bytes is no whole number of {_RECORD}-byte records"
            )
    return np.frombuffer(b"".join(files.values()), np.uint8).reshape(-1, _RECORD)


def _from_archive(path: Path, names: tuple[str, ...]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                name = Path(member.name).name
                if name in names and (file := archive.extractfile(member)):
                    found[name] = file.read()
    except (tarfile.TarError, EOFError, OSError) as error:
        raise UserError(f"data.args: {path} is damaged or truncated: {error}") from error
    if missing := [name for name in names if name not in found]:
        raise UserError(f"data.args: {path} holds no {missing[0]}; expected the binary version of CIFAR-10")
    return {name: found[name] for name in names}

"""Folders of images, one folder per class."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from accept_mpi.data.augment import crop_and_flip
from accept_mpi.data.base import Indices
from accept_mpi.errors import UserError
from accept_mpi.files.regular import is_regular, open_regular
from accept_mpi.files.start_directory import from_start
from accept_mpi.seeds import ORDER, mix

_ENDINGS = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm"}
_APART = ("test", "val", "valid", "validation")
"""Folders of the test set, in order of preference."""
_FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "PPM")  # Pillow's names; it hands some others to other programs
_LARGEST_SIZE, _MOST_PIXELS = 4096, 1 << 26
_Listing = list[tuple[Path, int]]


class ImageFolder:
    """Images (3, size, size) float32 in [-1, 1], decoded on demand; classes int64 in the order of folder names."""

    targets_anywhere = True

    def __init__(self, listing: _Listing, size: int, augment: bool, classes: Sequence[str] = ()) -> None:
        """``classes``: their names, in the order of their numbers."""
        self.classes = list(classes)
        self._files = [file for file, _ in listing]
        self._classes = torch.tensor([number for _, number in listing], dtype=torch.int64)
        self._size, self._augment = size, augment

    def __len__(self) -> int:
        return len(self._files)

    def of(self, listing: _Listing) -> "ImageFolder":
        """Other images of the same size, as in evaluation."""
        return ImageFolder(listing, self._size, False)

    def inputs(self, indices: Indices, seed: int | None = None) -> torch.Tensor:
        images = np.stack([_decode(self._files[i], self._size) for i in indices])
        if self._augment and seed is not None:
            images = crop_and_flip(images, indices, seed)
        return torch.from_numpy(images).float() / 127.5 - 1

    def targets(self, indices: Indices) -> torch.Tensor:
        return self._classes[torch.from_numpy(indices)]


def images(path: str, size: int = 32, augment: bool = True, test_fraction: float = 0.2) -> tuple[ImageFolder, ImageFolder]:
    """Training and test set from ``path/train/CLASS/*.jpg`` and ``path/test/CLASS/*.jpg`` (or .png, ...; ``val``, ``valid``
    or ``validation`` where there is no ``test``), or from ``path/CLASS/*`` split by a fixed shuffle.

    Images are scaled so that the shorter side is ``size``, and cropped in the middle. Hidden folders and files do not
    count. Raises UserError if folders are missing or empty, and later for an image that cannot be decoded.
    """
    _pillow()
    if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= _LARGEST_SIZE:
        raise ValueError(f"size must be a whole number of pixels, got {size!r}")
    root = from_start(path)
    apart = next((root / name for name in _APART if (root / name).is_dir()), None)
    if apart and (root / "train").is_dir():
        classes = _classes(root / "train")
        if strange := sorted(set(_classes(apart)) - set(classes)):
            raise UserError(f"data.args: {apart / strange[0]} is a class of which there is no folder in {root / 'train'}")
        train, test = _listing(root / "train", classes, every=True), _listing(apart, classes)
    else:
        classes = _classes(root)
        found = _listing(root, classes, every=True)
        if not 0 < test_fraction < 1:
            raise ValueError(f"test_fraction must lie between 0 and 1, got {test_fraction}")
        order = np.random.default_rng(mix(ORDER, 0)).permutation(len(found))
        held = max(1, round(len(found) * test_fraction))
        train, test = ([found[i] for i in part] for part in (order[:-held], order[-held:]))
    return ImageFolder(train, size, augment, classes), ImageFolder(test, size, False, classes)


def pictures_in(folder: Path) -> list[Path]:
    """The images in a folder and the folders in it, in order. Raises UserError if there are none."""
    if not os.path.isdir(folder):
        raise UserError(f"{folder}: there is no such folder")
    found = sorted(file for file in folder.rglob("*") if _is_image(file.relative_to(folder)) and is_regular(file))
    if not found:
        raise UserError(f"{folder}: no images there; expected {', '.join(sorted(_ENDINGS))}")
    return found


def _classes(root: Path) -> list[str]:
    if not root.is_dir():
        raise UserError(f"data.args: there is no directory {root}")
    classes = sorted(one.name for one in root.iterdir() if one.is_dir() and not one.name.startswith("."))
    if not classes:
        raise UserError(f"data.args: {root} holds no folders; expected one per class")
    return classes


def _is_image(file: Path) -> bool:
    """True if a file, given from where one looks for it, has an image's name, and is not hidden."""
    return file.suffix.lower() in _ENDINGS and not any(part.startswith(".") for part in file.parts)


def _listing(root: Path, classes: list[str], every: bool = False) -> _Listing:
    """``every``: each class must have images. Raises UserError."""
    found = [
        (file, number)
        for number, name in enumerate(classes)
        for file in sorted((root / name).glob("*"))
        if _is_image(Path(file.name))
    ]
    there = {number for _, number in found}
    if without := [name for number, name in enumerate(classes) if every and there and number not in there]:
        raise UserError(f"data.args: no images in {root / without[0]}; expected {', '.join(sorted(_ENDINGS))}")
    for file, _ in found:
        if not is_regular(file):
            raise UserError(f"data.args: {file} is not a file, though it has an image's name")
    if not found:
        raise UserError(f"data.args: no images in the folders of {root}; expected {', '.join(sorted(_ENDINGS))}")
    return found


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise UserError("data.name: images need Pillow: pip install pillow") from error
    return Image


def _eight_bits(image: Any) -> Any:
    """Image with 8 bits per channel, from grey of 16 bits, which Pillow would cut off at 255. Raises OSError for numbers
    whose white is not known."""
    if not image.mode.startswith(("I", "F")):
        return image
    pixels = np.asarray(image)
    if image.mode == "F" or pixels.min() < 0 or pixels.max() > 65535:
        raise OSError("its grey values are neither of 8 nor of 16 bits")
    return _pillow().fromarray(((pixels.astype(np.uint32) + 128) // 257).astype(np.uint8))


def _decode(file: Path, size: int) -> npt.NDArray[np.uint8]:
    try:
        with open_regular(file) as raw, _pillow().open(raw, formats=_FORMATS) as image:
            scale = size / min(image.size)
            scaled = [max(size, round(side * scale)) for side in image.size]
            for width, height in (image.size, scaled):
                if width * height > _MOST_PIXELS:
                    raise OSError(f"{width} x {height} pixels are too many")
            image = _eight_bits(image).convert("RGB").resize(scaled)
            left, top = ((side - size) // 2 for side in image.size)
            pixels = np.asarray(image.crop((left, top, left + size, top + size)), np.uint8)
    except Exception as error:  # decoders of six formats may raise anything
        known = "cannot identify" not in str(error)
        reason = str(error) if known else f"it is damaged or none of {', '.join(_FORMATS)}"
        raise UserError(f"data: cannot decode the image {file}: {reason}") from error
    return pixels.transpose(2, 0, 1)

"""Manifests of checkpoints, and the order in which the checkpoints of a directory were made, by numbers in the manifests.

Clocks and steps do not tell the order: a device without a battery wakes in 1970, and a run may resume from an earlier step.
"""

import contextlib
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from accept_mpi.errors import shown
from accept_mpi.files.regular import is_plain_name, read_regular
from accept_mpi.files.values import every_value

FORMAT = "accept-mpi checkpoint"
VERSION = 1
Part = Literal["weights", "optimizer"]
PARTS: tuple[Part, ...] = ("weights", "optimizer")

_MOST_BYTES = 4 << 20
_MOST_DEPTH = 64
_MOST = (1 << 53) - 1
Count = Annotated[int, Meta(ge=0, le=_MOST)]
Seed = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Text = Annotated[str, Meta(max_length=1000)]


class File(msgspec.Struct, frozen=True):
    """A file of a checkpoint, with the size and the checksum of its complete content."""

    name: Text
    nbytes: Count
    crc32: Annotated[int, Meta(ge=0, lt=1 << 32)]


class StageFiles(msgspec.Struct, frozen=True):
    """The two files of one stage, which held layers ``start <= i < stop``."""

    start: Count
    stop: Count
    weights: File
    optimizer: File


class Glimpse(msgspec.Struct, frozen=True):
    """What a run knows of one training sample, to tell whether another start has the same data."""

    sample: Count
    digest: Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]
    """``Checksum.digest`` of inputs and, where the first stage has them, targets."""
    projection: float
    norm: float


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Content of ``manifest.json``."""

    format: Text = FORMAT
    version: int = VERSION
    created: Text
    """Time (ISO 8601, UTC), for people."""
    run: Text = ""
    """Name of the run that made it: the same in all checkpoints of one ``train`` or ``launch``, and in no others."""
    number: Count = 0
    """Position in the directory's history: a later checkpoint has a higher number. 0: not numbered."""
    step: Annotated[int, Meta(ge=1, le=_MOST)]
    """Number of updates made."""
    epoch: Count
    seen: Count | None = None
    """Samples of ``epoch`` that have been used; None: to be derived from the steps and the job's batch size."""
    order: Seed | None = None
    """Seed of the order of the samples in ``epoch``; None: ``seed``."""
    model: Text
    model_args: dict[str, Any]
    layers: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1)]
    own_names: bool = False
    """True if names of tensors, behind their layer's, are those of the whole model, which had a forward of its own."""
    seed: Seed
    """Seed of the run. With the step, it is the whole state of the random numbers: every draw is seeded by its purpose."""
    samples: Annotated[int, Meta(ge=1, le=_MOST)]
    """Size of the training set."""
    classes: list[str] = []
    """Names of its classes, in the order of their numbers; empty if it has none."""
    glimpses: list[Glimpse] = []
    """Of some training samples; none where a sample is another one whenever it is asked for."""
    job: str
    """The job as JSON."""
    stages: list[StageFiles]

    def settings(self) -> dict[str, Any]:
        """The job as plain values."""
        found = msgspec.json.decode(self.job)
        assert isinstance(found, dict)
        return found


class OtherVersion(ValueError):
    """The manifest was written by another program, or by another version of this one."""


class _Head(msgspec.Struct):
    format: str
    version: int


def read_manifest(folder: Path) -> Manifest:
    """The manifest in a checkpoint's directory. Raises OSError if it cannot be read, ValueError if it is not valid."""
    data = read_regular(folder / "manifest.json", _MOST_BYTES, links=False)
    try:
        head = msgspec.json.decode(data, type=_Head)
        if (head.format, head.version) != (FORMAT, VERSION):
            raise OtherVersion(
                f"{shown(head.format)} of version {head.version}; this program reads {FORMAT} of version {VERSION}"
            )
        manifest = msgspec.json.decode(data, type=Manifest)
        check_job(manifest.job)
    except RecursionError as error:
        raise ValueError(f"nested more than {_MOST_DEPTH} deep") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from error
    _check(manifest)
    return manifest


def check_job(text: str) -> None:
    """Raise ValueError or RecursionError if ``text`` is not a job in JSON."""
    job = msgspec.json.decode(text)
    if not isinstance(job, dict):
        raise ValueError("job is not an object")
    _check_values("job", job)


def _check(manifest: Manifest) -> None:
    """Raise ValueError if fields contradict each other, or have values that no run writes."""
    layers, stages = manifest.layers, manifest.stages
    texts = {"created": manifest.created, "model": manifest.model, "run": manifest.run}
    for name, text in texts.items():
        if not text.isprintable():
            raise ValueError(f"{name} holds characters that cannot be printed")
    if len(set(layers)) < len(layers) or any("." in layer or "/" in layer for layer in layers):
        raise ValueError("its layers are not named once each, without dots and slashes")
    edges = [0, *(stage.stop for stage in stages)]
    if [stage.start for stage in stages] != edges[:-1] or edges[-1] != len(layers) or edges != sorted(set(edges)):
        raise ValueError(f"its stages do not hold the {len(layers)} layers once each, in order")
    files = [getattr(stage, part).name for stage in stages for part in PARTS]
    if elsewhere := [name for name in files if not is_plain_name(name)]:
        raise ValueError(f'it names "{shown(elsewhere[0])}", which is no file of its folder')
    if len(set(files)) < len(files):
        raise ValueError("it names a file twice")
    if manifest.epoch > manifest.step or (manifest.seen or 0) >= manifest.samples:
        raise ValueError(
            f"{manifest.seen or 0} samples of epoch {manifest.epoch} seen after {manifest.step} steps "
            f"of {manifest.samples} samples per epoch cannot be"
        )
    _check_values("model_args", manifest.model_args)


def _check_values(name: str, values: dict[str, Any]) -> None:
    """Raise ValueError if values are nested too deeply, or hold a number that no job can hold."""
    try:
        for value in every_value([values], _MOST_DEPTH):  # the list itself is one level
            if isinstance(value, int) and abs(value) >> 63:
                raise ValueError("holds a number of more than 64 bits")
    except ValueError as error:
        raise ValueError(f"{name} {error}") from error


def complete(run: Path) -> list[Path]:
    """Checkpoints in a run's directory, in the order in which they were made; several runs may have made them. Damaged ones
    are included, in the place that the times of their files suggest."""
    return [path for path, _ in _in_order(run)]


def made_by(run: Path, who: str) -> list[Path]:
    """The checkpoints in a run's directory that the run named ``who`` made, newest first; their tensors are not checked."""
    return [path for path, manifest in reversed(_in_order(run)) if manifest and manifest.run == who]


def same(where: Path, wanted: Manifest) -> Path | None:
    """The checkpoint with just this manifest in the directory ``where``, a checkpoint's or a run's; None if it is not there.
    Its tensors are not checked."""
    with contextlib.suppress(OSError, ValueError):
        if (where / "manifest.json").is_file():
            return where if read_manifest(where) == wanted else None
        return next((path for path, manifest in _in_order(where) if manifest == wanted), None)
    return None


def last_number(run: Path) -> int:
    """The highest number of a checkpoint in a run's directory; 0 if there is none."""
    return max((manifest.number for _, manifest in _in_order(run) if manifest), default=0)


def _in_order(run: Path) -> list[tuple[Path, Manifest | None]]:
    """Checkpoints with their manifests, in order (``complete``); None for damaged ones."""
    sound: list[tuple[Path, Manifest | None]] = []
    damaged: list[tuple[int, Path]] = []
    inside: list[Path] = []
    with contextlib.suppress(OSError):
        inside = list((run / "checkpoints").iterdir())
    keys: dict[Path, tuple[int, str, str]] = {}
    for path in inside:
        with contextlib.suppress(OSError):
            if re.fullmatch(r"step-\d{8,}", path.name) and (path / "manifest.json").is_file():
                try:
                    manifest = read_manifest(path)
                    keys[path] = manifest.number, manifest.created, path.name
                    sound.append((path, manifest))
                except (OSError, ValueError):
                    damaged.append((_written(path), path))
    found = sorted(sound, key=lambda one: keys[one[0]])
    for at, path in sorted(damaged, reverse=True):
        before = [index for index, (other, _) in enumerate(found) if _written(other) <= at]
        found.insert(before[-1] + 1 if before else 0, (path, None))
    return found


def _written(path: Path) -> int:
    with contextlib.suppress(OSError):
        return (path / "manifest.json").stat().st_mtime_ns
    return 0

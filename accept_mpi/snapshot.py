"""Checkpoints: safetensors files and a JSON manifest in a directory that appears whole or not at all.

    checkpoints/step-00000050/manifest.json
                              stage-0.weights.safetensors      names as in the whole model's state_dict()
                              stage-0.optimizer.safetensors    "<what>/<parameter's name>"
                              stage-1. ...

Each stage sends its two files to rank 0 in chunks, in the background; rank 0 writes chunks as they come, so that it never
holds another stage's weights, and renames the directory when all is on the disk. Resuming needs neither the same number of
ranks nor the same cuts: rank 0 sends each rank the tensors of the layers that it now holds.
"""

import contextlib
import os
import re
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from accept_mpi.errors import UserError

FORMAT = "accept-mpi checkpoint"
VERSION = 1
_CHUNK = 1 << 20
Part = Literal["weights", "optimizer"]
PARTS: tuple[Part, ...] = ("weights", "optimizer")


class File(msgspec.Struct, frozen=True):
    """A file of a checkpoint and how to know that it is whole."""

    name: str
    nbytes: int
    crc32: int


class StageFiles(msgspec.Struct, frozen=True):
    """What one stage left: layers ``start <= i < stop``."""

    start: int
    stop: int
    weights: File
    optimizer: File


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """``manifest.json``."""

    format: str = FORMAT
    version: int = VERSION
    created: str
    step: int
    """Updates made."""
    epoch: int
    model: str
    model_args: dict[str, Any]
    layers: list[str]
    seed: int
    """With the step, all there is to the state of the random numbers: every draw is seeded by what it is for."""
    samples: int
    """Size of the training set."""
    job: str
    """The job as JSON."""
    stages: list[StageFiles]


def directory_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def chunks(
    step: int, stage: int, weights: dict[str, torch.Tensor], optimizer: dict[str, torch.Tensor]
) -> Iterator[dict[str, Any]]:
    """A stage's two files as messages for ``CheckpointWriter.take``."""
    for part, tensors in zip(PARTS, (weights, optimizer), strict=True):
        data = memoryview(save(tensors))
        for offset in range(0, len(data), _CHUNK):
            yield {
                "step": step,
                "stage": stage,
                "part": part,
                "total": len(data),
                "data": data[offset : offset + _CHUNK],
            }


class CheckpointWriter:
    """Rank 0: puts the stages' chunks together, checkpoint by checkpoint."""

    def __init__(self, run: Path, edges: list[tuple[int, int]], manifest: Callable[[int], Manifest], keep: int) -> None:
        """``edges`` are each stage's first layer and end; ``manifest(step)`` gives all of a manifest but its stages."""
        self.run, self._edges, self._manifest, self._keep = run, edges, manifest, keep
        self._open: dict[int, dict[tuple[int, Part], _Growing]] = {}
        self._finished: dict[int, threading.Event] = {}
        self._lock = threading.Lock()
        self._committing: set[int] = set()
        self._made: list[Path] = []
        """Checkpoints of this writer, in order."""
        self.error: UserError | None = None
        for left in (run / "checkpoints").glob(".*step-*"):  # of a run that was killed
            shutil.rmtree(left, ignore_errors=True)

    def expect(self, step: int) -> None:
        """Announce a checkpoint, before any chunk of it can come."""
        with self._lock:
            self._finished.setdefault(step, threading.Event())

    def take(self, body: dict[str, Any]) -> None:
        """Write one chunk. Raises UserError where the disk will not have it."""
        step, stage, part = body["step"], body["stage"], body["part"]
        self.expect(step)
        try:
            files = self._open.setdefault(step, {})
            if (stage, part) not in files:
                folder = self._temporary(step)
                folder.mkdir(parents=True, exist_ok=True)
                files[stage, part] = _Growing(folder / f"stage-{stage}.{part}.safetensors", body["total"])
            files[stage, part].add(body["data"])
        except OSError as error:
            raise UserError(f"cannot write the checkpoint of step {step} to {self.run}: {error}") from error
        if len(files) == len(PARTS) * len(self._edges) and all(file.complete for file in files.values()):
            del self._open[step]
            self._committing.add(step)
            threading.Thread(target=self._commit, args=(step, files), name="checkpoint").start()

    def wait(self, step: int, deadline: float) -> bool:
        """Wait until the checkpoint of ``step`` is on the disk. Raises what went wrong; False when time is up."""
        done = self._finished[step].wait(deadline)
        if self.error:
            raise self.error
        return done

    def wait_for_begun(self, deadline: float) -> None:
        """Until all checkpoints that have come in whole are on the disk, or ``deadline`` seconds have passed."""
        until = time.monotonic() + deadline
        for step in sorted(self._committing):
            self._finished[step].wait(max(0.0, until - time.monotonic()))

    def has(self, step: int) -> bool:
        """Whether the checkpoint of ``step`` is on the disk."""
        return step in self._finished and self._finished[step].is_set()

    def _temporary(self, step: int) -> Path:
        final = directory_of(self.run, step)
        return final.with_name(f".{final.name}")

    def _commit(self, step: int, files: "dict[tuple[int, Part], _Growing]") -> None:
        """Manifest, fsync, rename; on a thread of its own, since an SD card may take seconds."""
        try:
            stages = [
                StageFiles(start, stop, *(files[stage, part].close() for part in PARTS))
                for stage, (start, stop) in enumerate(self._edges)
            ]
            folder, final = self._temporary(step), directory_of(self.run, step)
            manifest = msgspec.structs.replace(self._manifest(step), stages=stages)
            with open(folder / "manifest.json", "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
                file.flush()
                os.fsync(file.fileno())
            old = final.with_name(f".old-{final.name}")
            if final.exists():  # a resumed run comes by here again
                os.rename(final, old)
            os.rename(folder, final)
            _fsync_directory(final.parent)
            shutil.rmtree(old, ignore_errors=True)
            self._forget_old(final)
        except OSError as error:
            self.error = UserError(f"cannot write the checkpoint of step {step} to {self.run}: {error}")
        finally:
            self._finished[step].set()

    def _forget_old(self, newest: Path) -> None:
        """What others have made is older, whatever their steps and clocks say."""
        with self._lock:
            self._made = [*(path for path in self._made if path != newest), newest]
            kept = [*(path for path in complete(self.run) if path not in self._made), *self._made]
            self._made = [path for path in self._made if path in kept[-self._keep :]]
        if self._keep:
            for path in kept[: -self._keep]:
                shutil.rmtree(path, ignore_errors=True)


class _Growing:
    """A file that arrives in chunks."""

    def __init__(self, path: Path, total: int) -> None:
        self._path, self._total = path, total
        self._file: BinaryIO = open(path, "wb")  # noqa: SIM115  # closed by close()
        self._written = self._crc = 0

    @property
    def complete(self) -> bool:
        return self._written == self._total

    def add(self, data: bytes) -> None:
        self._file.write(data)
        self._written += len(data)
        self._crc = zlib.crc32(data, self._crc)

    def close(self) -> File:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return File(self._path.name, self._written, self._crc)


def complete(run: Path) -> list[Path]:
    """A run's checkpoints in the order in which they were made: a directory may hold those of several runs."""
    found = (run / "checkpoints").glob("step-*")
    whole = [path for path in found if re.fullmatch(r"step-\d{8,}", path.name) and (path / "manifest.json").is_file()]
    return sorted(whole, key=lambda path: (_made_at(path), path.name))


def _made_at(path: Path) -> str:
    """As its manifest says; of a damaged one, as its file does."""
    try:
        return msgspec.json.decode((path / "manifest.json").read_bytes(), type=Manifest).created
    except (msgspec.DecodeError, OSError):
        return _utc(path.stat().st_mtime)


def newest_since(run: Path, began: str) -> Path | None:
    """A run's newest checkpoint that was made at ``began`` (UTC, as a manifest has it) or later; not checked."""
    for path in reversed(complete(run)):
        with contextlib.suppress(msgspec.DecodeError, OSError):
            manifest = msgspec.json.decode((path / "manifest.json").read_bytes(), type=Manifest)
            if manifest.created >= began:
                return path
    return None


class Checkpoint:
    """A checkpoint on disk, checked."""

    def __init__(self, path: Path) -> None:
        """Open ``path``: a checkpoint's directory, or a run's (its newest checkpoint).

        Raises UserError where there is none, or it is damaged.
        """
        if not (path / "manifest.json").is_file():
            found = complete(path)
            if not found:
                raise UserError(f"{path}: neither a checkpoint nor a run with one")
            path = found[-1]
        self.path = path
        try:
            self.manifest = msgspec.json.decode((path / "manifest.json").read_bytes(), type=Manifest)
        except (msgspec.DecodeError, OSError) as error:
            raise UserError(f"{path}: damaged checkpoint: manifest.json: {error}") from error
        if self.manifest.format != FORMAT or self.manifest.version != VERSION:
            raise UserError(
                f"{path}: {self.manifest.format} of version {self.manifest.version}; "
                f"this program reads {FORMAT} of version {VERSION}"
            )
        for stage in self.manifest.stages:
            self._check(stage.weights)
            self._check(stage.optimizer)

    def tensors(self, part: Part, layers: range) -> dict[str, torch.Tensor]:
        """Tensors of ``layers``, under their names in the files."""
        wanted = {self.manifest.layers[i] for i in layers}
        found = {}
        for stage in self.manifest.stages:
            if stage.stop <= layers.start or layers.stop <= stage.start:
                continue
            file = stage.weights if part == "weights" else stage.optimizer
            try:
                with safe_open(self.path / file.name, framework="pt") as opened:
                    for key in opened.keys():  # noqa: SIM118  # not a dict
                        if key.rpartition("/")[2].partition(".")[0] in wanted:
                            found[key] = opened.get_tensor(key)
            except (SafetensorError, OSError) as error:
                raise UserError(f"{self.path}: damaged checkpoint: {file.name}: {error}") from error
        return found

    def whole(self) -> dict[str, torch.Tensor]:
        """The whole model's state_dict."""
        return self.tensors("weights", range(len(self.manifest.layers)))

    def _check(self, file: File) -> None:
        path = self.path / file.name
        try:
            crc = 0
            with open(path, "rb") as opened:
                while data := opened.read(_CHUNK):
                    crc = zlib.crc32(data, crc)
            size = path.stat().st_size
        except OSError as error:
            raise UserError(f"{self.path}: damaged checkpoint: {file.name}: {error.strerror}") from error
        if size != file.nbytes:
            raise UserError(f"{self.path}: damaged checkpoint: {file.name} has {size} bytes, not {file.nbytes}")
        if crc != file.crc32:
            raise UserError(f"{self.path}: damaged checkpoint: {file.name} does not match its checksum")


def new_manifest(**fields: Any) -> Manifest:
    """A manifest of now, its stages still to be filled in."""
    return Manifest(created=_now(), stages=[], **fields)


def _now() -> str:
    return _utc(time.time())


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds")


def _fsync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

"""Checkpoints: safetensors files and a JSON manifest in a directory that appears complete or not at all.

    checkpoints/step-00000050/manifest.json
                              stage-0.weights.safetensors      names as in the whole model's state_dict()
                              stage-0.optimizer.safetensors    "<what>/<parameter's name>"
                              stage-1. ...

Each stage sends its two files to rank 0 in chunks, in the background. Rank 0 writes each chunk as it arrives, so that it
never holds another stage's weights, and renames the directory when everything is on the disk. Resuming needs neither the
same number of ranks nor the same cuts: rank 0 sends each rank the tensors of the layers that it now holds.
"""

import contextlib
import math
import os
import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from accept_mpi.errors import UserError, shown
from accept_mpi.files.hdf5 import json_in
from accept_mpi.files.regular import open_regular, read_regular
from accept_mpi.job import Job
from accept_mpi.models.base import name_in_model
from accept_mpi.pipeline.averages import AVERAGE
from accept_mpi.pipeline.remembered import LAYERS
from accept_mpi.recovery.manifest import (
    PARTS,
    File,
    OtherVersion,
    Part,
    StageFiles,
    complete,
    read_manifest,
)
from accept_mpi.recovery.tensor_file import read_header

BEST = "checkpoints/best.json"
"""File in a run's directory that says which of its checkpoints is the best one."""
UNREADABLE = (OSError, ValueError, LookupError, TypeError, OverflowError)
_MOST_BEST = 1 << 20  # bytes
_TRIES = 5
_BLOCK = 1 << 20  # bytes that are read at once
_MOST_OPEN = 128  # files; a process may often have 1024


def directory_of(run: Path, step: int) -> Path:
    """Path of a run's checkpoint after ``step`` steps."""
    return run / "checkpoints" / f"step-{step:08d}"


def best_of(run: Path) -> Path:
    """The best checkpoint of a run. Raises UserError if the run has not kept one, or another run has replaced it."""
    try:
        best = read_best(run)
        path = directory_of(run, int(best["step"]))
        if "by" in best and read_manifest(path).run != best["by"]:
            raise LookupError("another run has made this step")
        return path
    except UNREADABLE as error:
        raise UserError(f"{run}: the run has kept no best checkpoint (output.keep_best) that is still there") from error


def read_best(run: Path) -> Any:
    """Content of the file ``BEST``. Raises one of ``UNREADABLE``, and so may what is done with it: anybody may have written
    it."""
    return json_in(read_regular(run / BEST, _MOST_BEST).decode(), BEST)


class Checkpoint:
    """A checkpoint on disk, verified when it is opened."""

    def __init__(self, path: Path, most: float = math.inf, of: Sequence[Part] = PARTS) -> None:
        """Open the checkpoint in directory ``path``, or the newest one if ``path`` is the directory of a run.

        Raises UserError if there is none, it is damaged, or its tensors ``of`` the given parts have more than ``most``
        bytes.
        """
        for left in reversed(range(_TRIES)):
            try:
                self._open(path, most, of)
                return
            except UserError:
                # A run keeps only its newest ones: what was that a moment ago may be gone, or be going.
                if not left or self.path == path or self.path in complete(path)[-1:]:
                    raise

    def _open(self, path: Path, most: float, of: Sequence[Part]) -> None:
        self.path = path
        self._files: dict[str, BinaryIO] = {}
        """Its open files: a run that goes on in that directory may remove them, or make others of the same names. Of many,
        those opened first are closed, and must be the same when they are opened again."""
        self._met: dict[str, tuple[int, ...]] = {}
        """What its files are known by."""
        weakref.finalize(self, _close, self._files)
        try:
            if not (path / "manifest.json").is_file():
                found = complete(path)
                if not found:
                    raise UserError(f"{path}: neither a checkpoint nor a run with one")
                self.path = path = found[-1]
            self.manifest = read_manifest(path)
        except OtherVersion as error:
            raise UserError(f"{path}: {error}") from error
        except ValueError as error:
            raise UserError(f"{path}: damaged checkpoint: manifest.json: {error}") from error
        except OSError as error:
            raise UserError(f"{path}: cannot read the checkpoint: {error.strerror or error}") from error
        files = [(stage, part) for stage in self.manifest.stages for part in PARTS]
        sizes = [(part, self._check_header(stage, part)) for stage, part in files]
        if (size := sum(nbytes for part, nbytes in sizes if part in of)) > most:
            raise UserError(f"{path}: holds {size / 1e9:.1f} GB, more than the {most / 1e9:.1f} GB of memory that there are")
        for stage, part in files:
            self._check_sum(stage, part)

    @property
    def job(self) -> Job:
        """The job of the run that made it. Raises UserError if it is none of this version."""
        try:
            return Job.from_json(self.manifest.job)
        except msgspec.MsgspecError as error:
            raise UserError(f"{self.path}: the job in its manifest.json is none of this version: {error}") from error

    def tensors(self, part: Part, layers: range, prefix: str = "") -> dict[str, torch.Tensor]:
        """Tensors of the layers with these indices, by their names in the files, which begin with ``prefix``. Raises
        UserError if a file is damaged."""
        wanted = {self.manifest.layers[i] for i in layers}
        found = {}
        for stage in self.manifest.stages:
            if stage.stop <= layers.start or layers.stop <= stage.start:
                continue
            file = _file(stage, part)
            try:
                with self._opened(file) as own, safe_open(f"/proc/self/fd/{own.fileno()}", framework="pt") as opened:
                    for key in opened.keys():  # noqa: SIM118  # not a dict
                        if key.startswith(prefix) and _layer(key, part) in wanted:
                            found[key] = opened.get_tensor(key)
            except (SafetensorError, OSError) as error:
                raise UserError(f"{self.path}: damaged checkpoint: {file.name}: {error}") from error
        return found

    def whole(self, average: bool = False) -> dict[str, torch.Tensor]:
        """The ``state_dict`` of the whole model; with the moving ``average`` of each trained parameter in place of its
        value, if this is asked for. Raises UserError if there are none."""
        state = {(layer, name): value for layer, own in self.by_layer(average).items() for name, value in own.items()}
        return {name_in_model(layer, name, self.manifest.own_names): value for (layer, name), value in state.items()}

    def remembered(self) -> dict[str, torch.Tensor]:
        """What forwards have left in the layers beside ``state_dict()``, as ``pipeline.remembered`` keeps it."""
        return self.tensors("optimizer", range(len(self.manifest.layers)), f"{LAYERS}/")

    def by_layer(self, average: bool = False) -> dict[str, dict[str, torch.Tensor]]:
        """The same as the ``state_dict`` of each layer."""
        every = range(len(self.manifest.layers))
        state = self.tensors("weights", every)
        if average:
            kept = ((key.partition("/"), value) for key, value in self.tensors("optimizer", every).items())
            averages = {name: value for (what, _, name), value in kept if what == AVERAGE}
            if not averages:
                raise UserError(f"{self.path}: it holds no moving averages; train.ema makes them")
            state |= averages
        found: dict[str, dict[str, torch.Tensor]] = {}
        for key, value in state.items():
            layer, _, name = key.partition(".")
            found.setdefault(layer, {})[name] = value
        return found

    def _check_header(self, stage: StageFiles, part: Part) -> int:
        """Check the size of a file and the tensors that its header names; returns their bytes. Raises UserError."""
        file = _file(stage, part)
        with self._opened(file) as opened:
            size = os.fstat(opened.fileno()).st_size
            if size != file.nbytes:
                raise self._damaged(file, f"has {size} bytes, not {file.nbytes}")
            try:
                entries = read_header(opened, size)
            except ValueError as error:
                raise self._damaged(file, str(error)) from error
        own = set(self.manifest.layers[stage.start : stage.stop])
        strange = next((name for name in entries if _layer(name, part) not in own), None)
        if strange is not None:
            raise self._damaged(file, f'holds "{shown(strange)}", which is of none of its layers')
        return sum(end - begin for begin, end in (entry.data_offsets for entry in entries.values()))

    def _check_sum(self, stage: StageFiles, part: Part) -> None:
        """Raise UserError if a file does not match its checksum."""
        file, crc = _file(stage, part), 0
        with self._opened(file) as opened:
            while data := opened.read(_BLOCK):
                crc = zlib.crc32(data, crc)
        if crc != file.crc32:
            raise self._damaged(file, "does not match its checksum")

    @contextlib.contextmanager
    def _opened(self, file: File) -> Iterator[BinaryIO]:
        try:
            if file.name not in self._files:
                if len(self._files) == _MOST_OPEN:
                    self._files.pop(next(iter(self._files))).close()
                self._files[file.name] = opened = open_regular(self.path / file.name, links=False)
                about = os.fstat(opened.fileno())
                known = about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns
                if self._met.setdefault(file.name, known) != known:
                    raise self._damaged(file, "is another file now than when the checkpoint was opened")
            self._files[file.name].seek(0)
            yield self._files[file.name]
        except OSError as error:
            raise self._damaged(file, error.strerror or str(error)) from error

    def _damaged(self, file: File, how: str) -> UserError:
        return UserError(f"{self.path}: damaged checkpoint: {file.name}: {how}")


def _close(files: Mapping[str, BinaryIO]) -> None:
    for file in files.values():
        file.close()


def _file(stage: StageFiles, part: Part) -> File:
    return stage.weights if part == "weights" else stage.optimizer


def _layer(key: str, part: Part) -> str:
    """Name of a tensor's layer: "features-3" for "features-3.conv.weight", in the optimizer's file for
    "exp_avg/features-3.conv.weight"."""
    return (key if part == "weights" else key.partition("/")[2]).partition(".")[0]

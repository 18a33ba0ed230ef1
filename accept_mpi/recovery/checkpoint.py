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
import errno
import fcntl
import math
import os
import re
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from accept_mpi.errors import UserError, shown
from accept_mpi.files.regular import open_regular
from accept_mpi.recovery.manifest import (
    PARTS,
    File,
    Manifest,
    OtherVersion,
    Part,
    StageFiles,
    complete,
    last_number,
    read_manifest,
)
from accept_mpi.recovery.tensor_file import read_header

_CHUNK = 1 << 20


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

    def __init__(
        self, run: Path, edges: list[tuple[int, int]], manifest: Callable[[int], Manifest], keep: int, after: int = 0
    ) -> None:
        """``edges`` are each stage's first layer and end; ``manifest(step)`` gives all of a manifest but its stages and its
        number; ``after``: the number of the checkpoint that the run goes on from."""
        self.run, self._edges, self._manifest, self._keep = run, edges, manifest, keep
        self._open: dict[int, dict[tuple[int, Part], _Growing]] = {}
        self._finished: dict[int, threading.Event] = {}
        self._lock = threading.Lock()
        self._committing: set[int] = set()
        self._number = max(after, last_number(run))
        self._counting = threading.Lock()
        self._held: dict[int, int] = {}
        """Open folders of unfinished checkpoints by step: locked, so that no other run takes them for left behind."""
        self.error: UserError | None = None
        for left in (run / "checkpoints").glob(".*step-*"):  # of a run that was killed
            with contextlib.suppress(OSError):
                handle = _lock(left) if re.fullmatch(r"\.(old-\.?)?step-\d{8,}", left.name) else None
                if handle is not None:
                    shutil.rmtree(left, ignore_errors=True)
                    os.close(handle)

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
                if step not in self._held:
                    self._held[step] = _hold(folder)
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

    def close(self) -> None:
        """Leave what has not come in whole: nobody will finish it, and whoever writes here next may clear it away."""
        for step, files in self._open.items():
            for file in files.values():
                file.abandon()
            if step in self._held:
                os.close(self._held.pop(step))
        self._open = {}

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
            old = final.with_name(f".old-{final.name}")
            with self._counting:
                self._number += 1
                manifest = msgspec.structs.replace(self._manifest(step), stages=stages, number=self._number)
                with open(folder / "manifest.json", "wb") as file:
                    file.write(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
                    file.flush()
                    os.fsync(file.fileno())
                if final.exists():  # a resumed run comes by here again
                    os.rename(final, old)
                os.rename(folder, final)
                _fsync_directory(final.parent)
                shutil.rmtree(old, ignore_errors=True)
                if self._keep:
                    for path in complete(self.run)[: -self._keep]:
                        shutil.rmtree(path, ignore_errors=True)
        except OSError as error:
            self.error = UserError(f"cannot write the checkpoint of step {step} to {self.run}: {error}")
        finally:
            os.close(self._held.pop(step))
            self._finished[step].set()


def _hold(folder: Path) -> int:
    """Raises OSError where another process writes to the same folder."""
    handle = _lock(folder)
    if handle is None:
        raise OSError(errno.EBUSY, "another run writes the same checkpoint")
    return handle


def _lock(folder: Path) -> int | None:
    """The folder, open and locked until it is closed; None where another process has it. Where the file system knows no
    locks it counts as free."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    except OSError:
        pass
    return handle


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

    def abandon(self) -> None:
        self._file.close()

    def close(self) -> File:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return File(self._path.name, self._written, self._crc)


class Checkpoint:
    """A checkpoint on disk, checked."""

    def __init__(self, path: Path, most: float = math.inf, of: Sequence[Part] = PARTS) -> None:
        """Open ``path``: a checkpoint's directory, or a run's (its newest checkpoint).

        Raises UserError where there is none, it is damaged, or its tensors ``of`` some kinds have more than ``most`` bytes.
        """
        try:
            if not (path / "manifest.json").is_file():
                found = complete(path)
                if not found:
                    raise UserError(f"{path}: neither a checkpoint nor a run with one")
                path = found[-1]
            self.path = path
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

    def tensors(self, part: Part, layers: range) -> dict[str, torch.Tensor]:
        """Tensors of ``layers``, under their names in the files."""
        wanted = {self.manifest.layers[i] for i in layers}
        found = {}
        for stage in self.manifest.stages:
            if stage.stop <= layers.start or layers.stop <= stage.start:
                continue
            file = _file(stage, part)
            try:
                with safe_open(self.path / file.name, framework="pt") as opened:
                    for key in opened.keys():  # noqa: SIM118  # not a dict
                        if _layer(key, part) in wanted:
                            found[key] = opened.get_tensor(key)
            except (SafetensorError, OSError) as error:
                raise UserError(f"{self.path}: damaged checkpoint: {file.name}: {error}") from error
        return found

    def whole(self) -> dict[str, torch.Tensor]:
        """The whole model's state_dict."""
        return self.tensors("weights", range(len(self.manifest.layers)))

    def _check_header(self, stage: StageFiles, part: Part) -> int:
        """The file's size, and which tensors it says that it holds; returns their bytes."""
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
        file, crc = _file(stage, part), 0
        with self._opened(file) as opened:
            while data := opened.read(_CHUNK):
                crc = zlib.crc32(data, crc)
        if crc != file.crc32:
            raise self._damaged(file, "does not match its checksum")

    @contextlib.contextmanager
    def _opened(self, file: File) -> Iterator[BinaryIO]:
        try:
            with open_regular(self.path / file.name, links=False) as opened:
                yield opened
        except OSError as error:
            raise self._damaged(file, error.strerror or str(error)) from error

    def _damaged(self, file: File, how: str) -> UserError:
        return UserError(f"{self.path}: damaged checkpoint: {file.name}: {how}")


def _file(stage: StageFiles, part: Part) -> File:
    return stage.weights if part == "weights" else stage.optimizer


def _layer(key: str, part: Part) -> str:
    """ "features-3" of "features-3.conv.weight", "exp_avg/features-3.conv.weight" in the optimizer's file."""
    return (key if part == "weights" else key.partition("/")[2]).partition(".")[0]


def new_manifest(**fields: Any) -> Manifest:
    """A manifest of now, its stages still to be filled in."""
    return Manifest(created=_now(), stages=[], **fields)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")


def _fsync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

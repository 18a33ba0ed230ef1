"""Assembles checkpoints on rank 0 from the chunks that all stages send."""

import contextlib
import errno
import fcntl
import os
import re
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch

from accept_mpi.comm.messages import CheckpointChunk
from accept_mpi.errors import UserError
from accept_mpi.recovery.checkpoint import directory_of
from accept_mpi.recovery.manifest import PARTS, File, Manifest, Part, StageFiles, complete, last_number
from accept_mpi.recovery.tensor_file import written

_CHUNK = 1 << 20  # bytes per message


def chunks(
    step: int, stage: int, weights: dict[str, torch.Tensor], optimizer: dict[str, torch.Tensor]
) -> Iterator[CheckpointChunk]:
    """Yield a stage's two files as messages for ``CheckpointWriter.take``. They share the tensors' memory."""
    for part, tensors in zip(PARTS, (weights, optimizer), strict=True):
        total, pieces = written(tensors, _CHUNK)
        for data in pieces:
            yield CheckpointChunk(step, stage, part, total, data)


class Keeper(Protocol):
    """Has checkpoints kept that are not the newest (``training.best.Best``)."""

    @property
    def keeps(self) -> set[int | None]:
        """Their steps."""

    def kept(self, step: int) -> None:
        """Take note that the checkpoint of ``step`` is on the disk; on any thread."""


class CheckpointWriter:
    """Writes the checkpoints of one deployment to rank 0's disk."""

    def __init__(
        self, run: Path, edges: list[tuple[int, int]], manifest: Callable[[int], Manifest], keep: int, after: int = 0
    ) -> None:
        """``edges``: first layer and last + 1 of each stage; ``manifest(step)``: a manifest without its stages and its
        number; ``keep``: checkpoints to keep, 0 for all; ``after``: number of the checkpoint that the run goes on from."""
        self.run, self._edges, self._manifest, self._keep = run, edges, manifest, keep
        self._open: dict[int, dict[tuple[int, Part], _Growing]] = {}
        self._finished: dict[int, threading.Event] = {}
        self._lock = threading.Lock()
        self._committing: set[int] = set()
        self.best: Keeper | None = None
        """Says which checkpoints are kept besides."""
        _finish_replacing(run / "checkpoints")
        self._number = max(after, last_number(run))
        self._one_at_a_time = threading.Lock()
        self._held: dict[int, int] = {}
        """Open directories of unfinished checkpoints by step, locked so that no other run removes them."""
        self.error: UserError | None = None
        self.made = 0
        """Checkpoints that it has put on the disk."""
        for left in (run / "checkpoints").glob(".*step-*"):  # left by a run that was killed
            with contextlib.suppress(OSError):
                handle = _lock(left) if re.fullmatch(r"\.(old-\.?)?step-\d{8,}", left.name) else None
                if handle is not None:
                    shutil.rmtree(left, ignore_errors=True)
                    os.close(handle)

    def expect(self, step: int) -> None:
        """Announce the checkpoint of ``step``, before any of its chunks can arrive."""
        with self._lock:
            self._finished.setdefault(step, threading.Event())

    def take(self, chunk: CheckpointChunk) -> None:
        """Write one chunk. Raises UserError if it cannot be written."""
        step, stage, part = chunk.step, chunk.stage, chunk.part
        self.expect(step)
        try:
            files = self._open.setdefault(step, {})
            if (stage, part) not in files:
                folder = self._temporary(step)
                folder.mkdir(parents=True, exist_ok=True)
                if step not in self._held:
                    self._held[step] = _hold(folder)
                files[stage, part] = _Growing(folder / f"stage-{stage}.{part}.safetensors", chunk.total)
            files[stage, part].add(chunk.data)
        except OSError as error:
            raise UserError(
                f"cannot write the checkpoint of step {step} to {self.run}: {error.strerror or error}"
            ) from error
        if len(files) == len(PARTS) * len(self._edges) and all(file.complete for file in files.values()):
            del self._open[step]
            self._committing.add(step)
            self._number += 1  # now, since a later one may be on the disk before it
            threading.Thread(target=self._commit, args=(step, files, self._number), name="checkpoint").start()

    def wait(self, step: int, deadline: float) -> bool:
        """Wait until the checkpoint of ``step`` is on the disk; returns False after ``deadline`` seconds. Raises UserError
        if a checkpoint could not be written."""
        done = self._finished[step].wait(deadline)
        if self.error:
            raise self.error
        return done

    def wait_for_begun(self, deadline: float) -> None:
        """Wait until all checkpoints that have arrived completely are on the disk, for at most ``deadline`` seconds."""
        until = time.monotonic() + deadline
        for step in sorted(self._committing):
            self._finished[step].wait(max(0.0, until - time.monotonic()))

    def has(self, step: int) -> bool:
        """True if the checkpoint of ``step`` is on the disk, or could not be written (``error``)."""
        return step in self._finished and self._finished[step].is_set()

    def close(self) -> None:
        """Abandon the checkpoints that have not arrived completely, so that the next writer here can remove them."""
        for step in self._open:
            if step in self._held:
                os.close(self._held.pop(step))
        self._open = {}

    def _temporary(self, step: int) -> Path:
        final = directory_of(self.run, step)
        return final.with_name(f".{final.name}")

    def _commit(self, step: int, files: "dict[tuple[int, Part], _Growing]", number: int) -> None:
        """Write the manifest, fsync and rename. Runs on a thread of its own, since an SD card may take seconds."""
        try:
            stages = [
                StageFiles(start, stop, *(files[stage, part].close() for part in PARTS))
                for stage, (start, stop) in enumerate(self._edges)
            ]
            folder, final = self._temporary(step), directory_of(self.run, step)
            old = final.with_name(f".old-{final.name}")
            with self._one_at_a_time:
                manifest = msgspec.structs.replace(self._manifest(step), stages=stages, number=number)
                with open(folder / "manifest.json", "wb") as file:
                    file.write(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
                    file.flush()
                    os.fsync(file.fileno())
                _fsync_directory(folder)
                if final.exists():  # a resumed run makes the same step again
                    os.rename(final, old)
                os.rename(folder, final)
                for changed in (final.parent, self.run):  # the run's, too, since checkpoints/ may be new
                    _fsync_directory(changed)
                shutil.rmtree(old, ignore_errors=True)
                if self.best is not None:
                    self.best.kept(step)
                if self._keep:
                    best = [directory_of(self.run, at) for at in self.best.keeps if at is not None] if self.best else []
                    for path in complete(self.run)[: -self._keep]:
                        if path not in best:
                            shutil.rmtree(path, ignore_errors=True)
        except OSError as error:
            self.error = UserError(f"cannot write the checkpoint of step {step} to {self.run}: {error.strerror or error}")
        finally:
            os.close(self._held.pop(step))
            self.made += 1
            self._finished[step].set()


def _finish_replacing(checkpoints: Path) -> None:
    """Give the name of a checkpoint that a killed run had just renamed to the one that was to replace it, which was whole
    by then, or else back to itself."""
    for old in checkpoints.glob(".old-step-*"):
        final = old.with_name(old.name.removeprefix(".old-"))
        new = old.with_name(f".{final.name}")
        whole = new if (new / "manifest.json").is_file() else old
        with contextlib.suppress(OSError):
            handle = _lock(whole)
            if handle is not None:
                if not final.exists():
                    os.rename(whole, final)
                os.close(handle)


def _hold(folder: Path) -> int:
    """Open and lock a directory. Raises OSError if another process has locked it."""
    handle = _lock(folder)
    if handle is None:
        raise OSError(errno.EBUSY, "another run writes the same checkpoint")
    return handle


def _lock(folder: Path) -> int | None:
    """Open a directory and lock it until it is closed; returns None if another process has locked it. On a file system
    without locks it counts as free."""
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
    """A file that arrives in chunks. It is open only while one is written: there may be thousands at a time."""

    def __init__(self, path: Path, total: int) -> None:
        self._path, self._total = path, total
        path.open("wb").close()
        self._written = self._crc = 0

    @property
    def complete(self) -> bool:
        return self._written == self._total

    def add(self, data: bytes) -> None:
        with self._path.open("ab", buffering=0) as file:
            left = memoryview(data)
            while left:
                left = left[file.write(left) :]
        self._written += len(data)
        self._crc = zlib.crc32(data, self._crc)

    def close(self) -> File:
        with self._path.open("rb") as file:
            os.fsync(file.fileno())
        return File(self._path.name, self._written, self._crc)


def new_manifest(**fields: Any) -> Manifest:
    """A manifest with the present time, and without stages, which are filled in later."""
    return Manifest(created=_now(), stages=[], **fields)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")


def _fsync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # as file systems say that have this for files only (some network shares)
            raise
    finally:
        os.close(handle)

"""Replicas on local disks: what outlives the processes of a run that a supervisor (``launch``) begins again.

Each rank writes what it holds of the last two snapshots that were whole everywhere, to
``~/.cache/accept_mpi/replicas/RUN/HOST/STEP-PID``: a CRC-32 (4 bytes) and MessagePack of {layer: state}. Two, since not all
ranks may have written the newest when they end. Nothing is synchronized: a host that loses its power is not asked. Only
this user's own files are read, in folders to which nobody else may write.
"""

import contextlib
import errno
import logging
import math
import os
import re
import shutil
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import msgspec

from accept_mpi.device.memory import available_memory
from accept_mpi.files.cache import cache_directory
from accept_mpi.files.regular import is_private, read_regular
from accept_mpi.launch.run_identity import RunIdentity
from accept_mpi.recovery.layer_state import Blobs

log = logging.getLogger(__name__)


_OLD = 7 * 24 * 3600.0  # seconds after which another run's replicas are thrown away
_ATTENDED, _SURVEY, _ROOM = "attended", "survey", "room"
_MOST_DIGITS, _MOST_SURVEY = 20, 64 << 20


class DiskReplicas:
    """The replicas that one host keeps of a run. Any thread."""

    def __init__(self, run: RunIdentity, host: str, root: Path | None = None) -> None:
        """``root``: in place of the user's cache."""
        self._root = root or cache_directory() / "replicas"
        self._directory = self._root / run.name / host
        self._number = run.number
        self._lock = threading.Lock()
        """Of what is to be written; never held for long."""
        self._disk = threading.Lock()
        """Of the directory."""
        self._next: tuple[int, Blobs] | None = None
        self._writer: threading.Thread | None = None
        self._before = 0
        """The snapshot before the last one."""
        self._warned = False

    def read(self) -> dict[int, Blobs]:
        """States by step and layer that earlier starts have left here; damaged files are passed over. Once a host and start.

        Nothing where this host had no part in the start before: others have made those steps anew, and asynchronous training
        does not come by the same way twice.
        """
        self._forget_old_runs()
        found: dict[int, Blobs] = {}
        for left in self._directory.glob(".*"):  # of a process that was killed while it wrote
            with contextlib.suppress(OSError):
                left.unlink()
        for path in self._kept() if self._attended() else []:
            try:
                found.setdefault(_step(path), {}).update(_decoded(path))
            except (OSError, ValueError, MemoryError, RecursionError) as error:
                log.warning("%s: a damaged replica is passed over: %s", path, getattr(error, "strerror", None) or error)
        with self._disk:
            self._put(self._directory / _ATTENDED, str(self._number).encode(), bare=True)
        return {step: blobs for step, blobs in found.items() if blobs}

    def write(self, step: int, layers: Blobs) -> None:
        """In the background: a snapshot that is whole everywhere. Some are left out where they come faster than the disk."""
        with self._lock:
            self._next = step, layers
            if self._writer is None or not self._writer.is_alive():
                self._writer = threading.Thread(target=self._write, daemon=True)
                self._writer.start()

    def drop_after(self, step: int) -> None:
        """Steps after this one will be made anew."""
        with self._disk:
            self._cancel()
            self._remove(step + 1, None)
            self._before = 0

    def wait(self, seconds: float) -> None:
        """Until what was asked for is written."""
        writer = self._writer
        if writer is not None:
            writer.join(seconds)

    def keep_cluster(self, cluster: Any) -> None:
        """What all devices have measured (plain values), for the next start's plan."""
        data = msgspec.msgpack.encode(cluster)
        with self._disk:
            self._put(self._directory / _SURVEY, data)

    def cluster(self) -> Any:
        """What the last ``keep_cluster`` was given; None where there is none, or it is damaged."""
        with contextlib.suppress(OSError, ValueError, RecursionError):
            return msgspec.msgpack.decode(_checked(self._directory / _SURVEY, _MOST_SURVEY))
        return None

    def keep_room(self, place: int, nbytes: float) -> None:
        """So much memory the next start may plan for the host's rank at this place among its ranks."""
        with self._disk:
            self._put(self._directory / f"{_ROOM}-{place}", str(int(nbytes)).encode(), bare=True)

    def room(self, place: int) -> float:
        """What the last ``keep_room`` was given for this place; infinite where there is none."""
        with contextlib.suppress(OSError, ValueError):
            return float(int(_own(self._directory / f"{_ROOM}-{place}", _MOST_DIGITS)))
        return math.inf

    def clear(self) -> None:
        """The run is at its end."""
        with self._disk:
            self._cancel()
            shutil.rmtree(self._directory, ignore_errors=True)
            with contextlib.suppress(OSError):
                self._directory.parent.rmdir()

    def _cancel(self) -> None:
        with self._lock:
            self._next = None

    def _write(self) -> None:
        while True:
            with self._disk:
                with self._lock:
                    if self._next is None:
                        self._writer = None
                        return
                    (step, layers), self._next = self._next, None
                self._write_one(step, layers)

    def _write_one(self, step: int, layers: Blobs) -> None:
        path = self._directory / f"{step:012}-{os.getpid()}"
        if self._put(path, msgspec.msgpack.encode(layers)):  # other ranks of this host keep to the same snapshots
            self._remove(0, self._before)
            self._before = step

    def _put(self, path: Path, data: bytes, bare: bool = False) -> bool:
        """``bare``: without a checksum."""
        beside = path.with_name(f".{path.name}")
        try:
            self._make()
            with open(beside, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                if not bare:
                    file.write(zlib.crc32(data).to_bytes(4, "little"))
                file.write(data)
            beside.replace(path)
        except OSError as error:
            self._warn(error)
            with contextlib.suppress(OSError):
                beside.unlink()
            return False
        return True

    def _make(self) -> None:
        """The folder. Raises OSError where it is not this user's alone."""
        self._root.mkdir(parents=True, exist_ok=True)
        for folder in (self._directory.parent, self._directory):
            with contextlib.suppress(FileExistsError):
                folder.mkdir(0o700)
            if not is_private(folder):
                raise PermissionError(errno.EPERM, "others may write to it", str(folder))

    def _attended(self) -> bool:
        """Whether this host had a part in the start before, or in this one."""
        with contextlib.suppress(OSError, ValueError):
            self._make()
            return int(_own(self._directory / _ATTENDED, _MOST_DIGITS)) >= self._number - 1
        return False

    def _kept(self) -> list[Path]:
        """Files of states, oldest step first."""
        return sorted(path for path in self._directory.glob("*-*") if re.fullmatch(r"\d{12}-\d{1,10}", path.name))

    def _remove(self, first: int, end: int | None) -> None:
        for path in self._kept():
            with contextlib.suppress(OSError):
                if first <= _step(path) and (end is None or _step(path) < end):
                    path.unlink()

    def _forget_old_runs(self) -> None:
        with contextlib.suppress(OSError):
            for run in self._root.iterdir():
                if run == self._directory.parent:  # whose last start may have been before the clock was set
                    continue
                newest = max((path.lstat().st_mtime for path in [run, *run.rglob("*")]), default=0.0)
                if time.time() - newest > _OLD:
                    shutil.rmtree(run, ignore_errors=True)

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            log.warning("%s: replicas are not kept on this disk: %s", self._directory, error.strerror or error)


def _step(path: Path) -> int:
    return int(path.name.partition("-")[0])


def _decoded(path: Path) -> Blobs:
    """Raises OSError or ValueError where the file is damaged."""
    blobs = msgspec.msgpack.decode(_checked(path, int(min(available_memory() / 2, 1 << 50))), type=Blobs)
    return {layer: blob for layer, blob in blobs.items() if blob}


def _checked(path: Path, most: int) -> bytes:
    """What follows the checksum. Raises OSError, or ValueError where it is another's."""
    data = _own(path, most)
    if len(data) <= 4 or zlib.crc32(data[4:]) != int.from_bytes(data[:4], "little"):
        raise ValueError("it does not match its checksum")
    return data[4:]


def _own(path: Path, most: int) -> bytes:
    if not is_private(path):
        raise PermissionError(errno.EPERM, "others may write to it", str(path))
    return read_regular(path, most, links=False)

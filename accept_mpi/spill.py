"""Replicas on local disks: what outlives the processes of a run that a supervisor (``launch``) begins again.

Each rank writes what it holds of the last two snapshots that were whole everywhere, to
``~/.cache/accept_mpi/replicas/RUN/HOST/STEP-PID``: a CRC-32 (4 bytes) and MessagePack of {layer: state}. Two, since not all
ranks may have written the newest when they end. Nothing is synchronized: a host that loses its power is not asked.
"""

import contextlib
import logging
import os
import re
import shutil
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import msgspec

from accept_mpi.kernels.options import cache_directory
from accept_mpi.supervised import Supervised

log = logging.getLogger(__name__)

Blobs = dict[int, bytes]
"""States by layer."""

_OLD = 7 * 24 * 3600.0  # seconds after which another run's replicas are thrown away
_ATTENDED, _SURVEY = "attended", "survey"


class Spill:
    """The replicas that one host keeps of a run. Any thread."""

    def __init__(self, run: Supervised, host: str, root: Path | None = None) -> None:
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
            with contextlib.suppress(OSError, msgspec.DecodeError):
                found.setdefault(_step(path), {}).update(_decoded(path))
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            (self._directory / _ATTENDED).write_text(str(self._number))
        except OSError as error:
            self._warn(error)
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

    def keep_survey(self, survey: Any) -> None:
        """What all devices have measured (plain values), for the next start's plan."""
        data = msgspec.msgpack.encode(survey)
        with self._disk:
            self._put(self._directory / _SURVEY, data)

    def survey(self) -> Any:
        """What the last ``keep_survey`` was given; None where there is none, or it is damaged."""
        with contextlib.suppress(OSError, msgspec.DecodeError):
            if data := _checked(self._directory / _SURVEY):
                return msgspec.msgpack.decode(data)
        return None

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

    def _put(self, path: Path, data: bytes) -> bool:
        beside = path.with_name(f".{path.name}")
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with open(beside, "wb") as file:
                file.write(zlib.crc32(data).to_bytes(4, "little"))
                file.write(data)
            beside.replace(path)
        except OSError as error:
            self._warn(error)
            with contextlib.suppress(OSError):
                beside.unlink()
            return False
        return True

    def _attended(self) -> bool:
        """Whether this host had a part in the start before, or in this one."""
        with contextlib.suppress(OSError, ValueError):
            return int((self._directory / _ATTENDED).read_text()) >= self._number - 1
        return False

    def _kept(self) -> list[Path]:
        """Files of states, oldest step first."""
        return sorted(path for path in self._directory.glob("*-*") if re.fullmatch(r"\d+-\d+", path.name))

    def _remove(self, first: int, end: int | None) -> None:
        for path in self._kept():
            with contextlib.suppress(OSError):
                if first <= _step(path) and (end is None or _step(path) < end):
                    path.unlink()

    def _forget_old_runs(self) -> None:
        with contextlib.suppress(OSError):
            for run in self._root.iterdir():
                newest = max((path.stat().st_mtime for path in [run, *run.rglob("*")]), default=0.0)
                if time.time() - newest > _OLD:
                    shutil.rmtree(run, ignore_errors=True)

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            log.warning("%s: replicas are not kept on this disk: %s", self._directory, error.strerror or error)


def _step(path: Path) -> int:
    return int(path.name.partition("-")[0])


def _decoded(path: Path) -> Blobs:
    """Nothing where the file is damaged."""
    data = _checked(path)
    return msgspec.msgpack.decode(data, type=Blobs) if data else {}


def _checked(path: Path) -> bytes:
    """What follows the checksum; nothing where it is another's."""
    data = path.read_bytes()
    return data[4:] if len(data) > 4 and zlib.crc32(data[4:]) == int.from_bytes(data[:4], "little") else b""

"""Replicas on local disks, which outlive the processes of a run that a supervisor (``launch``) restarts.

Each rank writes its part of the last two snapshots that were complete everywhere to
``~/.cache/accept_mpi/replicas/RUN/HOST/STEP-PID``: a CRC-32 (4 bytes) and MessagePack of {layer: state}. There are two,
because some ranks may not have written the newest one when they end. Nothing is synchronized to the disk (fsync), since
replicas need not survive a power failure. Only this user's own files are read, in directories to which nobody else may
write.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from accept_mpi.device.memory import available_memory
from accept_mpi.files.cache import cache_directory
from accept_mpi.files.regular import is_private, read_regular, replacing
from accept_mpi.launch.run_identity import RunIdentity
from accept_mpi.recovery.layer_state import Blobs

log = logging.getLogger(__name__)


_OLD = 7 * 24 * 3600.0  # seconds after which another run's replicas are removed
_ATTENDED, _SURVEY, _ROOM, _COUNT, _ORIGIN, _SAMPLES = "attended", "survey", "room", "micro-batches", "origin", "samples"
"""Names of files: the last start that this host took part in, the cluster profile, the memory of each rank, the number of
micro-batches, the manifest of the checkpoint that the run began with, what some samples were."""
_STATES = re.compile(r"\d{12}-\d{1,10}")
"""Names of files with states: the step, and the process that has written it."""
_MOST_DIGITS, _MOST_SURVEY = 20, 64 << 20


class DiskReplicas:
    """The replicas of one run on one host's disk. Thread-safe."""

    def __init__(self, run: RunIdentity, host: str, root: Path | None = None) -> None:
        """``root``: directory to use instead of the user's cache."""
        self._root = root or cache_directory() / "replicas"
        self._directory = self._root / run.name / host
        self._number = run.number
        self._lock = threading.Lock()
        """Guards the snapshot that is to be written; never held for long."""
        self._disk = threading.Lock()
        """Guards the directory."""
        self._next: tuple[int, Blobs] | None = None
        self._writer: threading.Thread | None = None
        self._before = 0
        """Step of the last snapshot that was written; older ones are removed with the next."""
        self._warned = False

    def read(self) -> dict[int, Blobs]:
        """States by step and layer that earlier starts left here, without damaged files. Call it once per host and start.

        Empty if this host had no part in the previous start: the other hosts have repeated those steps since, and
        asynchronous training does not reach the same state twice.
        """
        self._forget_old_runs()
        found: dict[int, Blobs] = {}
        for left in self._named(".*"):  # left by a process that was killed while it wrote
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
        """Write a snapshot that is complete everywhere, in the background. Skips some if the disk is too slow."""
        with self._lock:
            self._next = step, layers
            if self._writer is None or not self._writer.is_alive():
                self._writer = threading.Thread(target=self._write, daemon=True)
                self._writer.start()

    def drop_after(self, step: int) -> None:
        """Remove the states after later steps than ``step``, since these steps will be repeated."""
        with self._disk:
            self._cancel()
            self._remove(step + 1, None)
            self._before = 0

    def wait(self, seconds: float) -> None:
        """Wait until the snapshots given to ``write`` are written, for at most ``seconds``."""
        writer = self._writer
        if writer is not None:
            writer.join(seconds)

    def keep_cluster(self, cluster: Any) -> None:
        """Store the cluster profile (as plain values) for the next start's plan."""
        self._keep_values(_SURVEY, cluster)

    def cluster(self) -> Any:
        """The profile that ``keep_cluster`` stored last; None if there is none or it is damaged."""
        return self._values_in(_SURVEY)

    def keep_origin(self, manifest: Any) -> None:
        """Store the manifest (as plain values) of the checkpoint with which the run's first start has begun."""
        self._keep_values(_ORIGIN, manifest)

    def origin(self) -> Any:
        """What ``keep_origin`` stored; None if there is nothing or it is damaged."""
        return self._values_in(_ORIGIN)

    def keep_glimpses(self, values: Any) -> None:
        """Store what is known of the data (as plain values)."""
        self._keep_values(_SAMPLES, values)

    def glimpses(self) -> Any:
        """What ``keep_glimpses`` stored; None if there is nothing or it is damaged."""
        return self._values_in(_SAMPLES)

    def _keep_values(self, name: str, values: Any) -> None:
        data = msgspec.msgpack.encode(values)
        with self._disk:
            self._put(self._directory / name, data)

    def _values_in(self, name: str) -> Any:
        with contextlib.suppress(OSError, ValueError, RecursionError):
            return msgspec.msgpack.decode(_checked(self._directory / name, _MOST_SURVEY))
        return None

    def keep_room(self, place: int, nbytes: float) -> None:
        """Store how many bytes of memory the next start may plan for one of this host's ranks, number ``place`` of them."""
        self._keep_number(f"{_ROOM}-{place}", int(nbytes))

    def room(self, place: int) -> float:
        """Bytes that ``keep_room`` stored last for the host's rank number ``place``; infinite if there are none."""
        found = self._number_in(f"{_ROOM}-{place}")
        return math.inf if found is None else float(found)

    def keep_micro_batches(self, count: int) -> None:
        """Store into how many micro-batches the run divides its steps."""
        self._keep_number(_COUNT, count)

    def micro_batches(self) -> int | None:
        """What ``keep_micro_batches`` stored; None if there is nothing."""
        found = self._number_in(_COUNT)
        return found if found is not None and found > 0 else None

    def _keep_number(self, name: str, number: int) -> None:
        with self._disk:
            self._put(self._directory / name, str(number).encode(), bare=True)

    def _number_in(self, name: str) -> int | None:
        with contextlib.suppress(OSError, ValueError):
            return int(_own(self._directory / name, _MOST_DIGITS))
        return None

    def clear(self) -> None:
        """Remove all files of the run, at its end."""
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
        if self._put(path, msgspec.msgpack.encode(layers)):
            self._remove(0, self._before, spare=_is_another_s)  # other ranks here may be behind with writing
            self._before = step

    def _put(self, path: Path, data: bytes, bare: bool = False) -> bool:
        """Write a file, without a checksum if ``bare``. Returns False, after a warning, if that fails."""
        try:
            self._make()
            with (
                replacing(path) as beside,  # with the process's number in its name: ranks of a host write the same files
                open(beside, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file,
            ):
                if not bare:
                    file.write(zlib.crc32(data).to_bytes(4, "little"))
                file.write(data)
        except OSError as error:
            self._warn(error)
            return False
        return True

    def _make(self) -> None:
        """Make the directory. Raises OSError if others may write to it."""
        self._root.mkdir(parents=True, exist_ok=True)
        for folder in (self._directory.parent, self._directory):
            with contextlib.suppress(FileExistsError):
                folder.mkdir(0o700)
            if not is_private(folder):
                raise PermissionError(errno.EPERM, "others may write to it", str(folder))

    def _attended(self) -> bool:
        """True if this host took part in the previous start, or in this one."""
        with contextlib.suppress(OSError, ValueError):
            self._make()
            return int(_own(self._directory / _ATTENDED, _MOST_DIGITS)) >= self._number - 1
        return False

    def _kept(self) -> list[Path]:
        """Paths of the files with states, oldest step first."""
        return [path for path in self._named("*-*") if _STATES.fullmatch(path.name)]

    def _named(self, pattern: str) -> list[Path]:
        """Paths in the directory; none if it cannot be looked into."""
        with contextlib.suppress(OSError):
            return sorted(self._directory.glob(pattern))
        return []

    def _remove(self, first: int, end: int | None, spare: Callable[[Path], bool] = lambda path: False) -> None:
        for path in self._kept():
            with contextlib.suppress(OSError):
                if first <= _step(path) and (end is None or _step(path) < end) and not spare(path):
                    path.unlink()

    def _forget_old_runs(self) -> None:
        with contextlib.suppress(OSError):
            for run in self._root.iterdir():
                if run == self._directory.parent:  # seems old if its last start was before the clock was set
                    continue
                paths = [run, *run.rglob("*")]
                # So does one that writes until now, if the clock has been set since its last snapshot.
                if any(_is_another_s(path) for path in paths if _STATES.fullmatch(path.name)):
                    continue
                if time.time() - max(path.lstat().st_mtime for path in paths) > _OLD:
                    shutil.rmtree(run, ignore_errors=True)

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            log.warning("%s: replicas are not kept on this disk: %s", self._directory, error.strerror or error)


def _step(path: Path) -> int:
    return int(path.name.partition("-")[0])


def _is_another_s(path: Path) -> bool:
    """True if another process that lives has written the file."""
    pid = int(path.name.partition("-")[2])
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # it is another user's
        pass
    return True


def _decoded(path: Path) -> Blobs:
    """States by layer in a file. Raises OSError or ValueError if it is damaged."""
    blobs = msgspec.msgpack.decode(_checked(path, int(min(available_memory() / 2, 1 << 50))), type=Blobs)
    return {layer: blob for layer, blob in blobs.items() if blob}


def _checked(path: Path, most: int) -> bytes:
    """Content of a file after its checksum. Raises OSError; ValueError if the checksum does not match."""
    data = _own(path, most)
    if len(data) <= 4 or zlib.crc32(data[4:]) != int.from_bytes(data[:4], "little"):
        raise ValueError("it does not match its checksum")
    return data[4:]


def _own(path: Path, most: int) -> bytes:
    """Content of a file that only this user may write. Raises OSError, also if it has more than ``most`` bytes."""
    if not is_private(path):
        raise PermissionError(errno.EPERM, "others may write to it", str(path))
    return read_regular(path, most, links=False)

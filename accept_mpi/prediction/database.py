"""The latency database: layer times by model and device, kept from run to run (by default in the user's cache).

Layout (HDF5, version 2; root attributes ``format``, which is "accept-mpi latency", and ``packed``, the bytes that the file
had when it was last packed)::

    /MODEL              outline (JSON of ``outline.Outline``): the layers, shapes and micro-batch size behind the key
    /MODEL/DEVICE       times (4 x layers: seconds of forward, backward, the backward's weight gradients, update; NaN: not
                        measured yet), pieces (k x 4: first layer, last + 1, seconds forward, backward), observed (the same,
                        of stages in training); attributes device (JSON), stretch, lanes (JSON: what lanes gain, absent from
                        early files), created
    /predictor          written by ``predictor.Predictor``: weights, training data, errors on it

A damaged or foreign file is set aside under another name, never deleted. A change replaces the whole file atomically, under
a lock. Of two simultaneous runs, the last to write wins only where both measured the same model on the same device.
"""

import contextlib
import errno
import hashlib
import io
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import h5py
import msgspec
import numpy as np

from accept_mpi.errors import UserError, one_line
from accept_mpi.files.cache import cache_directory, hold, open_lock
from accept_mpi.files.hdf5 import Damaged, group_in, number_in, open_file, reason, text_in, values_in
from accept_mpi.files.regular import is_regular, open_regular
from accept_mpi.files.start_directory import from_start
from accept_mpi.job import MOST_LANES
from accept_mpi.prediction.predictor import Predictor
from accept_mpi.prediction.samples import DeviceSamples, known_of
from accept_mpi.profiling.cluster_profile import outline_in
from accept_mpi.profiling.layer_times import LayerTimes, TimedRange
from accept_mpi.profiling.outline import Outline

log = logging.getLogger(__name__)

FORMAT, VERSION = "accept-mpi latency", 2
_LOCK_SECONDS = 10.0
_LOOKED_AT = 1 << 26  # bytes
_MOST_OBSERVED = 100  # observed sub-models kept per device
_UNUSED = 1 << 20  # bytes that a file may have grown by, and by its own size, before it is packed


def database_path(asked: str) -> Path | None:
    """Path of a job's latency database: ``asked``, the user's cache for "auto", None for "none". Raises UserError if there
    is no home directory."""
    if asked == "none":
        return None
    try:
        return cache_directory() / "latency.h5" if asked == "auto" else from_start(Path(asked).expanduser())
    except RuntimeError as error:
        raise UserError(f"pipeline.latency_db: {asked}: {error}") from error


def check_database(asked: str) -> None:
    """Raise UserError if a job's latency database is a file that never was one, which must not be replaced."""
    path = database_path(asked)
    if path is None or asked == "auto" or not os.path.lexists(path):
        return
    try:
        with open_regular(path) as file:
            content = file.read(_LOOKED_AT)
    except OSError as error:
        raise UserError(f"pipeline.latency_db: cannot read {path}: {error.strerror}") from error
    if content and FORMAT.encode() not in content:
        raise UserError(
            f"pipeline.latency_db: {path} is no latency database; expected one, the name of a file that is not there yet, "
            '"auto" or "none"'
        )


def device_key(facts: dict[str, Any]) -> str:
    """Hash that identifies a device and its settings: equal for equal facts."""
    return hashlib.sha256(msgspec.json.encode(facts, order="deterministic")).hexdigest()[:16]


def recall(path: Path, outline: Outline, devices: list[str]) -> list[LayerTimes | None]:
    """Stored times of this model on the devices with these keys; None for each device that has none."""
    found: list[LayerTimes | None] = [None] * len(devices)
    with _opened(path) as file:
        for n, key in enumerate(devices):
            if file and _has(file, outline.key):
                with _passed_over(path, f"{outline.key}/{key}"):
                    model = group_in(file, outline.key)
                    found[n] = _read(group_in(model, key), len(outline.layers)) if _has(model, key) else None
    return found


def remember(path: Path, outline: Outline, entries: dict[str, tuple[dict[str, Any], LayerTimes]]) -> None:
    """Store measured times of a model; ``entries``: facts and times by device key. Only warns if that fails."""

    def put(file: Any) -> None:
        try:
            model = group_in(file, outline.key)
        except Damaged:  # or missing
            if _has(file, outline.key):
                del file[outline.key]
            model = file.create_group(outline.key)
        if not _has(model, "outline"):
            model["outline"] = np.frombuffer(msgspec.json.encode(outline), np.uint8)
        for key, (facts, times) in entries.items():
            if _has(model, key):
                del model[key]
            _write(model.create_group(key), facts, times)

    _change(path, put)


def library(path: Path) -> list[DeviceSamples]:
    """The samples of all models and devices in the database, for a predictor to learn from."""
    found = []
    with _opened(path) as file:
        for name in file or ():
            if name == "predictor":
                continue
            with _passed_over(path, name):
                model = group_in(file, name)
                outline = outline_in(model)
                for device in model:
                    if device == "outline":
                        continue
                    with _passed_over(path, f"{name}/{device}"):
                        times = _read(group_in(model, device), len(outline.layers))
                        if times is not None and times.pieces:
                            found.append(known_of(outline, device, times))
    return found


def recall_predictor(path: Path) -> Predictor | None:
    """The predictor that an earlier run stored; None if there is no readable one."""
    with _opened(path) as file:
        if file and _has(file, "predictor"):
            with _passed_over(path, "predictor"):
                return Predictor.read(group_in(file, "predictor"))
    return None


def keep_predictor(path: Path, predictor: Predictor) -> None:
    """Store the predictor for later runs. Only warns if that fails."""

    def put(file: Any) -> None:
        if _has(file, "predictor"):
            del file["predictor"]
        predictor.write(file.create_group("predictor"))

    _change(path, put)


def _change(path: Path, change: Callable[[Any], None]) -> None:
    """Apply ``change`` to a copy of the file, which then replaces it. A file that is too damaged for that is set aside, and
    a new one begun. Only warns if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path = Path(os.path.realpath(path))  # a link stays one
        if os.path.exists(path) and not is_regular(path):
            raise OSError(errno.EINVAL, "something else than a file has this name")
        with _locked(path):
            temporary = path.with_name(f".{path.name}.{os.getpid()}")
            try:
                with _opened(path) as file:
                    pass
                content = path.read_bytes() if file is not None else b""
                try:
                    content = _changed(content, change)
                except (KeyError, RuntimeError, ValueError, TypeError) as error:  # of HDF5: damaged where nothing has read
                    _set_aside(path, f"cannot be changed ({one_line(str(error), 300)})")
                    content = _changed(b"", change)
                temporary.write_bytes(content)
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
    except (OSError, Damaged) as error:
        log.warning("%s: the latency database cannot be written: %s", path, reason(error))


def _changed(before: bytes, change: Callable[[Any], None]) -> bytes:
    """A database after ``change``, as bytes; ``before``: what is in the file, nothing for a new one."""
    content = io.BytesIO(before)  # in memory, since HDF5 does not survive a disk that is full
    with h5py.File(content, "r+" if before else "w") as file:
        file.attrs.update(format=FORMAT, version=VERSION)
        change(file)
        packed = number_in(file, "packed") if "packed" in file.attrs else 0.0
    found = content.getvalue()
    return found if len(found) < 2 * packed + _UNUSED else _packed(found)


def _packed(before: bytes) -> bytes:
    """The same without the room of what was deleted, which HDF5 does not use again once a file is closed, and without
    entries that cannot be read."""
    content = io.BytesIO()
    with h5py.File(io.BytesIO(before), "r") as file, h5py.File(content, "w") as copy:
        copy.attrs.update(file.attrs)
        for name in file:
            with contextlib.suppress(KeyError, OSError, RuntimeError, ValueError):
                if isinstance(file.get(name, getlink=True), h5py.HardLink):
                    file.copy(name, copy)
    nbytes = len(content.getvalue())
    with h5py.File(content, "r+") as copy:
        copy.attrs["packed"] = nbytes
    return content.getvalue()


def observe(path: Path, outline: Outline, runs: dict[str, list[TimedRange]]) -> None:
    """Add times of sub-models in training, by device key, to devices that the database has. Only warns if that fails."""

    def add(file: Any) -> None:
        if not _has(file, outline.key):
            return
        model = group_in(file, outline.key)
        for key, rows in runs.items():
            if _has(model, key):
                device = group_in(model, key)
                before = values_in(device, "observed", kinds="f", shape=(None, 4))
                del device["observed"]
                device["observed"] = np.concatenate([before, np.array(rows, float).reshape(-1, 4)])[-_MOST_OBSERVED:]

    if os.path.exists(path):
        _change(path, add)


def _has(group: Any, name: str) -> bool:
    """True if the group has an entry of that name, even a dangling link."""
    return bool(group.id.links.exists(name.encode()))


@contextlib.contextmanager
def _passed_over(path: Path, what: str) -> Iterator[None]:
    """Treat errors of the ``with`` block as "entry ``what`` is unreadable": log a warning and continue."""
    try:
        yield
    except (Damaged, KeyError, OSError, ValueError, TypeError, RuntimeError, msgspec.MsgspecError) as error:
        log.warning("%s: %s in it cannot be read and does not count: %s", path, what, one_line(str(error), 300))


def _read(group: Any, layers: int) -> LayerTimes | None:
    """Times of a device from its group. Raises Damaged if they are not valid."""
    times = values_in(group, "times", kinds="f", shape=(4, layers))
    there = np.isfinite(times)
    impossible = (times < 0).any() or np.isinf(times).any() or not np.nansum(times[:2]) > 0
    if (there != there[0]).any() or not there.any() or impossible:
        raise Damaged("times that there cannot be")
    stretch = number_in(group, "stretch")
    if not 1 <= stretch < math.inf:
        raise Damaged("a stretch that there cannot be")
    rows = [tuple(map(float, row)) for row in times]
    runs = []
    for name in ("pieces", "observed"):
        found = values_in(group, name, kinds="f", shape=(None, 4))
        first, stop = found[:, 0], found[:, 1]
        if not (np.isfinite(found).all() and (found >= 0).all() and (first < stop).all() and (stop <= layers).all()):
            raise Damaged(f"{name} that there cannot be")
        runs.append(tuple((int(a), int(b), float(forward), float(backward)) for a, b, forward, backward in found))
    lanes = _lanes(text_in(group, "lanes")) if "lanes" in group.attrs else {}
    return LayerTimes(rows[0], rows[1], rows[2], rows[3], 0.0, runs[0], stretch, runs[1], lanes)


def _lanes(text: str) -> dict[int, float]:
    """What lanes gain. Raises Damaged if that cannot be."""
    found = msgspec.json.decode(text, type=dict[int, float])
    if not all(1 < k <= MOST_LANES and 0 < factor < math.inf for k, factor in found.items()):
        raise Damaged("a gain of lanes that there cannot be")
    return found


def _write(group: Any, facts: dict[str, Any], times: LayerTimes) -> None:
    group["times"] = np.array([times.forward, times.backward, times.weight_gradient, times.update])
    for name, runs in (("pieces", times.pieces), ("observed", times.observed)):
        group[name] = np.array(runs, float).reshape(-1, 4)
    group.attrs.update(
        device=msgspec.json.encode(facts).decode(),
        stretch=times.stretch,
        lanes=msgspec.json.encode(times.lanes).decode(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open the database for reading; None if there is none. A file that is not a valid database is set aside."""
    file = None
    if os.path.exists(path) and not is_regular(path):
        log.warning("%s is no file, so there is no latency database", path)
    elif os.path.exists(path):
        try:
            file = open_file(path)
            if text_in(file, "format") != FORMAT or number_in(file, "version") != VERSION:
                raise Damaged("it is not a latency database of a version known here")
            file.visit(lambda name: None)
        except (Damaged, OSError, RuntimeError, KeyError, ValueError, TypeError) as error:
            if file is not None:
                file.close()
            file = None
            _set_aside(path, f"cannot be read ({one_line(str(error), 300)})")
    try:
        yield file
    finally:
        if file is not None:
            file.close()


def _set_aside(path: Path, why: str) -> None:
    kept = path.with_name(f"{path.name}.set-aside-{time.time_ns() // 1_000_000}")
    with contextlib.suppress(OSError):
        path.rename(kept)
    log.warning("%s %s; it is kept as %s", path, why, kept.name)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open_lock(path.with_name(f"{path.name}.lock")) as lock:
        hold(lock.fileno(), _LOCK_SECONDS)
        yield

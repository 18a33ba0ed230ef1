"""The latency database: what layers took on which device, kept from run to run (by default in the user's cache).

Layout (HDF5, version 1; root attribute ``format`` is "accept-mpi latency")::

    /MODEL              outline (JSON of ``outline.Outline``): the layers, shapes and size of micro-batch the key stands for
    /MODEL/DEVICE       times (4 x layers: seconds forward, backward, of it weights, update), pieces (k x 4: first layer,
                        last + 1, seconds forward, backward: sub-models as measured); attributes device (JSON), stretch,
                        created

A damaged or foreign file is set aside under another name, never deleted. Files change as a whole (written beside, renamed),
under a lock, so that two runs at a time lose nothing.
"""

import contextlib
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import h5py
import msgspec
import numpy as np

from accept_mpi.kernels.options import cache_directory, hold
from accept_mpi.outline import Outline
from accept_mpi.probe import LayerTimes, Run

log = logging.getLogger(__name__)

FORMAT, VERSION = "accept-mpi latency", 1
_LOCK_SECONDS = 10.0
_MOST_OBSERVED = 100  # sub-models kept of a device, besides those probed


def database_path(asked: str) -> Path | None:
    """Where a job's database lies ("auto": in the user's cache; "none": nowhere)."""
    if asked == "none":
        return None
    return cache_directory() / "latency.h5" if asked == "auto" else Path(asked).expanduser()


def device_key(facts: dict[str, Any]) -> str:
    """Names a device and its settings: equal for equal facts."""
    return hashlib.sha256(msgspec.json.encode(facts, order="deterministic")).hexdigest()[:16]


def recall(path: Path, outline: Outline, devices: list[str]) -> list[LayerTimes | None]:
    """What is known of this model on devices with these keys."""
    found: list[LayerTimes | None] = [None] * len(devices)
    with _opened(path) as file:
        for n, key in enumerate(devices):
            with contextlib.suppress(KeyError, OSError, ValueError, RuntimeError):
                found[n] = _read(file[outline.key][key], len(outline.layers)) if file else None
    return found


def remember(path: Path, outline: Outline, entries: dict[str, tuple[dict[str, Any], LayerTimes]]) -> None:
    """Put in what was measured, by device key. Warns, and goes on, where the file cannot be written."""

    def put(model: Any) -> None:
        for key, (facts, times) in entries.items():
            if key in model:
                del model[key]
            _write(model.create_group(key), facts, times)

    _change(path, outline, put)


def _change(path: Path, outline: Outline, change: Callable[[Any], None]) -> None:
    """Change a model's group in a copy of the file, which then takes its place."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path):
            temporary = path.with_name(f".{path.name}.{os.getpid()}")
            try:
                with _opened(path) as file:
                    pass
                if file is not None:
                    shutil.copyfile(path, temporary)
                with h5py.File(temporary, "a") as changed:
                    changed.attrs.update(format=FORMAT, version=VERSION)
                    model = changed.require_group(outline.key)
                    if "outline" not in model:
                        model["outline"] = np.frombuffer(msgspec.json.encode(outline), np.uint8)
                    change(model)
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s: the latency database cannot be written: %s", path, error)


def observe(path: Path, outline: Outline, runs: dict[str, list[Run]]) -> None:
    """Add what sub-models took in training, by device key, to devices that are known. Warns where that cannot be written."""

    def add(model: Any) -> None:
        for key, rows in runs.items():
            if key in model:
                before = model[key]["pieces"][:]
                cover = 1 + int(np.argmax(before[:, 1])) if len(before) else 0  # what was probed comes first
                later = np.concatenate([before[cover:], np.array(rows, float).reshape(-1, 4)])[-_MOST_OBSERVED:]
                del model[key]["pieces"]
                model[key]["pieces"] = np.concatenate([before[:cover], later])

    if path.exists():
        _change(path, outline, add)


def _read(group: Any, layers: int) -> LayerTimes | None:
    times, pieces = group["times"][:], group["pieces"][:]
    if times.shape != (4, layers) or not np.isfinite(times).all() or (times < 0).any():
        return None
    rows = [tuple(map(float, row)) for row in times]
    whole = tuple((int(a), int(b), float(forward), float(backward)) for a, b, forward, backward in pieces)
    return LayerTimes(rows[0], rows[1], rows[2], rows[3], 0.0, whole, float(group.attrs["stretch"]))


def _write(group: Any, facts: dict[str, Any], times: LayerTimes) -> None:
    group["times"] = np.array([times.forward, times.backward, times.weights, times.update])
    group["pieces"] = np.array(times.pieces, float).reshape(-1, 4)
    group.attrs.update(
        device=msgspec.json.encode(facts).decode(),
        stretch=times.stretch,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The database for reading; None where there is none. What is not one is set aside."""
    file = None
    if path.exists():
        try:
            file = h5py.File(path, "r", locking=False)
            if file.attrs.get("format") != FORMAT or file.attrs.get("version") != VERSION:
                file.close()
                file = None
                _set_aside(path, "is not a latency database of a version known here")
            else:
                file.visit(lambda name: None)
        except (OSError, RuntimeError, KeyError) as error:
            file = None
            _set_aside(path, f"cannot be read ({' '.join(str(error).split())})")
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
    with open(path.with_name(f"{path.name}.lock"), "w") as lock:
        hold(lock.fileno(), _LOCK_SECONDS)
        yield

"""The latency database: what layers took on which device, kept from run to run (by default in the user's cache).

Layout (HDF5, version 2; root attribute ``format`` is "accept-mpi latency")::

    /MODEL              outline (JSON of ``outline.Outline``): the layers, shapes and size of micro-batch the key stands for
    /MODEL/DEVICE       times (4 x layers: seconds forward, backward, of it weights, update; NaN: not measured yet),
                        pieces (k x 4: first layer, last + 1, seconds forward, backward: sub-models as probed), observed
                        (alike: stages in training); attributes device (JSON), stretch, created
    /predictor          what ``predictor.Predictor`` writes: weights, what they were learned from, errors on that

A damaged or foreign file is set aside under another name, never deleted. Files change as a whole (written beside, renamed),
under a lock, so that two runs at a time lose nothing but what both measured of the same model on the same device: the last
counts.
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
from accept_mpi.predictor import Predictor
from accept_mpi.probe import LayerTimes, Run
from accept_mpi.submodels import Known

log = logging.getLogger(__name__)

FORMAT, VERSION = "accept-mpi latency", 2
_LOCK_SECONDS = 10.0
_MOST_OBSERVED = 100  # sub-models kept of a device, besides those probed
_LEAST = 1e-6  # seconds that a run of layers is taken to need at least: its logarithm is learned


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

    def put(file: Any) -> None:
        model = file.require_group(outline.key)
        if "outline" not in model:
            model["outline"] = np.frombuffer(msgspec.json.encode(outline), np.uint8)
        for key, (facts, times) in entries.items():
            if key in model:
                del model[key]
            _write(model.create_group(key), facts, times)

    _change(path, put)


def library(path: Path) -> list[Known]:
    """All that is known, of every model and device, for a predictor to learn from."""
    found = []
    with _opened(path) as file:
        for name in file or ():
            with contextlib.suppress(KeyError, OSError, ValueError, RuntimeError, msgspec.MsgspecError):
                outline = msgspec.json.decode(file[name]["outline"][:].tobytes(), type=Outline)
                for device in file[name]:
                    times = _read(file[name][device], len(outline.layers)) if device != "outline" else None
                    if times is not None and times.pieces:
                        found.append(known_of(outline, device, times))
    return found


def known_of(outline: Outline, device: str, times: LayerTimes) -> Known:
    """A device's times as the predictor takes them: its probes, runs of layers between its clocks, and stages observed."""
    probes, observed = (np.array(runs).reshape(-1, 4) for runs in (times.pieces, times.observed))
    rows = np.array([times.forward, times.backward]).T
    lengths = [2**k for k in range(1, len(rows).bit_length())]
    inside = np.array([(a, a + n) for n in lengths for a in range(0, len(rows) - n + 1, n)], np.int64).reshape(-1, 2)
    sums = np.array([rows[a:b].sum(axis=0) for a, b in inside]).reshape(-1, 2)
    measured = np.isfinite(sums).all(axis=1)
    return Known(
        outline=outline,
        device=device,
        probes=probes[:, :2].astype(np.int64),
        probe_times=np.maximum(probes[:, 2:], _LEAST),
        intervals=np.concatenate([inside[measured], observed[:, :2].astype(np.int64)]),
        times=np.maximum(np.concatenate([sums[measured], observed[:, 2:]]), _LEAST),
        layer_times=rows,
    )


def recall_predictor(path: Path) -> Predictor | None:
    """The predictor that an earlier run has left; None where there is none that can be read."""
    with _opened(path) as file:
        with contextlib.suppress(KeyError, OSError, ValueError, RuntimeError, msgspec.MsgspecError):
            return Predictor.read(file["predictor"]) if file else None
    return None


def keep_predictor(path: Path, predictor: Predictor) -> None:
    """Leave it to later runs. Warns where the file cannot be written."""

    def put(file: Any) -> None:
        if "predictor" in file:
            del file["predictor"]
        predictor.write(file.create_group("predictor"))

    _change(path, put)


def _change(path: Path, change: Callable[[Any], None]) -> None:
    """Change a copy of the file, which then takes its place."""
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
                    change(changed)
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s: the latency database cannot be written: %s", path, error)


def observe(path: Path, outline: Outline, runs: dict[str, list[Run]]) -> None:
    """Add what sub-models took in training, by device key, to devices that are known. Warns where that cannot be written."""

    def add(file: Any) -> None:
        model = file.get(outline.key, {})
        for key, rows in runs.items():
            if key in model:
                both = np.concatenate([model[key]["observed"][:], np.array(rows, float).reshape(-1, 4)])
                del model[key]["observed"]
                model[key]["observed"] = both[-_MOST_OBSERVED:]

    if path.exists():
        _change(path, add)


def _read(group: Any, layers: int) -> LayerTimes | None:
    times = group["times"][:]
    there = np.isfinite(times)
    if times.shape != (4, layers) or (there != there[0]).any() or not there.any() or (times < 0).any():
        return None
    rows = [tuple(map(float, row)) for row in times]
    pieces, observed = (
        tuple((int(a), int(b), float(forward), float(backward)) for a, b, forward, backward in group[name][:])
        for name in ("pieces", "observed")
    )
    return LayerTimes(rows[0], rows[1], rows[2], rows[3], 0.0, pieces, float(group.attrs["stretch"]), observed)


def _write(group: Any, facts: dict[str, Any], times: LayerTimes) -> None:
    group["times"] = np.array([times.forward, times.backward, times.weights, times.update])
    for name, runs in (("pieces", times.pieces), ("observed", times.observed)):
        group[name] = np.array(runs, float).reshape(-1, 4)
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

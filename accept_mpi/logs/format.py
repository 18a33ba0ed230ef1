"""The HDF5 log of a run: facts, per-step results and the trace. Rank 0 writes it (``writer``); ``reader`` opens it.

Layout, version 1 (attribute ``version`` of the root; ``format`` is "accept-mpi log"):

====================  ====================================================================================
``/`` attributes      ``job`` (JSON text), ``plan`` (JSON), ``facts`` (JSON: versions, hosts, clock offsets,
                      ...), ``created`` (ISO 8601, UTC)
``/steps``            one row per optimizer step: STEPS below
``/evals``            one row per evaluation on the test set: EVALS
``/metrics``          one row per evaluation and metric: METRICS
``/trace``            one row per action or transfer: TRACE. Times are seconds on rank 0's clock since the
                      run began
``/events``           other events (checkpoints, warnings, the end): EVENTS
``/plans``            which rank held which layers, and from when: PLANS (``plan`` is the first one)
``/survey``           the cluster profile (group, see ``profiling.cluster_profile``), if "auto" cuts had it measured
====================  ====================================================================================

The file appears under its name only once its layout is complete, and is in HDF5's single-writer multiple-readers mode from
then on: it can be opened at any moment, even after ``kill -9`` (with ``open_log``, or ``h5py.File(path, swmr=True)``).

A log may come from an untrusted source, so ``check_log`` validates it once, when it is opened. From then on readers may
assume that the tables exist with their columns, that texts are texts, and that ranks, stages, layers and kinds are within
the run's bounds.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any

import h5py
import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from accept_mpi.direction import Direction
from accept_mpi.files.hdf5 import Damaged, dataset_in, group_in, json_in, text_in
from accept_mpi.job import LONGEST_METRIC
from accept_mpi.plan import Plan

#: Kinds of trace rows, in the order of their numbers in the column ``kind``. F, B, W, U: forward, backward (only of inputs
#: if there is a W), weight gradients, update. E: forward of an evaluation. On the data plane: encode; send (from the call of
#: MPI here to the arrival there, both on rank 0's clock); decode (from the arrival to the tensor). Pauses: wait (for a
#: message); checkpoint and snapshot (the state is copied here and sent in the background).
KINDS = ("F", "B", "W", "U", "E", "encode", "send", "decode", "wait", "checkpoint", "snapshot", "sum")

TRACE = np.dtype(
    [
        ("start", "f8"),  # seconds
        ("end", "f8"),
        ("rank", "i4"),
        ("stage", "i4"),
        ("kind", "u1"),  # index into KINDS
        ("boundary", "i2"),  # between stage `boundary` and the next; -1 for actions
        ("direction", "i1"),  # ``Direction``; -1 for actions
        ("step", "i8"),
        ("micro_batch", "i4"),  # -1 for U and checkpoint
        ("bytes_raw", "i8"),  # before coding; 0 for actions
        ("bytes_wire", "i8"),  # after coding, header included
        ("lane", "u1"),  # of a rank that computes several actions at a time; absent from early logs
    ]
)
_EARLY_TRACE = np.dtype([(name, TRACE[name]) for name in TRACE.names or () if name != "lane"])
STEPS = np.dtype(
    [
        ("step", "i8"),  # counted from 1: this many updates have been made
        ("epoch", "i4"),  # counted from 0
        ("samples", "i4"),
        ("loss", "f8"),  # mean over the step's samples, before its update
        ("accuracy", "f8"),  # share of correct predictions, NaN if undefined
        ("lr", "f8"),
        ("end", "f8"),  # seconds since the run began
        ("samples_per_s", "f8"),
    ]
)
EVALS = np.dtype([("step", "i8"), ("epoch", "i4"), ("samples", "i4"), ("loss", "f8"), ("accuracy", "f8"), ("end", "f8")])
EVENTS = np.dtype([("time", "f8"), ("step", "i8"), ("text", "S480")])
PLANS = np.dtype(
    [
        ("time", "f8"),  # seconds at which the plan began; a plan has a row per rank of each stage
        ("step", "i8"),  # steps made before
        ("stage", "i4"),
        ("rank", "i4"),
        ("start", "i4"),  # first layer
        ("stop", "i4"),
    ]
)
METRICS = np.dtype([("step", "i8"), ("name", f"S{LONGEST_METRIC}"), ("value", "f8")])
TABLES = {"steps": STEPS, "evals": EVALS, "metrics": METRICS, "trace": TRACE, "events": EVENTS, "plans": PLANS}

_PART = 1 << 18  # rows validated at a time
_LATEST = 1e10  # seconds, three hundred years
_MOST_RANKS, _MOST_LAYERS = 1 << 16, 1 << 16

Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Rank = Annotated[int, Meta(ge=0, lt=_MOST_RANKS)]

FORMAT = "accept-mpi log"
VERSION = 1
Rows = npt.NDArray[Any]


class _Host(msgspec.Struct):
    rank: Rank
    host: str = ""
    machine: str = ""
    cores: int | float | str | None = None
    memory_bytes: Annotated[float, Meta(ge=0, le=1e18)] = 0


class _Facts(msgspec.Struct):
    """The facts of a run that readers use; others are not validated."""

    hosts: Annotated[list[_Host], Meta(max_length=_MOST_RANKS)] = []
    layers: Annotated[list[str], Meta(max_length=_MOST_LAYERS)] = []
    versions: dict[str, str] = {}
    parameters: Count = 0
    first_step: Count = 0
    last_step: Count | None = None
    plan_why: list[str] = []
    codecs_why: list[str] = []
    run: str = ""
    ancestors: dict[str, Count] = {}
    """Runs that it goes on from, and the last step that each made of its history."""
    created_s: Annotated[float, Meta(ge=0, le=_LATEST)] = 0
    """Second of the run at which its log was created."""


class _Named(msgspec.Struct):
    name: str
    args: dict[str, Any] = {}


class _Pipeline(msgspec.Struct):
    schedule: str


class _Job(msgspec.Struct):
    """The entries of a job that readers use."""

    model: _Named
    data: _Named
    pipeline: _Pipeline
    train: dict[str, Any] = {}


def check_log(file: h5py.File) -> None:
    """Validate a file that has a log's attributes. Raises Damaged, or an error of h5py, if its content is not a log's."""
    _check_time(text_in(file, "created"))
    _typed(json_in(text_in(file, "job"), "the job"), _Job, "the job")
    facts = _typed(json_in(text_in(file, "facts"), "what is said of the run"), _Facts, "what is said of the run")
    plan = _typed(json_in(text_in(file, "plan"), "the plan"), Plan, "the plan")
    layers = len(facts.layers) or (plan.stages[-1].stop if plan.stages else 0)
    _check_plan(plan, layers)
    tables = {name: dataset_in(file, name, dtype=dtype, shape=(None,)) for name, dtype in _tables(file).items()}
    if _has(file, "survey"):
        group_in(file, "survey")
    ranks = {host.rank for host in facts.hosts} | {rank for stage in plan.stages for rank in stage.ranks}
    for rows in _parts(tables["plans"]) if "plans" in tables else ():
        _check(rows, "plans", layers)
        ranks |= {*rows["rank"].tolist()}
    known = np.array(sorted(ranks))
    for name in ("steps", "evals", "events"):
        for rows in _parts(tables[name]):
            _check(rows, name, layers)
    for rows in _parts(tables["trace"]):
        _check(rows, "trace", layers)
        _all(np.isin(rows["rank"], known), "trace", "rank")


def rows_of(file: h5py.File, table: str) -> Rows:
    """All rows of one of the TABLES; none of one that an early log lacks."""
    return file[table][:] if table in file else np.empty(0, TABLES[table])


def lanes_in(rows: Rows) -> Rows:
    """The lane of each row of a trace; 0 in early logs."""
    return rows["lane"] if "lane" in (rows.dtype.names or ()) else np.zeros(len(rows), np.uint8)


def _tables(file: h5py.File) -> dict[str, Any]:
    """The dtypes of a log's tables."""
    found = {name: dtype for name, dtype in TABLES.items() if _has(file, name)}
    trace = file.get("trace")
    if isinstance(trace, h5py.Dataset) and trace.dtype == _EARLY_TRACE:
        found["trace"] = _EARLY_TRACE
    return found


def _has(file: h5py.File, name: str) -> bool:
    """True if the log has the table or group. Only "plans" and "metrics" (absent from early logs) and "survey" are
    optional."""
    return name not in ("plans", "metrics", "survey") or bool(file.id.links.exists(name.encode()))


def _check_time(text: str) -> None:
    try:
        datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError) as error:
        raise Damaged(f'the attribute "created" is no time: {error}') from error


def _typed(value: Any, kind: Any, what: str) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise Damaged(f"{what} is not as it should be: {error}") from error


def _check_plan(plan: Plan, layers: int) -> None:
    at = 0
    for stage in plan.stages:
        if not (stage.start == at < stage.stop <= layers and stage.ranks):
            raise Damaged("the plan's stages do not follow each other")
        if not all(0 <= rank < _MOST_RANKS for rank in stage.ranks):
            raise Damaged("the plan has a rank that there cannot be")
        at = stage.stop
    if at != layers or layers > _MOST_LAYERS:
        raise Damaged(f"the plan's stages end at layer {at} of {layers}")


def _parts(table: h5py.Dataset) -> Any:
    """A table's rows in parts of ``_PART``, since a log may not fit into memory."""
    for begin in range(0, len(table), _PART):
        yield table[begin : begin + _PART]


def _check(rows: npt.NDArray[Any], name: str, layers: int) -> None:
    """Raises Damaged if a value of ``rows`` is out of bounds for its column of table ``name``."""
    bounds = {
        "rank": (0, _MOST_RANKS - 1), "stage": (-1, layers - 1), "kind": (0, len(KINDS) - 1), "boundary": (-1, layers - 1),
        "direction": (-1, max(Direction)), "micro_batch": (-1, None), "step": (0, None), "epoch": (0, None),
        "samples": (0, None), "bytes_raw": (0, None), "bytes_wire": (0, None), "start": (0, layers - 1), "stop": (1, layers),
    }  # fmt: skip
    for column in rows.dtype.names or ():
        values = rows[column]
        if values.dtype.kind == "f" and column in ("start", "end", "time"):
            _all(~(np.abs(values) > _LATEST), name, column)  # NaN means unknown
        elif values.dtype.kind in "iu" and column in bounds:
            least, most = bounds[column]
            _all(values >= least, name, column)
            if most is not None:
                _all(values <= most, name, column)
    if name == "plans":
        _all(rows["stage"] >= 0, name, "stage")
        _all(rows["start"] < rows["stop"], name, "stop")
    if name == "trace":
        moved = np.isin(rows["kind"], [KINDS.index(kind) for kind in ("encode", "send", "decode")])
        _all(~moved | ((rows["direction"] >= 0) & (rows["boundary"] >= 0)), name, "direction")


def number_of(rank: int, names: Sequence[int] | None) -> int:
    """A rank's number in a trace, and in whatever a run tells. ``names``: those of ranks 0, 1, ... if they differ, since
    after a loss ranks keep the numbers that they had when the job began."""
    return names[rank] if names else rank


def _all(right: npt.NDArray[np.bool_], table: str, column: str) -> None:
    if not right.all():
        raise Damaged(f'"{table}" has a {column} that there cannot be')

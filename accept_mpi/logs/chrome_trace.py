"""Export of a log's trace for Chrome's and Perfetto's trace viewers (Trace Event Format, JSON)."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from accept_mpi.direction import Direction
from accept_mpi.errors import UserError
from accept_mpi.files.regular import replacing
from accept_mpi.logs.format import KINDS, Rows
from accept_mpi.logs.reader import log_in, open_log, read_facts
from accept_mpi.logs.timeline import plans_of, timed

_CHUNK = 50_000  # rows held in memory at once
_LANES = {"compute": 0, "encode, decode": 1, "send forward": 2, "send backward": 8, "sum of gradients": 14}
_FURTHER = 20  # of the lanes of a rank that computes several actions at a time
_SENDS = 6  # lanes per direction: slices in one lane must not overlap, and several messages are in flight at once


def export_chrome(log: Path, out: Path) -> None:
    """Write the trace of ``log`` to ``out``: a process per rank, with lanes for computing, coding and sending each way.

    Times are microseconds since the run began; an arrow leads from each send to the decoding on the other side. Raises
    UserError if the log cannot be read or ``out`` cannot be written.
    """
    with open_log(log) as file:
        if os.path.exists(out) and os.path.samefile(out, log_in(log)):
            raise UserError(f"{out}: cannot write: it is the log itself; choose another name")
        facts = read_facts(file)
        try:
            with replacing(out) as beside, open(beside, "w") as stream:
                stream.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
                for number, event in enumerate(_events(file, facts)):
                    stream.write((",\n" if number else "") + json.dumps(event))
                stream.write("\n]}\n")
        except OSError as error:
            raise UserError(f"{out}: cannot write: {error.strerror or error}") from error


def _events(file: Any, facts: dict[str, Any]) -> Iterator[dict[str, Any]]:
    plans = plans_of(file)
    until: dict[tuple[int, int], float] = {}
    for host in facts.get("hosts", []):
        rank = host["rank"]
        stages = "".join(f" · stage {stage}" for stage in np.unique(plans["stage"][plans["rank"] == rank])) or " · idle"
        name = f"rank {rank}{stages} · {host.get('host', '?')}"
        yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": name}}
        yield {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}}
        for lane, number in _LANES.items():
            if lane != "sum of gradients" or _in_group(plans, rank):
                yield from _lane(rank, number, lane)
    rows = file["trace"]
    for begin in range(0, len(rows), _CHUNK):
        for row in timed(rows[begin : begin + _CHUNK]):
            yield from _event(dict(zip(rows.dtype.names or (), row.tolist(), strict=True)), until)


def _in_group(plans: Rows, rank: int) -> bool:
    """True if some plan (rows of dtype PLANS) has ``rank`` hold a stage together with others."""
    mine = plans[plans["rank"] == rank]
    return any(np.count_nonzero((plans["time"] == row["time"]) & (plans["stage"] == row["stage"])) > 1 for row in mine)


def _lane(rank: int, number: int, name: str) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": rank, "tid": number, "name": "thread_name", "args": {"name": name}}
    yield {"ph": "M", "pid": rank, "tid": number, "name": "thread_sort_index", "args": {"sort_index": number}}


def _event(row: dict[str, Any], until: dict[tuple[int, int], float]) -> Iterator[dict[str, Any]]:
    """Trace events of one row. ``until`` maps (rank, lane) to the second at which the lane's last message had arrived."""
    kind = KINDS[row["kind"]]
    way = str(Direction(row["direction"])) if row["direction"] >= 0 else ""
    lane = {"send": f"send {way}", "encode": "encode, decode", "decode": "encode, decode", "sum": "sum of gradients"}.get(
        kind, "compute"
    )
    start, length = row["start"] * 1e6, (row["end"] - row["start"]) * 1e6
    place = {"pid": row["rank"], "tid": _LANES[lane]}
    if number := row.get("lane", 0):
        place["tid"] = _FURTHER + number
        if (row["rank"], place["tid"]) not in until:
            yield from _lane(row["rank"], place["tid"], f"compute, lane {number}")
        until[row["rank"], place["tid"]] = row["end"]
    if kind in ("send", "sum"):
        lanes = range(_LANES[lane], _LANES[lane] + _SENDS)
        place["tid"] = min(lanes, key=lambda tid: (until.get((row["rank"], tid), 0.0) > row["start"], tid))
        if place["tid"] != _LANES[lane] and (row["rank"], place["tid"]) not in until:
            yield from _lane(row["rank"], place["tid"], lane)
        until[row["rank"], place["tid"]] = row["end"]
    details = {"step": row["step"], "micro_batch": row["micro_batch"]}
    if row["boundary"] >= 0:
        details |= {k: row[k] for k in ("boundary", "bytes_raw", "bytes_wire")} | {"direction": way}
    name = kind if row["micro_batch"] < 0 else f"{kind}{row['micro_batch']}"
    yield {"ph": "X", **place, "name": name, "cat": kind, "ts": start, "dur": length, "args": details}
    if kind in ("send", "decode"):
        flow = f"{row['step']}.{row['micro_batch']}.{row['boundary']}.{way}"
        arrow = {"cat": "transfer", "name": f"transfer {way}", "id": flow, **place}
        if kind == "send":
            yield {"ph": "s", "ts": start, **arrow}
        else:
            yield {"ph": "f", "bp": "e", "ts": start, **arrow}

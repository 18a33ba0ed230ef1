"""Which runs a run goes on from: their history, and their best checkpoint, are its own, too."""

import json
from pathlib import Path
from typing import Any

from accept_mpi.errors import UserError
from accept_mpi.logs.reader import open_log

Lineage = dict[str, int]
"""Runs by name, the oldest first, each with the last step that it made of a history."""
_ALL = (1 << 63) - 1


def ancestors(log: Path, run: str, step: int) -> Lineage:
    """The lineage of a run that goes on from what ``run`` has made in ``step`` steps. ``log``: that of an earlier run in the
    same directory, if there is one; it knows what ``run`` itself went on from, if the two are related."""
    if not step:
        return {}
    known: Lineage = {}
    try:
        with open_log(log) as old:
            known = lineage(json.loads(old.attrs["facts"]))
    except UserError:  # there is none, or it cannot be read
        pass
    if run not in known:
        return {run: step}
    older = list(known)[: list(known).index(run) + 1]
    return {name: min(step, known[name]) for name in older}


def unevaluated(log: Path, run: str, step: int) -> bool:
    """True if ``log`` is of the history that ``run`` has made in ``step`` steps, and has no evaluation after the last one: a
    signal's checkpoint comes before it, and what is killed may have made it in vain."""
    try:
        with open_log(log) as old:
            known = lineage(json.loads(old.attrs["facts"]))
            return min(step, known.get(run, 0)) == step and step not in old["evals"]["step"][:]
    except UserError:  # there is no log, or it cannot be read
        return False


def lineage(facts: dict[str, Any]) -> Lineage:
    """The lineage of the run whose log has these facts, itself included."""
    return {**facts.get("ancestors", {}), facts.get("run", ""): _ALL}


def shared(one: Lineage, other: Lineage) -> int:
    """Number of steps that two histories have in common."""
    return max((min(one[name], other[name]) for name in one.keys() & other.keys()), default=0)

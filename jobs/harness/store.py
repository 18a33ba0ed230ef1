"""Stores the results of points in one HDF5 file, so that no point is measured twice.

Layout: a group ``/points/00000``, ... for each point. Its attribute ``point`` is the point's JSON text; all other attributes
and datasets are results. The file is written under another name and renamed, so it is complete or absent.
"""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from accept_mpi.errors import UserError

Point = dict[str, Any]
Result = dict[str, Any]


def name_of(point: Point) -> str:
    """Text that identifies a point."""
    return json.dumps(point, sort_keys=True)


class Store:
    """Results by point: ``store.add(point, result)``; ``store.get(point)`` is None until then."""

    def __init__(self, path: Path) -> None:
        """Read the results at ``path``, if there are any. Raises UserError if the file is something else."""
        self.path = path
        self._found: dict[str, Result] = {}
        if path.exists():
            try:
                self._read()
            except (OSError, KeyError) as error:
                raise UserError(f"{path}: not a file of results ({error}); move it away to begin anew") from error

    def _read(self) -> None:
        with h5py.File(self.path, "r") as file:
            for group in file["points"].values():
                values = {key: value for key, value in group.attrs.items() if key != "point"}
                self._found[group.attrs["point"]] = values | {key: data[()] for key, data in group.items()}

    def take(self, path: Path) -> None:
        """Add another file's results for points that have none yet. Raises UserError if it is not a file of results."""
        other = Store(path)
        self._found = other._found | self._found

    def get(self, point: Point) -> Result | None:
        """The result of a point; None if there is none."""
        return self._found.get(name_of(point))

    def add(self, point: Point, result: Result) -> None:
        """Store a point's result; it is on disk when this returns."""
        self._found[name_of(point)] = result
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_suffix(".part")
        with h5py.File(beside, "w") as file:
            for number, (name, values) in enumerate(self._found.items()):
                group = file.create_group(f"points/{number:05}")
                group.attrs["point"] = name
                for key, value in values.items():
                    if np.ndim(value):
                        group[key] = value
                    else:
                        group.attrs[key] = value
        os.replace(beside, self.path)

    def rows(self) -> list[dict[str, Any]]:
        """For each point a dict of its keys and its result's."""
        return [json.loads(name) | values for name, values in self._found.items()]


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; floats have about three significant digits, None is an empty cell."""

    def text(value: object) -> str:
        if value is None:
            return ""
        if isinstance(value, float):
            return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}" if abs(value) < 1 else f"{value:.1f}"
        return str(value)

    lines = [head, ["---"] * len(head), *([text(value) for value in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"

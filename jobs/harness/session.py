"""Sessions: a program under mpirun in the lab measures many points, so that it is started once; links change in between.

All hosts of a lab see the same files. The driver (``Session``) writes ``point-N.json``, every rank waits for it
(``points()``) and writes ``result-N-RANK.json``.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from accept_mpi.launch import mpirun
from edgelab import LabError
from edgelab.laboratory import Laboratory, Running

Answer = Callable[[dict[str, Any]], None]
_START_SECONDS = 180.0
_POLL = 0.02
_IDLE_POLL = 0.2  # seconds between polls of programs that wait while others are measured


class Session:
    """A program that measures points: ``with Session(lab, "harness.ours", folder) as session: session.measure(...)``."""

    def __init__(self, lab: Laboratory, module: str, folder: Path) -> None:
        self._ranks = len(lab.hosts)
        self._folder, self._number = folder, 0
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("*.json"):
            old.unlink()
        self._out = open(folder / "output.txt", "w+")  # noqa: SIM115 (closed in __exit__)
        jobs = str(Path(__file__).resolve().parent.parent)
        path = os.pathsep.join([str(Path(jobs).parent), jobs, f"{jobs}/lab"])
        command = [mpirun.path(), "-n", self._ranks]
        command += ["-hostfile", lab.hostfile, sys.executable, "-m", module, folder]
        self._running: Running = lab.start(
            command,
            env=mpirun.ENVIRONMENT | os.environ | {"PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._out,
        )

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        try:
            if kind is None:
                self._ask(None)
                self._running.process.wait(30)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self._running.end()
            self._out.close()

    def measure(self, point: dict[str, Any], seconds: float) -> list[dict[str, Any]]:
        """Measure a point; returns all ranks' results. Raises LabError if the program ends or exceeds ``seconds``."""
        number = self._ask(point)
        until = time.monotonic() + seconds + (_START_SECONDS if number == 0 else 0)
        files = [self._folder / f"result-{number}-{rank}.json" for rank in range(self._ranks)]
        while not all(file.exists() for file in files):
            ended = self._running.process.poll() is not None
            if ended or time.monotonic() > until:
                self._out.seek(0)
                what = "ended" if ended else f"took longer than {seconds:.0f} s"
                raise LabError(f"{' '.join(self._running.command)} {what} at {point}:\n{self._out.read()[-3000:]}")
            time.sleep(_POLL)
        return [json.loads(file.read_text()) for file in files]

    def _ask(self, point: dict[str, Any] | None) -> int:
        _write(self._folder / f"point-{self._number}.json", point)
        self._number += 1
        return self._number - 1


def points() -> Iterator[tuple[dict[str, Any], Answer]]:
    """On every rank of the program: the points as they arrive, each with a function that takes its result."""
    folder, rank = Path(sys.argv[1]), int(os.environ["OMPI_COMM_WORLD_RANK"])
    number = 0
    while True:
        file = folder / f"point-{number}.json"
        since = time.monotonic()
        while not file.exists():
            time.sleep(_POLL if time.monotonic() < since + 1 else _IDLE_POLL)
            if not folder.exists():
                sys.exit("the session's folder is gone")
        point = json.loads(file.read_text())
        if point is None:
            return
        result = folder / f"result-{number}-{rank}.json"
        yield point, lambda found, result=result: _write(result, found)  # type: ignore[misc]
        number += 1


def _write(path: Path, content: object) -> None:
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(content))
    beside.rename(path)

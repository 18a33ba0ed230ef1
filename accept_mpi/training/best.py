"""The best checkpoint of a run, by a metric of the test set, and the end of a run that no longer gets better."""

import contextlib
import json
import math
import threading
from collections.abc import Callable
from pathlib import Path

from accept_mpi.errors import UserError
from accept_mpi.files.regular import replacing
from accept_mpi.logs.observers import Evaluated, Observer
from accept_mpi.models.metrics import BETTER_LOW
from accept_mpi.recovery.checkpoint import BEST, UNREADABLE, directory_of, read_best
from accept_mpi.recovery.manifest import made_by
from accept_mpi.training.lineage import Lineage


class Best(Observer):
    """Watches evaluations on rank 0, each of which a checkpoint follows."""

    def __init__(
        self,
        directory: Path,
        run: str,
        metric: str,
        patience: int | None,
        before: Lineage,
        end: Callable[[str], None],
        first: int = 0,
        counts: Callable[[int], bool] = lambda step: True,
    ) -> None:
        """``directory``: the run's; ``run``: its name; ``metric``: "loss", "accuracy" or a metric's name; ``patience``:
        evaluations without a better one after which ``end`` is called, once, with the reason; ``before``: what the run goes
        on from, whose best may be its own; ``first``: the step with which it goes on here. Earlier evaluations are told
        again, and count if their checkpoints are on the disk. ``counts``: whether an evaluation after so many steps counts
        for ``patience``: one more at a run's end does not, since another run may go on from there."""
        self._directory, self._name, self._metric, self._patience, self._end = directory, run, metric, patience, end
        self._first, self._counts = first, counts
        self.at: int | None = None
        """Step of the best checkpoint; None before the first evaluation."""
        self._value = math.nan
        self._by = run
        """The run that has made it: this one, or one that it goes on from."""
        self._worse: list[int] = []
        """Steps of the evaluations since, none of which was better."""
        self._on_disk: int | None = None
        """Step of the best of the checkpoints that are on the disk, which the file names."""
        self._there: set[int] = set()
        """Steps whose checkpoints are on the disk: one may be there before its evaluation is known."""
        self._lock = threading.Lock()
        self.over = False
        """True if the run is to end."""
        with contextlib.suppress(*UNREADABLE):
            found = read_best(directory)
            at, by = int(found["step"]), str(found.get("by", found["run"]))
            there = directory_of(directory, at) in made_by(directory, by)  # else a run without a best one has removed it
            if there and found["metric"] == metric and at <= (made := before[found["run"]]):
                value, worse = float(found["value"]), [int(step) for step in found.get("worse", ())]
                self.at = self._on_disk = at
                self._there.add(at)
                self._value, self._worse = value, [step for step in worse if step <= made]
                self._by = by

    @property
    def keeps(self) -> set[int | None]:
        """Steps of the checkpoints that must stay: the best, and the best before it until that is on the disk."""
        return {self.at, self._on_disk}

    def kept(self, step: int) -> None:
        """Take note that the checkpoint of ``step`` is on the disk; on any thread."""
        with self._lock:
            self._there.add(step)
            self._name_best()

    def evaluated(self, result: Evaluated) -> None:
        value = result.value(self._metric)
        if self._metric == "accuracy" and math.isnan(value):  # however bad the model is, hits among classes are a number
            raise UserError('output.keep_best: "accuracy" makes no sense for these outputs and targets; "loss" does')
        if result.step in {self.at, *self._worse}:  # made again after a loss
            return
        if result.step < self._first and not self._is_on_disk(result.step):  # it was lost with who was to write it
            return
        low = self._metric in BETTER_LOW
        better = value < self._value if low else value > self._value
        with self._lock:
            if self.at is None or better or (math.isnan(self._value) and not math.isnan(value)):
                self.at, self._value, self._worse, self._by = result.step, value, [], self._name
            elif self._counts(result.step):
                self._worse.append(result.step)
            self._name_best()
        self.check()

    def check(self) -> None:
        """End the run if it has not been getting better for long enough."""
        if self._patience is not None and len(self._worse) >= self._patience and not self.over:
            self.over = True
            self._end(
                f"no better {self._metric} in {len(self._worse)} evaluations than {self._value:.4g} after step {self.at}: "
                "the run ends"
            )

    def _is_on_disk(self, step: int) -> bool:
        """True if an earlier process of this run has written the checkpoint of ``step``."""
        if there := directory_of(self._directory, step) in made_by(self._directory, self._name):
            self._there.add(step)
        return there

    def _name_best(self) -> None:
        """Write which checkpoint is the best, if it is on the disk."""
        if self.at in self._there:
            self._on_disk = self.at
            self._write()

    def _write(self) -> None:
        path = self._directory / BEST
        with contextlib.suppress(OSError):  # a full disk is reported by the checkpoint that follows
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as beside:
                found = {
                    "run": self._name,
                    "by": self._by,
                    "step": self.at,
                    "metric": self._metric,
                    "value": self._value,
                    "worse": self._worse,
                }
                beside.write_text(json.dumps(found))

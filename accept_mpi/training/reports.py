"""Reports of steps and evaluations to rank 0, from the results of single micro-batches on the last stage.

If a group holds the last stage, its leader collects the results of the other members.
"""

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from accept_mpi.comm.messages import Control, EvaluationMade, MemberResults, StepMade
from accept_mpi.data.calendar import Calendar
from accept_mpi.logs.observers import Evaluated, StepDone
from accept_mpi.logs.recorder import Clock
from accept_mpi.models.losses import Result
from accept_mpi.models.metrics import Metric
from accept_mpi.polling import wait_while

log = logging.getLogger(__name__)

_POLL = 0.002

Key = tuple[int, bool]
"""A number of steps made, and whether an evaluation followed."""


class Reports:
    """Collects the results of one rank of the last stage. Thread-safe."""

    def __init__(
        self,
        batches: Calendar,
        clock: Clock,
        leader: int | None,
        post: Callable[[int, Control], None],
        told: deque[StepMade | EvaluationMade],
        metrics: Sequence[Metric] = (),
    ) -> None:
        """``leader``: rank of the stage's leader; None if this one leads. ``told`` keeps the newest reports, in case a loss
        overtakes them."""
        self._metrics = metrics
        self._batches, self._clock, self._leader, self._post, self._told = batches, clock, leader, post, told
        self._results: dict[Key, dict[int, Result]] = {}
        self._open: dict[Key, tuple[int, float]] = {}
        """Number of micro-batches and learning rate of what is made but not reported yet."""
        self._must_count = True
        """Until it was said once that nothing counts."""
        self._began = clock.now()
        self._lock = threading.Lock()

    def add(self, steps_made: int, evaluation: bool, results: dict[int, Result]) -> None:
        """Take the results of some micro-batches of a step (or of the evaluation after it), by micro-batch."""
        if not results:
            return
        if self._leader is not None:
            plain = {k: msgspec.to_builtins(result) for k, result in results.items()}
            self._post(self._leader, MemberResults(steps_made, evaluation, plain))
            return
        with self._lock:
            self._results.setdefault((steps_made, evaluation), {}).update(results)
            self._report_complete()

    def made(self, steps_made: int, evaluation: bool, count: int, lr: float = 0.0) -> None:
        """Note that a step of ``count`` micro-batches (or an evaluation) is made; it is reported once all its results are
        there."""
        if self._leader is None:
            with self._lock:
                self._open[steps_made, evaluation] = count, lr
                self._report_complete()

    def handle(self, control: Control) -> bool:
        """Take a member's results on the data-plane thread; returns False for other messages."""
        if not isinstance(control, MemberResults):
            return False
        self.add(
            control.step, control.evaluation, {k: msgspec.convert(fields, Result) for k, fields in control.results.items()}
        )
        return True

    def flush(self, deadline: float, check: Callable[[], None]) -> None:
        """Wait until everything has been reported. Raises DeadlineError after ``deadline`` seconds, and what ``check``
        raises."""
        wait_while(lambda: self._open, _POLL, deadline, check, "the results of the other ranks of the last stage")

    def _report_complete(self) -> None:
        """Report everything whose results are complete, in order."""
        for key in sorted(self._open):
            count, lr = self._open[key]
            found = self._results.get(key, {})
            if len(found) < count:
                return
            del self._open[key]
            self._results.pop(key, None)
            self._report(*key, [found[k] for k in sorted(found)], lr)

    def _report(self, step: int, evaluation: bool, results: Sequence[Result], lr: float) -> None:
        summary = self._summary(step, results)
        if self._must_count and not any(result.count for result in results):
            what = "the test set" if evaluation else f"step {step}"
            log.warning("no target of %s counts in the loss (all are -100, or padding, or have no weight): it is nan", what)
            self._must_count = False
        report: StepMade | EvaluationMade
        if evaluation:
            parts = zip(*(result.metrics for result in results), strict=True)
            metrics = {metric.name: metric.value(found) for metric, found in zip(self._metrics, parts, strict=False)}
            report = EvaluationMade(Evaluated(**summary, metrics=metrics))
        else:
            speed = summary["samples"] / (summary["end"] - self._began)
            report = StepMade(StepDone(**summary, lr=lr, samples_per_s=speed))
        self._began = summary["end"]
        self._post(0, report)
        self._told.append(report)

    def _summary(self, step: int, results: Sequence[Result]) -> dict[str, Any]:
        """Fields of a report about ``step``, from the results of its micro-batches."""
        samples, targets = sum(r.samples for r in results), sum(r.targets for r in results)
        count = sum(r.count for r in results)
        return {
            "step": step,
            "epoch": self._batches.last_epoch(step),
            "samples": samples,
            "loss": sum(r.loss for r in results) / count if count else math.nan,
            "accuracy": sum(r.correct for r in results) / targets if targets else math.nan,
            "end": self._clock.now(),
        }

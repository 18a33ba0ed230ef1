"""Metrics of the test set, by name: what an evaluation reports beside loss and accuracy."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from accept_mpi.errors import UserError
from accept_mpi.job import LONGEST_METRIC, Job
from accept_mpi.models.losses import IGNORED, OWN, scores, widened
from accept_mpi.registry import find_function
from accept_mpi.users_code import RAISED, blame, does_not_fit, in_words

_MISTAKES = AttributeError, ImportError, NameError, TypeError  # whatever the values are

Part = tuple[float, float]
"""Sum and count over a micro-batch."""


class Metric:
    """A metric: the quotient of a sum and a count over the test set."""

    def __init__(self, name: str) -> None:
        """``name``: "top5" (any number), "perplexity", "mae", "mse", or "package.module:function" of (output, target) that
        returns a mean over samples, or (sum, count). Raises UserError."""
        self.name = name
        known = _known(name)
        self._function = known or find_function(name, _KNOWN, "train.metrics")
        self._whole = known is not None
        self.ranks = self._whole and name.startswith("top")
        """True if it ranks the scores of classes."""

    def part(
        self, output: Any, target: Any, samples: int, loss: Part, setting_up: bool = False, ignored: int = IGNORED
    ) -> Part:
        """Sum and count of a micro-batch. ``loss``: those of the loss; ``ignored``: the class that does not count in it.
        Raises UserError for what it cannot take, UsersBug for any other exception in it, but not while ``setting_up`` for
        one that values may cause: these are made up then."""
        if self.name == "perplexity":
            return loss
        try:
            given = (scores(output) if self._whole else output), target
            found = self._function(*given, ignored) if self.ranks else self._function(*given)
            if isinstance(found, tuple | list):
                return float(found[0]), float(found[1])
            return float(found) * samples, float(samples)
        except RAISED as error:
            if does_not_fit(error):
                what = f'train.metrics: "{self.name}" cannot take what the model gives'
                raise UserError(f"{what}: {in_words(error)}") from error
            if setting_up and not isinstance(error, _MISTAKES):
                return math.nan, 1.0
            blame(error, f'the metric "{self.name}"')

    def value(self, parts: Sequence[Part]) -> float:
        """The metric of the whole test set."""
        total, count = sum(part[0] for part in parts), sum(part[1] for part in parts)
        if not count:
            return math.nan
        mean = total / count
        if self.name == "perplexity":
            return math.exp(mean) if mean < 700 else math.inf
        return mean


def _known(name: str) -> Callable[..., Any] | None:
    if name.startswith("top") and name[3:].isdecimal() and int(name[3:]) > 0:
        return partial(_top, int(name[3:]))
    return _KNOWN.get(name)


def _top(count: int, output: torch.Tensor, target: torch.Tensor, ignored: int) -> Part:
    """Share of targets that are among the highest scores."""
    if target.is_floating_point() or output.shape[:-1] != target.shape:
        raise ValueError("wants scores (..., classes) and classes (...)")
    best = output.topk(min(count, output.shape[-1]), dim=-1).indices
    classes = widened(target)
    counting = classes != ignored
    hits = (best == classes.unsqueeze(-1)).any(-1)
    return float(hits[counting].sum()), float(counting.sum())


def _errors(power: int) -> Callable[[torch.Tensor, torch.Tensor], Part]:
    def found(output: torch.Tensor, target: torch.Tensor) -> Part:
        if output.shape != target.shape:
            raise ValueError("the shapes differ")
        return float((output - target).abs().double().pow(power).sum()), float(target.numel())

    return found


_KNOWN: dict[str, Callable[..., Any]] = {
    "perplexity": lambda output, target: None,
    "mae": _errors(1),
    "mse": _errors(2),
    "top5": partial(_top, 5),
}

BETTER_LOW = ("loss", "perplexity", "mae", "mse")
"""Metrics of which less is better; of others more is."""


def metrics_of(job: Job) -> list[Metric]:
    """The metrics that a job names. Raises UserError, also for a name too long for the log, and for a best checkpoint by a
    metric that there is not."""
    train, best = job.train, job.output.keep_best
    if best and best not in ("loss", "accuracy", *train.metrics):
        raise UserError(f'output.keep_best: "{best}" is neither "loss" nor "accuracy" nor one of train.metrics')
    if best and not train.evaluate_every:
        raise UserError("output.keep_best goes with evaluations: train.evaluate_every must not be 0")
    if best == "accuracy" and train.loss == "mse" and job.model.output != OWN:
        raise UserError('output.keep_best: "accuracy" makes no sense with train.loss = "mse"; "loss" does')
    if train.patience is not None and not best:
        raise UserError("train.patience goes with output.keep_best, which says what must get better")
    for name in train.metrics:
        if (size := len(name.encode())) > LONGEST_METRIC:
            raise UserError(
                f'train.metrics: "{name}" takes {size} bytes, and the log has room for {LONGEST_METRIC}: give the '
                "function a shorter name or module"
            )
    return [Metric(name) for name in train.metrics]

"""What a stage's gradients go through between B and U where several ranks, or several lanes of a rank, compute them."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from accept_mpi.codecs.gradient_chunks import Gradients
from accept_mpi.comm.group_sum import GroupSum
from accept_mpi.device.compute import here
from accept_mpi.pipeline.micro_batch import Key, Outputs
from accept_mpi.pipeline.stage import Clip, Stage
from accept_mpi.training.early_gradients import EarlyGradients


class Part(NamedTuple):
    """Some of a stage's trained parameters, by position, and the ranks that compute their gradients."""

    parameters: Sequence[int]
    sums: GroupSum | None
    """None: this rank alone."""
    early: EarlyGradients | None = None
    """If their gradients may be passed on while B goes on."""


class GradientSums:
    """Sums a stage's gradients by step, and replays what micro-batches did to BatchNorm. Its own parameters are summed by
    its group, or by this rank's lanes; tied ones by all ranks that have a copy."""

    def __init__(self, stage: Stage, parts: Sequence[Part], mine: Callable[[int], Sequence[int]]) -> None:
        """``parts``: all trained parameters, in the first place the stage's own; ``mine(step)``: the micro-batches of a step
        that this rank takes, in order."""
        self._stage, self._taken = stage, mine
        self._parts = [PartSums(part, mine) for part in parts]
        self._group = parts[0].sums
        """The sums of the group that holds the stage, if one does."""
        self._left: dict[Key, Gradients] = {}
        """Gradients of B or of W, while those of the other are still to come, by micro-batch."""
        self._statistics: dict[int, list[torch.Tensor]] = {}
        """What this rank's micro-batches did to BatchNorm, by step, if no group needs it."""
        self._seen: Sequence[torch.Tensor] = []
        self._summed: tuple[Gradients, float] = [], 1.0

    def after_forward(self, step: int, k: int, out: Outputs) -> None:
        """Tell the others what BatchNorm saw. Called in the order of the micro-batches."""
        if out.statistics is None or not len(out.statistics):
            return
        if self._group is None:
            self._statistics.setdefault(step, []).append(out.statistics)
        else:
            self._group.share_statistics(step, k, out.statistics)

    def in_backward(self, step: int, k: int, scale: float, layer: int) -> None:
        """Pass on what is whole of the gradients of micro-batch ``k``, while B goes on: they are there from ``layer`` on."""
        self._parts[0].in_backward(step, k, scale, layer)

    def after_backward(self, step: int, k: int, gradients: Gradients, scale: float, whole: bool) -> None:
        """Take what B has computed of the gradients of micro-batch ``k``: all, if they are ``whole``, else without W's part.
        ``scale``: that of the step, as known now."""
        if whole:
            self._add(step, k, gradients, scale)
        else:
            self._join(step, k, gradients, scale)

    def after_weight_gradient(self, step: int, k: int, gradients: Gradients, scale: float) -> None:
        """Take what W has computed. In lanes it may come before B's part: that waits for what earlier Bs have computed, in
        lanes that are behind, and not all micro-batches have a W for this to wait for."""
        self._join(step, k, gradients, scale)

    def _join(self, step: int, k: int, gradients: Gradients, scale: float) -> None:
        if (other := self._left.pop((step, k), None)) is None:
            self._left[step, k] = gradients
        else:
            self._add(step, k, _added(other, gradients), scale)

    def _add(self, step: int, k: int, gradients: Gradients, scale: float) -> None:
        for part in self._parts:
            part.add(step, k, gradients, scale)

    def whole(self, step: int) -> Gradients | None:
        """A step's gradients, scaled, once all its micro-batches are in them, where this rank alone computes them."""
        return self._parts[0].whole(step)

    def wait(self, step: int, deadline: float) -> None:
        """Wait for the other ranks' part of a step, before ``update``. Raises DeadlineError after ``deadline`` seconds."""
        assert not any(one == step for one, _ in self._left), f"gradients of step {step + 1} are missing"
        gradients: Gradients = [None] * sum(len(part.parameters) for part in self._parts)
        scale = 1.0
        for n, part in enumerate(self._parts):
            found, its_scale = part.take(step, deadline)
            for parameter, gradient in zip(part.parameters, found, strict=False):  # no gradients: nothing is trained
                gradients[parameter] = gradient
            scale = its_scale if n == 0 or not self._parts[0].parameters else scale
        self._summed = gradients, scale
        if self._group is None:
            self._seen = self._statistics.pop(step, [])
        elif self._stage.statistics is not None and self._stage.statistics.size:
            self._seen = self._group.statistics(step, deadline)

    def update(self, lr: float, version: int, clip: Clip | None = None) -> None:
        """U: the optimizer's step with the gradients of all ranks, and the running statistics of all micro-batches. ``clip``
        as in ``Stage.update``."""
        gradients, scale = self._summed
        self._stage.exchange_gradients(gradients)
        self._stage.update(lr, version, scale, clip)
        self._stage.exchange_gradients()
        if self._stage.statistics is not None:
            self._stage.statistics.replay(self._seen)


class PartSums:
    """Sums of the gradients of some parameters, or of what else adds up over micro-batches."""

    def __init__(self, part: Part, mine: Callable[[int], Sequence[int]]) -> None:
        self.parameters, self._sums, self._early, self._taken = *part, mine
        self._mine: dict[int, _Sum] = {}
        """Sums of this rank's gradients, by step."""

    def in_backward(self, step: int, k: int, scale: float, layer: int) -> None:
        """As ``GradientSums.in_backward``."""
        if self._early is None or self._sums is None:
            return
        mine = None if self._sums.exact else self._of(step)
        if mine is not None and mine.left != [k]:
            return
        chunks, found = self._early.reached(layer)
        if chunks:
            gradients: Gradients = [None] * len(self.parameters)
            for n, gradient in found.items():
                gradients[n] = gradient if mine is None else mine.merge(n, gradient)
            self._sums.contribute_early(step, k, gradients, scale, chunks)

    def add(self, step: int, k: int, every: Gradients, scale: float) -> None:
        """Add the gradients of a micro-batch; ``every``: those of all parameters."""
        gradients = [every[parameter] for parameter in self.parameters]
        given = self._early.end(gradients) if self._early is not None else ()
        if self._sums is not None and self._sums.exact:
            self._sums.contribute(step, k, here().on_host(gradients), scale, given)
            return
        mine = self._of(step)
        mine.add(k, gradients, scale)
        if self._sums is not None and not mine.left:
            del self._mine[step]
            self._sums.contribute(step, k, here().on_host(mine.gradients), mine.scale, given)

    def _of(self, step: int) -> "_Sum":
        """The sum of a step."""
        if step not in self._mine:
            self._mine[step] = _Sum(list(reversed(self._taken(step))))
        return self._mine[step]

    def whole(self, step: int) -> Gradients | None:
        """As ``GradientSums.whole``; what goes to other ranks is not kept here."""
        mine = self._mine.get(step)
        if mine is None or mine.left:
            return None
        for gradient in mine.gradients if mine.scale != 1.0 else ():
            if gradient is not None:
                gradient.mul_(mine.scale)
        mine.scale = 1.0
        return mine.gradients

    def take(self, step: int, deadline: float) -> tuple[Gradients, float]:
        """The sum of a step, of all ranks. Raises DeadlineError."""
        if self._sums is not None:
            began = time.monotonic()
            found, scale = self._sums.take(step, deadline)
            if self._early is not None:
                self._early.waited(began)
            return list(here().take(tuple(found))), scale
        mine = self._mine.pop(step)
        assert not mine.left, f"micro-batches {mine.left} of step {step + 1} are missing"
        return mine.gradients, mine.scale


class _Sum:
    """Sum of a rank's gradients in a step, added up in the order of the micro-batches, in whatever order they come."""

    def __init__(self, left: list[int]) -> None:
        """``left``: the micro-batches to come, the last one first."""
        self.left = left
        self._merged: set[int] = set()
        self.gradients: Gradients = []
        self.scale = 1.0
        self._waiting: dict[int, tuple[Gradients, float]] = {}

    def add(self, k: int, gradients: Gradients, scale: float) -> None:
        """Add those of a micro-batch, as soon as all before it are there."""
        self._waiting[k] = gradients, scale
        while self.left and self.left[-1] in self._waiting:
            found, self.scale = self._waiting.pop(self.left.pop())
            rest = [None if n in self._merged else gradient for n, gradient in enumerate(found)]
            self.gradients = _added(self.gradients, rest) if self.gradients else found

    def merge(self, n: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """The sum with one gradient of the last micro-batch, before the others of it are added."""
        if not self.gradients:
            return gradient
        if n not in self._merged:
            self._merged.add(n)
            self.gradients[n] = _plus(self.gradients[n], gradient)
        return self.gradients[n]


def _added(ones: Gradients, others: Gradients) -> Gradients:
    """The sums of two lists of gradients, in the memory of the first."""
    return [_plus(one, two) for one, two in zip(ones, others, strict=True)]


def _plus(one: torch.Tensor | None, two: torch.Tensor | None) -> torch.Tensor | None:
    return two if one is None else one if two is None else one.add_(two)

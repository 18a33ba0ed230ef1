"""What a stage's gradients go through between B and U where several ranks, or several lanes of a rank, compute them."""

from collections.abc import Callable, Sequence

import torch

from accept_mpi.comm.group_sum import Gradients, GroupSum
from accept_mpi.pipeline.micro_batch import Key, Outputs
from accept_mpi.pipeline.stage import Stage


class GroupMember:
    """Sums a stage's gradients by step, and replays what micro-batches did to BatchNorm: with the sums of a group, or of
    this rank's lanes alone."""

    def __init__(self, stage: Stage, sums: GroupSum | None, mine: Callable[[int], Sequence[int]]) -> None:
        """``sums``: the group's, if there is one; ``mine(step)``: the micro-batches of a step that this rank takes, in
        order."""
        self._stage, self._sums, self._taken = stage, sums, mine
        self._parts: dict[Key, Gradients] = {}
        """Gradients that B computed while W is still to come, by micro-batch."""
        self._mine: dict[int, _Sum] = {}
        """Sums of this rank's gradients, by step."""
        self._statistics: dict[int, list[torch.Tensor]] = {}
        """What this rank's micro-batches did to BatchNorm, by step, if no group needs it."""
        self._summed: tuple[Gradients, float] = [], 1.0
        self._seen: Sequence[torch.Tensor] = []

    def after_forward(self, step: int, k: int, out: Outputs) -> None:
        """Tell the others what BatchNorm saw. Called in the order of the micro-batches."""
        if out.statistics is None or not len(out.statistics):
            return
        if self._sums is None:
            self._statistics.setdefault(step, []).append(out.statistics)
        else:
            self._sums.share_statistics(step, k, out.statistics)

    def after_backward(self, step: int, k: int, gradients: Gradients, scale: float, whole: bool) -> None:
        """Take the gradients of micro-batch ``k``; only a part of them if they are not ``whole`` (W is to come). ``scale``:
        that of the step, as known now."""
        if (earlier := self._parts.pop((step, k), None)) is not None:
            gradients = _added(earlier, gradients)
        if not whole:
            self._parts[step, k] = gradients
            return
        if self._sums is not None and self._sums.exact:
            self._sums.contribute(step, k, gradients, scale)
            return
        if step not in self._mine:
            self._mine[step] = _Sum(list(reversed(self._taken(step))))
        mine = self._mine[step]
        mine.add(k, gradients, scale)
        if self._sums is not None and not mine.left:
            del self._mine[step]
            self._sums.contribute(step, self._sums.me, mine.gradients, mine.scale)

    def wait(self, step: int, deadline: float) -> None:
        """Wait for the other members' part of a step, before ``update``. Raises DeadlineError after ``deadline`` seconds."""
        has_statistics = self._stage.statistics is not None and self._stage.statistics.size
        if self._sums is None:
            mine = self._mine.pop(step)
            assert not mine.left, f"micro-batches {mine.left} of step {step + 1} are missing"
            self._summed = mine.gradients, mine.scale
            self._seen = self._statistics.pop(step, [])
            return
        self._summed = self._sums.take(step, deadline)
        if has_statistics:
            self._seen = self._sums.statistics(step, deadline)

    def update(self, lr: float, version: int) -> None:
        """U: the optimizer's step with the gradients of all members, and the running statistics of all micro-batches."""
        gradients, scale = self._summed
        self._stage.exchange_gradients(gradients)
        self._stage.update(lr, version, scale)
        self._stage.exchange_gradients()
        if self._stage.statistics is not None:
            self._stage.statistics.replay(self._seen)


class _Sum:
    """Sum of a rank's gradients in a step, added up in the order of the micro-batches, in whatever order they come."""

    def __init__(self, left: list[int]) -> None:
        """``left``: the micro-batches to come, the last one first."""
        self.left = left
        self.gradients: Gradients = []
        self.scale = 1.0
        self._waiting: dict[int, tuple[Gradients, float]] = {}

    def add(self, k: int, gradients: Gradients, scale: float) -> None:
        self._waiting[k] = gradients, scale
        while self.left and self.left[-1] in self._waiting:
            found, self.scale = self._waiting.pop(self.left.pop())
            self.gradients = _added(self.gradients, found) if self.gradients else found


def _added(ones: Gradients, others: Gradients) -> Gradients:
    """The sums of two lists of gradients, in the memory of the first."""
    return [_plus(one, two) for one, two in zip(ones, others, strict=True)]


def _plus(one: torch.Tensor | None, two: torch.Tensor | None) -> torch.Tensor | None:
    return two if one is None else one if two is None else one.add_(two)

"""A rank's part in the group that holds its stage: what it gives the other members, and what it takes from them."""

import torch

from accept_mpi.comm.group_sum import Gradients, GroupSum
from accept_mpi.pipeline.micro_batch import Key, Outputs
from accept_mpi.pipeline.stage import Stage


class GroupMember:
    """Connects a stage with the sums of its group."""

    def __init__(self, stage: Stage, sums: GroupSum) -> None:
        self._stage, self._sums = stage, sums
        self._parts: dict[Key, Gradients] = {}
        """Gradients that B computed while W is still to come, by micro-batch."""
        self._summed: tuple[Gradients, float] = [], 1.0
        self._seen: list[torch.Tensor] = []

    def after_forward(self, step: int, k: int, out: Outputs) -> None:
        """Tell the others what BatchNorm saw."""
        if out.statistics is not None and len(out.statistics):
            self._sums.share_statistics(step, k, out.statistics)

    def after_backward(self, step: int, k: int, scale: float) -> None:
        """Give the gradients of micro-batch ``k``, or keep them until W. ``scale``: that of the step, as known now."""
        if self._sums.exact:
            gradients = self._exchange()
            earlier = self._parts.pop((step, k), None)
            if earlier is not None:
                gradients = [_sum(one, two) for one, two in zip(earlier, gradients, strict=True)]
            if (step, k) in self._stage.in_flight:
                self._parts[step, k] = gradients
            else:
                self._sums.contribute(step, k, gradients, scale)
        elif k == self._sums.last_of_mine(step) and (step, k) not in self._stage.in_flight:
            self._sums.contribute(step, self._sums.me, self._exchange(), scale)

    def wait(self, step: int, deadline: float) -> None:
        """Wait for the other members' part of a step, before ``update``. Raises DeadlineError after ``deadline`` seconds."""
        self._summed = self._sums.take(step, deadline)
        if self._stage.statistics is not None and self._stage.statistics.size:
            self._seen = self._sums.statistics(step, deadline)

    def update(self, lr: float, version: int) -> None:
        """U: the optimizer's step with the gradients of all members, and the running statistics of all micro-batches."""
        gradients, scale = self._summed
        later = self._exchange(gradients)  # of later steps' micro-batches
        self._stage.update(lr, version, scale)
        self._exchange(later)
        if self._stage.statistics is not None:
            self._stage.statistics.replay(self._seen)

    def _exchange(self, gradients: Gradients | None = None) -> Gradients:
        """Take the gradients out of the stage, and put others in."""
        found = [parameter.grad for parameter in self._stage.trained]
        for parameter, gradient in zip(self._stage.trained, gradients or [None] * len(found), strict=True):
            parameter.grad = gradient
        return found


def _sum(one: torch.Tensor | None, two: torch.Tensor | None) -> torch.Tensor | None:
    return two if one is None else one if two is None else one.add_(two)

"""Correction of updates that are made from the gradients of older weights.

Zmushko et al. 2026, "One-Step Gradient Delay is Not a Barrier" (arXiv 2606.30634): with u(t) the optimizer's whole update in
step t, learning rate and weight decay included, weights become x - u(t) - (u(t) - u(t-1)), which extrapolates to the update
that the newest weights would have given.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from accept_mpi.pipeline.kept_values import KeptValues

LAST_UPDATE = "last_update"
"""Name of what is kept beside the optimizer's state."""


class Correction(KeptValues):
    """The last updates of a stage's trained parameters."""

    name = LAST_UPDATE

    @contextmanager
    def around(self, parameters: Sequence[torch.Tensor]) -> Iterator[None]:
        """A context for the optimizer's step, whose updates are corrected. A parameter without a gradient is not updated,
        and its next update is a first one, which is not corrected."""
        if not self.on:
            yield
            return
        before = [(parameter, parameter.detach().clone()) for parameter in parameters if parameter.grad is not None]
        yield
        with torch.no_grad():
            kept, self._values = self._values, {}
            for parameter, old in before:
                update = old.sub_(parameter)
                if (last := kept.get(parameter)) is not None:
                    parameter.sub_(update - last)
                self._values[parameter] = update

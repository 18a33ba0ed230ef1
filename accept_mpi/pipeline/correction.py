"""Correction of updates that are made from the gradients of older weights.

Zmushko et al. 2026, "One-Step Gradient Delay is Not a Barrier" (arXiv 2606.30634): with u(t) the optimizer's whole update in
step t, learning rate and weight decay included, weights become x - u(t) - (u(t) - u(t-1)), which extrapolates to the update
that the newest weights would have given.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

LAST_UPDATE = "last_update"
"""Name of what is kept beside the optimizer's state."""


class Correction:
    """The last updates of a stage's trained parameters."""

    def __init__(self, on: bool) -> None:
        self.on = on
        self._last: dict[torch.Tensor, torch.Tensor] = {}

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
            kept, self._last = self._last, {}
            for parameter, old in before:
                update = old.sub_(parameter)
                if (last := kept.get(parameter)) is not None:
                    parameter.sub_(update - last)
                self._last[parameter] = update

    def put(self, parameter: torch.Tensor, update: torch.Tensor) -> None:
        """Make this a parameter's last update."""
        self._last[parameter] = update

    def of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """A parameter's last update under its name beside the optimizer's state, if there is one."""
        return {LAST_UPDATE: self._last[parameter]} if parameter in self._last else {}

"""Moving averages of weights (EMA), with which a model is evaluated.

Polyak and Juditsky 1992; the first update's weights begin the average, as in ``torch.optim.swa_utils.AveragedModel``.
"""

from collections.abc import Sequence

import torch

AVERAGE = "ema"
"""Name of the average beside the optimizer's state."""


class Averages:
    """Averages of a stage's trained parameters."""

    def __init__(self, decay: float) -> None:
        """``decay``: weight of what the average has been; 0: no averages."""
        self._decay = decay
        self._averages: dict[torch.Tensor, torch.Tensor] = {}

    @property
    def on(self) -> bool:
        """True if averages are kept."""
        return bool(self._decay)

    def add(self, parameters: Sequence[torch.Tensor]) -> None:
        """Take the parameters after an update into account."""
        if not self._decay:
            return
        with torch.no_grad():
            for parameter in parameters:
                average = self._averages.get(parameter)
                if average is None:
                    self._averages[parameter] = parameter.detach().clone()
                else:
                    average.lerp_(parameter, 1 - self._decay)

    def show(self, updated: Sequence[torch.Tensor], shown: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Have the parameters ``shown`` show the averages of ``updated``, which are as many. Returns what ``hide`` needs."""
        before = [parameter.data for parameter in shown]
        for own, parameter in zip(updated, shown, strict=True):
            parameter.data = self._averages.get(own, parameter.data)
        return before

    @staticmethod
    def hide(shown: Sequence[torch.Tensor], before: Sequence[torch.Tensor]) -> None:
        """Undo ``show``."""
        for parameter, data in zip(shown, before, strict=True):
            parameter.data = data

    def put(self, parameter: torch.Tensor, average: torch.Tensor) -> None:
        """Make this a parameter's average."""
        self._averages[parameter] = average

    def of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """A parameter's average under its name beside the optimizer's state, if there is one."""
        return {AVERAGE: self._averages[parameter]} if parameter in self._averages else {}

"""Moving averages of weights (EMA), with which a model is evaluated.

Polyak and Juditsky 1992; the first update's weights begin the average, as in ``torch.optim.swa_utils.AveragedModel``.
"""

from collections.abc import Sequence

import torch

from accept_mpi.pipeline.kept_values import KeptValues

AVERAGE = "ema"
"""Name of the average beside the optimizer's state."""


class Averages(KeptValues):
    """Averages of a stage's trained parameters."""

    name = AVERAGE

    def __init__(self, decay: float) -> None:
        """``decay``: weight of what the average has been; 0: no averages."""
        super().__init__(bool(decay))
        self._decay = decay

    def add(self, parameters: Sequence[torch.Tensor]) -> None:
        """Take the parameters after an update into account."""
        if not self.on:
            return
        with torch.no_grad():
            for parameter in parameters:
                average = self._values.get(parameter)
                if average is None:
                    self._values[parameter] = parameter.detach().clone()
                else:
                    average.lerp_(parameter, 1 - self._decay)

    def show(self, updated: Sequence[torch.Tensor], shown: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Have the parameters ``shown`` show the averages of ``updated``, which are as many. Returns what ``hide`` needs."""
        before = [parameter.data for parameter in shown]
        for own, parameter in zip(updated, shown, strict=True):
            parameter.data = self._values.get(own, parameter.data)
        return before

    @staticmethod
    def hide(shown: Sequence[torch.Tensor], before: Sequence[torch.Tensor]) -> None:
        """Undo ``show``."""
        for parameter, data in zip(shown, before, strict=True):
            parameter.data = data

"""Moving averages of weights (EMA), with which a model is evaluated.

Polyak and Juditsky 1992; the first update's weights begin the average, as in ``torch.optim.swa_utils.AveragedModel``.
"""

from collections.abc import Sequence
from typing import Any

import torch

AVERAGE = "ema"
"""Name of the average beside the optimizer's state."""


class Averages:
    """Averages of a stage's trained parameters."""

    def __init__(self, decay: float) -> None:
        """``decay``: weight of what the average has been; 0: no averages."""
        self._decay = decay
        self._tables: dict[torch.Tensor, dict[str, torch.Tensor]] = {}

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
                table = self.table(parameter)
                if AVERAGE in table:
                    table[AVERAGE].lerp_(parameter, 1 - self._decay)
                else:
                    table[AVERAGE] = parameter.detach().clone()

    def show(self, updated: Sequence[torch.Tensor], shown: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Have the parameters ``shown`` show the averages of ``updated``, which are as many. Returns what ``hide`` needs."""
        before = [parameter.data for parameter in shown]
        for own, parameter in zip(updated, shown, strict=True):
            parameter.data = self.of(own).get(AVERAGE, parameter.data)
        return before

    @staticmethod
    def hide(shown: Sequence[torch.Tensor], before: Sequence[torch.Tensor]) -> None:
        """Undo ``show``."""
        for parameter, data in zip(shown, before, strict=True):
            parameter.data = data

    def table(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Where a parameter's average is kept."""
        return self._tables.setdefault(parameter, {})

    def of(self, parameter: torch.Tensor) -> dict[str, Any]:
        """A parameter's average by its name, if there is one."""
        return self._tables.get(parameter, {})

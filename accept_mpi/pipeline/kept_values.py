"""Values that a stage keeps for each parameter beside the optimizer's state."""

import torch


class KeptValues:
    """A tensor for some parameters, under a name of its own in checkpoints."""

    name = ""

    def __init__(self, on: bool) -> None:
        """``on``: whether there will be any."""
        self.on = on
        self._values: dict[torch.Tensor, torch.Tensor] = {}

    def put(self, parameter: torch.Tensor, value: torch.Tensor) -> None:
        """Make this a parameter's value."""
        self._values[parameter] = value

    def of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """A parameter's value under its name, if there is one."""
        return {self.name: self._values[parameter]} if parameter in self._values else {}

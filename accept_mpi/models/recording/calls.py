"""What nodes of a tape call, apart from the model's own modules and torch's functions."""

from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Apply:
    """Call of a ``torch.autograd.Function``."""

    function: Any

    def __call__(self, *args: Any) -> Any:
        return self.function.apply(*args)


@dataclass(frozen=True)
class Made:
    """Call of a module that the forward itself makes, without state."""

    module: nn.Module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Made) and type(self.module) is type(other.module)

    def __hash__(self) -> int:
        return hash(type(self.module))

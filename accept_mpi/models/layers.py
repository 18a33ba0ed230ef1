"""The layers that a rank holds, built."""

from typing import NamedTuple

from torch import nn

from accept_mpi.errors import UserError
from accept_mpi.models.base import Chain


class Layers(NamedTuple):
    """Layers ``start``, ``start`` + 1, ... of a chain, built."""

    start: int
    names: list[str]
    modules: list[nn.Module]

    @property
    def has_conv2d(self) -> bool:
        return any(isinstance(part, nn.Conv2d) for module in self.modules for part in module.modules())


def build_layers(chain: Chain, start: int, stop: int, seed: int) -> Layers:
    """Layers ``start <= i < stop`` with their initial weights. Raises UserError where one cannot be built."""
    return Layers(start, chain.names[start:stop], [build_layer(chain, index, seed) for index in range(start, stop)])


def build_layer(chain: Chain, index: int, seed: int) -> nn.Module:
    """One layer with its initial weights. Raises UserError where it cannot be built."""
    what = f'model: layer {index} "{chain.names[index]}"'
    try:
        module = chain.build(index, seed)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{what} cannot be built: {type(error).__name__}: {error}") from error
    if not isinstance(module, nn.Module):
        raise UserError(f"{what} is a {type(module).__name__}, not an nn.Module")
    return module

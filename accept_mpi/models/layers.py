"""The layers that a rank holds, built."""

from typing import Any, NamedTuple

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


def call_layer(index: int, name: str, layer: nn.Module, values: Any) -> Any:
    """What a layer gives. Raises UserError where it cannot take ``values``, a tensor or a tuple."""
    try:
        return layer(values)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        tensors = values if isinstance(values, tuple | list) else (values,)
        shapes = ", ".join(f"{tuple(v.shape)} {str(v.dtype)[6:]}" for v in tensors)
        raise UserError(
            f'layer {index} "{name}" cannot take what the layer before gives '
            f"({shapes}): {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error

"""The layers that a rank holds, built."""

from typing import Any, NamedTuple

from torch import nn

from accept_mpi.errors import UserError
from accept_mpi.models.base import Chain
from accept_mpi.models.shared import watched


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
    return Layers(start, chain.names[start:stop], chain.build_range(start, stop, seed))


def build_stage(chain: Chain, start: int, stop: int, seed: int) -> Layers:
    """The same for a stage that is going to train: what it shares with other stages, it must not write to (a forward that
    does raises UserError), and the chain lets go of the other layers that were made with these."""
    shared = chain.shared() if 0 < stop - start < len(chain) else ()
    layers = build_layers(chain, start, stop, seed)
    watched(layers.modules, start, shared)
    chain.release()
    return layers


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

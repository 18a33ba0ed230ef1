"""The layers that a rank holds: how they are built."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import nn

from accept_mpi.models.base import Chain, name_in_model
from accept_mpi.models.common import Common, calls, with_loss
from accept_mpi.models.shared import watched

_VIEWS = ("view", "view_as", "view_as_complex", "as_strided")


class Layers(NamedTuple):
    """Layers ``start``, ``start`` + 1, ... of a chain, built."""

    start: int
    names: list[str]
    modules: list[nn.Module]
    own_names: bool = False
    """As ``Chain.own_names``."""
    ties: tuple[dict[tuple[int, str], str], ...] = ()
    """Parameters that several layers have in common: for each of its names in these layers the one in the whole model."""
    common: tuple[Common, ...] = ()
    """What else these layers and those of other stages have in common."""

    def name_of(self, layer: int, key: str) -> str:
        """As ``Chain.name_of``."""
        return name_in_model(self.names[layer - self.start], key, self.own_names)

    @property
    def likes_channels_last(self) -> tuple[bool, bool]:
        """Whether images should be in that memory format for a layer here, and whether one may not take it."""
        return has_conv2d(self.modules), calls_view(self.modules)


def in_channels_last(memory_format: str, told: Iterable[tuple[bool, bool]]) -> bool:
    """True if images are to be in channels_last format. ``memory_format``: what the job says; ``told``: of all layers,
    ``likes_channels_last``."""
    if memory_format != "auto":
        return memory_format == "channels_last"
    likes = list(told)
    return any(one for one, _ in likes) and not any(refuses for _, refuses in likes)


def has_conv2d(layers: Iterable[nn.Module]) -> bool:
    """True if a layer contains a 2-D convolution, which is faster where images are in channels_last format."""
    return any(isinstance(part, nn.Conv2d) for layer in layers for part in layer.modules())


def calls_view(layers: Iterable[nn.Module]) -> bool:
    """True if a layer's code calls ``view`` or the like, which take no images in channels_last format, or take them for
    others."""
    return any(calls(layer, _VIEWS) for layer in layers)


def may_draw(layer: nn.Module) -> bool:
    """True if a layer may ask NumPy or Python for random numbers. Only torch's layers and this package's, without hooks, do
    not."""
    for module in layer.modules():
        hooked = module._forward_hooks or module._forward_pre_hooks
        if hooked or not type(module).__module__.startswith(("torch.nn.", "accept_mpi.models.")):
            return True
    return False


def build_layers(chain: Chain, start: int, stop: int, seed: int) -> Layers:
    """Layers ``start <= i < stop`` with their initial weights. Raises UserError if one cannot be built."""
    return Layers(start, chain.names[start:stop], chain.build_range(start, stop, seed), chain.own_names)


def build_stage(chain: Chain, start: int, stop: int, seed: int, loss: Any = None) -> Layers:
    """Layers ``start <= i < stop`` for a stage that is going to train. They must not write to what they share with other
    stages (a forward that does raises UserError). The chain frees the other layers that were made with them. ``loss``: what
    judges the last layer's outputs."""
    parted = 0 < stop - start < len(chain)
    shared = chain.shared() if parted else ()
    ties = tuple({place: chain.name_of(*place) for place in one.places} for one in shared if one.tied)
    here = range(start, stop + (stop == len(chain)))  # the loss, too
    every = with_loss(chain.common(), loss, len(chain)) if parted else []
    common = [one for one in every if {layer in here for layer in one.layers} == {False, True}]
    layers = build_layers(chain, start, stop, seed)._replace(ties=ties, common=tuple(common))
    watched(layers.modules, start, shared)
    chain.release()
    return layers

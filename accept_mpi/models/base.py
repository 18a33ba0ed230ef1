"""A model as a chain of layers, each built on its own, so that a rank builds only the layers it holds.

A layer is an ``nn.Module`` that takes and gives a tensor or a tuple of tensors, as one argument. The whole model is the
``nn.Sequential`` of all of them under their names, so ``state_dict()`` names are the same whole or cut.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable

from torch import nn

from accept_mpi.seeds import init_seed, seeded

Factory = Callable[[], nn.Module]
Named = tuple[str, Factory]


class Chain:
    """Named layer factories, built layer by layer from a seed.

    A layer's initial weights depend on the seed and its position alone, so any cut of the chain starts from the same model.
    """

    def __init__(self, layers: Iterable[Named]) -> None:
        self.layers = list(layers)
        if not self.layers:
            raise ValueError("a model needs at least one layer")
        names = [name for name, _ in self.layers]
        if wrong := [n for n in names if not n or "." in n or "/" in n]:
            raise ValueError(f'layer name "{wrong[0]}" must not contain "." or "/" and not be empty')
        if doubled := sorted({n for n in names if names.count(n) > 1}):
            raise ValueError(f"layer names must differ, but these come twice: {', '.join(doubled)}")

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.layers]

    def __len__(self) -> int:
        return len(self.layers)

    def build(self, index: int, seed: int) -> nn.Module:
        """Layer ``index`` with its initial weights, a new module each time."""
        with seeded(init_seed(seed, index)):
            return self.layers[index][1]()

    def whole(self, seed: int = 0) -> nn.Sequential:
        """The whole model, plain PyTorch: what an exported checkpoint loads into with ``strict=True``."""
        return nn.Sequential(OrderedDict((name, self.build(i, seed)) for i, name in enumerate(self.names)))


def copies(layer: nn.Module) -> Factory:
    """Makes copies of a layer that exists already (in a user's ``nn.Sequential``). It stays as it is: a run begins anew
    from it after a loss."""
    return lambda: copy.deepcopy(layer)

"""A stage's parameters and their names."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from accept_mpi.device.compute import here
from accept_mpi.models.layers import Layers


class Parameters:
    """Each parameter once, under the first of its names: a layer may use one twice, and so may two layers."""

    def __init__(self, layers: Layers) -> None:
        self.every: list[nn.Parameter] = []
        self.names: list[str] = []
        self.layers: list[int] = []
        """The first layer that has each parameter."""
        self.aliases: list[list[str]] = []
        """Each parameter's names. The optimizer's state is kept under all of them, since
        another plan may part these layers."""
        self.whole: list[list[str]] = []
        """Each parameter's names in the whole model, those in layers of other stages included."""
        self.first: list[bool] = []
        """For each parameter, False if one of its layers is in an earlier stage."""
        seen: dict[int, int] = {}
        for n, (layer_name, layer) in enumerate(zip(layers.names, layers.modules, strict=True), layers.start):
            for name, parameter in layer.named_parameters(prefix=layer_name, remove_duplicate=False):
                if id(parameter) not in seen:
                    seen[id(parameter)] = len(self.every)
                    self.every.append(parameter)
                    self.names.append(name)
                    self.layers.append(n)
                    self.aliases.append([])
                self.aliases[seen[id(parameter)]].append(name)
        index = {name: n for n, name in enumerate(layers.names, layers.start)}
        self.in_model: dict[str, str] = {}
        """The name in the whole model of each name."""
        for names in self.aliases:
            places = [(index[layer], key) for layer, _, key in (name.partition(".") for name in names)]
            found = [layers.name_of(*place) for place in places]
            self.in_model |= dict(zip(names, found, strict=True))
            tie = next((tie for tie in layers.ties if places[0] in tie), {})
            self.whole.append(list(dict.fromkeys([*tie.values(), *found])))
            self.first.append(all(layer >= layers.start for layer, _ in tie))

    def every_name(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each parameter under all its names."""
        for names, parameter in zip(self.aliases, self.every, strict=True):
            yield from ((name, parameter) for name in names)

    def kept_state(
        self, updated: Sequence[torch.Tensor], of: Callable[[torch.Tensor], dict[str, Any]]
    ) -> dict[str, torch.Tensor]:
        """Copies of the tensors that ``of`` has for each of the ``updated`` parameters, as "<what>/<parameter's name>",
        under all its names."""
        return {
            f"{what}/{name}": here().copied(value.detach().to_dense())
            for names, parameter in zip(self.aliases, updated, strict=True)
            for name in names
            for what, value in of(parameter).items()
            if isinstance(value, torch.Tensor)
        }


def by_parameter(state: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """What a state as ``kept_state`` gives it has of each parameter, by the parameter's name."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in state.items():
        what, _, name = key.partition("/")
        found.setdefault(name, {})[what] = value
    return found

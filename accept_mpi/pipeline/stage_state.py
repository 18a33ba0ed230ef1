"""A stage's state as named tensors, to be copied and loaded: the layers', the optimizer's, and what is kept beside that."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from accept_mpi.device.compute import here
from accept_mpi.models.losses import Loss
from accept_mpi.pipeline.averages import Averages
from accept_mpi.pipeline.correction import Correction
from accept_mpi.pipeline.findings import Findings
from accept_mpi.pipeline.kept_bases import KeptBases
from accept_mpi.pipeline.kept_norms import KeptNorms
from accept_mpi.pipeline.kept_values import KeptValues
from accept_mpi.pipeline.parameters import Parameters, by_parameter
from accept_mpi.pipeline.remembered import THE_LOSS, Remembered
from accept_mpi.pipeline.running_statistics import RunningStatistics
from accept_mpi.pipeline.state import check_state, load_layer, state_of
from accept_mpi.pipeline.weight_versions import Weights, may_be_written, named


class Stateful:
    """The part of a ``Stage`` that keeps and loads state. ``Stage.__init__`` sets the fields."""

    names: list[str]
    layers: list[nn.Module]
    loss: Loss | None
    own: Parameters
    parameters: list[nn.Parameter]
    optimizer: torch.optim.Optimizer | None
    averages: Averages
    statistics: RunningStatistics | None
    _weights: Weights
    _trained: list[int]
    _correction: Correction
    found: Findings
    _held: deque[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]
    remembered: Remembered
    bases: KeptBases
    norms: KeptNorms
    check_settled: Callable[[bool], None]

    @property
    def modules(self) -> list[tuple[str, nn.Module]]:
        """The layers, and a loss that is a module, with their names."""
        found = [*zip(self.names, self.layers, strict=True)]
        if self.loss is not None and isinstance(self.loss.function, nn.Module):
            found.append((THE_LOSS, self.loss.function))
        return found

    def state_names(self) -> set[str]:
        """Names of all state of the layers. Raises UserError if some of it cannot be kept."""
        layers = zip(self.names, self.layers, strict=True)
        return {f"{name}.{key}" for name, layer in layers for key in check_state(name, layer)}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the newest weights under their names in the whole model."""
        yield from zip(self.own.names, self.parameters, strict=True)

    def weights(self) -> dict[str, torch.Tensor]:
        """Copies of all state of the layers, contiguous, under its names in the whole model. Raises UserError if forwards
        have left other state with each rank or lane that shares the stage."""
        self.check_settled(True)
        return self._now() | (self._held[0][0] if self._held else {})

    def _now(self) -> dict[str, torch.Tensor]:
        self._weights.newest()
        return {
            f"{name}.{key}": value
            for name, layer in zip(self.names, self.layers, strict=True)
            for key, value in state_of(name, layer).items()
        }

    def hold(self) -> None:
        """Before a step's first F, while the update of the one before is to come: keep what forwards change, for what is
        copied after that update. A group changes it in its updates."""
        if self.statistics is None:
            trained = {name for name, _ in self.own.every_name()}
            untrained = {name: value for name, value in self._now().items() if name not in trained}
            self._held.append((untrained, self.remembered.state()))

    def release(self) -> None:
        """Forget what ``hold`` has kept for the update that was made."""
        if self._held:
            self._held.popleft()

    def is_matrix(self) -> dict[str, bool]:
        """Whether Muon updates a parameter, by all its names."""
        groups = self.optimizer.param_groups if self.optimizer is not None else ()
        found = {parameter for group in groups if group["matrix"] for parameter in group["params"]}
        every = zip(self.own.aliases, self._weights.updated, strict=True)
        return {name: parameter in found for names, parameter in every for name in names}

    def optimizer_state(self) -> dict[str, torch.Tensor]:
        """Copies of the optimizer's tensors, and of what ``beside`` names, as "<name of the state>/<parameter's name>";
        of what forwards have modules remember, of the bases in which activations are sent on, and of the norms of the last
        gradients."""
        memory = self._held[0][1] if self._held else self.remembered.state()
        memory = memory | self.bases.state() | self.norms.state()
        if self.optimizer is None:
            return memory
        every, beside = self.optimizer.state, self._beside

        def of(parameter: torch.Tensor) -> dict[str, Any]:
            found: dict[str, Any] = dict(every.get(parameter, {}))
            for kept in beside:
                found |= kept.of(parameter)
            return found

        return memory | self.own.kept_state(self._weights.updated, of)

    @property
    def beside(self) -> set[str]:
        """Names of what is kept for each parameter beside the optimizer's state."""
        return {kept.name for kept in self._beside}

    @property
    def _beside(self) -> list[KeptValues]:
        return [kept for kept in (self.averages, self._correction, self._weights.previous) if kept.on]

    def load(self, weights: dict[str, torch.Tensor], optimizer: dict[str, torch.Tensor]) -> None:
        """Load weights and optimizer state. Raises UserError if they belong to another model."""
        self._weights.newest()
        with torch.no_grad():
            for name, layer in zip(self.names, self.layers, strict=True):
                prefix = f"{name}."
                own = {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}
                made = {key.removeprefix(prefix) for key in self.found.made if key.startswith(prefix)}
                load_layer(name, layer, own, made)
            for layer in self.layers:
                here().hold(layer)  # buffers that forwards make
            self._weights.adopt()
            self.keep_apart()
            self.remembered.put(optimizer)
            self.bases.put(optimizer)
            self.norms.put(optimizer)
            if self.optimizer is None:
                return
            beside, of = {kept.name: kept for kept in self._beside}, by_parameter(optimizer)
            for n in self._trained:  # a parameter that was trained once has nothing, whatever else is in its stage
                parameter = self._weights.updated[n]
                for what, value in of.get(self.own.names[n], {}).items():
                    like = parameter if value.shape == parameter.shape else value
                    kept = torch.empty_like(like, dtype=value.dtype).copy_(value)
                    if what in beside:
                        beside[what].put(parameter, kept)
                    else:
                        self.optimizer.state[parameter][what] = kept

    def may_be_written(self) -> dict[str, torch.Tensor]:
        """As ``weight_versions.may_be_written``."""
        return may_be_written(self.parameters, [module for _, module in self.modules])

    def keep_apart(self) -> None:
        """Have each micro-batch keep its own values of what forwards write to, as far as it is there: a forward may make
        it, or make it anew."""
        modules = [module for _, module in self.modules]
        self._weights.written = named(sorted(self.found.written), self.parameters, modules)

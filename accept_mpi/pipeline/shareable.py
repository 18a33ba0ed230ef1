"""Finds out whether a group of ranks can hold some layers: whether all that a forward leaves behind can be shared."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from accept_mpi.models.divisors import Divisors
from accept_mpi.models.memory import same_bits
from accept_mpi.pipeline.running_statistics import batch_norms

_State = tuple[int, int, torch.Tensor | None]
"""Identity, number of writes and, if it has any, values of a buffer."""


class Watch:
    """Watches one forward and backward of a stage. It must be created before the forward."""

    def __init__(self, names: Sequence[str], layers: Sequence[nn.Module]) -> None:
        self._names, self._layers = names, layers
        self._parameters = [(path, p) for name, layer in self._named() for path, p in layer.named_parameters(name)]
        norms = batch_norms(names, layers).values()
        self._normal = {id(buffer) for module in norms for buffer in module.buffers(recurse=False)}
        self._before = self._state()
        self.ever_changed: set[str] = set()
        """Names of all buffers that are not as they were."""
        lazy = [path for path, parameter in self._parameters if is_lazy(parameter)]
        self._reason = f'the first forward makes "{lazy[0]}"' if lazy else ""

    def after_forward(self, divisors: Divisors | None = None) -> str:
        """The reason so far why a group cannot hold the layers, after the forward; empty if it can. ``divisors``: the
        loss's, on the last stage."""
        if divisors and divisors.used:
            self._reason = "the loss gives (sum, count), and the count must be known before the first micro-batch"
        now = self._state()
        # BatchNorm's own buffers may change, since ``running_statistics`` replays that.
        if changed := [name for name in self._changed(now) if now[name][0] not in self._normal]:
            self._reason = f'a forward changes the buffer "{changed[0]}"'
        for name, layer in self._named():
            for module in layer.modules():
                mean = module._buffers.get("running_mean")
                if id(mean) in self._normal and mean is not None and mean.dtype != torch.float32:
                    self._reason = f'layer "{name}" has running statistics of another type than float32'
        sparse = [name for name, layer in self._named() for module in layer.modules() if getattr(module, "sparse", False)]
        if sparse:
            self._reason = f'layer "{sparse[0]}" has sparse gradients'
        self._before = now
        return self._reason

    def after_backward(self) -> str:
        """The reason why a group cannot hold the layers; empty if it can."""
        if changed := self._changed(self._state()):
            self._reason = f'a backward changes the buffer "{changed[0]}"'
        sparse = [name for name, p in self._parameters if p.grad is not None and p.grad.layout is not torch.strided]
        if sparse:
            self._reason = f'the gradient of "{sparse[0]}" is sparse'
        return self._reason

    def _named(self) -> list[tuple[str, nn.Module]]:
        return list(zip(self._names, self._layers, strict=True))

    def _state(self) -> dict[str, _State]:
        return {
            path: (id(buffer), buffer._version, None if buffer.is_meta else buffer.detach().clone())
            for name, layer in self._named()
            for path, buffer in layer.named_buffers(name)
        }

    def _changed(self, now: dict[str, _State]) -> list[str]:
        """Names of the buffers that are not as they were."""
        found = [name for name, state in now.items() if not _same(state, self._before.get(name))]
        self.ever_changed |= set(found)
        return found


def _same(now: _State, before: _State | None) -> bool:
    if before is None or now[:2] != before[:2]:
        return False
    values, old = now[2], before[2]
    return values is None or old is None or same_bits(values, old)

"""BatchNorm's running statistics in a stage that a group holds.

Each member sees only its own micro-batches. So it takes the mean and variance of each of them out of its layers, and all
members replay the updates of all micro-batches in order. Normalization itself uses a micro-batch's own statistics, so it
needs nothing.

A layer whose momentum is 1 keeps just the micro-batch's mean and (unbiased) variance, bit for bit. How torch then combines
them with the old values differs between processors (some fuse a product and a sum): ``_blend`` finds out what it does here.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch
from torch import nn

from accept_mpi.errors import UserError

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
_Blend = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]


class RunningStatistics:
    """The running statistics of all BatchNorm layers of a stage."""

    def __init__(self, names: Sequence[str], layers: Sequence[nn.Module]) -> None:
        self._modules = [
            (f"{name}.{path}" if path else name, module)
            for name, layer in zip(names, layers, strict=True)
            for path, module in layer.named_modules()
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None
        ]
        sizes = [module.num_features for _, module in self._modules]
        self.size = sum(1 + 2 * size for size in sizes)
        """Number of values about each micro-batch: for each layer whether it was used, its mean and its variance."""

    @contextmanager
    def taken(self) -> Iterator[list[torch.Tensor]]:
        """Within the context, run one forward; afterwards the list holds its statistics as one float32 vector of ``size``.
        The layers' own running statistics stay as they are. Raises UserError if a layer is used twice."""
        found: list[torch.Tensor] = []
        mine = [(name, module) for name, module in self._modules if module.training]
        kept = [([module._buffers[key] for key in _BUFFERS], module.momentum) for _, module in mine]
        for _, module in mine:
            for key in _BUFFERS:
                module._buffers[key] = torch.zeros_like(getattr(module, key))
            module.momentum = 1.0
        try:
            yield found
            parts = []
            for name, module in self._modules:
                used = int(module._buffers["num_batches_tracked"]) if module.training else 0  # type: ignore[arg-type]
                if used > 1:
                    raise UserError(f'layer "{name}" is used twice in a forward, which a group of ranks cannot hold')
                parts.append(torch.tensor([float(used)]))
                parts += [getattr(module, key).float() * used for key in _BUFFERS[:2]]
            found.append(torch.cat(parts) if parts else torch.empty(0))
        finally:
            for (_, module), (buffers, momentum) in zip(mine, kept, strict=True):
                module._buffers.update(zip(_BUFFERS, buffers, strict=True))
                module.momentum = momentum

    @torch.no_grad()
    def replay(self, micro_batches: Sequence[torch.Tensor]) -> None:
        """Update the layers' running statistics by those of some micro-batches, in order."""
        blend_mean, blend_variance = _blend("running_mean"), _blend("running_var")
        at = 0
        for _, module in self._modules:
            size = module.num_features
            assert module.running_mean is not None
            assert module.running_var is not None
            assert module.num_batches_tracked is not None
            for values in micro_batches:
                if not values[at]:
                    continue
                module.num_batches_tracked.add_(1)
                momentum = module.momentum
                factor = 1.0 / float(module.num_batches_tracked) if momentum is None else momentum
                mean, variance = values[at + 1 : at + 1 + size], values[at + 1 + size : at + 1 + 2 * size]
                module.running_mean.copy_(blend_mean(mean, module.running_mean, factor))
                module.running_var.copy_(blend_variance(variance, module.running_var, factor))
            at += 1 + 2 * size


def _plain(new: torch.Tensor, old: torch.Tensor, momentum: float) -> torch.Tensor:
    share, rest = _shares(momentum)
    return share * new + rest * old


def _fused_new(new: torch.Tensor, old: torch.Tensor, momentum: float) -> torch.Tensor:
    """The product with ``new`` unrounded, as a fused multiply-add leaves it."""
    share, rest = _shares(momentum)
    return (share.double() * new.double() + (rest * old).double()).float()


def _fused_old(new: torch.Tensor, old: torch.Tensor, momentum: float) -> torch.Tensor:
    share, rest = _shares(momentum)
    return (rest.double() * old.double() + (share * new).double()).float()


def _double(new: torch.Tensor, old: torch.Tensor, momentum: float) -> torch.Tensor:
    return (momentum * new.double() + (1 - momentum) * old.double()).float()


def _shares(momentum: float) -> tuple[torch.Tensor, torch.Tensor]:
    share = torch.tensor(momentum, dtype=torch.float32)
    return share, 1 - share


@cache
def _blend(key: str) -> _Blend:
    """The function that updates a running statistic just as torch does here, found by trying each on random values; the
    plain one, which differs by rounding, if none does."""
    generator = torch.Generator().manual_seed(0)
    ways = (_plain, _fused_new, _fused_old, _double)
    left = list(ways)
    for momentum in (0.1, 0.03, 1 / 3, 0.77):
        x = torch.randn(8, 67, generator=generator) * 3 + 1
        mean, variance = torch.zeros(67), torch.zeros(67)
        nn.functional.batch_norm(x, mean, variance, training=True, momentum=1.0)
        old = torch.rand(67, generator=generator)
        updated = {"running_mean": old.clone(), "running_var": old.clone()}
        nn.functional.batch_norm(x, updated["running_mean"], updated["running_var"], training=True, momentum=momentum)
        new = mean if key == "running_mean" else variance
        left = [way for way in left if torch.equal(way(new, old, momentum), updated[key])]
    return left[0] if left else _plain

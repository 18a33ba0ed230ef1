"""BatchNorm's running statistics in a stage that a group holds.

Each member sees only its own micro-batches. So it takes the mean and variance of each of them out of its layers, and all
members replay the updates of all micro-batches in order. Normalization itself uses a micro-batch's own statistics, so it
needs nothing.

A layer whose momentum is 1 keeps just the micro-batch's mean and (unbiased) variance, bit for bit. How torch then combines
them with the old values differs between processors (some fuse a product and a sum) and between types of inputs: ``_blend``
finds out what it does here.

Of inputs that are contiguous in no memory format, torch combines the mean and variance in double precision, before it rounds
them. What rounding has taken away is found by having torch combine them half and half with their rounded negatives.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import nn

from accept_mpi.errors import UserError

_LAYOUTS = torch.contiguous_format, torch.channels_last, torch.channels_last_3d
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
_Blend = Callable[[torch.Tensor, torch.Tensor, "_Shares"], torch.Tensor]


def batch_norms(names: Sequence[str], layers: Sequence[nn.Module]) -> dict[str, nn.modules.batchnorm._BatchNorm]:
    """The BatchNorm modules of layers, by name."""
    return {
        path: module
        for name, layer in zip(names, layers, strict=True)
        for path, module in layer.named_modules(prefix=name)
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
    }


def lies_apart(x: torch.Tensor) -> bool:
    """True if a tensor is contiguous in no memory format."""
    return not any(x.is_contiguous(memory_format=layout) for layout in _LAYOUTS)


def input_of(given: tuple[Any, ...], named: Mapping[str, Any]) -> torch.Tensor:
    """What a BatchNorm module takes, of a call's arguments: it may be ``given`` or ``named``."""
    found: torch.Tensor = given[0] if given else next(iter(named.values()))
    return found


class RunningStatistics:
    """The running statistics of all BatchNorm layers of a stage."""

    def __init__(
        self,
        names: Sequence[str],
        layers: Sequence[nn.Module],
        taken: Mapping[str, torch.dtype] | None = None,
        apart: Collection[str] = (),
    ) -> None:
        """``taken``: types of the layers' inputs, by name; by default float32. ``apart``: names of those whose inputs may be
        contiguous in no memory format."""
        norms = batch_norms(names, layers).items()
        self._modules = [(name, module) for name, module in norms if module.running_mean is not None]
        self._sizes = [module.num_features for _, module in self._modules]
        kinds = [(taken or {}).get(name, torch.float32) for name, _ in self._modules]
        sizes = torch.tensor(self._sizes, dtype=torch.int64)
        self._layer = torch.arange(len(kinds)).repeat_interleave(sizes)
        """The layer of each value."""
        self._kinds = {kind: torch.tensor([one is kind for one in kinds])[self._layer] for kind in dict.fromkeys(kinds)}
        """The values, of all layers', that belong to inputs of each type."""
        self._half = sum(self._sizes)
        self._apart = [n for n, (name, _) in enumerate(self._modules) if name in apart]
        self._rest = sum(self._sizes[n] for n in self._apart)
        self.size = len(self._sizes) + 2 * self._half + 2 * self._rest
        """Number of values about each micro-batch: for each layer whether it was used; all means; all variances; then what
        rounding has taken from the means and from the variances of ``apart`` layers, NaN where torch rounds first."""
        # Where the layers leave the statistics of one micro-batch: a forward is short beside making new tensors for each.
        self._used = torch.zeros(len(self._sizes), dtype=torch.int64)
        self._seen = torch.zeros(2, self._half)
        self._scratch = [
            {"running_mean": mean, "running_var": variance, "num_batches_tracked": self._used[n]}
            for n, (mean, variance) in enumerate(zip(*(half.split(self._sizes) for half in self._seen), strict=True))
        ] if self._sizes else []  # fmt: skip

    @contextmanager
    def taken(self) -> Iterator[list[torch.Tensor]]:
        """Within the context, run one forward; afterwards the list holds its statistics as one float32 vector of ``size``.
        The layers' own running statistics stay as they are. Raises UserError if a layer is used twice."""
        found: list[torch.Tensor] = []
        for values in (self._used, self._seen):
            values.numpy().fill(0)  # unseen by autograd, which keeps them for a backward that does not need them
        kept = []
        rest = torch.full((2, self._rest), math.nan)
        parts = (
            zip(*(half.split([self._sizes[n] for n in self._apart]) for half in rest), strict=True) if self._apart else ()
        )
        hooks = [
            self._modules[n][1].register_forward_hook(partial(_look, self._scratch[n], part), with_kwargs=True)
            for n, part in zip(self._apart, parts, strict=True)
        ]
        for (_, module), scratch in zip(self._modules, self._scratch, strict=True):
            if module.training:
                kept.append((module, [module._buffers[key] for key in _BUFFERS], module.momentum))
                module._buffers.update(scratch)
                module.momentum = 1.0
        try:
            yield found
            if self._used.max().item() > 1 if self._sizes else False:
                name = self._modules[int(self._used.argmax())][0]
                raise UserError(f'layer "{name}" is used twice in a forward')
            found.append(torch.cat([self._used.float(), self._seen.detach().reshape(-1), rest.reshape(-1)]))
        finally:
            for hook in hooks:
                hook.remove()
            for module, buffers, momentum in kept:
                module._buffers.update(zip(_BUFFERS, buffers, strict=True))
                module.momentum = momentum

    def _everywhere(self, rest: torch.Tensor) -> torch.Tensor:
        """Values of ``apart`` layers in their places among those of all layers, in double precision; NaN elsewhere."""
        every = torch.full((self._half,), math.nan, dtype=torch.float64).split(self._sizes)
        for n, part in zip(self._apart, rest.split([self._sizes[n] for n in self._apart]), strict=True):
            every[n].copy_(part)
        return torch.cat(every)

    @torch.no_grad()
    def replay(self, micro_batches: Sequence[torch.Tensor]) -> None:
        """Update the layers' running statistics by those of some micro-batches, in order."""
        layers, count = [module for _, module in self._modules], len(self._sizes)
        uses = [values[:count].tolist() for values in micro_batches]
        # Not those that no micro-batch has changed, in eval mode: graphs in flight keep theirs.
        changed = [n for n in range(count) if any(used[n] for used in uses)]
        if not changed:
            return
        means = torch.cat([module.running_mean for module in layers])  # type: ignore[misc]
        variances = torch.cat([module.running_var for module in layers])  # type: ignore[misc]
        tracked = [int(module.num_batches_tracked) for module in layers]  # type: ignore[arg-type]
        known: dict[tuple[float, ...], tuple[_Shares, torch.Tensor]] = {}
        for values, used in zip(micro_batches, uses, strict=True):
            tracked = [before + int(one) for before, one in zip(tracked, used, strict=True)]
            factors = tuple(
                (1.0 / now if module.momentum is None else module.momentum) if one else 0.0
                for module, now, one in zip(layers, tracked, used, strict=True)
            )
            if factors not in known:  # mostly all micro-batches have the same
                momentum = torch.tensor(factors, dtype=torch.float64)[self._layer]
                known[factors] = _Shares.of(momentum), momentum > 0
            shares, was_used = known[factors]
            mean, variance, rests = values[count:].split([self._half, self._half, 2 * self._rest])
            before = means, variances
            for kind, of_kind in self._kinds.items():
                blended = (
                    _blend("running_mean", kind)(mean, means, shares),
                    _blend("running_var", kind)(variance, variances, shares),
                )
                if len(self._kinds) == 1 and min(factors) > 0:
                    means, variances = blended
                else:
                    these = was_used & of_kind
                    means, variances = (torch.where(these, *both) for both in zip(blended, (means, variances), strict=True))
            if self._rest:
                lost = [self._everywhere(rest) for rest in rests.split(self._rest)]
                precise = was_used & ~lost[0].isnan()
                means, variances = (
                    torch.where(precise, _double(new.double() + 2 * rest, old, shares), now)
                    for new, rest, old, now in zip((mean, variance), lost, before, (means, variances), strict=True)
                )
        for key, kept in (("running_mean", means), ("running_var", variances)):
            parts = kept.split(self._sizes)
            torch._foreach_copy_([layers[n]._buffers[key] for n in changed], [parts[n] for n in changed])  # type: ignore[misc]
        for n in changed:
            layers[n].num_batches_tracked.fill_(tracked[n])  # type: ignore[union-attr]


def _look(
    rounded: Mapping[str, torch.Tensor],
    rest: Sequence[torch.Tensor],
    module: nn.Module,
    given: tuple[Any, ...],
    named: Mapping[str, Any],
    _: Any,
) -> None:
    """After a layer's forward in training: half of what rounding has taken from its mean and variance; a hook."""
    if module.training and lies_apart(x := input_of(given, named)):
        halves = [-rounded[key] for key in _BUFFERS[:2]]
        with torch.no_grad():
            mean, variance = halves
            torch.batch_norm_update_stats(x.detach(), running_mean=mean, running_var=variance, momentum=0.5)
        for here, half in zip(rest, halves, strict=True):
            here.copy_(half)


class _Shares(NamedTuple):
    """The shares of the new and of the old values in a running statistic: ``momentum`` and what is left of 1."""

    new: torch.Tensor
    old: torch.Tensor
    """Both in double precision."""
    rounded_new: torch.Tensor
    rounded_old: torch.Tensor
    """Both in single precision: the second is what the rounded first leaves."""
    wide_new: torch.Tensor
    wide_old: torch.Tensor
    """The rounded ones in double precision again."""

    @staticmethod
    def of(momentum: torch.Tensor) -> "_Shares":
        rounded = momentum.float()
        rest = 1 - rounded
        return _Shares(momentum, 1 - momentum, rounded, rest, rounded.double(), rest.double())


def _plain(new: torch.Tensor, old: torch.Tensor, shares: _Shares) -> torch.Tensor:
    return shares.rounded_new * new + shares.rounded_old * old


def _fused_new(new: torch.Tensor, old: torch.Tensor, shares: _Shares) -> torch.Tensor:
    """The product with ``new`` unrounded, as a fused multiply-add leaves it."""
    return (shares.wide_new * new.double() + (shares.rounded_old * old).double()).float()


def _fused_old(new: torch.Tensor, old: torch.Tensor, shares: _Shares) -> torch.Tensor:
    return (shares.wide_old * old.double() + (shares.rounded_new * new).double()).float()


def _double(new: torch.Tensor, old: torch.Tensor, shares: _Shares) -> torch.Tensor:
    return (shares.new * new.double() + shares.old * old.double()).float()


@cache
def _blend(key: str, kind: torch.dtype) -> _Blend:
    """The function that updates a running statistic just as torch does here for inputs of this type, found by trying each on
    random values; the plain one, which differs by rounding, if none does."""
    generator = torch.Generator().manual_seed(0)
    ways = (_plain, _fused_new, _fused_old, _double)
    left = list(ways)
    for momentum in (0.1, 0.03, 1 / 3, 0.77):
        x = (torch.randn(8, 67, generator=generator) * 3 + 1).to(kind)
        mean, variance = torch.zeros(67), torch.zeros(67)
        nn.functional.batch_norm(x, mean, variance, training=True, momentum=1.0)
        old = torch.rand(67, generator=generator)
        updated = {"running_mean": old.clone(), "running_var": old.clone()}
        nn.functional.batch_norm(x, updated["running_mean"], updated["running_var"], training=True, momentum=momentum)
        new = mean if key == "running_mean" else variance
        shares = _Shares.of(torch.tensor(momentum, dtype=torch.float64))
        left = [way for way in left if torch.equal(way(new, old, shares), updated[key])]
    return left[0] if left else _plain

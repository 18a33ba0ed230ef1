"""A session's program: torch.distributed.pipelining with 1F1B over gloo, layers split evenly or at the point's ``cuts``.

A point has ``job``, ``tuned``, and the keys of ``harness.peer.serve``.
"""

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from harness.peer import Setting, Trial, loss_of, serve


class _Enter(torch.autograd.Function):
    """Converts a tensor to channels_last, and its gradient back to contiguous, since gloo sends only contiguous tensors."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone(memory_format=torch.channels_last)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0].contiguous()


class _Stage(nn.Module):
    """Layers, which take one argument each, as a stage that takes each tensor crossing a boundary as an argument."""

    def __init__(self, layers: nn.Sequential, channels_last: bool) -> None:
        super().__init__()
        self.layers, self._channels_last = layers, channels_last

    def forward(self, *values: torch.Tensor) -> Any:
        given = tuple(_Enter.apply(v) if self._channels_last and v.dim() == 4 else v for v in values)
        out = self.layers(given[0] if len(given) == 1 else given)
        return tuple(o.contiguous() for o in out) if isinstance(out, tuple) else out.contiguous()


def gathered(setting: Setting, module: _Stage, rank: int, size: int, cuts: list[int] | None) -> nn.Module | None:
    """Gather all stages' weights; returns the whole model on rank 0, None elsewhere."""
    states: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(module.layers.state_dict(), states)
    if states is None:
        return None
    whole = setting.layers(0, len(setting.chain))
    for (start, stop), state in zip(setting.edges(size, cuts), states, strict=True):
        nn.Sequential(*list(whole)[start:stop]).load_state_dict(state)  # numbered from 0, as in the stage
    return whole


def build(point: dict[str, Any], rank: int, size: int) -> Trial:
    """A trial of torch's pipelining with this rank's stage and schedule."""
    setting = Setting(point)
    module = _Stage(setting.layers(*setting.edges(size, point.get("cuts"))[rank]), setting.tuned)
    optimizer = setting.optimizer(module)
    schedule = Schedule1F1B(PipelineStage(module, rank, size, torch.device("cpu")), setting.micro_batches, loss_fn=loss_of)
    batches = setting.batches()

    def step() -> None:
        inputs, targets = next(batches)
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(inputs)
        elif rank == size - 1:
            schedule.step(target=targets, losses=[])
        else:
            schedule.step()
        optimizer.step()

    return Trial(setting, step, functools.partial(gathered, setting, module, rank, size, point.get("cuts")))


serve(build)

"""Torch's optimizers under a learning rate that is a function of the step alone.

The first call of their methods imports ``torch._dynamo``, a compiler that nothing here uses. That takes more than a second
of a whole core, as long as torch itself, and three to four seconds of a small device's start. So the import is avoided
(unless a model needs it).
"""

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from accept_mpi.job import Optimizer, ParameterGroup
from accept_mpi.models.fine_tuning import matches
from accept_mpi.pipeline.lion import Lion


def learning_rate(options: Optimizer, lr: float, step: int, steps: int) -> float:
    """Learning rate of update ``step``, counted from 0, in a run of ``steps`` updates."""
    if step < options.warmup_steps:
        return lr * (step + 1) / options.warmup_steps
    done, span = step - options.warmup_steps, max(1, steps - options.warmup_steps)
    if options.schedule == "cosine":
        return options.final_lr + (lr - options.final_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, done / span)))
    if options.schedule == "step":
        return float(lr * options.decay ** (done // options.decay_every))
    return lr


def make_optimizer(
    options: Optimizer,
    lr: float,
    parameters: Sequence[nn.Parameter],
    names: Sequence[Sequence[str]] = (),
    groups: Sequence[ParameterGroup] = (),
) -> torch.optim.Optimizer | None:
    """Optimizer that a job names, for a stage's parameters; None if there are none. ``names``: for each parameter all its
    names in the whole model, by which ``groups`` have settings of their own. A group's "factor" is that of its learning
    rate (``set_learning_rate``)."""
    if not parameters:
        return None
    tables: dict[tuple[float, float], list[nn.Parameter]] = {}
    for n, parameter in enumerate(parameters):
        known = names[n] if names else ()
        own = next((one for one in groups if any(matches(name, one.names) for name in known)), None)
        decay = options.weight_decay if options.decay_vectors or parameter.dim() > 1 else 0.0
        if own is not None and own.weight_decay is not None:
            decay = own.weight_decay
        factor = own.lr / lr if own is not None and own.lr is not None else 1.0
        tables.setdefault((factor, decay), []).append(parameter)
    kind, *_ = _KINDS[options.name]
    extra: dict[str, Any] = {"betas": options.betas}
    if options.name == "sgd":
        extra = {"momentum": options.momentum, "nesterov": options.nesterov}
    elif options.name != "lion":
        extra["eps"] = options.eps
    if options.name == "nadam":
        extra["decoupled_weight_decay"] = True
    leave_the_compiler_out()
    arguments: dict[str, Any] = {"lr": lr, "weight_decay": options.weight_decay, **extra}
    own_tables = [
        {"params": some, "factor": factor, "lr": factor * lr, "weight_decay": decay}
        for (factor, decay), some in tables.items()
    ]
    return kind(own_tables, **arguments)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of the next update."""
    for group in optimizer.param_groups:
        group["lr"] = group["factor"] * lr


COUNTER = "step"
"""Name, in the optimizer's state, of the number of a parameter's updates."""
SCALARS = frozenset({COUNTER, "mu_product"})
"""Names of what is one number per parameter."""
_KINDS: dict[str, tuple[Any, ...]] = {
    "sgd": (torch.optim.SGD, "momentum_buffer"),
    "adam": (torch.optim.Adam, COUNTER, "exp_avg", "exp_avg_sq"),
    "adamw": (torch.optim.AdamW, COUNTER, "exp_avg", "exp_avg_sq"),
    "nadam": (torch.optim.NAdam, COUNTER, "mu_product", "exp_avg", "exp_avg_sq"),
    "lion": (Lion, "exp_avg"),
}
"""Optimizers by name, and the names of their state."""


def state_names(options: Optimizer) -> frozenset[str]:
    """Names of the optimizer's state for each parameter that has been updated."""
    if options.name == "sgd":
        return frozenset({"momentum_buffer"} if options.momentum else ())
    return frozenset(_KINDS[options.name][1:])


def values_kept(options: Optimizer) -> int:
    """Number of values that are kept per value of a parameter: the optimizer's, and the last update for a correction."""
    return len(state_names(options) - SCALARS) + (options.correction != "none")


def update(optimizer: torch.optim.Optimizer) -> None:
    """Make one step with the gradients of the parameters, and drop the gradients."""
    with torch.no_grad():
        inspect.unwrap(type(optimizer).step)(optimizer)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def leave_the_compiler_out() -> None:
    """Mark torch's plain method as the version that its compiler would make, so that torch does not import the compiler."""
    plain = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    if not hasattr(plain, "__dynamo_disable"):
        setattr(plain, "__dynamo_disable", plain)

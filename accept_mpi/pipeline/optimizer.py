"""Torch's optimizers under a learning rate that is a function of the step alone."""

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from accept_mpi.job import GOES_WITH, Optimizer, ParameterGroup
from accept_mpi.models.fine_tuning import matches
from accept_mpi.pipeline.lion import Lion
from accept_mpi.pipeline.muon import BUFFER, Muon
from accept_mpi.without_compiler import leave_the_compiler_out


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
    matrices: Sequence[bool] = (),
) -> torch.optim.Optimizer | None:
    """Optimizer that a job names, for a stage's parameters; None if there are none. ``names``: for each parameter all its
    names in the whole model, by which ``groups`` have settings of their own; ``matrices``: for each parameter, whether Muon
    updates it. A group's "usual" is its learning rate without the schedule (``set_learning_rate``)."""
    if not parameters:
        return None
    tables: dict[tuple[float, float, bool], list[nn.Parameter]] = {}
    for n, parameter in enumerate(parameters):
        known = names[n] if names else ()
        own = next((one for one in groups if any(matches(name, one.names) for name in known)), None)
        decay = options.weight_decay if options.decay_vectors or parameter.dim() > 1 else 0.0
        if own is not None and own.weight_decay is not None:
            decay = own.weight_decay
        usual = own.lr if own is not None and own.lr is not None else lr
        is_matrix = bool(matrices) and matrices[n] and not (own is not None and own.adamw)
        tables.setdefault((usual, decay, is_matrix), []).append(parameter)
    extra: dict[str, Any] = {key: getattr(options, key) for key in _SETTINGS if options.name in GOES_WITH[key][1]}
    if options.name == "nadam":
        extra["decoupled_weight_decay"] = True
    leave_the_compiler_out()
    arguments: dict[str, Any] = {"lr": lr, "weight_decay": options.weight_decay, **extra}
    own_tables = [
        {"params": some, "usual": usual, "lr": usual, "weight_decay": decay, "matrix": is_matrix}
        for (usual, decay, is_matrix), some in tables.items()
    ]
    return _KINDS[options.name](own_tables, **arguments)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float, usual: float) -> None:
    """Set the learning rate of the next update, which is ``usual`` without the job's schedule. Other rates of groups follow
    that as in ``torch.optim.lr_scheduler.LambdaLR``."""
    for group in optimizer.param_groups:
        group["lr"] = lr if group["usual"] == usual else group["usual"] * (lr / usual)


COUNTER = "step"
"""Name, in the optimizer's state, of the number of a parameter's updates."""
SCALARS = frozenset({COUNTER, "mu_product"})
"""Names of what is one number per parameter."""
_KINDS: dict[str, Any] = {
    "sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "nadam": torch.optim.NAdam, "lion": Lion,
    "muon": Muon,
}  # fmt: skip
_SETTINGS = ("momentum", "nesterov", "muon_momentum", "betas", "eps")
_ADAM = frozenset({COUNTER, "exp_avg", "exp_avg_sq"})
_STATE = {
    "adam": _ADAM, "adamw": _ADAM, "muon": _ADAM, "nadam": _ADAM | {"mu_product"}, "lion": frozenset({"exp_avg"}),
}  # fmt: skip


STATES = frozenset({*_STATE.values(), frozenset({BUFFER})})
"""For each kind of state of a parameter that has been updated: its names, all of which belong together."""


def state_names(options: Optimizer, is_matrix: bool = False) -> frozenset[str]:
    """Names of the optimizer's state of a parameter that has been updated; of one that Muon updates, if ``is_matrix``."""
    if is_matrix or (options.name == "sgd" and options.momentum):
        return frozenset({BUFFER})
    return _STATE.get(options.name, frozenset())


def left_behind(before: Optimizer, now: Optimizer) -> tuple[bool, bool]:
    """True if an optimizer's state is not what another one goes on from: that of weight matrices, and that of all else.
    Parameter by parameter, state is taken over as a whole or not at all: its names say what the values mean."""
    kinds = [(state_names(one, one.name == "muon"), state_names(one)) for one in (before, now)]
    of_matrices, of_others = (bool(old) and old != new for old, new in zip(*kinds, strict=True))
    return of_matrices, of_others


def values_kept(options: Optimizer) -> int:
    """Most values that are kept per value of a parameter: the optimizer's, and the last update for a correction."""
    return len(state_names(options) - SCALARS) + (options.correction != "none")


def update(optimizer: torch.optim.Optimizer) -> None:
    """Make one step with the gradients of the parameters, and drop the gradients."""
    with torch.no_grad():
        inspect.unwrap(type(optimizer).step)(optimizer)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None

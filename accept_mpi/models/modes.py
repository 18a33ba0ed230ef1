"""Modes of modules, training or evaluation, and what a user's own ``train`` does besides setting them."""

import logging
from collections.abc import Sequence
from functools import lru_cache

from torch import nn

log = logging.getLogger(__name__)


def in_training(model: nn.Module, whole: bool = False) -> nn.Module:
    """A new model, after its own ``train`` has been called, which may do more than set the mode: norms keep their
    statistics, parts are frozen. A plain loop calls it before it begins. What is in evaluation mode stays there, unless it
    is the ``whole`` model and all of it is: so libraries give models that are trained already. The user is told."""
    if whole and not any(module.training for module in model.modules()):
        _tell(type(model).__name__)
        return model.train()
    modes = [(module, module.training) for module in model.modules()]
    for module, training in modes:
        if training and type(module).train is not nn.Module.train:
            module.train()
    for module, training in modes:
        module.training = module.training and training
    return model


@lru_cache
def _tell(model: str) -> None:
    log.info(
        "model.name: all of %s is in evaluation mode, as libraries give models that are trained already; it is trained in "
        "training mode, with dropout and batch statistics (parts stay in evaluation mode if others are not)",
        model,
    )


def restore_modes(modes: Sequence[tuple[nn.Module, bool]]) -> None:
    """Set modules back to their former modes. A user's own ``train`` may do more than set the mode (low-rank weights are
    merged for evaluation, and split again), so it is called; what it does to the modes of other modules is overwritten."""
    own = [(module, training) for module, training in modes if type(module).train is not nn.Module.train]
    for module, training in sorted(own, key=lambda one: not one[1]):
        module.train(training)
    for module, training in modes:
        module.training = training

"""Modes of modules, training or evaluation, and what a user's own ``train`` does besides setting them."""

from collections.abc import Sequence

from torch import nn


def in_training(model: nn.Module, whole: bool = False) -> nn.Module:
    """A new model, after its own ``train`` has been called, which may do more than set the mode: norms keep their
    statistics, parts are frozen. A plain loop calls it before it begins. What is in evaluation mode stays there, unless it
    is the ``whole`` model and all of it is: so libraries give models that are trained already."""
    if whole and not any(module.training for module in model.modules()):
        return model.train()
    modes = [(module, module.training) for module in model.modules()]
    for module, training in modes:
        if training and type(module).train is not nn.Module.train:
            module.train()
    for module, training in modes:
        module.training = module.training and training
    return model


def restore_modes(modes: Sequence[tuple[nn.Module, bool]]) -> None:
    """Set modules back to their former modes. A user's own ``train`` may do more than set the mode (low-rank weights are
    merged for evaluation, and split again), so it is called; what it does to the modes of other modules is overwritten."""
    own = [(module, training) for module, training in modes if type(module).train is not nn.Module.train]
    for module, training in sorted(own, key=lambda one: not one[1]):
        module.train(training)
    for module, training in modes:
        module.training = training

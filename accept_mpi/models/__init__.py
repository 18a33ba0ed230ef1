"""Models as chains of layers: a small zoo, and the user's own by import path."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from accept_mpi.errors import UserError
from accept_mpi.models.base import Chain, Entry
from accept_mpi.models.cnn import cnn
from accept_mpi.models.gpt import gpt
from accept_mpi.models.mobilenet import mobilenetv2
from accept_mpi.models.resnet import resnet18
from accept_mpi.models.vgg import vgg11
from accept_mpi.registry import call, find_function

__all__ = ["ZOO", "Chain", "load"]

ZOO: dict[str, Callable[..., Chain]] = {
    "cnn": cnn,
    "gpt": gpt,
    "mobilenetv2": mobilenetv2,
    "resnet18": resnet18,
    "vgg11": vgg11,
}


def load(name: str, args: Mapping[str, Any], seed: int) -> Chain:
    """Chain of layers that a job names. Raises UserError with one sentence.

    A user's function returns an ``nn.Sequential``, a list of layers, or (to build only what a rank holds) a list of
    functions that each make a layer; list entries may be ``(name, layer)``. It is called under ``seed``, and called again
    whenever new layers are needed.
    """
    function = find_function(name, ZOO, "model.name")

    def make() -> list[tuple[str, Entry]]:
        model = call(function, args, "model.args", seed)
        try:
            return entries_of(model)
        except (TypeError, ValueError) as error:
            raise UserError(f'model.name: "{name}": {error}') from error

    if name in ZOO:
        chain: Chain = call(function, args, "model.args", seed)
        return chain
    try:
        return Chain(make(), make)
    except ValueError as error:
        raise UserError(f'model.name: "{name}": {error}') from error


def as_chain(model: object) -> Chain:
    """Chain of layers that exist already, and of which it hands out copies. (A job's model is made by its function instead.)

    Raises TypeError or ValueError with a sentence if ``model`` is not a model.
    """
    if isinstance(model, Chain):
        return model

    def make() -> list[tuple[str, Entry]]:
        return entries_of(copy.deepcopy(model))

    return Chain(make(), make)


def entries_of(model: object) -> list[tuple[str, Entry]]:
    """Named layers, or functions that make them, in what a user's function returned. Raises TypeError or ValueError with a
    sentence if it is not a model."""
    if isinstance(model, Chain):
        return list(model.layers)
    if isinstance(model, nn.Sequential):
        if type(model).forward is not nn.Sequential.forward:
            raise TypeError(f"{type(model).__name__} has a forward of its own, so its layers cannot be run one by one")
        model = list(model._modules.items())  # named_children() leaves out repeated modules
    if not isinstance(model, list | tuple):
        raise TypeError(f"expected an nn.Sequential or a list of layers, got {type(model).__name__}")
    named = [entry if _is_named(entry) else (str(i), entry) for i, entry in enumerate(model)]
    for layer_name, layer in named:
        if not isinstance(layer, nn.Module) and not callable(layer):
            raise TypeError(f'layer "{layer_name}" is a {type(layer).__name__}, not an nn.Module')
    return named


def _is_named(entry: object) -> bool:
    return isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str)

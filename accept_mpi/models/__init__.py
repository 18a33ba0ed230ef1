"""Models as chains of layers: a small zoo, and the user's own by import path."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from accept_mpi.errors import UserError
from accept_mpi.imports import call, find_function
from accept_mpi.models.base import BuiltChain, Chain
from accept_mpi.models.cnn import cnn
from accept_mpi.models.gpt import gpt
from accept_mpi.models.mobilenet import mobilenetv2
from accept_mpi.models.resnet import resnet18
from accept_mpi.models.vgg import vgg11

__all__ = ["ZOO", "Chain", "load"]

ZOO: dict[str, Callable[..., Chain]] = {
    "cnn": cnn,
    "gpt": gpt,
    "mobilenetv2": mobilenetv2,
    "resnet18": resnet18,
    "vgg11": vgg11,
}


def load(name: str, args: Mapping[str, Any], seed: int) -> Chain:
    """The chain that a job names. Raises UserError with one sentence.

    A user's function returns an ``nn.Sequential``, or a list of layers, or (to build only what a rank holds) a list of
    functions that each make one; list entries may be ``(name, layer)``. It runs under ``seed``.
    """
    function = find_function(name, ZOO, "model.name")
    result = call(function, args, "model.args", seed)
    try:
        return as_chain(result)
    except (TypeError, ValueError) as error:
        raise UserError(f'model.name: "{name}": {error}') from error


def as_chain(model: object) -> Chain:
    """A user's model as a chain. Raises TypeError or ValueError with a sentence where it is not one."""
    if isinstance(model, Chain):
        return model
    if isinstance(model, nn.Sequential):
        return _tied_apart(BuiltChain(list(model.named_children())))
    if not isinstance(model, list | tuple):
        raise TypeError(f"expected an nn.Sequential or a list of layers, got {type(model).__name__}")
    named = [entry if _is_named(entry) else (str(i), entry) for i, entry in enumerate(model)]
    for layer_name, layer in named:
        if not isinstance(layer, nn.Module) and not callable(layer):
            raise TypeError(f'layer "{layer_name}" is a {type(layer).__name__}, not an nn.Module')
    if all(isinstance(layer, nn.Module) for _, layer in named):
        return _tied_apart(BuiltChain(named))
    return Chain((n, (lambda m=layer: m) if isinstance(layer, nn.Module) else layer) for n, layer in named)  # type: ignore[misc]


def _is_named(entry: object) -> bool:
    return isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str)


def _tied_apart(chain: BuiltChain) -> BuiltChain:
    """Refuse parameters shared between layers: two stages could not both own one."""
    owner: dict[int, str] = {}
    for name, make in chain.layers:
        for parameter in make().parameters():
            first = owner.setdefault(id(parameter), name)
            if first != name:
                raise ValueError(f'layers "{first}" and "{name}" share a parameter, so they cannot be cut apart')
    return chain

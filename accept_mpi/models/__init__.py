"""Models as chains of layers: a small zoo, and the user's own by import path."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from accept_mpi.errors import UserError
from accept_mpi.imports import call, find_function
from accept_mpi.models.base import Chain, copies
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
        if type(model).forward is not nn.Sequential.forward:
            raise TypeError(f"{type(model).__name__} has a forward of its own, so its layers cannot be run one by one")
        model = list(model._modules.items())  # named_children() leaves out what comes a second time
    if not isinstance(model, list | tuple):
        raise TypeError(f"expected an nn.Sequential or a list of layers, got {type(model).__name__}")
    named = [entry if _is_named(entry) else (str(i), entry) for i, entry in enumerate(model)]
    for layer_name, layer in named:
        if not isinstance(layer, nn.Module) and not callable(layer):
            raise TypeError(f'layer "{layer_name}" is a {type(layer).__name__}, not an nn.Module')
    _refuse_tied((name, layer) for name, layer in named if isinstance(layer, nn.Module))
    return Chain((name, copies(layer) if isinstance(layer, nn.Module) else layer) for name, layer in named)


def _is_named(entry: object) -> bool:
    return isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str)


def _refuse_tied(layers: Iterable[tuple[str, nn.Module]]) -> None:
    """Refuse parameters and buffers shared between layers: two stages could not both own one."""
    owner: dict[int, str] = {}
    for name, layer in layers:
        for what, tensors in (("parameter", layer.parameters()), ("buffer", layer.buffers())):
            for tensor in tensors:
                first = owner.setdefault(id(tensor), name)
                if first != name:
                    raise ValueError(f'layers "{first}" and "{name}" share a {what}, so they cannot be cut apart')

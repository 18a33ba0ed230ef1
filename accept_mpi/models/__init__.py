"""Models as chains of layers: a small zoo, and the user's own by import path."""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from accept_mpi.errors import UserError
from accept_mpi.models.base import Chain, Entry
from accept_mpi.models.cnn import cnn
from accept_mpi.models.gpt import gpt
from accept_mpi.models.mobilenet import mobilenetv2
from accept_mpi.models.recording.recorded import RecordedModel
from accept_mpi.models.resnet import resnet18
from accept_mpi.models.vgg import vgg11
from accept_mpi.registry import call, find_function, import_module

__all__ = ["ZOO", "Chain", "Whole", "load", "load_any"]

ZOO: dict[str, Callable[..., Chain]] = {
    "cnn": cnn,
    "gpt": gpt,
    "mobilenetv2": mobilenetv2,
    "resnet18": resnet18,
    "vgg11": vgg11,
}


class Whole(NamedTuple):
    """A model with a forward of its own, which becomes a chain once that has been recorded."""

    make: Callable[[], nn.Module]
    name: str
    output: str

    def record(self, value: Any) -> Chain:
        """The chain, for micro-batches like ``value``, which the data set gives. Raises UserError."""
        return RecordedModel(self.make, self.name, value, self.output).chain()


def load(name: str, args: Mapping[str, Any], seed: int, value: Callable[[], Any] | None = None, output: str = "") -> Chain:
    """Chain of layers that a job names. Raises UserError with one sentence.

    ``value`` returns what the data set gives for a micro-batch; it is called if the model has a forward of its own.
    ``output``: the part of its result that the loss gets.
    """
    found = load_any(name, args, seed, output)
    if isinstance(found, Chain):
        return found
    if value is None:
        raise UserError(f'model.name: "{name}" has a forward of its own, so samples are needed to divide it into layers')
    return found.record(value())


def load_any(name: str, args: Mapping[str, Any], seed: int, output: str = "") -> Chain | Whole:
    """The model that a job names. Raises UserError with one sentence.

    A user's function returns any ``nn.Module``; an ``nn.Sequential`` and a list of layers are chains already, and so is (to
    build only what a rank holds) a list of functions that each make a layer; list entries may be ``(name, layer)``. It is
    called under ``seed``, and called again whenever new layers are needed.
    """
    if name.partition(":")[0] in _LIBRARIES and ":" in name:
        function = _LIBRARIES[name.partition(":")[0]](name)
    else:
        function = find_function(name, ZOO, "model.name")

    def again() -> Any:
        return call(function, args, "model.args", seed)

    def entries(model: object) -> list[tuple[str, Entry]]:
        try:
            return entries_of(model)
        except (TypeError, ValueError) as error:
            raise UserError(f'model.name: "{name}": {error}') from error

    model = again()
    if isinstance(model, Chain):
        return model
    if isinstance(model, nn.Module) and not _is_sequence(model):
        return Whole(again, name, output)
    if output:
        raise UserError(f'model.output: "{name}" is a chain of layers, whose result the loss gets as a whole')
    try:
        return Chain(entries(model), lambda: entries(again()))
    except ValueError as error:
        raise UserError(f'model.name: "{name}": {error}') from error


def _of_transformers(name: str) -> Callable[..., Any]:
    """A class of transformers, from the keys of its configuration: "transformers:GPT2LMHeadModel"."""
    found = find_function(name, ZOO, "model.name")
    config: Any = getattr(found, "config_class", None)

    def make(**keys: Any) -> Any:
        return found(config(**keys))

    return found if config is None else make


def _of_timm(name: str) -> Callable[..., Any]:
    """A model of timm: "timm:mobilenetv3_small_100"."""
    timm = import_module("timm", "model.name")
    return partial(timm.create_model, name.partition(":")[2])


_LIBRARIES: dict[str, Callable[[str], Callable[..., Any]]] = {"transformers": _of_transformers, "timm": _of_timm}


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
        if not _is_sequence(model):
            raise TypeError(f"{type(model).__name__} has a forward of its own, so its layers cannot be run one by one")
        model = list(model._modules.items())  # named_children() leaves out repeated modules
    if not isinstance(model, list | tuple):
        raise TypeError(f"expected an nn.Sequential or a list of layers, got {type(model).__name__}")
    named = [entry if _is_named(entry) else (str(i), entry) for i, entry in enumerate(model)]
    for layer_name, layer in named:
        if not isinstance(layer, nn.Module) and not callable(layer):
            raise TypeError(f'layer "{layer_name}" is a {type(layer).__name__}, not an nn.Module')
    return named


def _is_sequence(model: nn.Module) -> bool:
    """True if a module does no more than call its parts in order."""
    return isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward


def _is_named(entry: object) -> bool:
    return isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str)

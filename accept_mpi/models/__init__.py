"""Models as chains of layers: a small zoo, and the user's own by import path."""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from accept_mpi.errors import UserError
from accept_mpi.job import Job, Model
from accept_mpi.models.base import Chain, Entry, unfilled_if_possible
from accept_mpi.models.cnn import cnn
from accept_mpi.models.common import HOOKS
from accept_mpi.models.copies import copied
from accept_mpi.models.fine_tuning import Changes, check_patterns, is_adapter
from accept_mpi.models.gpt import gpt
from accept_mpi.models.mobilenet import mobilenetv2
from accept_mpi.models.modes import in_training
from accept_mpi.models.recording.recorded import RecordedModel
from accept_mpi.models.recording.refusals import Foreign, Unrecordable
from accept_mpi.models.recording.undivided import one_layer
from accept_mpi.models.resnet import resnet18
from accept_mpi.models.vgg import vgg11
from accept_mpi.registry import call, find_function, import_module
from accept_mpi.users_code import RAISED
from accept_mpi.without_compiler import leave_the_compiler_out

__all__ = ["ZOO", "Chain", "Whole", "chain_of", "check_changes", "library_of", "load", "model_of", "undivided"]

ZOO: dict[str, Callable[..., Chain]] = {
    "cnn": cnn,
    "gpt": gpt,
    "mobilenetv2": mobilenetv2,
    "resnet18": resnet18,
    "vgg11": vgg11,
}


_ADDRESS = re.compile(r"0x[0-9a-f]+")


class Whole(NamedTuple):
    """A model with a forward of its own, which becomes a chain once that has been recorded."""

    make: Callable[[], nn.Module]
    name: str
    output: str
    blocks: tuple[str, ...] = ()
    changes: Changes | None = None
    autocast: bool = False
    looks: Mapping[str, str] = {}

    def record(self, value: Any) -> Chain:
        """The chain, for micro-batches like ``value``, which the data set gives: of one layer if the forward cannot be
        recorded. Raises UserError."""
        try:
            chain = RecordedModel(self.make, value, self.output, self.blocks, self.autocast).chain()
        except Unrecordable as error:
            chain = self._as_it_is(value, error)
        chain.changes, chain.autocast, chain.looks = self.changes, self.autocast, dict(self.looks)
        return chain

    def _as_it_is(self, value: Any, why: Unrecordable) -> Chain:
        """The chain of one layer of a model that cannot be recorded. Raises ``why`` where it would not train either, or the
        job asks for a division."""
        if self.blocks or isinstance(why, Foreign):
            raise why
        try:
            chain = one_layer(self.make, value, self.output)
        except UserError:
            raise
        except RAISED:  # of the model's own code, which ``why`` tells
            raise why from why.__cause__
        chain.one_layer = str(why).removeprefix("model.name: ")
        return chain


def load(name: str, args: Mapping[str, Any], seed: int) -> Chain:
    """Chain of layers that a job names. Raises UserError with one sentence."""
    found = _load(Model(name=name, args=dict(args)), seed, None)
    if isinstance(found, Whole):
        raise UserError(f'model.name: "{name}" has a forward of its own, so samples are needed to divide it into layers')
    return found


def chain_of(job: Job, value: Callable[[], Any]) -> Chain:
    """Chain of a job's model; ``value`` returns what the data set gives for a micro-batch. Raises UserError."""
    found = model_of(job)
    return found if isinstance(found, Chain) else found.record(value())


def model_of(job: Job) -> Chain | Whole:
    """The model that a job names, with the changes that it asks for. Raises UserError with one sentence.

    A user's function returns any ``nn.Module``; an ``nn.Sequential`` and a list of layers are chains already, and so is (to
    build only what a rank holds) a list of functions that each make a layer; list entries may be ``(name, layer)``. It is
    called under the job's seed, and called again whenever new layers are needed.
    """
    changes, autocast = Changes(job), job.train.precision == "bf16"
    found = _load(job.model, job.train.seed, changes if changes.any else None)
    if isinstance(found, Whole):
        return found._replace(autocast=autocast)
    found.autocast = autocast
    return found


def undivided(job: Job) -> nn.Module:
    """The model that a job names as one module, with the changes that it asks for; of any values. Raises UserError."""
    found = model_of(job)
    make = found.make if isinstance(found, Whole) else partial(found.whole, job.train.seed)
    return unfilled_if_possible(make)


def check_changes(chain: Chain, job: Job) -> str:
    """Check that what a job changes of its model fits it. Returns a line on weights that are loaded, "" without any. Raises
    UserError."""
    changes, train = chain.changes, job.train
    if changes is None and not train.groups:
        return ""
    layers = [chain.abstract(index, train.seed) for index in range(len(chain))]
    state = {
        chain.name_of(index, key): tuple(value.shape)
        for index, layer in enumerate(layers)
        for key, value in layer.state_dict(keep_vars=True).items()
        if isinstance(value, torch.Tensor)
    }
    named = [
        chain.name_of(index, key)
        for index, layer in enumerate(layers)
        for key, _ in layer.named_parameters(remove_duplicate=False)
    ]
    for group in train.groups:
        check_patterns("train.groups", group.names, named)
    if changes is None:
        return ""
    modules = [
        (chain.name_of(index, path).rstrip("."), module)
        for index, layer in enumerate(layers)
        for path, module in layer.named_modules(remove_duplicate=False)
    ]
    changes.check(named, [name for name, _ in modules])
    if not any(parameter.requires_grad for layer in layers for parameter in layer.parameters()):
        raise UserError("train.freeze: no parameter of the model is left to train; train.unfreeze names those that are")
    if changes.file is None:
        return ""
    optional = [name for name in state if is_adapter(name)]
    # As for load_state_dict: files of old versions of torch have no such counters.
    optional += [f"{name}.num_batches_tracked".lstrip(".") for name, module in modules if isinstance(module, _NormBase)]
    return changes.file.check(list(state), state, chain.aliases(), optional) + changes.unheard


def _load(asked: Model, seed: int, changes: Changes | None) -> Chain | Whole:
    leave_the_compiler_out()
    name = asked.name
    library = library_of(name)
    function = _LIBRARIES[library](name) if library else find_function(name, ZOO, "model.name")
    if isinstance(function, nn.Module):
        raise UserError(f'model.name: "{name}" is a model already: name the function, or the class, that makes one')

    def again() -> Any:
        made = call(function, asked.args, "model.args", seed)
        return in_training(made, whole=True) if isinstance(made, nn.Module) else made

    def whole() -> Any:
        made = again()
        return changes.apply(made, "") if changes else made

    def entries(model: object) -> list[tuple[str, Entry]]:
        try:
            return [(key, _changed(entry, key, changes)) for key, entry in entries_of(model)]
        except (TypeError, ValueError) as error:
            raise UserError(f'model.name: "{name}": {error}') from error

    model = again()
    if isinstance(model, nn.Module) and not isinstance(model, Chain) and not _is_sequence(model):
        blocks = (asked.blocks,) if isinstance(asked.blocks, str) else asked.blocks
        return Whole(whole, name, asked.output, blocks, changes, looks=looks_of(model))
    if asked.output:
        raise UserError(f'model.output: "{name}" is a chain of layers, whose result the loss gets as a whole')
    if asked.blocks:
        raise UserError(f'model.blocks: "{name}" is a chain of layers already')
    if isinstance(model, Chain):
        found = Chain(entries(model)) if changes else model
    else:
        try:
            found = Chain(entries(model), lambda: entries(again()))
        except ValueError as error:
            raise UserError(f'model.name: "{name}": {error}') from error
    found.changes, found.looks = changes, looks_of(model)
    return found


def _changed(entry: Entry, name: str, changes: Changes | None) -> Entry:
    """A layer, or a function that makes one, with the changes that a job asks for."""
    if changes is None:
        return entry
    if isinstance(entry, nn.Module):
        return changes.apply(entry, name)

    def make() -> nn.Module:
        layer = entry()
        return changes.apply(layer, name) if isinstance(layer, nn.Module) else layer

    return make


def library_of(name: str) -> str:
    """Package from which a job has its model; empty if it is none of those known here."""
    library, colon, _ = name.partition(":")
    return library if colon and library in _LIBRARIES else ""


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
        return entries_of(copied([model])[0])

    return Chain(make(), make)


def entries_of(model: object) -> list[tuple[str, Entry]]:
    """Named layers, or functions that make them, in what a user's function returned. Raises TypeError or ValueError with a
    sentence if it is not a model."""
    if isinstance(model, Chain):
        return list(model.layers)
    if isinstance(model, nn.Sequential):
        if not _is_sequence(model):
            raise TypeError(
                f"{type(model).__name__} has a forward, hooks or state of its own, so its layers cannot be run one by one"
            )
        model = list(model._modules.items())  # named_children() leaves out repeated modules
    if not isinstance(model, list | tuple):
        raise TypeError(f"expected an nn.Module or a list of layers, got {type(model).__name__}")
    named = [entry if _is_named(entry) else (str(i), entry) for i, entry in enumerate(model)]
    for layer_name, layer in named:
        if not isinstance(layer, nn.Module) and not callable(layer):
            raise TypeError(f'layer "{layer_name}" is a {type(layer).__name__}, not an nn.Module')
    return named


def looks_of(model: object) -> dict[str, str]:
    """Text of each part of a model that a user's function has made, the same wherever the parts are the same: modules, their
    settings, and the shapes of their state. Parts that are yet to be made are left out."""
    if isinstance(model, Chain):
        return {}
    if isinstance(model, nn.Module) and not _is_sequence(model):
        parts: list[tuple[str, Any]] = [("", model), *model.named_children()]
    else:
        parts = entries_of(model)
    return {name: _look(part, recurse=bool(name)) for name, part in parts if isinstance(part, nn.Module)}


def _look(module: nn.Module, recurse: bool) -> str:
    try:
        text = repr(module) if recurse else f"{type(module).__qualname__}({module.extra_repr()})"
        state = [*module.named_parameters("", recurse, False), *module.named_buffers("", recurse, False)]
        text += "".join(f", {name} {tuple(value.shape)} {value.dtype}" for name, value in state)
    except Exception:  # of the user's own code, or a shape that is not known yet
        text = type(module).__qualname__
    return _ADDRESS.sub("", text)


def _is_sequence(model: nn.Module) -> bool:
    """True if a module does no more than call its parts in order, and has nothing beside them: hooks of its own would not be
    called, and parameters and buffers of its own would be in no layer."""
    kind, own = type(model), vars(model)
    if not isinstance(model, nn.Sequential) or "forward" in own or any(own.get(name) for name in HOOKS):
        return False
    state = (*own["_parameters"].values(), *own["_buffers"].values())
    return (kind.forward, kind.__call__, kind.get_extra_state) == _CALLS and all(one is None for one in state)


_CALLS = (nn.Sequential.forward, nn.Module.__call__, nn.Module.get_extra_state)


def _is_named(entry: object) -> bool:
    return isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str)

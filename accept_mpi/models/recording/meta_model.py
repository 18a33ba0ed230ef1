"""A model on torch's meta device, where tensors have shapes but no values: it costs no memory, and is recorded."""

import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from accept_mpi.errors import UserError
from accept_mpi.models.attributes import Attributes
from accept_mpi.models.common import Finder, Seen
from accept_mpi.models.held import OWN
from accept_mpi.models.memory import memory_of, overlap
from accept_mpi.models.modes import restore_modes
from accept_mpi.models.parts import part_at
from accept_mpi.models.recording.blocks import blocks_of
from accept_mpi.models.recording.kept import (
    AS_BEFORE,
    MISSING,
    SETS,
    UNSET,
    Sets,
    Values,
    get,
    is_set_anew,
    plain_attributes,
    put,
)
from accept_mpi.models.recording.own_hooks import Hooks, OwnHooks, is_handle
from accept_mpi.models.recording.refusals import SPARSE, Unrecordable, passed_by
from accept_mpi.models.recording.structure import is_plain, mapped, parts_of
from accept_mpi.models.scripted import refuse_scripted
from accept_mpi.models.shared import refuse_lazy

_OF_OTHERS = (
    nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.DataParallel,
    nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder,
)  # fmt: skip
"""Torch's modules that only call others."""
_SMALL = 1 << 16
"""Most bytes of a tensor whose values blocks are tried out with."""


class MetaModel:
    """A user's model, converted in place, and the names of what it consists of."""

    def __init__(self, model: nn.Module, blocks: tuple[str, ...] = ()) -> None:
        """``blocks``: names of modules that are recorded as wholes (``[model] blocks``). Raises UserError if parameters have
        no shape yet, or a name is of no module; Unrecordable for a model that is compiled."""
        refuse_lazy("model", model)
        refuse_scripted("the model", model)
        if model._compiled_call_impl is not None or type(model).__module__.startswith("torch._dynamo."):
            raise Unrecordable(
                "model.name: the model has been compiled as a whole (torch.compile): give it as it is, or compile its parts"
            )
        self.model = model
        self._blocks = blocks_of(model, blocks)
        self.undivided: list[str] = []
        """Patterns of names of further modules that are recorded as wholes."""
        self.paths: dict[int, str] = {}
        """Dotted name of each module, by its id."""
        self.states: dict[int, str] = {}
        """Dotted name of each of the model's tensors, by its id; the first name if there are several."""
        self.parameters: set[str] = set()
        """Those names that are of parameters."""
        self.known: dict[int, torch.Tensor] = {}
        """Values of small tensors that are not trained, such as flags and tables, by their ids."""
        self._memory: list[tuple[StorageWeakRef, str]] = []
        self._before: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}
        """Each of the model's tensors as the user's function made it, by its id, and the one that is there now."""
        self._made = self._to_meta()  # keeps ids from being used again
        self._leaves: dict[int, Attributes] = {}
        self._plain: dict[int, list[tuple[nn.Module, str, torch.Tensor]]] = {}
        self.remade: set[str] = set()
        """Names of plain tensors that hooks make anew whenever a module is called, as those of ``weight_norm`` do."""
        self.tensors = {name: self._made[which] for which, name in self.states.items()}
        """The model's tensors by name."""
        self._open: set[int] = set()
        """Modules without parts that are looked into, since they set attributes."""
        self.sets: set[str] = set()
        """Names of attributes that forwards set (``kept``)."""
        self._values: Values = {}
        """What was in the modules' attributes before the forward that runs."""
        self.hooks = OwnHooks(self.model)
        """Those that forwards find, and put there."""
        finder = Finder()
        finder.show(0, self.model)
        self._variables = finder.variables()
        """Variables of Python's and of functions that forwards refer to."""
        self.grown = False
        """True if the last forward has put something new into collections of the model, or into attributes."""
        self.changing: frozenset[str] = frozenset()
        """Names of those to which a recorded forward has written."""
        self.viewed: set[str] = set()
        """Names of buffers in whose memory tensors lie that forwards use and find elsewhere."""

    def _to_meta(self) -> dict[int, torch.Tensor]:
        """Put the model's tensors on the meta device, in place, and note their names. Returns them, by the ids of what they
        were made of, and by their own. Raises UserError for a sparse one."""
        made: dict[int, torch.Tensor] = {}
        laid: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for path, module in self.model.named_modules(remove_duplicate=False):
            self.paths.setdefault(id(module), path)
            prefix = f"{path}." if path else ""
            tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, module.__dict__)
            for table in tables:
                for name, tensor in list(table.items()):
                    if isinstance(tensor, torch.Tensor):
                        if tensor.layout is not torch.strided:
                            raise UserError(f"model.name: {prefix}{name} is {SPARSE}")
                        new = made.get(id(tensor))
                        if new is None:
                            new = made[id(tensor)] = _on_meta(tensor, laid)
                            made[id(new)] = new  # a module may be met again under another name
                            self._before[id(tensor)] = weakref.ref(tensor), new
                            if tensor.nbytes <= _SMALL and not tensor.requires_grad and not tensor.is_meta:
                                self.known[id(new)] = tensor.detach()
                            if table is not module.__dict__ and (memory := memory_of(tensor)) is not None:
                                self._memory.append((StorageWeakRef(memory), prefix + name))
                        table[name] = new
                        self.states.setdefault(id(new), prefix + name)
                        if isinstance(new, nn.Parameter):
                            self.parameters.add(self.states[id(new)])
        return made

    def parameter_in(self, tensor: torch.Tensor) -> str:
        """Name of the parameter in whose memory a tensor lies that the model holds outside of its modules' own tables (in a
        list, say); "" if there is none."""
        return next((name for name in self._around(tensor) if name in self.parameters), "")

    def _around(self, tensor: torch.Tensor) -> list[str]:
        """Names of parameters and buffers in whose memory a tensor lies."""
        with torch._C.DisableTorchFunction():  # a forward that is recorded would answer for the tensor that is there now
            memory = memory_of(tensor)
        return [name for one, name in self._memory if memory is not None and one.cdata == memory._cdata]

    def own(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The model's tensor that was made of this one, which a list or a function may hold; None for others."""
        before, now = self._before.get(id(tensor), (None, None))
        return now if before is not None and before() is tensor else None

    def reached(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, which a forward computes with. Raises Unrecordable for a parameter of the model that it does not reach
        through the model: by a view of it, say. Its shape and type may be asked for."""
        if error := passed_by(self.parameter_in(tensor)):
            raise error
        self.viewed.update(self._around(tensor))
        return tensor

    def is_leaf(self, module: nn.Module) -> bool:
        """True if the module's call is recorded as a whole."""
        kind = type(module)
        if self.is_block(module):
            return True
        if module is self.model or isinstance(module, _OF_OTHERS):
            return False
        if id(module) in self._open:
            return False
        if kind.__module__.startswith("torch.nn."):
            return True
        of_torch = any(base.__module__.startswith("torch.nn.") and base is not nn.Module for base in kind.__mro__)
        return not module._modules or (of_torch and bool(module._parameters))

    def keep_whole(self, path: str) -> bool:
        """From now on record this module as a whole, and all of its kind that have its place in other layers; False if it is
        one of these already."""
        pattern = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)
        kind = type(part_at(self.model, path))
        found = {
            id(module) for name, module in self.model.named_modules() if fnmatchcase(name, pattern) and type(module) is kind
        }
        if found <= self._blocks:
            return False
        self._blocks |= found
        self.undivided.append(pattern)
        return True

    def is_block(self, module: nn.Module) -> bool:
        """True if what the module's forward computes may depend on values."""
        return id(module) in self._blocks

    def changed(self, leaf: nn.Module) -> str:
        """Name of what the forward, within ``mode``, has changed of a module that is recorded as a whole; "" for nothing."""
        return next(iter(self._leaves[id(leaf)].changed()), "") or self.hooks.changed(leaf)

    def settle(self, leaf: nn.Module) -> None:
        """After a call of a module that is recorded as a whole: put back the plain tensors that its hooks have made anew."""
        self.hooks.settle(leaf)
        for holder, name, tensor in self._plain[id(leaf)]:
            if holder.__dict__.get(name) is not tensor:
                holder.__dict__[name] = tensor
                self.remade.add(self.states[id(tensor)])

    def state_names(self, module: nn.Module) -> tuple[str, ...]:
        """Names of a module's tensors, those of its parts included."""
        found = []
        for part in module.modules():
            for table in (part._parameters, part._buffers):
                found += [self.states[id(tensor)] for tensor in table.values() if tensor is not None]
        return tuple(dict.fromkeys(found))

    def with_aliases(self, names: frozenset[str]) -> frozenset[str]:
        """These names of the model's tensors, and their other names."""
        which = {id(self.tensors[name]) for name in names}
        found = set()
        for path, module in self.model.named_modules(remove_duplicate=False):
            for table in (module._parameters, module._buffers):
                found |= {f"{path}.{name}" if path else name for name, tensor in table.items() if id(tensor) in which}
        return frozenset(found)

    @contextmanager
    def mode(self, training: bool, attributes: Values | None = None, hooks: Hooks | None = None) -> Iterator[None]:
        """Within the context the model trains, as the user's function has left it, or is in evaluation mode; its attributes
        that forwards set (``sets``) have these values, or those that they had at first, and its modules these ``hooks``.

        Raises Sets if what happens within the context changes others: a record would not do that again.
        """
        modes = [(module, module.training) for module in self.model.modules()]
        if not training:
            self.model.eval()
        self._values = plain_attributes(self.model)
        put(self.model, attributes or {})
        self.hooks = OwnHooks(self.model)
        self.hooks.put(hooks or {})
        before, seen = Attributes([("", self.model)]), Seen([self.model], 0, self._variables)
        leaves = [(path, module) for path, module in self.model.named_modules() if self.is_leaf(module)]
        self._leaves = {id(module): Attributes([(path, module)]) for path, module in leaves}
        self._plain = {id(module): _plain_tensors(module) for _, module in leaves}
        try:
            yield
            changed = list(dict.fromkeys([*before.changed(), *self._new()]))
            self.grown = not set(before.changed(grown=True)) <= {*changed, *self.sets}
            if changed := [name for name in changed if name not in self.sets]:
                raise Sets(self.set_anew(changed), SETS.format(changed[0]))
            if outside := seen.changed():
                raise Sets({}, SETS.format(f"{outside[0].places[0][1].text}, a variable outside"))
        finally:
            self.hooks.put({})
            put(self.model, dict.fromkeys(self._new(), MISSING))
            put(self.model, {name: old for name, old in self._values.items() if get(self.model, name) is not old})
            restore_modes(modes)

    @contextmanager
    def same_tables(self) -> Iterator[None]:
        """On exit dictionaries in modules' attributes have the keys that they had: what forwards put there has no values."""
        own = (value for name, value in plain_attributes(self.model).items() if name.rpartition(".")[2] not in OWN)
        before = [(table, dict(dict.items(table))) for table in own if isinstance(table, dict)]
        try:
            yield
        finally:
            for table, items in before:
                if table.keys() != items.keys():
                    table.clear()
                    table.update(items)

    def _new(self) -> list[str]:
        """Names of the attributes that the forward, within ``mode``, has added, as far as they are plain or of hooks."""
        now = {name: value for name, value in plain_attributes(self.model).items() if name not in self._values}
        return [name for name, value in now.items() if is_plain(value) or is_handle(value)]

    def set_anew(self, names: Sequence[str]) -> dict[str, bool]:
        """Whether the forward, within ``mode``, has given these attributes other values, and not changed those they had."""
        return {name: is_set_anew(self._values.get(name, MISSING), get(self.model, name)) for name in names}

    def left(self, attributes: Values, constant: Callable[[torch.Tensor], Any]) -> Values:
        """What the forward, within ``mode`` with these ``attributes``, has left in those that forwards set. ``constant``
        gives the values of tensors."""
        found: Values = {}
        for name in sorted(self.sets):
            began, now = attributes.get(name, self._values.get(name, MISSING)), get(self.model, name)
            values = mapped(now, constant, (torch.Tensor,)) if is_plain(now) else UNSET
            found[name] = AS_BEFORE if now is began else UNSET if UNSET in parts_of(values, (type(UNSET),)) else values
        return found

    def let_set(self, names: Mapping[str, bool]) -> bool:
        """From now on forwards may set these attributes; False if one of them is changed in another way, or is of a module
        that can only be recorded as a whole."""
        if not names or not all(names.values()):
            return False
        for name in names:
            module = part_at(self.model, name.rpartition(".")[0])
            if self.is_leaf(module):
                if self.is_block(module) or type(module).__module__.startswith("torch.nn."):
                    return False
                self._open.add(id(module))
        self.sets |= names.keys()
        return True


def _on_meta(tensor: torch.Tensor, laid: dict[int, list[tuple[torch.Tensor, torch.Tensor]]]) -> torch.Tensor:
    """A tensor like this one, without values; in the memory of one of those before it in whose memory this one lies.
    ``laid``: those, and what they have become, by their storages."""
    if tensor.is_meta:
        return tensor
    new = torch.empty_like(tensor, device="meta")
    before = laid.setdefault(tensor.untyped_storage()._cdata, [])
    if (over := next((now for one, now in before if overlap(one, tensor)), None)) is not None:
        new = new.set_(over.untyped_storage(), 0, tensor.shape, tensor.stride())
    before.append((tensor.detach(), new))
    return nn.Parameter(new, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new


def _plain_tensors(leaf: nn.Module) -> list[tuple[nn.Module, str, torch.Tensor]]:
    """The tensors of a module and its parts that are neither parameters nor buffers, and may be computed by hooks in front
    of each call; and where they are."""
    return [
        (part, name, value)
        for part in leaf.modules()
        for name, value in vars(part).items()
        if isinstance(value, torch.Tensor) and part._forward_pre_hooks
    ]

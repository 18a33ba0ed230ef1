"""A recorded model: its records by shape and mode, its layers, and the chain that they make."""

import dataclasses
import itertools
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from accept_mpi.errors import UserError
from accept_mpi.models.aliases import every_name
from accept_mpi.models.base import Chain, Entry
from accept_mpi.models.parts import part_at
from accept_mpi.models.recording.arguments import arguments_of, hint
from accept_mpi.models.recording.calls import Strided, Viewed
from accept_mpi.models.recording.cutting import Flow, cut, cut_alike, cuts_in_both
from accept_mpi.models.recording.kept import SETS, UNSET, Record, Sets, Values, later, leaves_another, put
from accept_mpi.models.recording.key import keyed, value_of
from accept_mpi.models.recording.layer import Program, RecordedLayer, program, put_module, put_tensor
from accept_mpi.models.recording.meta_model import MetaModel
from accept_mpi.models.recording.output import select
from accept_mpi.models.recording.own_hooks import Hooks
from accept_mpi.models.recording.recorder import Recorder
from accept_mpi.models.recording.refusals import VIEWED, ReadsData, ResultVaries, Unrecordable
from accept_mpi.models.recording.structure import parts_of
from accept_mpi.models.recording.switches import as_if_compiled
from accept_mpi.models.recording.tape import Node, State, Tape
from accept_mpi.seeds import DRAWING

_MOST_RECORDS = 256
_VIEWS = (torch.Tensor.view, torch.Tensor.view_as, torch.view_as_complex)
_RECORDING = threading.RLock()
"""Held while a forward is recorded, since all modules' calls pass through the recorder then."""
Key = tuple[bytes, bool]


class RecordedModel:
    """A user's model with a forward of its own, divided into layers."""

    def __init__(
        self, make: Callable[[], nn.Module], value: Any, output: str, blocks: tuple[str, ...] = (), autocast: bool = False
    ) -> None:
        """``make`` gives a new model whenever it is called; ``value``: what the data set gives for a micro-batch of the
        usual size; ``output``: the part of the result that the loss gets (``[model] output``); ``blocks``: names of modules
        that are not looked into (``[model] blocks``); ``autocast``: forwards compute under torch's autocast, in bfloat16.

        Raises UserError, Unrecordable.
        """
        self._make, self._wanted, self._autocast = make, output, autocast
        # With its initial weights: what __init__ computes from them, or draws after them, is part of the record.
        self._meta = MetaModel(make(), blocks)
        self._check()
        self._as_if_compiled = False
        self._kept: tuple[Record, bytes, bool] | None = None
        """If forwards set attributes: the first record, and what it is for."""
        usual, _ = keyed(value)
        self._usual, evaluated = self._found_out(usual)
        """The record by which the model is cut; others are cut alike."""
        self._cuts = cuts_in_both(evaluated, self._usual, cut(self._usual), self._meta.parameters)
        self._programs: dict[Key, list[Program]] = {
            (usual, training): self._divided(flow) for training, flow in ((True, self._usual), (False, evaluated))
        }
        """Programs of all layers, by what they are for; the oldest first."""
        self._modules, self._tensors = self._held(list(self._programs.values()))
        self.names = self._layer_names()

    def chain(self) -> Chain:
        """The chain of its layers."""
        model = self._meta.model
        first = {id(parameter): n for n, parameter in enumerate(model.parameters())}
        order = {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
        chain = Chain.recorded(self.names, lambda: self.entries(self._make()), order)
        chain.undivided = self._meta.undivided
        chain.prepare = self._prepare
        return chain

    def _prepare(self, value: Any) -> None:
        """Record for the shapes of this value, if that has not been done."""
        self._programs_of(keyed(value)[0], True)

    def entries(self, model: nn.Module) -> list[tuple[str, Entry]]:
        """The layers of a new model, under their names. They hold the model's own modules and parameters. Raises UserError
        if it is not new."""
        if used := next((name for name, parameter in model.named_parameters() if parameter.is_meta), ""):
            raise UserError(f"model.name: the function gives the same {used} whenever it is called: it must make it anew")
        changing = self._meta.with_aliases(self._meta.changing)
        layers = [RecordedLayer(index, self._programs_of, changing) for index in range(len(self.names))]
        paths: dict[int, list[str]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            paths.setdefault(id(module), []).append(path)
        home: dict[int, int] = {}
        for index, layer in enumerate(layers):
            for path in self._modules[index]:
                module = part_at(model, path)
                for alias in paths[id(module)]:
                    put_module(layer, alias, module)
                for part in module.parameters():
                    home.setdefault(id(part), index)
            for name in self._tensors[index]:
                put_tensor(layer, name, model)
        there = {name for layer in layers for name in layer.state_dict()}
        own = {name for name, _ in every_name(model)}
        index = 0
        for name, tensor in model.state_dict(keep_vars=True).items():
            if isinstance(tensor, torch.Tensor):
                index = home.get(id(tensor), index)
                if name not in there and name not in own:
                    raise UserError(
                        f'model.name: its state_dict() has "{name}", which is no name of a parameter or buffer (a hook '
                        "renames it?), so the state cannot be divided"
                    )
                path = "" if name in there else self._leaf_with(name)
                if path and not any(one.startswith(f"{path}.") for one in there):  # it may be called for other shapes
                    put_module(layers[index], path, part_at(model, path))
                    there |= set(layers[index].state_dict())
                elif name not in there:
                    put_tensor(layers[index], name, model)
        put(model, dict.fromkeys(self._meta.sets, UNSET))  # for who looks there
        return list(zip(self.names, layers, strict=True))

    # ------------------------------------------------------------------------------------------------------------------

    def _leaf_with(self, name: str) -> str:
        """Path of the module recorded as a whole that has the tensor of this name; "" if there is none."""
        parts = name.split(".")[:-1]
        paths = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
        return next((path for path in paths if self._meta.is_leaf(part_at(self._meta.model, path))), "")

    def _check(self) -> None:
        """Raise UserError for state that layers would not have."""
        for path, module in self._meta.model.named_modules():
            own_state = type(module).get_extra_state is not nn.Module.get_extra_state
            if own_state and not self._meta.is_leaf(module):
                raise UserError(
                    f"model.name: {path or 'the model'} has state of its own (get_extra_state), which cannot be divided"
                )

    def _found_out(self, usual: bytes) -> tuple[Flow, Flow]:
        """The records for training and evaluation, once it is known which modules must stay whole in either: for each that
        fails both are begun again. Raises the first failure if the model itself is what fails."""
        first: Unrecordable | None = None
        while True:
            self._kept = None
            try:
                return self._recorded(usual, True), self._recorded(usual, False)
            except Unrecordable as error:
                if isinstance(error, Sets) and self._meta.let_set(error.names):
                    continue
                first = error if isinstance(error, ResultVaries) else first or error
                if not error.within or not self._meta.keep_whole(error.within):
                    raise first from first.__cause__

    def _recorded(self, key: bytes, training: bool) -> Flow:
        """A new record for inputs of these shapes."""
        try:
            with as_if_compiled() if self._as_if_compiled else nullcontext():
                return self._record(key, training)
        except ReadsData as error:
            try:
                with as_if_compiled():
                    found = self._record(key, training)
            except UserError as other:
                raise _further(error, other) from None
            self._as_if_compiled = True
            return found

    def _record(self, key: bytes, training: bool) -> Flow:
        with self._meta.same_tables():
            record = self._once(key, training)
            if self._meta.grown:  # with what a cache keeps, or with a count, which is another one now
                self._once(key, training)
            if self._meta.sets or record.hooks:
                self._check_kept(record, key, training)
        tape = record.tape
        written = tape.written
        tape.nodes = _laid_out(tape)
        self._meta.changing |= {name for name, memory in tape.memory_of.items() if memory in written}
        if stale := sorted(self._meta.viewed & self._meta.changing):
            raise Unrecordable(VIEWED.format(stale[0]))
        return Flow(tape, self._meta.changing)

    def _once(self, key: bytes, training: bool, attributes: Values | None = None, hooks: Hooks | None = None) -> Record:
        """A record of the forward, when the model's attributes that forwards set hold these values, and its modules have
        these hooks."""
        value, tensors = value_of(key)
        args, kwargs = arguments_of(self._meta.model, value)
        recorder = Recorder(self._meta, tensors, self._autocast)
        try:
            result = recorder.record(args, kwargs, training, attributes, hooks)
        except Unrecordable as error:
            error.args = (f"{error}{hint(self._meta.model, value, args, str(error))}",)
            raise
        recorder.tape.output = recorder.result(select(result, self._wanted))
        return Record(recorder.tape, recorder.constants, recorder.left, recorder.hooks)

    def _check_kept(self, record: Record, key: bytes, training: bool) -> None:
        """Raise Sets if what earlier forwards, of these shapes or the usual ones, leave in attributes matters to this one,
        or what this one leaves to the usual one."""
        own = (record, key, training)
        usual = self._kept = self._kept or own
        tried = [(own, record, usual[0])]
        if usual is not own:
            tried += [(own, usual[0], record), (usual, record, usual[0])]
        for (first, of, mode), newest, older in tried:
            began, hooks = later(newest.left, older.left), older.hooks | newest.hooks
            some = min([*began, *(f"{path}.{name}" for path, name in hooks)])
            try:
                again = self._once(of, mode, began, hooks)
            except UserError as error:
                raise Sets({}, SETS.format(some)) from error
            same = first.same(again) and again.hooks == hooks
            wrong = leaves_another(first.left, again.left) or ("" if same else some)
            if wrong:
                raise Sets({}, SETS.format(wrong))

    def _programs_of(self, key: bytes, training: bool) -> Sequence[Program]:
        """The programs of all layers, from a new record if there are none."""
        if (found := self._programs.get((key, training))) is not None:
            return found
        with DRAWING, _RECORDING:  # lanes may meet a new shape at the same moment
            if (found := self._programs.get((key, training))) is None:
                found = self._programs[key, training] = self._divided(self._recorded(key, training))
                if len(self._programs) > _MOST_RECORDS:
                    del self._programs[next(iter(self._programs))]
            return found

    def _divided(self, flow: Flow) -> list[Program]:
        """The programs of all layers."""
        return _divided(flow, cut_alike(flow, self._usual, self._cuts, self._meta.parameters))

    def _held(self, programs: Sequence[Sequence[Program]]) -> tuple[list[list[str]], list[list[str]]]:
        """For each layer, the names of the modules that it calls, and of the model's tensors that it uses directly."""
        modules: list[dict[str, None]] = [{} for _ in programs[0]]
        tensors: list[dict[str, None]] = [{} for _ in programs[0]]
        for index, one in ((index, one) for layers in programs for index, one in enumerate(layers)):
            for step in one.steps:
                if step.node.function is None:
                    modules[index][step.node.module] = None
                given = parts_of((step.node.args, step.node.kwargs), (State,))
                tensors[index].update(dict.fromkeys(place.name for place in given))
            tensors[index].update(dict.fromkeys(place.name for place in parts_of(one.output, (State,))))
        return [list(one) for one in modules], [list(one) for one in tensors]

    def _layer_names(self) -> list[str]:
        """A layer's name is that of its first part with parameters."""
        found: list[str] = []
        for start, stop in _runs(self._usual, self._cuts):
            nodes = self._usual.tape.nodes[start:stop]
            first = next((node for node in nodes if node.parameters), None)
            name = "layer"
            if first is not None:
                name = first.module or next(n for n in first.states if n in self._meta.parameters)
            name = name.replace(".", "-").replace("/", "-")
            same = sum(1 for one in found if one == name or one.startswith(f"{name}~"))
            found.append(f"{name}~{same + 1}" if same else name)
        return found


def _further(error: Unrecordable, other: UserError) -> UserError:
    """What is to be done something about: the ``error`` of a forward, or the ``other`` one that it comes to if it is told to
    be compiled."""
    if isinstance(other, Sets) and other.names:
        return other
    return other if isinstance(other, Unrecordable) and other.within not in ("", error.within) else error


def _laid_out(tape: Tape) -> list[Node]:
    """A tape's nodes, for whatever memory format images have: views and ``as_strided`` may copy, unless something is
    written there later."""
    found: list[Node] = []
    later: set[int] = set()
    for node in reversed(tape.nodes):
        function = node.function
        if function in _VIEWS and tape.specs[node.gives[0]].memory not in later:
            function = Viewed(function)
        elif function in (torch.as_strided, torch.Tensor.as_strided) and node.takes:
            spec = tape.specs[node.takes[0]]
            function = Strided(function, spec.stride, spec.offset, spec.memory not in later)
        found.append(dataclasses.replace(node, function=function))
        later |= node.writes
    return found[::-1]


def _runs(flow: Flow, cuts: Sequence[int]) -> list[tuple[int, int]]:
    """First node, and last + 1, of each layer."""
    return list(itertools.pairwise([0, *cuts, len(flow.tape.nodes)]))


def _divided(flow: Flow, cuts: Sequence[int]) -> list[Program]:
    """The programs of all layers."""
    tape, runs = flow.tape, _runs(flow, cuts)
    found: list[Program] = []
    for n, (start, stop) in enumerate(runs, 1):
        last = n == len(runs)  # the last ones may be empty, and alike
        takes = list(tape.inputs) if not found else flow.crossing(start)
        gives = tape.results if last else flow.crossing(stop)
        nodes = [tape.nodes[at] for at in flow.steps(start, stop, tape.results if last else ())]
        found.append(program(nodes, takes, gives, tape.output if last else None))
    return found

"""Records a model's forward: real Python runs on torch's meta device, and each call of a leaf module or of a torch function
becomes a node of the tape.

Shapes, configuration and None steer the recorded Python as they steer the model's own; values of tensors cannot, so reading
one (``if mask.all():``) is refused with file and line.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from accept_mpi.errors import UserError
from accept_mpi.models.recording.autocasting import Autocast, casting, lower, watched
from accept_mpi.models.recording.blocks import Trials
from accept_mpi.models.recording.calls import EFFECTS, READS, Apply, Made, averages, of_arrays, on_devices, refers_to_tensors
from accept_mpi.models.recording.constants import Constants
from accept_mpi.models.recording.counting import Counting, place_of
from accept_mpi.models.recording.kept import UNSET, Sets, Values
from accept_mpi.models.recording.meta_model import MetaModel
from accept_mpi.models.recording.own_hooks import Hooks
from accept_mpi.models.recording.places import Places
from accept_mpi.models.recording.refusals import (
    READS_DATA,
    TRANSFORMS,
    Foreign,
    ReadsData,
    Unrecordable,
    innermost,
    is_for_want_of_values,
    passed_by,
    where,
    without_values,
)  # fmt: skip
from accept_mpi.models.recording.replaced import computed_once, replaced
from accept_mpi.models.recording.structure import as_it_is, constants_in, fixed_in, is_plain, mapped, parts_of, tensors_in
from accept_mpi.models.recording.switches import as_it_will_run, switches
from accept_mpi.models.recording.tape import WHERE, Node, State, Tape
from accept_mpi.models.untouched import untouched
from accept_mpi.seeds import kept, state
from accept_mpi.users_code import RAISED

_ASSIGNED = ("__set__", "__delete__")
_NEEDS_GRADIENT = vars(torch._C.TensorBase)["requires_grad"].__set__
_NEW = {"new_zeros": torch.zeros, "new_ones": torch.ones, "new_empty": torch.empty, "new_full": torch.full}
"""Of a parameter these take no more than the type, and where it lies."""


class _Functions(TorchFunctionMode):
    def __init__(self, recorder: "Recorder") -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return self._recorder.function(*on_devices(func, args, kwargs or {}))
        except Unrecordable as error:
            self._recorder.refuse(error)
            raise


class Recorder:
    """Writes a tape. ``autocast``: of forwards that compute under torch's autocast, in bfloat16."""

    def __init__(self, of: MetaModel, inputs: list[torch.Tensor], autocast: bool = False) -> None:
        self._of, self._bf16 = of, autocast
        self._within: list[str] = []
        """Names of the modules whose forward runs, "" for blocks and those made in forward; the innermost last."""
        self._busy = False
        self._written: list[torch.Tensor] = []
        """What a call has written to without a trace in the tensors' versions."""
        self._thread = threading.get_ident()
        self._switches = switches()
        self._counting, self._calling = Counting(), ""
        self._changed: dict[str, set[str]] = {}  # by the modules that have been called, the attributes that they change
        self._refusal: Unrecordable | None = None
        self._autocast: Sequence[Autocast] = []
        """The ``torch.autocast`` contexts of the forward that are open."""
        self.tape = Tape(())
        self._places = Places(of, self.tape, self._failed)
        self.constants = Constants(self.tape)
        self.left, self.hooks = Values(), Hooks()
        """What the forward has left in attributes that it sets, and in tables of hooks."""
        self.tape.inputs = tuple(self._places.slot(tensor) for tensor in inputs)
        self.tape.memory_of = {name: self._places.memory(tensor) for name, tensor in of.tensors.items()}

    def record(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool, attributes: Values | None, hooks: Hooks | None
    ) -> Any:
        """Record ``model(*args, **kwargs)``, in which ``inputs`` are the tensors, on the meta device; returns its result.
        ``attributes`` and ``hooks`` as in ``MetaModel.mode``. The tape's ``output`` is left to the caller (``result``).
        Raises Unrecordable, UserError."""
        outer = torch.enable_grad() if training else torch.no_grad()
        _, *before = state()
        with (
            kept(),
            untouched([self._of.model]),
            self._of.mode(training, attributes, hooks),
            outer,
            torch.autocast("cpu", torch.bfloat16, self._bf16, cache_enabled=False),
            torch.device("meta"),
            self._counting,
            self._watching(),
        ):
            try:
                found = self._of.model(*args, **kwargs)
            except UserError:
                raise
            except RAISED as error:
                raise self._refusal or self._without_values(error, innermost(error)) from error
            if self._refusal is not None:  # which the forward has caught
                raise self._refusal
            given = parts_of([(node.args, node.kwargs) for node in self.tape.nodes], (State,))
            if name := next((place.name for place in given if place.name in self._of.remade), ""):
                raise Unrecordable(f"model.name: forward uses {name}, which the module that has it makes anew in each call")
            _, *after = state()  # torch's own does not count: some functions draw from it on the meta device, too
            self._busy = True
            self.left, self.hooks = self._of.left(attributes or {}, self._constant), self._of.hooks.left()
            self._busy = False
            if after != before:
                raise Unrecordable(
                    "model.name: the forward asks Python's or NumPy's random numbers what to compute, which cannot be "
                    "recorded; torch's own can, if no choice depends on them"
                )
        return found

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Within the context all calls of this thread are recorded."""

        def mine() -> bool:
            return not self._busy and threading.get_ident() == self._thread

        def apply(plain: Any, cls: Any, *args: Any, **kwargs: Any) -> Any:
            if not mine():
                return plain(cls, *args, **kwargs)
            if cls is CheckpointFunction:
                return computed_once(*args)
            if not is_plain(args):
                said = f"{cls.__name__}, called in forward, takes what is no tensor and no constant, which no record does"
                raise Unrecordable(f"model.name: {said} ({where()})")
            return self._recorded(Apply(cls), "", partial(plain, cls), args, {}, (), True)

        def call(plain: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self.module(module, plain, args, kwargs) if mine() else plain(module, *args, **kwargs)

        def script(plain: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
            if not mine():
                return plain(function, *args, **kwargs)
            return self._recorded(function, "", partial(plain, function), args, kwargs, (), False)

        def seed(plain: Any, *args: Any) -> Any:
            if threading.get_ident() != self._thread:
                return plain(*args)
            raise self._failed(
                Unrecordable, f"model.name: forward seeds torch's random numbers, which no record does ({where()})"
            )

        with replaced(call, apply, script, seed), watched() as self._autocast, _Functions(self):
            yield

    # -- calls ---------------------------------------------------------------------------------------------------------

    def module(self, module: nn.Module, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A module is called."""
        path = self._of.paths.get(id(module))
        self._within.append("" if path is None or self._of.is_block(module) else path)
        found = self._called(module, path, plain, args, kwargs)
        self._within.pop()  # not if it fails: then it is named
        return found

    def _called(self, module: nn.Module, path: str | None, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        hooks = module._backward_hooks or module._backward_pre_hooks
        if path is None:
            if module._modules or module._buffers or not is_plain((args, kwargs)):
                return plain(module, *args, **kwargs)  # its parts, and what it calls, are recorded
            own = list(module.parameters())
            for parameter in own:
                if self._of.own(parameter) is None:
                    raise passed_by(self._of.parameter_in(parameter)) or Foreign()
            if own:  # of the model, though the module is in a list
                return plain(module, *args, **kwargs)
            return self._recorded(Made(module), "", lambda *a, **k: plain(module, *a, **k), args, kwargs, (), False)
        plainly = is_plain((args, kwargs))
        if self._of.is_block(module) and not plainly:
            strange = next(type(one).__name__ for one in constants_in((args, kwargs)) if not is_plain(one))
            raise self._failed(
                Unrecordable, f"model.blocks: {path} is to stay whole, but takes a {strange}, which cannot be recorded"
            )
        if not self._of.is_leaf(module) or not plainly:
            if hooks:
                raise Unrecordable(
                    f"model.name: {path or 'the model'} has a backward hook, which can be called only for a module that is "
                    "recorded as a whole; put it on one of torch.nn's modules within"
                )
            with as_it_will_run(module):
                return plain(module, *args, **kwargs)
        if name := self._of.changed(module):
            self._within[-1] = ""
            said = f"model.name: forward changes {name} before it calls {path}, which no record does ({where()})"
            raise self._failed(partial(Sets, self._of.set_anew([name])), said)
        if self._of.hooks.around(module):
            with self._of.hooks.apart(module, lambda *a, **k: self._called(module, path, plain, a, k)):
                return plain(module, *args, **kwargs)
        block = self._of.is_block(module)
        again, changed = path in self._changed, self._changed.setdefault(path, set())
        call = Trials(module, plain, self._of.known, changed, self._written) if block else partial(plain, module)
        found = self._recorded(None, path, call, args, kwargs, self._of.state_names(module), True, block)
        self._of.settle(module)
        if again and changed:
            raise UserError(
                f"model.name: {path} stays whole, changes {min(changed)} and is called twice, perhaps in two layers "
                f"({where()}); name the module around it in model.blocks"
            )
        return found

    def function(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A torch function is called."""
        name = self._calling = getattr(func, "__name__", "")
        self._counting.lower = precision = lower()
        if self._busy:
            self._written += averages(name, args, kwargs)
            return casting(func, name, precision)(*args, **kwargs)
        if torch._C._are_functorch_transforms_active():
            raise Unrecordable(TRANSFORMS.format(where()))
        if func == _NEEDS_GRADIENT:
            func, name = torch.Tensor.requires_grad_, "requires_grad_"
        if name in _NEW and id(args[0]) in self._of.states:
            func, (like, *args) = _NEW[name], args
            kwargs = {"dtype": like.dtype, "device": like.device} | {k: one for k, one in kwargs.items() if one is not None}
        if name in _ASSIGNED:
            raise Unrecordable(f"model.name: forward sets an attribute of a tensor, which cannot be recorded ({where()})")
        if name in READS and tensors_in(args):
            return self._read(func, name, args, kwargs)
        if name == "__get__" and func in WHERE:
            return WHERE[func]
        if name == "type" and len(args) == 1 and not kwargs:
            return f"torch.{args[0].type().split('.')[-1]}"  # as on the CPU
        if name == "requires_grad_" and id(args[0]) in self._of.states:
            raise self._failed(
                Unrecordable,
                f"model.name: forward says whether {self._of.states[id(args[0])]} requires a gradient, which no record does "
                f"({where()}); use what needs none by detach()",
            )
        if parts_of((args, kwargs), (torch.Generator,)):
            raise self._failed(
                Unrecordable,
                f"model.name: forward draws from a generator of its own, whose state a record does not keep ({where()}); "
                "make what it draws in __init__, as a buffer, or draw from torch's own",
            )
        self._written = averages(name, args, kwargs)
        if name in EFFECTS and refers_to_tensors(args):
            said = "forward puts a hook on a tensor that refers to another tensor, which no record does"
            raise self._failed(Unrecordable, f"model.name: {said} ({where()})")
        node = of_arrays(func, args, kwargs)
        return self._recorded(node, "", casting(func, name, precision), args, kwargs, (), name in EFFECTS)

    def _recorded(
        self,
        function: Callable[..., Any] | None,
        module: str,
        call: Callable[..., Any],
        args: Any,
        kwargs: Any,
        states: tuple[str, ...],
        stays: bool,
        block: bool = False,
    ) -> Any:
        self._refuse_switches()
        self._busy = True
        try:
            args, kwargs = mapped((args, kwargs), self._places.stand_in, (torch.Tensor, torch.device))
            given = tensors_in((args, kwargs))
            places = as_it_is(mapped((args, kwargs), self._places.place, (torch.Tensor, torch.device)))
            operations, self._counting.drew, self._counting.written = self._counting.total, False, set()
            if module:
                self._written.clear()
            found = mapped(call(*args, **kwargs), self._places.stand_in, (torch.Tensor,))
            written = self._written_of([*given, *(self._of.tensors[name] for name in states)])
            results = tensors_in(found)
            if module and not is_plain(found) and not results:
                raise Unrecordable(f"model.name: {module} gives a {type(found).__name__}, which cannot be recorded")
            if not results and not written and not stays:
                return found
            self._places.reach((*given, *results))
            used = tuple(dict.fromkeys(self._of.states[id(t)] for t in given if id(t) in self._of.states))
            takes, gives = self._places.taken(given), tuple(self._places.slot(tensor) for tensor in results)
            writes, draws = frozenset(self._places.memory(tensor) for tensor in written), self._counting.drew
            of_constants = not (states or used or stays or draws) and self.constants.slots.issuperset(takes)
            self._note_constants(gives, writes, of_constants)
            args, kwargs = places
            self.tape.nodes.append(
                Node(
                    function, module, args, kwargs, takes, gives, (*states, *used),
                    any(one in self._of.parameters for one in (*states, *used)), writes, stays, draws, of_constants,
                    torch.is_grad_enabled(), tuple(self._autocast),
                    fixed_in(found) if block else None, self._counting.total - operations,
                )
            )  # fmt: skip
            return found
        except Exception as error:
            if is_for_want_of_values(error):  # the forward may catch it
                self._without_values(error, where())
            raise
        finally:
            self._busy, self._written = False, []

    def _refuse_switches(self) -> None:
        """Raise Unrecordable if a switch of torch's is not as it was when the forward began."""
        if wrong := next((name for name, value in switches().items() if value != self._switches[name]), ""):
            raise self._failed(
                Unrecordable, f"model.name: forward sets {wrong} around a call, which no record does ({where()})"
            )

    def _written_of(self, watched: list[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors to which a call has written. Raises Unrecordable if one is neither the model's nor made in the forward."""
        written = [tensor for tensor in watched if place_of(tensor) in self._counting.written]
        written += [tensor for tensor in self._written if tensor.is_meta]
        if self._places.any_real(written):
            raise self._failed(
                Unrecordable,
                f"model.name: forward writes to a tensor that is no buffer of the model, so each rank would have a copy "
                f"({where()}); make it one by register_buffer, or in each forward by torch.empty",
            )
        return written

    def _note_constants(self, gives: tuple[int, ...], writes: frozenset[int], of_constants: bool) -> None:
        """Note whether what a call gives is the same in every step: it is if the call is ``of_constants`` alone. What it
        writes to is not any more."""
        if of_constants:
            self.constants.slots.update(gives)
        else:
            specs = self.tape.specs
            self.constants.slots -= {slot for slot in self.constants.slots if slot in gives or specs[slot].memory in writes}

    def _read(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """The value of a tensor is asked for: of one that is the same in every step it is computed."""
        self._busy = True
        try:

            def value(tensor: torch.Tensor) -> torch.Tensor:
                tensor = self._places.stand_in(tensor)
                if (real := self._places.real(tensor)) is not None:
                    return self._of.reached(real)
                slot = self._places.known(tensor)
                if slot not in self.constants.slots:
                    raise self._failed(ReadsData, READS_DATA.format(name.strip("_"), where()))
                return self.constants.value(slot)

            args = mapped(args, value, (torch.Tensor,))
            return func(*args, **kwargs)
        finally:
            self._busy = False

    def _constant(self, tensor: torch.Tensor) -> Any:
        """Value of a tensor that is a constant, or ``UNSET``."""
        slot = self._places.known(tensor)
        if not tensor.is_meta:
            return tensor
        known = slot in self.constants.slots and self.constants.is_used_as_it_is(slot)
        return self.constants.value(slot) if known else UNSET

    def refuse(self, error: Unrecordable) -> None:
        """Remember why the forward cannot be recorded: it may catch the exception, and go on in another way."""
        self._refusal = self._refusal or error

    def _without_values(self, error: BaseException, at: str) -> Unrecordable:
        """The error for what a forward raises where tensors have no values."""
        return self._failed(*without_values(error, self._calling, at))

    def _failed(self, kind: Callable[[str], Unrecordable], text: str) -> Unrecordable:
        """The error for what fails in the forward that runs."""
        error = kind(text)
        error.within = next((path for path in reversed(self._within) if path), "")
        self.refuse(error)
        return error

    def result(self, value: Any) -> Any:
        """A structure with places instead of tensors."""
        return mapped(value, self._places.place, (torch.Tensor,))

"""Records a model's forward: real Python runs on torch's meta device, and each call of a leaf module or of a torch function
becomes a node of the tape.

Shapes, configuration and None steer the recorded Python as they steer the model's own; values of tensors cannot, so reading
one (``if mask.all():``) is refused with file and line.
"""

import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from accept_mpi.errors import UserError
from accept_mpi.models.recording.blocks import try_out
from accept_mpi.models.recording.calls import Apply, Made
from accept_mpi.models.recording.meta_model import MetaModel
from accept_mpi.models.recording.structure import constants_in, is_plain, mapped, tensors_in
from accept_mpi.models.recording.tape import DEVICE, Node, Spec, State, Tape, Value

_OWN = (str(Path(__file__).parent), str(Path(torch.__file__).parent))
_RANDOM = (
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli", "bernoulli_", "normal",
    "normal_", "uniform_", "multinomial", "poisson", "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout",
    "feature_alpha_dropout", "feature_dropout", "dropout_", "exponential_", "geometric_", "cauchy_", "log_normal_",
    "random_", "rrelu", "rrelu_", "gumbel_softmax",
)  # fmt: skip
_EFFECTS = ("register_hook", "retain_grad", "register_post_accumulate_grad_hook")
_READS = (
    "item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__complex__", "is_nonzero", "numpy", "equal",
    "__contains__", "allclose",
)  # fmt: skip
_ASSIGNED = ("__set__", "__delete__")


class Unrecordable(UserError):
    """A forward that cannot be recorded; the message says why, with file and line."""

    within = ""
    """Name of the module in whose forward that is found out, if that module may be recorded as a whole instead."""


class ReadsData(Unrecordable):
    """A forward that depends on the values of its data."""


@contextmanager
def as_if_compiled() -> Iterator[None]:
    """Within the context ``torch.compiler.is_compiling()`` is true: libraries then take a way that does not depend on
    values, where they have one (transformers makes masks that it else leaves out where nothing is masked)."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def _generators() -> tuple[Any, Any]:
    """States of Python's and NumPy's random numbers."""
    return random.getstate(), str(np.random.get_state(legacy=False))


class _Counting(TorchDispatchMode):
    """Counts floating-point operations."""

    total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.total += count(*args, **kwargs, out_val=found)
        return found


class _Functions(TorchFunctionMode):
    def __init__(self, recorder: "Recorder") -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._recorder.function(func, args, kwargs or {})


class Recorder:
    """Writes a tape."""

    def __init__(self, of: MetaModel, inputs: list[torch.Tensor]) -> None:
        self._of = of
        self._slots: dict[int, int] = {}
        self._kept: list[torch.Tensor] = []
        """All tensors, by slot, so that their ids stay theirs."""
        self._memories: dict[int, int] = {}
        self._real: dict[int, torch.Tensor] = {}
        """Tensors with values that the forward uses though they are not the model's, by their stand-in's id."""
        self._stand_ins: dict[int, torch.Tensor] = {}
        self._within: list[str] = []
        """Names of the modules whose forward runs, "" for blocks and those made in forward; the innermost last."""
        self._constants: set[int] = set()
        """Slots that depend on no input and none of the model's tensors."""
        self._busy = self._drew = False
        self._written: list[torch.Tensor] = []
        """What a call has written to without a trace in the tensors' versions."""
        self._thread = threading.get_ident()
        self._counting = _Counting()
        self.tape = Tape(())
        self.tape.inputs = tuple(self._slot(tensor) for tensor in inputs)
        self.tape.memory_of = {name: self._memory(tensor) for name, tensor in of.tensors.items()}

    def record(self, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool) -> Any:
        """Record ``model(*args, **kwargs)``, in which ``inputs`` are the tensors, on the meta device; returns its result.
        The tape's ``output`` is left to the caller (``result``). Raises Unrecordable, UserError."""
        outer = torch.enable_grad() if training else torch.no_grad()
        generators = _generators()
        with self._of.mode(training), outer, torch.device("meta"), self._counting, self._watching():
            try:
                found = self._of.model(*args, **kwargs)
            except UserError:
                raise
            except Exception as error:
                kind = ReadsData if "meta tensor" in str(error).lower() else Unrecordable
                raise self._failed(
                    kind,
                    f"model.name: the forward cannot be recorded: {type(error).__name__}: {' '.join(str(error).split())} "
                    f"({_innermost(error)})",
                ) from error
        if _generators() != generators:
            raise Unrecordable(
                "model.name: the forward asks Python's or NumPy's random numbers what to compute, which cannot be recorded; "
                "torch's own can, if no choice depends on them"
            )
        return found

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Within the context all calls of this thread are recorded."""
        plain_call, plain_apply = nn.Module.__call__, torch.autograd.Function.__dict__["apply"]
        recorder = self

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if recorder._busy or threading.get_ident() != recorder._thread:
                return plain_call(module, *args, **kwargs)
            return recorder.module(module, plain_call, args, kwargs)

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if recorder._busy or threading.get_ident() != recorder._thread:
                return plain_apply.__func__(cls, *args, **kwargs)
            if not is_plain(args):
                raise Unrecordable(
                    f"model.name: {cls.__name__}, called in forward, takes what is no tensor and no constant, which cannot "
                    f"be recorded ({_where()})"
                )
            return recorder._recorded(Apply(cls), "", lambda *a: plain_apply.__func__(cls, *a), args, {}, (), True)

        nn.Module.__call__ = call  # type: ignore[method-assign]
        torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment]
        try:
            with _Functions(self):
                yield
        finally:
            nn.Module.__call__ = plain_call  # type: ignore[method-assign]
            torch.autograd.Function.apply = plain_apply  # type: ignore[method-assign]

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
            if next(module.parameters(), None) is not None:
                raise Unrecordable(
                    f"model.name: forward uses a parameter that is no part of the model: make it in __init__ ({_where()})"
                )
            if module._modules or not is_plain((args, kwargs)):
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
            return plain(module, *args, **kwargs)
        block = self._of.is_block(module)
        call = partial(try_out, module, plain) if block else partial(plain, module)
        return self._recorded(None, path, call, args, kwargs, self._of.state_names(module), True, block)

    def function(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A torch function is called."""
        name = getattr(func, "__name__", "")
        if self._busy:
            self._drew = self._drew or _draws(name, args, kwargs)
            self._written += _averages(name, args, kwargs)
            return func(*args, **kwargs)
        if torch._C._are_functorch_transforms_active():
            raise Unrecordable(
                f"model.name: forward uses a transform of torch.func, which cannot be recorded unless it is within a module "
                f"without parts ({_where()})"
            )
        if name in _ASSIGNED:
            raise Unrecordable(f"model.name: forward sets an attribute of a tensor, which cannot be recorded ({_where()})")
        if name in _READS and tensors_in(args):
            return self._read(func, name, args, kwargs)
        self._drew, self._written = _draws(name, args, kwargs), _averages(name, args, kwargs)
        return self._recorded(func, "", func, args, kwargs, (), name in _EFFECTS)

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
        self._busy = True
        try:
            args, kwargs = mapped((args, kwargs), self._stand_in, (torch.Tensor,))
            given = tensors_in((args, kwargs))
            places = mapped((args, kwargs), self._place, (torch.Tensor, torch.device))
            watched = [*given, *(self._of.tensors[name] for name in states)]
            versions = [tensor._version for tensor in watched]
            operations = self._counting.total
            if module:
                self._drew, self._written = False, []
            found = call(*args, **kwargs)
            found = mapped(found, self._stand_in, (torch.Tensor,))
            written = [tensor for tensor, old in zip(watched, versions, strict=True) if tensor._version != old]
            written += [tensor for tensor in self._written if tensor.is_meta]
            results = tensors_in(found)
            if module and not is_plain(found) and not results:
                raise Unrecordable(f"model.name: {module} gives a {type(found).__name__}, which cannot be recorded")
            if not results and not written and not stays:
                return found
            used = tuple(dict.fromkeys(self._of.states[id(t)] for t in given if id(t) in self._of.states))
            takes = tuple(
                dict.fromkeys(self._slots[id(t)] for t in given if id(t) in self._slots and id(t) not in self._of.states)
            )
            known = len(self._kept)
            gives = tuple(self._slot(tensor) for tensor in results)
            writes = frozenset(self._memory(tensor) for tensor in written)
            plain = not states and not used and not writes and not stays and not self._drew
            if plain and all(slot in self._constants for slot in takes):
                self._constants.update(slot for slot in gives if slot >= known)
            args, kwargs = places
            self.tape.nodes.append(
                Node(
                    function, module, args, kwargs, takes, gives, states or used,
                    any(one in self._of.parameters for one in states or used), writes, stays, self._drew,
                    torch.is_grad_enabled(), tuple(one.shape for one in results) if block else None,
                    self._counting.total - operations,
                )
            )  # fmt: skip
            return found
        finally:
            self._busy, self._drew, self._written = False, False, []

    def _read(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """The value of a tensor is asked for: of one that is the same in every step it is computed."""
        self._busy = True
        try:

            def value(tensor: torch.Tensor) -> torch.Tensor:
                if not tensor.is_meta:
                    return tensor
                slot = self._slots.get(id(tensor))
                if slot not in self._constants:
                    raise self._failed(
                        ReadsData,
                        f"model.name: forward depends on the values of its data ({name.strip('_')}() of a tensor), so it "
                        f"cannot be recorded ({_where()})",
                    )
                with torch.device("cpu"):
                    return self._value(slot)

            args = mapped(args, value, (torch.Tensor,))
            return func(*args, **kwargs)
        finally:
            self._busy = False

    def _failed(self, kind: type[Unrecordable], text: str) -> Unrecordable:
        """The error for what fails in the forward that runs."""
        error = kind(text)
        error.within = next((path for path in reversed(self._within) if path), "")
        return error

    def _value(self, slot: int) -> torch.Tensor:
        """Value of a constant."""
        node = next(node for node in self.tape.nodes if slot in node.gives)

        def real(place: Any) -> Any:
            return self._value(place.slot) if isinstance(place, Value) else torch.device("cpu")

        args, kwargs = mapped((node.args, node.kwargs), real, (Value, type(DEVICE)))
        assert node.function is not None
        return dict(zip(node.gives, tensors_in(node.function(*args, **kwargs)), strict=True))[slot]

    # -- places --------------------------------------------------------------------------------------------------------

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself, or one on the meta device for it."""
        if tensor.is_meta:
            return tensor
        new = self._stand_ins.get(id(tensor))
        if new is None:
            new = self._stand_ins[id(tensor)] = torch.empty_like(tensor, device="meta")
            self._real[id(new)] = tensor
        return new

    def _place(self, value: Any) -> Any:
        if isinstance(value, torch.device):
            return DEVICE if value.type == "meta" else value
        if (name := self._of.states.get(id(value))) is not None:
            return State(name)
        if (slot := self._slots.get(id(value))) is not None:
            return Value(slot)
        if (real := self._real.get(id(value))) is not None:
            return real
        if isinstance(value, nn.Parameter):
            raise Unrecordable(
                f"model.name: forward uses a parameter that is no part of the model: make it in __init__ ({_where()})"
            )
        raise Unrecordable(f"model.name: forward uses a tensor whose origin cannot be recorded ({_where()})")

    def result(self, value: Any) -> Any:
        """A structure with places instead of tensors."""
        return mapped(value, self._place, (torch.Tensor,))

    def _slot(self, tensor: torch.Tensor) -> int:
        """Number of a tensor; a new one for a new tensor."""
        found = self._slots.get(id(tensor))
        if found is None:
            found = self._slots[id(tensor)] = len(self._kept)
            self._kept.append(tensor)
            nbytes = tensor.numel() * tensor.element_size()
            self.tape.specs.append(Spec(self._memory(tensor), tensor.requires_grad, nbytes))
        return found

    def _memory(self, tensor: torch.Tensor) -> int:
        return self._memories.setdefault(tensor.untyped_storage()._cdata, len(self._memories))


def _draws(name: str, args: Any, kwargs: Any) -> bool:
    """True if a function draws random numbers."""
    if name == "scaled_dot_product_attention":
        return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))
    return name in _RANDOM


def _averages(name: str, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The running averages that ``batch_norm`` writes to: it alone of torch's functions does not count that as a version."""
    if name != "batch_norm":
        return []
    given = dict(zip(("input", "running_mean", "running_var", "weight", "bias", "training"), args, strict=False)) | kwargs
    both = (given.get("running_mean"), given.get("running_var"))
    return [one for one in both if isinstance(one, torch.Tensor)] if given.get("training") else []


def _where() -> str:
    """File and line of the model's code that is running."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OWN):
        frame = frame.f_back  # type: ignore[assignment]
    return f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}" if frame else "unknown place"


def _innermost(error: Exception) -> str:
    found, at = error.__traceback__, "unknown place"
    while found is not None:
        name = found.tb_frame.f_code.co_filename
        if not name.startswith(_OWN):
            at = f"{Path(name).name}, line {found.tb_lineno}"
        found = found.tb_next
    return at

"""Keeps torch from importing its compiler where nothing is compiled.

Torch imports ``torch._dynamo`` as soon as an optimizer's methods, or those functions that are written in Python for the
meta device (drawing weights, BatchNorm), are called, only to mark them as not to be compiled. That takes more than a second
of a core, as long as torch itself, three to four seconds of a small device's start, and 70 MiB of memory. What is computed
on the meta device asks ``torch.fx.experimental.symbolic_shapes`` whether sizes are what they must be, and whether numbers
are SymPy's: another 0.7 s of a core and 34 MiB. Stand-ins for these modules do what is asked in these cases. Whoever wants
anything else of them (a model that is compiled, a model that uses SymPy) gets the real ones.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

import torch
import torch.fx.experimental._config

_DYNAMO, _SHAPES, _SYMPY = "torch._dynamo", "torch.fx.experimental.symbolic_shapes", "sympy"
_MARK = "__dynamo_disable"  # where torch keeps, for a function, what ``disable`` has made of it


class _StandIn(ModuleType):
    """Stands for a module until it is needed."""

    def __init__(self, name: str, parent: ModuleType | None) -> None:
        super().__init__(name)
        self.__spec__ = spec = PathFinder.find_spec(name, parent.__path__ if parent else None)
        self.__file__ = spec.origin if spec else None
        self._own = ("__all__", "__version__", *(["__path__"] if spec and spec.submodule_search_locations else []))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in self._own:  # Python itself looks for these; a package has a path
            raise AttributeError(name)
        return getattr(self._real(), name)

    def _real(self) -> Any:
        """Import the real module in place of this one."""
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return importlib.import_module(self.__name__)


class _Dynamo(_StandIn):
    """Stands for ``torch._dynamo``."""

    def __init__(self) -> None:
        super().__init__(_DYNAMO, torch)
        self._spared: list[Callable[..., Any]] = []

    def disable(self, function: Any = None, *args: Any, **options: Any) -> Any:
        """What torch calls before the first call of such a function (with ``wrapping`` off), and users call otherwise."""
        if options.get("wrapping", True) or not callable(function):
            return self._real().disable(function, *args, **options)
        self._spared.append(function)
        return function

    def _real(self) -> Any:
        """Functions are marked again as they would have been."""
        for function in self._spared:
            vars(function).pop(_MARK, None)
        self._spared.clear()
        return super()._real()


class _Shapes(_StandIn):
    """Stands for ``torch.fx.experimental.symbolic_shapes``. Where sizes are numbers, what is asked of it is known."""

    def __init__(self) -> None:
        super().__init__(_SHAPES, torch.fx.experimental)
        for name, known in _KNOWN.items():
            setattr(self, name, self._answering(name, known))

    def _answering(self, name: str, known: Callable[..., int | None]) -> Callable[..., Any]:
        def answer(*asked: Any, **options: Any) -> Any:
            found = None if options else known(*asked)
            return getattr(self._real(), name)(*asked, **options) if found is None else found

        return answer


def _a_truth(*asked: Any) -> bool | None:
    return asked[0] if len(asked) == 1 and type(asked[0]) is bool else None


def _of_a_size(answer: Callable[[int], int]) -> Callable[..., int | None]:
    return lambda *asked: answer(asked[0]) if len(asked) == 1 and type(asked[0]) is int else None


def _of_truths(answer: Callable[[Sequence[bool]], bool]) -> Callable[..., bool | None]:
    return lambda *asked: answer(asked) if asked and all(type(one) is bool for one in asked) else None


def _same(*asked: Any) -> bool | None:
    if [type(one) for one in asked] == [int, int]:
        return bool(asked[0] == asked[1])
    shapes = [tuple(one) for one in asked if isinstance(one, tuple | list)]
    known = len(shapes) == 2 == len(asked) and all(type(size) is int for shape in shapes for size in shape)
    return shapes[0] == shapes[1] if known else None


_TRUTHS = (
    "expect_true", "guard_bool", "guard_or_false", "guard_or_true", "guard_size_oblivious", "statically_known_true",
)  # fmt: skip
_KNOWN: dict[str, Callable[..., int | None]] = {
    **dict.fromkeys(_TRUTHS, _a_truth),
    **dict.fromkeys(("guard_int", "guarding_hint_or_throw", "size_hint"), _of_a_size(lambda size: size)),
    "has_guarding_hint": _of_a_size(lambda size: True), "is_nested_int": _of_a_size(lambda size: False),
    "sym_and": _of_truths(all), "sym_or": _of_truths(any), "sym_eq": _same,
}  # fmt: skip
"""What functions answer about sizes that are numbers and truths about them; None: only the real one knows."""


class _SymPy(_StandIn):
    """Stands for ``sympy``."""

    def __init__(self) -> None:
        super().__init__(_SYMPY, None)

    def __getattr__(self, name: str) -> Any:
        asks = sys._getframe(1).f_globals.get("__name__")
        return _Nothing if name == "Basic" and asks == "torch._prims_common" else super().__getattr__(name)


class _Nothing:
    """What no number is an instance of."""


def leave_the_compiler_out() -> None:
    """From now on, import torch's compiler only when it is needed."""
    sys.modules.setdefault(_DYNAMO, _Dynamo())
    sys.modules.setdefault(_SYMPY, _SymPy())
    if _SHAPES not in sys.modules:
        sys.modules[_SHAPES] = torch.fx.experimental.symbolic_shapes = _Shapes()

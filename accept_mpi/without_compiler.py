"""Keeps torch from importing its compiler, ``torch._dynamo``, where nothing is compiled.

Torch imports it as soon as an optimizer's methods, or those functions that are written in Python for the meta device
(drawing weights, BatchNorm), are called, only to mark them as not to be compiled. That takes more than a second of a
core, as long as torch itself, three to four seconds of a small device's start, and 70 MiB of memory. A stand-in for the
module does nothing in that case. Whoever wants anything else of it (a model that is compiled) gets the real one.
"""

import importlib
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

import torch

_NAME = "torch._dynamo"
_MARK = "__dynamo_disable"  # where torch keeps, for a function, what ``disable`` has made of it


class _StandIn(ModuleType):
    """Stands for ``torch._dynamo`` until it is needed."""

    def __init__(self) -> None:
        super().__init__(_NAME)
        self.__spec__ = PathFinder.find_spec(_NAME, torch.__path__)
        self.__file__ = self.__spec__.origin if self.__spec__ else None
        self._spared: list[Callable[..., Any]] = []

    def disable(self, function: Any = None, *args: Any, **options: Any) -> Any:
        """What torch calls before the first call of such a function (with ``wrapping`` off), and users call otherwise."""
        if options.get("wrapping", True) or not callable(function):
            return self._real().disable(function, *args, **options)
        self._spared.append(function)
        return function

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # Python itself looks for these; a package has a path
            raise AttributeError(name)
        return getattr(self._real(), name)

    def _real(self) -> Any:
        """Import the real module in place of this one. Functions are then marked again as they would have been."""
        if sys.modules.get(_NAME) is self:
            del sys.modules[_NAME]
            for function in self._spared:
                vars(function).pop(_MARK, None)
            self._spared.clear()
        return importlib.import_module(_NAME)


def leave_the_compiler_out() -> None:
    """From now on, import torch's compiler only when it is needed."""
    sys.modules.setdefault(_NAME, _StandIn())

"""Find the function that a name in a job file stands for: in a zoo, or the user's "package.module:function"."""

import difflib
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from accept_mpi.errors import UserError
from accept_mpi.seeds import seeded
from accept_mpi.users_code import RAISED


def nearest(word: str, known: list[str]) -> str:
    """Hint ``; did you mean "..."?`` with the nearest known word, or an empty string."""
    by_small_letters = {k.lower(): k for k in known}
    close = difflib.get_close_matches(word.lower(), by_small_letters, n=1, cutoff=0.5)
    return f'; did you mean "{by_small_letters[close[0]]}"?' if close else ""


def find_function(name: str, zoo: Mapping[str, Callable[..., Any]], key: str) -> Callable[..., Any]:
    """Function that a job's ``key`` names: one of the zoo, or imported from "package.module:function".

    The current directory is importable, as with ``python -m``. Raises UserError with one sentence.
    """
    if ":" not in name:
        if name in zoo:
            return zoo[name]
        known = sorted(zoo)
        raise UserError(
            f'{key}: unknown name "{name}"{nearest(name, known)} '
            f'(known: {", ".join(known)}; your own: "package.module:function")'
        )
    module_name, _, function_name = name.partition(":")
    if not (function_name.isidentifier() and all(part.isidentifier() for part in module_name.split("."))):
        raise UserError(f'{key}: expected "package.module:function", got "{name}"')
    module = import_module(module_name, key)
    function = getattr(module, function_name, None)
    if not callable(function):
        names = [n for n in dir(module) if callable(getattr(module, n)) and not n.startswith("_")]
        raise UserError(f'{key}: "{module_name}" has no function "{function_name}"{nearest(function_name, names)}')
    return function


def import_module(name: str, key: str) -> Any:
    """Import a module for a job's ``key``, under a seed: what it draws while it is imported (the weights of a model that it
    makes at once) is the same on all hosts. Raises UserError with one sentence."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        with seeded(0):
            return importlib.import_module(name)
    except RAISED as error:
        raise UserError(f'{key}: cannot import "{name}": {type(error).__name__}: {error}') from error


def call(function: Callable[..., Any], args: Mapping[str, Any], key: str, seed: int) -> Any:
    """Call ``function`` with a job's ``args``. Any exception becomes a UserError, one sentence that names the key.

    Torch's, NumPy's and Python's global random numbers are seeded during the call, so that all hosts get the same result.
    """
    try:
        with seeded(seed):
            return function(**args)
    except UserError:
        raise
    except RAISED as error:
        name = getattr(function, "__qualname__", str(function))
        raise UserError(f"{key}: {name}({_show(args)}) failed: {type(error).__name__}: {error}") from error


def _show(args: Mapping[str, Any]) -> str:
    return ", ".join(f"{k}={v!r}" for k, v in args.items())

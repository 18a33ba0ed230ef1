"""Models whose forward cannot be recorded: they train as they are, as a chain of one layer.

No rank holds a part of such a model, but several may share its micro-batches as a group, each with a copy of it. Its forward
may do whatever that of a user's layer may.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from accept_mpi import tree
from accept_mpi.errors import UserError
from accept_mpi.models.base import Chain
from accept_mpi.models.classes import put_before
from accept_mpi.models.recording.arguments import arguments_of
from accept_mpi.models.recording.blocks import made_up
from accept_mpi.models.recording.output import select
from accept_mpi.models.untouched import untouched
from accept_mpi.seeds import seeded
from accept_mpi.users_code import RAISED


class _Running(threading.local):
    """The models whose calls run on this thread."""

    def __init__(self) -> None:
        self.models: list[Any] = []


_RUNNING = _Running()


class _Undivided:
    """Call of a model that gets what the data set gives as one argument, as all layers do; a call from its own forward gets
    what that gives."""

    undivided_output: str

    def __call__(self, *given: Any, **more: Any) -> Any:
        if any(one is self for one in _RUNNING.models):
            return super().__call__(*given, **more)  # type: ignore[misc]
        _RUNNING.models.append(self)
        try:
            args, kwargs = arguments_of(self, *given)  # type: ignore[arg-type]
            return select(super().__call__(*args, **kwargs), self.undivided_output)  # type: ignore[misc]
        finally:
            _RUNNING.models.pop()


def one_layer(make: Callable[[], nn.Module], value: Any, output: str) -> Chain:
    """The chain whose only layer is the model that ``make`` gives; ``value`` and ``output`` as for a ``RecordedModel``. Its
    state has the model's own names.

    Raises what the model raises when it is called with made-up values, UserError if it does not give what is asked for.
    """
    model = _as_layer(make(), output)
    _try_out(model, value)
    order = {name: n for n, (name, _) in enumerate(model.named_parameters())}
    name = type(model).__name__
    return Chain.recorded([name], lambda: [(name, _as_layer(make(), output))], order)


def _as_layer(model: nn.Module, output: str) -> nn.Module:
    """The model itself, with another call: its hooks, modes and names stay what they are."""
    put_before(model, _Undivided, undivided_output=output)
    return model


def _try_out(model: nn.Module, value: Any) -> None:
    """Call the model with made-up values, the same on all ranks."""
    try:
        _call(model, value, 0)
    except UserError:
        raise
    except RAISED as error:
        try:
            _call(model, value, 1)  # lengths, say
        except RAISED:
            raise error from None


def _call(model: nn.Module, value: Any, variant: int) -> None:
    with seeded(0), untouched([model]), torch.enable_grad():
        model(tree.replace(value, lambda tensor: made_up(tensor, variant)))

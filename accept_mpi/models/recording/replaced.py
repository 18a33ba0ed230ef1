"""Ways into torch that no mode of torch's sees, replaced while a forward is recorded."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.variable import VariableMeta

Instead = Callable[..., Any]
"""Called with the plain function and its arguments."""


def computed_once(function: Callable[..., Any], _: bool, *args: Any) -> Any:
    """What ``torch.utils.checkpoint`` (reentrant) would compute again in backward: without a gradient if nothing that the
    function is given needs one."""
    wanted = any(isinstance(one, torch.Tensor) and one.requires_grad for one in args)
    with torch.set_grad_enabled(wanted and torch.is_grad_enabled()):
        return function(*args)


def _variable(data: torch.Tensor | None = None, requires_grad: bool = False, *_: Any, **__: Any) -> torch.Tensor:
    """What ``torch.autograd.Variable`` gives, by functions that a mode sees."""
    found = torch.empty(0) if data is None else data.detach()
    return found.requires_grad_() if requires_grad else found


@contextmanager
def replaced(call: Instead, apply: Instead, script: Instead, seed: Instead) -> Iterator[None]:
    """Within the context these are called instead of ``nn.Module.__call__``, ``torch.autograd.Function.apply``, scripted
    functions, and what seeds torch or sets the state of its random numbers; ``Variable`` is as above."""
    plain_call, plain_apply = nn.Module.__call__, torch.autograd.Function.__dict__["apply"]
    scripted: Any = torch.jit.ScriptFunction
    plain_script = scripted.__call__
    torch_itself: Any = torch
    plain_seeds = {name: getattr(torch.random, name) for name in ("manual_seed", "seed", "set_rng_state")}

    def in_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return call(plain_call, module, *args, **kwargs)

    def in_script(function: Any, *args: Any, **kwargs: Any) -> Any:
        return script(plain_script, function, *args, **kwargs)

    def unreplaced(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return plain_apply.__get__(None, cls)(*args, **kwargs)

    def of_class(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return apply(unreplaced, cls, *args, **kwargs)

    def set_seeds(functions: dict[str, Any]) -> None:
        for name, function in functions.items():
            for place in (torch_itself, torch_itself.random):
                setattr(place, name, function)

    nn.Module.__call__ = in_module  # type: ignore[method-assign]
    torch.autograd.Function.apply = classmethod(of_class)  # type: ignore[assignment]
    scripted.__call__ = in_script
    kind: Any = VariableMeta  # whatever name the forward has for Variable
    kind.__call__ = lambda _, *args, **kwargs: _variable(*args, **kwargs)
    checked: Any = torch.distributions.Distribution
    checking = checked._validate_args
    checked.set_default_validate_args(False)  # it reads values
    set_seeds({name: partial(seed, plain) for name, plain in plain_seeds.items()})
    try:
        yield
    finally:
        nn.Module.__call__ = plain_call  # type: ignore[method-assign]
        torch.autograd.Function.apply = plain_apply  # type: ignore[method-assign]
        scripted.__call__ = plain_script
        del kind.__call__
        set_seeds(plain_seeds)
        checked.set_default_validate_args(checking)

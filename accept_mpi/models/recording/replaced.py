"""Ways into torch that no mode of torch's sees, replaced while a forward is recorded."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

Instead = Callable[..., Any]
"""Called with the plain function and its arguments."""


@contextmanager
def replaced(call: Instead, apply: Instead, script: Instead, seed: Instead) -> Iterator[None]:
    """Within the context these are called instead of ``nn.Module.__call__``, ``torch.autograd.Function.apply``, scripted
    functions and ``torch.manual_seed``."""
    plain_call, plain_apply = nn.Module.__call__, torch.autograd.Function.__dict__["apply"]
    scripted: Any = torch.jit.ScriptFunction
    plain_script, plain_seed = scripted.__call__, torch.random.manual_seed
    torch_itself: Any = torch

    def in_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return call(plain_call, module, *args, **kwargs)

    def in_script(function: Any, *args: Any, **kwargs: Any) -> Any:
        return script(plain_script, function, *args, **kwargs)

    def of_class(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return apply(plain_apply.__func__, cls, *args, **kwargs)

    def seeds(number: Any) -> Any:
        return seed(plain_seed, number)

    nn.Module.__call__ = in_module  # type: ignore[method-assign]
    torch.autograd.Function.apply = classmethod(of_class)  # type: ignore[assignment]
    scripted.__call__ = in_script
    torch_itself.manual_seed = torch_itself.random.manual_seed = seeds
    try:
        yield
    finally:
        nn.Module.__call__ = plain_call  # type: ignore[method-assign]
        torch.autograd.Function.apply = plain_apply  # type: ignore[method-assign]
        scripted.__call__ = plain_script
        torch_itself.manual_seed = torch_itself.random.manual_seed = plain_seed

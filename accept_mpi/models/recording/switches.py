"""Torch's own switches, which a forward may set around a call that does not show it: a record would not do it again."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.utils.parametrize
from torch import nn

_ATTENTION = ("flash_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled", "cudnn_sdp_enabled")


def switches() -> dict[str, Any]:
    """How torch's switches stand, by what is said of each."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint":
        hooks = None  # they change no values
    return {
        "torch's default dtype": torch.get_default_dtype(),
        "which kernels attention takes": [getattr(torch.backends.cuda, name)() for name in _ATTENTION],
        "whether algorithms are deterministic": torch.are_deterministic_algorithms_enabled(),
        "whether oneDNN is used": torch._C._get_mkldnn_enabled(),
        "the precision of products": torch.get_float32_matmul_precision(),
        "whether parametrized weights are kept": torch.nn.utils.parametrize._cache_enabled > 0,
        "hooks of what autograd saves": hooks,
    }


@contextmanager
def as_if_compiled() -> Iterator[None]:
    """Within the context ``torch.compiler.is_compiling()`` is true: libraries then take a way that does not depend on
    values, where they have one (transformers makes masks that it else leaves out where nothing is masked)."""
    with _compiling(True):
        yield


@contextmanager
def _compiling(flag: bool) -> Iterator[None]:
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = flag
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def as_it_will_run(module: nn.Module) -> AbstractContextManager[None]:
    """Context for the forward of a module whose parts are recorded. ``nn.TransformerEncoder`` evaluates what is padded in
    another way if it is compiled, with other results."""
    return _compiling(False) if isinstance(module, nn.TransformerEncoder) else nullcontext()

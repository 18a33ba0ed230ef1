"""``torch.autocast`` within a forward: a record notes the contexts that are open at each call, so that it is carried out in
them, whatever precision the job has around them. Torch leaves tensors on the meta device alone there; what a forward asks
of their types while it is recorded is what it will ask of those on the CPU, since their operations cast here as there."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

import torch

from accept_mpi.models.recording.structure import mapped, tensors_in

_LOWER = frozenset((
    "mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "convolution", "_prelu_kernel",
    "_scaled_dot_product_attention_math", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
))  # fmt: skip
"""Operations of what torch's autocast computes in lower precision on the CPU."""
_SINGLE = frozenset((
    "avg_pool3d", "_adaptive_avg_pool3d", "max_pool3d_with_indices", "binary_cross_entropy", "mse_loss", "nll_loss_forward",
    "nll_loss2d_forward", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "multi_margin_loss", "grid_sampler_2d",
    "grid_sampler_3d", "_cdist_forward", "polar", "prod", "trace", "view_as_complex", "_fft_r2c", "_fft_c2c", "_fft_c2r",
    "reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d", "replication_pad3d",
))  # fmt: skip
"""Those of what it computes in single precision."""
_FUNCTIONS = frozenset((
    "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "prelu",
    "scaled_dot_product_attention",
))  # fmt: skip
"""Functions in lower precision that compare the types of their arguments before they come to any operation."""
_SINGLE_FUNCTIONS = frozenset((
    "fft_fft", "fft_ifft", "fft_fft2", "fft_ifft2", "fft_fftn", "fft_ifftn", "fft_rfft", "fft_irfft", "fft_rfft2",
    "fft_irfft2", "fft_rfftn", "fft_irfftn", "fft_hfft", "fft_ihfft",
))  # fmt: skip
"""Functions in single precision that refuse lower ones before they come to any operation."""
_PRODUCTS = (torch.float32, torch.bfloat16, torch.float16)


class Autocast(NamedTuple):
    """A ``torch.autocast`` context."""

    kind: str
    """Of device."""
    dtype: torch.dtype
    enabled: bool


@contextmanager
def watched() -> Iterator[list[Autocast]]:
    """Within the context the list has the ``torch.autocast`` contexts of this thread that are open, from the outermost."""
    cls: Any = torch.amp.autocast_mode.autocast
    plain_enter, plain_exit = cls.__enter__, cls.__exit__
    open_ones: list[Autocast] = []
    thread = threading.get_ident()

    def enter(self: Any) -> Any:
        if threading.get_ident() == thread:
            open_ones.append(Autocast(self.device, self.fast_dtype, self._enabled))
        return plain_enter(self)

    def leave(self: Any, *error: Any) -> Any:
        if threading.get_ident() == thread:
            open_ones.pop()
        return plain_exit(self, *error)

    cls.__enter__, cls.__exit__ = enter, leave
    try:
        yield open_ones
    finally:
        cls.__enter__, cls.__exit__ = plain_enter, plain_exit


class Opened:
    """The contexts that are open while calls are carried out. One that several calls have in common stays open from the
    first to the last: torch keeps the casts of parameters that are made in it."""

    def __init__(self) -> None:
        self._open: list[tuple[Autocast, torch.autocast]] = []

    def have(self, contexts: Sequence[Autocast]) -> None:
        """Have these contexts open, from the outermost, and no others."""
        same = 0
        while same < min(len(contexts), len(self._open)) and contexts[same] is self._open[same][0]:
            same += 1
        while len(self._open) > same:
            self._open.pop()[1].__exit__(None, None, None)
        for one in contexts[same:]:
            context = torch.autocast(one.kind, one.dtype, one.enabled)
            context.__enter__()
            self._open.append((one, context))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.have(())


def lower() -> torch.dtype | None:
    """The precision to which autocast casts on the CPU; None where it is off. Not to be asked below autograd."""
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None


def casting(function: Callable[..., Any], name: str, lower: torch.dtype | None) -> Callable[..., Any]:
    """The function ``name``, or what casts the arguments that it compares as autocast does."""
    if lower is None or name not in _FUNCTIONS | _SINGLE_FUNCTIONS:
        return function

    def cast_first(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = cast(name, args, kwargs, lower)
        return function(*args, **kwargs)

    return cast_first


def cast(name: str, args: Any, kwargs: Any, lower: torch.dtype) -> tuple[Any, Any]:
    """The arguments of an operation on tensors of the meta device, cast as autocast casts those on the CPU."""
    to = lower if name in _LOWER | _FUNCTIONS else torch.float32 if name in _SINGLE | _SINGLE_FUNCTIONS else None
    if to is None or not all(tensor.is_meta for tensor in tensors_in((args, kwargs))):
        return args, kwargs

    def one(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(to) if tensor.dtype in _PRODUCTS else tensor

    found: tuple[Any, Any] = mapped((args, kwargs), one, (torch.Tensor,))
    return found

"""What several threads must know that compute micro-batches of one stage at a time (``training.lanes``).

Torch, NumPy and Python each have one generator of random numbers for all threads. So layers that draw take turns: each
seeds the generators and draws from them while no other thread may. Which layers these are is found in the first forward;
that nothing else draws is checked at each turn.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from torch import nn

from accept_mpi.errors import UserError
from accept_mpi.seeds import DRAWING, state

_SHARED = ("torch/random.py", "torch/utils/checkpoint.py")
"""Files of torch whose functions save and restore the generators of all threads."""


class Turns:
    """Turns of what draws: layers, and data sets, which seed the generators for each sample."""

    def __init__(self) -> None:
        self._lock = DRAWING
        self._left: tuple[object, ...] | None = None

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Within the context no other thread draws. Raises UserError if one has drawn outside of such a context."""
        with self._lock:
            self.check()
            yield
            self._left = state()

    def begin(self) -> None:
        """Begin to watch, if that has not been done since ``forget``."""
        if self._left is None:
            with self._lock:
                self._left = state()

    def check(self) -> None:
        """Raise UserError if a thread has drawn outside of ``drawing``."""
        with self._lock:
            if self._left is not None and state() != self._left:
                raise UserError(
                    "pipeline.lanes: a layer draws random numbers that it did not draw in its first forward, so micro-"
                    'batches side by side would disturb each other; set pipeline.lanes = "off"'
                )

    def forget(self) -> None:
        """Let something else draw, while no lane computes."""
        self._left = None


@contextmanager
def calls_of_shared() -> Iterator[list[str]]:
    """Within the context, note calls of functions that save and restore the generators of all threads (by file)."""
    found: list[str] = []

    def look(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.endswith(_SHARED):
            found.append(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield found
    finally:
        if before is None or callable(before):
            sys.setprofile(before)
        else:  # cProfile's, which only its own method sets
            before.enable()


def why_in_turn(again: bool, back: bool, loss: bool, writes: bool) -> str:
    """The reason why several threads cannot compute a stage; empty if they can. ``again``: ``calls_of_shared`` found some;
    ``back``, ``loss``: a backward, or the loss, draws random numbers; ``writes``: a forward writes into the layers."""
    if again:
        return "a layer computes forwards again in its backward, or saves the state of random numbers"
    if back or loss:
        return f"{'a backward' if back else 'the loss'} draws random numbers"
    return "a forward writes into its own parameters or buffers" if writes else ""


def hooked(parameters: list[nn.Parameter]) -> bool:
    """True if something is called with a parameter's gradient; copies of the parameter would not have it."""
    return any(p._backward_hooks for p in parameters) or sees_sums(parameters)


def sees_sums(parameters: list[nn.Parameter]) -> bool:
    """True if something is called with what a step's micro-batches so far have added up to a parameter's gradient."""
    return any(getattr(p, "_post_accumulate_grad_hooks", None) for p in parameters)

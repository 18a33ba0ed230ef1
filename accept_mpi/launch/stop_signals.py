"""Signals that ask a run to end with a checkpoint: SIGTERM (Slurm, before a time limit), SIGUSR1 (which mpirun forwards),
SIGHUP (a closed terminal) and Ctrl-C."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

ENDED = 128
"""Added to a signal's number, it is the exit code of what the signal ends, as shells have it."""
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)


def heeded(numbers: Sequence[signal.Signals]) -> list[signal.Signals]:
    """The given signals that this process should handle: all but a SIGHUP that it was started to ignore (nohup)."""
    return [n for n in numbers if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]


_told: list[Callable[[int], None]] = []


def tell_before_end(tell: Callable[[int], None]) -> None:
    """Have ``tell`` called with a signal's number before the signal ends this process at once."""
    _told[:] = [tell]


def end_by_signals() -> None:
    """From now on stop signals end this process with an exit code, not as signals do: mpirun --with-ft ulfm takes what a
    signal ends for lost ranks, and where all are lost its own exit code is 0, as if the run were done. Nor does Ctrl-C raise
    KeyboardInterrupt: a rank that ends by an exception waits in MPI_Finalize for the others, who wait for it."""
    for number in heeded(_SIGNALS):
        signal.signal(number, _end)


@contextlib.contextmanager
def keep_handlers() -> Iterator[None]:
    """Keep the handlers of ``end_by_signals`` over this block, in which MPI starts: Open MPI puts one of its own, which does
    nothing, in the place of SIGHUP's. A SIGHUP meanwhile is delivered afterwards."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
    try:
        yield
    finally:
        end_by_signals()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGHUP])


def end_undisturbed() -> None:
    """From now on stop signals have no effect: all is done, and Python, which gives up its handlers as it ends, would have
    them end this process as if it were not."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _end(number: int, frame: FrameType | None) -> None:
    try:
        for tell in _told:
            tell(number)
    finally:
        os._exit(ENDED + number)


class StopSignals:
    """Handles the stop signals of a process.

    A signal that arrives while layers move or ranks regroup is remembered and delivered to the next deployment; one after
    the last deployment, while the log is closed or others are waited for, changes nothing any more. Before the first
    deployment, when nothing would be lost (``end_by_signals``), and after the first signal, a signal ends the process.
    """

    def __init__(self) -> None:
        self._asked = False
        self._tell: Callable[[], None] | None = None
        self._handles = False
        """True from the first deployment on."""

    def connect(self, tell: Callable[[], None] | None) -> None:
        """Have ``tell`` called at the first signal, immediately if it has arrived already. None: remember it for later."""
        self._tell = tell
        if not self._handles:
            self._handles = True
            for number in heeded(_SIGNALS):
                signal.signal(number, self._hear)
        if self._asked and tell:
            tell()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        tell, self._asked = self._tell, True
        for each in _SIGNALS:  # SIGHUP is ignored, since a closing terminal sends it more than once (by its shell, too)
            signal.signal(each, signal.SIG_IGN if each == signal.SIGHUP else _end)
        if tell:
            tell()

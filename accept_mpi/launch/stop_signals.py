"""SIGTERM (Slurm, before a time limit), SIGUSR1 (which mpirun hands on), SIGHUP (a closed terminal) and Ctrl-C ask a run to
end with a checkpoint."""

import signal
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)


def heeded(numbers: Sequence[signal.Signals]) -> list[signal.Signals]:
    """Those of some signals that a process is to hear of: not a hangup that it was told to ignore (nohup)."""
    return [n for n in numbers if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]


class StopSignals:
    """What is asked for while layers move, or ranks find together after a loss, is not forgotten: the next term hears of it.

    Before the first term, where nothing would be lost, and after the first signal, they end the process.
    """

    def __init__(self) -> None:
        self._asked = False
        self._tell: Callable[[], None] | None = None
        self._before: dict[signal.Signals, Any] = {}
        """What the signals did before the first term."""

    def connect(self, tell: Callable[[], None] | None) -> None:
        """``tell`` is called when it is asked for, at once where it was before; None: nobody can be told now."""
        self._tell = tell
        if not self._before:
            self._before = {number: signal.signal(number, self._hear) for number in heeded(_SIGNALS)}
        if self._asked and tell:
            tell()

    def close(self) -> None:
        """The run is over: they do what they did before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before, self._tell = {}, None

    def _hear(self, number: int, frame: FrameType | None) -> None:
        tell, self._asked = self._tell, True
        for each in _SIGNALS:  # a terminal's end comes more than once, by its shell, too
            signal.signal(each, signal.SIG_IGN if each == signal.SIGHUP else signal.SIG_DFL)
        if tell:
            tell()

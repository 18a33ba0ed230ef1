"""SIGTERM (Slurm, before a time limit) and SIGUSR1 (which mpirun hands on) ask a run to end with a checkpoint."""

import signal
from collections.abc import Callable
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopSignals:
    """What is asked for while layers move, or ranks find together after a loss, is not forgotten: the next term hears of it.

    Before the first term, where nothing would be lost, and after the first signal, they end the process.
    """

    def __init__(self) -> None:
        self._asked = self._listening = False
        self._tell: Callable[[], None] | None = None

    def connect(self, tell: Callable[[], None] | None) -> None:
        """``tell`` is called when it is asked for, at once where it was before; None: nobody can be told now."""
        self._tell = tell
        if not self._listening:
            self._listening = True
            for number in _SIGNALS:
                signal.signal(number, self._hear)
        if self._asked and tell:
            tell()

    def close(self) -> None:
        """The run is over: they end the process again."""
        self._listening, self._tell = False, None
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        tell, self._asked = self._tell, True
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        if tell:
            tell()

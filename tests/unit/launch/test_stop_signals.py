"""A signal asks a run to stop, whenever it comes."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from accept_mpi.launch import stop_signals
from accept_mpi.launch.stop_signals import StopSignals


@pytest.fixture
def stop() -> Iterator[StopSignals]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    yield StopSignals()
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_term_is_told_and_the_second_signal_ends_the_process(stop: StopSignals) -> None:
    told: list[int] = []
    stop.connect(lambda: told.append(1))
    os.kill(os.getpid(), signal.SIGUSR1)
    assert told == [1]
    ends = signal.getsignal(signal.SIGTERM)
    assert ends == signal.getsignal(signal.SIGINT) == stop_signals._end


@pytest.mark.parametrize("second", [False, True])
def test_a_process_that_signals_end_has_an_exit_code(second: bool) -> None:
    """mpirun --with-ft ulfm ends with 0 where signals, not exit codes, end all ranks."""
    code = "import os, signal\nfrom accept_mpi.launch.stop_signals import StopSignals, end_by_signals\nend_by_signals()\n"
    code += "StopSignals().connect(lambda: None); os.kill(os.getpid(), signal.SIGTERM)\n" if second else ""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}os.kill(os.getpid(), signal.SIGTERM)"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (128 + signal.SIGTERM, "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT])
def test_a_signal_to_a_process_that_is_done_changes_nothing(number: signal.Signals) -> None:
    """Python gives up its handlers before the last of what it tears down."""
    code = "import os, sys\nfrom accept_mpi.launch.stop_signals import end_by_signals, end_undisturbed\n"
    code += f"class Late:\n    def __del__(self, kill=os.kill, me=os.getpid()):\n        kill(me, {int(number)})\n"
    code += "end_by_signals(); end_undisturbed(); sys.late = Late(); sys.exit(0)\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_between_terms_it_is_kept_for_the_next_one(stop: StopSignals) -> None:
    told: list[int] = []
    stop.connect(lambda: told.append(1))
    stop.connect(None)
    os.kill(os.getpid(), signal.SIGTERM)
    assert told == []
    stop.connect(lambda: told.append(2))
    assert told == [2]
    stop.connect(None)
    stop.connect(lambda: told.append(3))  # the term before may have been lost with what it was told
    assert told == [2, 3]

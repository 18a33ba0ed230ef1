"""The start and the end of MPI in this process, and the rank's view of the job: ranks, agreement, clock, losses.

A job ends by ``finish`` if all went well or all ranks agreed on the same mistake; by ``fail`` if one rank alone raised; by
the lifeline's callback if another rank raised or died. The last two print the one message that matters, on rank 0, close the
log and abort the job, so that no rank waits for a dead one.
"""

import contextlib
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from mpi4py import MPI

from accept_mpi.comm.lifeline import Lifeline
from accept_mpi.comm.links import clock_offset
from accept_mpi.comm.membership import Circle, leave_together, stay, survivable
from accept_mpi.comm.messenger import Messenger
from accept_mpi.device.facts import host_facts
from accept_mpi.device.networks import addresses
from accept_mpi.errors import INTERRUPTED, Agreed, DeadlineError, NonFiniteLoss, ProtocolError, Stopped, UserError, UsersBug
from accept_mpi.logs.recorder import Clock

T = TypeVar("T")

_AGREE_SECONDS = 600.0
_MEET_SECONDS = 20.0
"""Seconds after which rank 0 says that it has not met all others yet. All have started by then, and need less than one."""
_END_SECONDS = 5.0
_REGROUP_SECONDS = 30.0


class Runtime:
    """This process as a rank of the job; ``start`` creates it."""

    def __init__(self) -> None:
        with _within(_MEET_SECONDS, _not_met_yet), _within(_AGREE_SECONDS, _not_met):
            self.circle = Circle.of(MPI.COMM_WORLD)
        self.rank, self.size = self.world.rank, self.world.size
        self.members = list(range(self.size))
        """The ranks that ranks 0, 1, ... had when the job began; they differ after a loss."""
        self.survives = survivable()
        """True if the job goes on when a rank is lost."""
        self.host = socket.gethostname()
        self.startup_seconds = _AGREE_SECONDS
        self._before_end: Callable[[str], None] = lambda text: None
        self._describe: Callable[[int], str] = lambda rank: ""
        self._ended = threading.Lock()
        self._ending = False
        """True once this rank ends by itself."""
        self._left_behind: list[object] = []
        self._leaving: Circle | None = None
        """The circle in which this rank has come to the end."""
        self.messenger = Messenger(self.circle.control)

    @staticmethod
    def start() -> "Runtime":
        """Exchange the facts of each host, create the lifeline and one clock; all ranks call this together. An error of one
        rank ends all. Raises UserError if MPI was built without MPI_THREAD_MULTIPLE."""
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise UserError("this MPI library was built without MPI_THREAD_MULTIPLE, which accept_mpi needs")
        try:
            runtime = Runtime()
            runtime._meet()
            return runtime
        except BaseException as error:
            # Without a lifeline nobody would hear of it: the others wait for this rank, and it for them in MPI_Finalize.
            world = MPI.COMM_WORLD
            text, exit_code = _told(error, f"rank {world.rank} on host {socket.gethostname()}", world.size > 1)
            _say(text)
            world.Abort(exit_code)
            raise

    def _meet(self) -> None:
        _log_format(self.rank, self.size, self.host)
        library = MPI.Get_library_version().split(",")[0].split("\n")[0].strip()
        everyone = self.messenger.allgather(host_facts(self.rank, library), self.startup_seconds, "the facts of each host")
        self.hosts: list[dict[str, Any]] = everyone
        machines = [facts["machine_id"] for facts in everyone]
        self.ranks_on_host = machines.count(machines[self.rank])
        self.lifeline = self._lifeline()
        firsts = list(map(machines.index, machines))  # a machine has one clock
        measured = clock_offset(self.world, sorted({*firsts} - {0}))
        origin = self.messenger.broadcast(time.monotonic(), self.startup_seconds, "the start of the clock")
        offsets = self.messenger.allgather(measured, self.startup_seconds, "the clocks of each host")
        for facts, first in zip(self.hosts, firsts, strict=True):
            facts["clock_offset_s"] = offsets[first]
        self.clock = Clock(origin, offsets[firsts[self.rank]])

    @property
    def world(self) -> MPI.Intracomm:
        """Communicator of all ranks."""
        return self.circle.world

    @property
    def cores(self) -> float:
        """This rank's share of its host's cores."""
        return float(self.hosts[self.rank]["cores"] / self.ranks_on_host)

    def agree(self, what: str, do: Callable[[], T]) -> T:
        """Call ``do`` on all ranks together. If it raises UserError on any rank, all raise the same error as Agreed;
        otherwise each gets its own result. ``what`` names the step for a DeadlineError."""
        value, error = None, None
        try:
            value = do()
        except UserError as mistake:
            error = str(mistake)
        errors = self.messenger.allgather(error, self.startup_seconds, what)
        found = [(rank, text) for rank, text in enumerate(errors) if text is not None]
        if not found:
            return value  # type: ignore[return-value]
        rank, text = found[0]
        everywhere = len({text for _, text in found}) == 1 and len(found) == self.size
        raise Agreed(text if everywhere or rank == 0 else f"{self.at(rank)}: {text}")

    def same(self, what: str, value: Any) -> None:
        """Raise Agreed on every rank unless ``value`` (named ``what`` in the error) is the same on all ranks."""
        values = self.messenger.allgather(value, self.startup_seconds, what)
        for rank, other in enumerate(values):
            if other != values[0]:
                raise Agreed(f"{what} differ between hosts: {values[0]} for {self.at(0)}, {other} for {self.at(rank)}")

    # -- losses --------------------------------------------------------------------------------------------------------

    def lost_one(self, error: BaseException) -> bool:
        """True if an error may be due to the loss of a rank, and the others can go on.

        Any MPI error counts, since losses also cause others than ULFM's three: a broken collective is MPI_ERR_OTHER.
        """
        return self.survives and isinstance(error, MPI.Exception)

    def regroup(self) -> list[int]:
        """After a loss, make the surviving ranks 0, 1, ... in their old order. All of them call this together.

        Returns the lost ranks, as numbered when the job began. Ends the process after ``_REGROUP_SECONDS``: if a host has
        lost its cable, regrouping would take for ever.
        """
        with _within(_REGROUP_SECONDS, self._give_up):
            return self._regroup()

    def leave_behind(self, used: object) -> None:
        """Keep what MPI may still read from and write to after a loss."""
        self._left_behind.append(used)

    def _regroup(self) -> list[int]:
        here = self.members[self.rank]
        facts = dict(zip(self.members, self.hosts, strict=True))
        while True:
            self.lifeline.leave()
            self.circle.revoke()
            if self._leaving is not self.circle:
                stay(self.world)
            self.circle = self.circle.survivors()
            self.leave_behind(self.messenger)
            try:
                rank, size = self.world.rank, self.world.size
                self.messenger = Messenger(self.circle.control)
                members = self.messenger.allgather(here, self.startup_seconds, "who is left")
                self.rank, self.size = rank, size
                self.lifeline = self._lifeline()
                break
            except MPI.Exception:
                continue  # another rank was lost meanwhile
        gone = [member for member in self.members if member not in members]
        self.members, self.hosts = members, [facts[member] for member in members]
        return gone

    def all_done(self) -> bool:
        """Wait until all ranks have come to the end; returns True, or, on all ranks alike, False if one was lost."""
        self._leaving = self.circle
        return not self.survives or leave_together(self.world, self.messenger.poll)

    def _give_up(self) -> None:
        at = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident or 0])[-1]
        where = f"{Path(at.filename).name}:{at.lineno}, {at.name}"
        _say(f"{self.who(self.rank)}: the surviving ranks could not regroup (waits in {where})")
        os._exit(1)

    # -- ends ----------------------------------------------------------------------------------------------------------

    def finish(self, exit_code: int) -> NoReturn:
        """End the process with ``exit_code``; all ranks call this together."""
        self._ending = True
        if not self.survives:
            # Without a deadline: those that still send or write a checkpoint have theirs, and the lifeline tells of a loss.
            self.messenger.allgather(None, math.inf, "the end of the run")
        self.lifeline.close()
        if self.world != MPI.COMM_WORLD:
            # MPI_Finalize sometimes waits for lost ranks. The surviving ones have agreed that all is done, so skip it.
            _flush()
            os._exit(exit_code)
        MPI.Finalize()
        sys.exit(exit_code)

    def fail(self, error: BaseException) -> NoReturn:
        """End the job because this rank raised ``error``: rank 0 prints the message once and ends all ranks.

        If ``error`` is Agreed, all ranks have raised it, and ``finish`` together.
        """
        self._ending = True
        if isinstance(error, Agreed):
            if self.rank == 0:
                _say(error)
            self.finish(error.exit_code)
        text, exit_code = _told(error, self.who(self.rank), self.size > 1)
        if self.rank == 0:
            self.lifeline.mute()
            self._end_job(text, exit_code)
        if not self.lifeline.report(text, exit_code):
            _say(text)
            MPI.COMM_WORLD.Abort(exit_code)
        time.sleep(2 * _END_SECONDS)
        # Rank 0 has not ended this one: it hangs itself, and has not told of the error.
        _say(text)
        os._exit(exit_code)

    def end_by_signal(self, number: int) -> None:
        """Tell the others that a signal is about to end this rank at once, which ends all: mpirun --with-ft ulfm does not
        count a rank that ends with an exit code as lost, and the others could not regroup."""
        exit_code = 128 + number
        # mpirun ends ranks so, too, after another's error, which has been told.
        if self.size == 1 or self._ending or self._ended.locked():
            return
        threading.Timer(_END_SECONDS, os._exit, [exit_code]).start()  # even if something below hangs
        text = f"{self.who(self.rank)}: ended by {signal.Signals(number).name}"
        if self.rank and self.lifeline.report(text, exit_code):
            return
        _say(text)
        if self.rank == 0:
            self.lifeline.end_all(exit_code)
        MPI.COMM_WORLD.Abort(exit_code)

    def _lifeline(self) -> Lifeline:
        """Create the lifeline; all ranks call this together."""
        circle, messenger = self.circle, self.messenger  # bound here, so that a late callback cannot end a later circle
        return Lifeline.start(messenger, self.startup_seconds, lambda *end: self._on_end(circle, messenger, *end))

    def _on_end(self, circle: Circle, messenger: Messenger, rank: int, error: str | None, exit_code: int) -> None:
        """Handle the end of another rank of this circle. Called on the lifeline's thread; arguments as in ``Lifeline``."""
        if error is None and self.survives:
            # Revoking interrupts all ranks that wait for the lost one. The polling thread must do it: Open MPI may lock up
            # if two threads call it.
            messenger.interrupt_with(circle.revoke)
        elif self.rank == 0:
            if error is None:
                error = f"{self.who(rank)} ended unexpectedly (killed, out of memory, or its machine is gone)"
            self._end_job(error, exit_code)
        elif error is None:  # rank 0 died, which would have printed the message, so rank 1 does
            if self.rank == 1:
                text = f"{self.who(0)} ended unexpectedly; the run is over"
                _say(text)
            time.sleep(_END_SECONDS / 5)  # mpirun usually ends us first
            threading.Timer(_END_SECONDS, os._exit, [exit_code]).start()
            MPI.COMM_WORLD.Abort(exit_code)
        else:
            time.sleep(_END_SECONDS)
            os._exit(exit_code)

    def _end_job(self, text: str, exit_code: int) -> NoReturn:
        """On rank 0: print the reason, close the log, end all ranks."""
        with self._ended:
            _say(text)
            threading.Timer(_END_SECONDS, os._exit, [exit_code]).start()  # even if something below hangs
            try:
                self._before_end(text)
            finally:
                self.lifeline.end_all(exit_code)
                _flush()
                if MPI.COMM_WORLD.size > 1:
                    MPI.COMM_WORLD.Abort(exit_code)
        os._exit(exit_code)

    def allow(self, startup_seconds: float) -> None:
        """Set the deadline, in seconds, of waits during start-up and of agreements between all ranks."""
        self.startup_seconds = startup_seconds

    def describe_ranks(self, describe: Callable[[int], str]) -> None:
        """Set the function that describes a rank's place in the plan for messages, such as "stage 2, layers 10..14"."""
        self._describe = describe

    def call_before_end(self, call: Callable[[str], None]) -> None:
        """Set the function that rank 0 calls, with the error's text, before an error ends the job; it closes the log."""
        self._before_end = call

    def who(self, rank: int) -> str:
        """Name of a rank for messages, such as "rank 2 on host edge2 (stage 2, layers 10..14) in step 17"."""
        holds = self._describe(rank)
        step = self.lifeline.steps.get(rank)
        return self.at(rank) + (f" ({holds})" if holds else "") + (f" in step {step}" if step else "")

    def at(self, rank: int) -> str:
        """Name of a rank for messages, such as "rank 2 on host edge2", with the number that it had when the job began."""
        return f"rank {self.members[rank]} on host {self.hosts[rank]['host']}"


@contextlib.contextmanager
def _within(seconds: float, give_up: Callable[[], None]) -> Iterator[None]:
    """Have ``give_up`` called on a thread if the block, which may wait within MPI, takes longer than ``seconds``."""
    guard = threading.Timer(seconds, give_up)
    guard.daemon = True
    guard.start()
    try:
        yield
    finally:
        guard.cancel()


def _say(text: object) -> None:
    print(f"accept_mpi: {text}", file=sys.stderr, flush=True)


def _flush() -> None:
    """Write out what has been printed, as far as its reader or its disk takes it, before the process ends at once."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()


def _not_met_yet() -> None:
    if MPI.COMM_WORLD.rank == 0:
        has = ", ".join(f"{name} {at}" for name, at in addresses().items() if not at.ip.is_loopback)
        text = f"the ranks do not reach each other through MPI yet, after {_MEET_SECONDS:.0f} s; this host's networks: {has}"
        _say(f'note: {text}; see README, "Before the first run"')


def _not_met() -> None:
    text = f"the ranks could not reach each other through MPI within {_AGREE_SECONDS:.0f} s: one hangs, or several networks"
    who = f"rank {MPI.COMM_WORLD.rank} on host {socket.gethostname()}"
    _say(f'{who}: {text} or a firewall are in the way; see README, "Before the first run"')
    os._exit(1)


def _told(error: BaseException, who: str, several: bool) -> tuple[str, int]:
    """What to tell of an error that ends the job, and the exit code. ``who``: the rank that raised it; ``several``: True if
    there are others."""
    exit_code = getattr(error, "exit_code", 1)
    if isinstance(error, UserError | UsersBug | NonFiniteLoss | DeadlineError | ProtocolError | Stopped):
        return f"{who}: {error}" if several or isinstance(error, UsersBug) else str(error), exit_code
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", INTERRUPTED
    return f"{who} raised:\n{''.join(traceback.format_exception(error))}".rstrip(), exit_code


def _log_format(rank: int, size: int, host: str) -> None:
    """Set up logging: records carry rank, size and host; ranks other than 0 log only warnings and errors."""
    logging.basicConfig(
        format=f"[rank {rank}/{size} {host}] %(levelname)s %(message)s",
        level=logging.INFO if rank == 0 else logging.WARNING,
    )

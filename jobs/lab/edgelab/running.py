"""Commands that run in a lab, outside its hosts and through them on the hosts, and their end."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from edgelab import LabError
from edgelab.cgroups import Groups, kill

END_SECONDS = 60.0
HEAD_GROUP = "_head"  # of what runs outside the hosts
_RUN = "ACCEPT_LAB_RUN"


class Running:
    """A command outside the hosts of a lab and all that it started on them; all of it ends with the ``with`` block.
    ``environment`` is the lab's, ``inside`` begins a shell command line outside the hosts; ``options`` go to Popen."""

    def __init__(
        self, lab: str, environment: dict[str, str], inside: str, command: list[str], options: dict[str, Any]
    ) -> None:
        self.command, self._groups = command, Groups(lab)
        self._mark = f"{lab}-{os.getpid()}-{time.monotonic_ns()}"
        given = options.pop("env", None)
        variables = (os.environ if given is None else given) | environment | {_RUN: self._mark}
        heads = " && ".join(f"echo $$ > {group}/cgroup.procs" for group in self._groups.of(HEAD_GROUP))
        script = ["sh", "-c", f'{heads} && {inside} "$@"', "sh", *command]
        self.process: subprocess.Popen[Any] = subprocess.Popen(script, env=variables, **options)

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self.end()

    def end(self) -> None:
        """Kill all that still runs of the command, here and on the hosts, by SIGKILL. Raises LabError if some remains."""
        with uninterrupted():
            until = time.monotonic() + END_SECONDS
            while left := self._left():
                for pid in left:
                    kill(pid)
                self.process.poll()
                if time.monotonic() > until:
                    raise LabError(f"processes {left} do not end, not even by SIGKILL: {' '.join(self.command)}")
                time.sleep(0.01)
            if self.process.stdin is None:
                self.process.wait(END_SECONDS)

    def _left(self) -> list[int]:
        """Process ids of the command's that still run, on any host."""
        mark = f"{_RUN}={self._mark}".encode()
        everywhere = [pid for host in self._groups.hosts() for pid in self._groups.processes(host)]
        return [pid for pid in everywhere if mark in _environment(pid)]


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore Ctrl-C during the block."""
    try:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:  # another thread than the main one, which Ctrl-C does not interrupt
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""

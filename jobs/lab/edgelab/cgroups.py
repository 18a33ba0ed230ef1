"""Limits hosts' shares of cores and memory by control groups, version 1 or 2."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from edgelab import LabError

_ROOT = Path("/sys/fs/cgroup")
_PREFIX = "accept-lab-"
# With a short period a slow host is slow evenly; the kernel accepts no quota below 1 ms.
_PERIOD_US, _LEAST_QUOTA_US = 5_000, 1_000


def quota(cpu: float) -> tuple[int, int]:
    """Microseconds of computing per period, and the period in microseconds, for a share ``cpu`` of one core."""
    period = max(_PERIOD_US, round(_LEAST_QUOTA_US / cpu))
    return round(cpu * period), period


class Groups:
    """The control groups of one lab: one per host, below one for the lab."""

    def __init__(self, lab: str, root: Path = _ROOT) -> None:
        self.name = _PREFIX + lab
        self.root = root
        v2 = (root / "cgroup.controllers").is_file()
        self.version = 2 if v2 else 1
        self.trees = [root] if v2 else [root / controller for controller in ("cpu", "cpuset", "memory")]
        if not all(tree.is_dir() for tree in self.trees):
            raise LabError(f"no control groups for cpu, cpuset and memory under {root}: the lab needs them to slow hosts")

    def of(self, host: str) -> list[Path]:
        """Directories of the groups to which a host's processes belong."""
        return [tree / self.name / host for tree in self.trees]

    def make(self, host: str, cpu: float | None, cores: list[int], memory: int | None) -> None:
        """Create a host's groups: ``cpu`` cores (None: no limit) of ``cores``, ``memory`` bytes. Raises LabError."""
        try:
            for tree in self.trees:
                (tree / self.name / host).mkdir(parents=True, exist_ok=True)
            listed = ",".join(map(str, cores))
            if self.version == 2:
                group = self.of(host)[0]
                for parent in (self.root, group.parent):
                    (parent / "cgroup.subtree_control").write_text("+cpu +cpuset +memory")
                (group / "cpuset.cpus").write_text(listed)
                if memory:
                    (group / "memory.max").write_text(str(memory))
            else:
                _, cpuset, limits = self.of(host)
                for group in (cpuset.parent, cpuset):
                    (group / "cpuset.cpus").write_text((self.root / "cpuset" / "cpuset.cpus").read_text())
                    (group / "cpuset.mems").write_text((self.root / "cpuset" / "cpuset.mems").read_text())
                (cpuset / "cpuset.cpus").write_text(listed)
                if memory:
                    (limits / "memory.limit_in_bytes").write_text(str(memory))
            if cpu is not None:
                self.set_cpu(host, cpu)
        except OSError as error:
            raise LabError(f'no control group for host "{host}": {error}') from error

    def set_cpu(self, host: str, cpu: float) -> None:
        """Limit a host to this share of a core."""
        mine, period = quota(cpu)
        group = self.of(host)[0]
        burst = group / ("cpu.max.burst" if self.version == 2 else "cpu.cfs_burst_us")
        if burst.is_file():
            burst.write_text("0")  # reset, since the burst may not exceed the new quota
        if self.version == 2:
            (group / "cpu.max").write_text(f"{mine} {period}")
        else:
            (group / "cpu.cfs_quota_us").write_text("-1")  # the old quota with a longer period may be refused
            (group / "cpu.cfs_period_us").write_text(str(period))
            (group / "cpu.cfs_quota_us").write_text(str(mine))
        # The kernel checks quotas only at its ticks (4 ms), so hosts that share a core overrun theirs in turn. Without a
        # burst, a host would lose the time that it could not use meanwhile: up to 13 % of its share.
        if burst.is_file():  # Linux 5.14
            burst.write_text(str(mine))

    def hosts(self) -> list[str]:
        """Names of the hosts that have groups."""
        return sorted({path.name for tree in self.trees for path in (tree / self.name).glob("*") if path.is_dir()})

    def processes(self, host: str) -> list[int]:
        """Process ids on a host."""
        found: set[int] = set()
        for group in self.of(host):
            try:
                found |= {int(line) for line in (group / "cgroup.procs").read_text().split()}
            except OSError:
                continue
        return sorted(found - {os.getpid()})

    def kill(self, host: str, seconds: float = 10.0) -> None:
        """Kill all processes on a host by SIGKILL, until none is left. Raises LabError if some remain after ``seconds``."""
        until = time.monotonic() + seconds
        while pids := self.processes(host):
            for pid in pids:
                kill(pid)
            if time.monotonic() > until:
                raise LabError(f'processes {pids} of host "{host}" did not end within {seconds:.0f} s of SIGKILL')
            time.sleep(0.01)

    def remove(self) -> None:
        """End all processes of the lab and remove its groups."""
        hosts = self.hosts()
        self._kill_all(hosts)
        for tree in self.trees:
            for path in [*(tree / self.name).glob("*/"), tree / self.name]:
                if path.is_dir():
                    _remove(path, lambda: self._kill_all(hosts))

    def _kill_all(self, hosts: Iterable[str]) -> None:
        for host in hosts:
            self.kill(host)


def kill(pid: int) -> None:
    """Kill a process by SIGKILL, if it still exists."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _remove(group: Path, again: Callable[[], object], seconds: float = 5.0) -> None:
    """Remove a group. Until that succeeds (the kernel may need a moment, or a new process has entered) call ``again``, which
    kills what is in it. Raises LabError after ``seconds``."""
    until = time.monotonic() + seconds
    while True:
        try:
            return group.rmdir()
        except FileNotFoundError:
            return
        except OSError as error:
            if time.monotonic() > until:
                raise LabError(f"{group}: cannot remove the control group: {error.strerror}") from error
            again()
            time.sleep(0.02)

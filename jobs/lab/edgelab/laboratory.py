"""Labs: their creation and removal, their state on disk, and changes while they are up.
State is in /run/accept-lab/NAME (gone after a reboot, like namespaces) and is written before anything else is created, in
one step, so that ``down`` finds everything, whatever happened. Nothing is touched that this state does not name.
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from accept_mpi.device.fleet import Host, changed
from edgelab import LabError
from edgelab.cgroups import Groups, kill
from edgelab.network import HEAD, NAMESPACES, Network, free_number
from edgelab.running import END_SECONDS, HEAD_GROUP, Running, uninterrupted
from edgelab.shells import Shells
from edgelab.shells import why_not as why_no_shells

STATE = Path("/run/accept-lab")
_SCRIPT = Path(__file__).resolve().parent.parent / "lab"
_FREE_SHARE = 0.2
_MOST_HOSTS = 200  # on one network of 254 addresses


def why_not() -> str | None:
    """A sentence on why there can be no lab on this machine; None if there can."""
    if sys.platform != "linux":
        return "the lab needs Linux"
    if os.geteuid() != 0:
        return "the lab needs root: network namespaces, traffic control and control groups are the kernel's"
    for tool in ("ip", "tc", "nsenter", "unshare"):
        if shutil.which(tool) is None:
            return f'the lab needs the command "{tool}" (Debian: iproute2 and util-linux)'
    try:
        Groups("probe")
    except LabError as error:
        return str(error)
    # Try a namespace without a name, of which nothing remains however this ends.
    made = subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True, text=True)
    return f"network namespaces are not allowed here: {made.stderr.strip()}" if made.returncode else None


def labs() -> list[str]:
    """Names of the labs on this machine that are up, or were left incomplete."""
    return sorted(path.parent.name for path in STATE.glob("*/state.json") if "." not in path.parent.name)


class Laboratory:
    """A lab: ``Laboratory(name).up(hosts)`` until ``down()``, or ``with Laboratory(name).using(hosts) as lab: ...``."""

    def __init__(self, name: str) -> None:
        if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,30}", name):
            raise LabError(f'"{name}": a lab is named with small letters, digits and hyphens')
        self.name = name
        self.folder = STATE / name
        self.shells = Shells(self.folder)
        self._keeper: subprocess.Popen[bytes] | None = None

    # -- up and down ---------------------------------------------------------------------------------------------------

    def up(
        self, hosts: list[Host], keep: bool = True, ssh: bool | None = None, homes: dict[str, Path] | None = None
    ) -> "Laboratory":
        """Create all hosts; on any error, Ctrl-C or death of this process all is removed again. ``keep``: the lab outlives
        this process. ``ssh``: each host has an ssh server (None: if this machine can run one); else mpirun and ``launch``
        reach hosts by a script. ``homes``: root's home by host, if not in the lab's folder. Raises LabError."""
        reason = why_not()
        if reason:
            raise LabError(reason)
        if len(hosts) > _MOST_HOSTS:
            raise LabError(f"{len(hosts)} hosts: a lab has at most {_MOST_HOSTS}")
        cores = sorted(os.sched_getaffinity(0))
        for host in hosts:
            if host.threads > len(cores):
                raise LabError(f'host "{host.name}" has {host.threads} threads, this machine only {len(cores)} cores')
        missing = why_no_shells()
        if ssh and missing:
            raise LabError(f"the lab {missing}")
        claim = f"{self.name}.{os.getpid()}-{time.monotonic_ns()}"
        self._keeper = subprocess.Popen(
            [sys.executable, str(_SCRIPT), "_keep", claim], stdin=subprocess.PIPE, start_new_session=True
        )
        try:
            network = self._claim(claim, hosts, spread(hosts, cores), missing is None if ssh is None else ssh)
            groups = Groups(self.name)
            groups.make(HEAD_GROUP, None, cores, None)
            network.make_bridge()
            for place, host in enumerate(hosts):
                groups.make(host.name, host.cpu, self.state()["cores"][host.name], host.memory)
                network.make_host(host.name, place, self._names(host.name))
                if host.link:
                    network.set_link(host.name, place, host.link)
            if self.has_ssh:
                self.shells.write(hosts, [network.address(place) for place in range(len(hosts))], homes or {})
            self._write_scripts(hosts, network, groups)
            if self.has_ssh:
                self.shells.serve({host.name: self._enter(host.name) for host in hosts})
        except BaseException:
            with contextlib.suppress(LabError):
                self._release(keep=False)
            raise
        if keep:
            self._release(keep=True)
        return self

    @contextlib.contextmanager
    def using(self, hosts: list[Host], **options: Any) -> Iterator["Laboratory"]:
        """A lab that exists for the duration of the block, whatever ends it; ``options`` are those of ``up``."""
        self.up(hosts, keep=False, **options)
        try:
            yield self
        finally:
            self._release(keep=False)

    def _release(self, keep: bool) -> None:
        """Have the keeper leave the lab up (``keep``) or remove it. Raises LabError if it cannot be removed completely."""
        assert self._keeper is not None
        assert self._keeper.stdin is not None
        with uninterrupted():
            with contextlib.suppress(BrokenPipeError):
                self._keeper.stdin.write(b"keep" if keep else b"down")
                self._keeper.stdin.close()
            try:
                failed = self._keeper.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                failed = 1
        if failed:
            raise LabError(f'the lab "{self.name}" could not be removed whole; "lab down --name {self.name}" tries again')

    def _claim(self, claim: str, hosts: list[Host], cores: dict[str, list[int]], ssh: bool) -> Network:
        """Reserve the lab's name and a number for its network, under a lock. Raises LabError if the name is taken."""
        STATE.mkdir(mode=0o755, exist_ok=True)
        with open(STATE / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (self.folder / "state.json").exists():
                raise LabError(f'the lab "{self.name}" is up already; "lab down --name {self.name}" ends it')
            number = free_number({Laboratory(other).state()["number"] for other in labs()})
            state = {"claim": claim, "number": number, "hosts": [asdict(host) for host in hosts], "cores": cores, "ssh": ssh}
            shutil.rmtree(self.folder, ignore_errors=True)  # without a state: the end of a removal was killed
            beside = STATE / claim
            (beside / "tmp").mkdir(parents=True)
            (beside / "state.json").write_text(json.dumps(state, indent=1))
            beside.rename(self.folder)
        return Network(self.name, number)

    def down(self) -> None:
        """End every process of the lab and remove it. Raises LabError if it is not up."""
        state = self.state()
        groups = Groups(self.name)
        names = [host["name"] for host in state["hosts"]]
        groups.remove()
        for name in names:  # processes that entered the namespace by other ways than the lab's scripts
            space = NAMESPACES / self.network.namespace(name)
            if space.exists():
                listed = subprocess.run(["ip", "netns", "pids", space.name], capture_output=True, text=True).stdout
                for pid in listed.split():
                    kill(int(pid))
        self.network.remove(names, [self._names(name) for name in names])
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- state ---------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The lab's state on disk. Raises LabError if it is not up."""
        try:
            found: dict[str, Any] = json.loads((self.folder / "state.json").read_text())
        except FileNotFoundError:
            others = f"; up are: {', '.join(labs())}" if labs() else ""
            raise LabError(f'no lab "{self.name}" is up{others}') from None
        return found

    def _write_state(self, state: dict[str, Any]) -> None:
        beside = self.folder / f"state.{os.getpid()}"
        beside.write_text(json.dumps(state, indent=1))
        beside.rename(self.folder / "state.json")

    @property
    def hosts(self) -> list[Host]:
        return [Host(**entry) for entry in self.state()["hosts"]]

    @property
    def network(self) -> Network:
        return Network(self.name, self.state()["number"])

    @property
    def has_ssh(self) -> bool:
        """True if each host has an ssh server."""
        return bool(self.state()["ssh"])

    @property
    def hostfile(self) -> Path:
        """Path of a host file for ``mpirun -hostfile``, one line per host."""
        return self.folder / "edges"

    def place(self, name: str) -> int:
        """Position of a host in the fleet: 0, 1, ... Raises LabError if there is no such host."""
        names = [host.name for host in self.hosts]
        if name not in names:
            raise LabError(f'the lab "{self.name}" has no host "{name}"; it has {", ".join(names)}')
        return names.index(name)

    def _enter(self, host: str) -> Path:
        """The script that runs a command on a host."""
        return self.folder / f"enter-{host}"

    def _names(self, host: str) -> Path:
        return self.folder / f"{host}.uts"

    # -- changes while it runs -----------------------------------------------------------------------------------------

    def set(self, name: str, *settings: str) -> Host:
        """Change a host, as in ``set("edge2", "cpu=0.2", "link=5")``; returns the changed host. Raises LabError."""
        place = self.place(name)
        before = self.hosts[place]
        after = changed(before, list(settings))
        if after.cpu != before.cpu:
            Groups(self.name).set_cpu(name, after.cpu)
        if after.link != before.link:
            self.network.set_link(name, place, after.link)
        state = self.state()
        state["hosts"][place] = asdict(after)
        self._write_state(state)
        return after

    def kill(self, name: str) -> None:
        """Power a host off: cut its cable, then kill its processes, so that the others see no connection close."""
        self.cut(name)
        Groups(self.name).kill(name)

    def cut(self, name: str) -> None:
        """Pull a host's cable; its processes go on."""
        self.network.set_cable(self.place(name), plugged=False)

    def mend(self, name: str) -> None:
        """Plug a host's cable in again; after a power-off it is on again, with nothing running but its ssh server."""
        self.network.set_cable(self.place(name), plugged=True)
        if self.has_ssh and self.shells.server(name) not in Groups(self.name).processes(name):
            self.shells.serve({name: self._enter(name)})

    def processes(self, name: str) -> list[int]:
        """Process ids on a host, without its ssh server."""
        self.place(name)
        server = self.shells.server(name)
        return [pid for pid in Groups(self.name).processes(name) if pid != server]

    # -- commands ------------------------------------------------------------------------------------------------------

    def environment(self) -> dict[str, str]:
        """Environment of commands that run outside the hosts, as on a head node. It gives mpirun the hosts, their network
        and, without ssh servers, the script that replaces ssh."""
        cidr = self.network.cidr
        agent = {} if self.has_ssh else {"PRTE_MCA_plm_ssh_agent": str(self.folder / "agent")}
        return agent | {
            "PRTE_MCA_prte_if_include": cidr,
            "PRTE_MCA_prte_default_hostfile": str(self.hostfile),
            "PRTE_MCA_hwloc_default_binding_policy": "none",
            "OMPI_MCA_btl_tcp_if_include": cidr,
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "TMPDIR": str(self.folder / "tmp"),
            "ACCEPT_LAB": self.name,
            "LAB_HOSTFILE": str(self.hostfile),
            "LAB_HEAD": f"{cidr.removesuffix('0/24')}{HEAD}",
            "GLOO_SOCKET_IFNAME": "eth0",
        }

    def start(self, command: Sequence[object], **options: Any) -> Running:
        """Start a command outside the hosts; ``options`` go to Popen. Use as ``with``, at whose end all of it is killed."""
        return Running(self.name, self.environment(), self.inside(), [str(word) for word in command], options)

    def run(self, command: Sequence[object], seconds: float, **options: Any) -> str:
        """Run a command outside the hosts; returns its output. Raises LabError if it fails or exceeds ``seconds``."""
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True} | options
        with self.start(command, stdin=subprocess.DEVNULL, **options) as running:
            try:
                out, _ = running.process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                running.end()
                out, _ = running.process.communicate()
                raise LabError(f"{' '.join(running.command)}: still running after {seconds:.0f} s\n{out}") from None
        if running.process.returncode:
            raise LabError(f"{' '.join(running.command)}: exit code {running.process.returncode}\n{out}")
        return str(out or "")

    def on(self, name: str, command: Sequence[object]) -> list[str]:
        """Command line that runs ``command`` on a host."""
        self.place(name)
        return [str(self._enter(name)), *map(str, command)]

    def inside(self) -> str:
        """Beginning of a shell command line that runs the rest outside the hosts."""
        return f"exec {self.shells.inside()}" if self.has_ssh else "exec"

    def _write_scripts(self, hosts: list[Host], network: Network, groups: Groups) -> None:
        """Write the scripts that run a command on a host, the launch agent that replaces ssh, and the host file."""
        cases = []
        for place, host in enumerate(hosts):
            lines = [f"echo $$ > {group}/cgroup.procs || exit 1" for group in groups.of(host.name)]
            lines += [f"export {key}={value}" for key, value in host.environment().items()]
            names = f"--net={NAMESPACES / network.namespace(host.name)} --uts={self._names(host.name)}"
            enter, inside = self._enter(host.name), self.shells.inside(host.name) if self.has_ssh else ""
            _write_script(enter, [*lines, f'exec nsenter {names} -- {inside} "$@"'])
            cable = f"/sys/class/net/{network.port(place)}/operstate"
            there = f'grep -qx up {cable} || {{ echo "no answer from $1" >&2; exit 255; }}'
            cases.append(f'{network.address(place)}|{host.name}) {there}; shift; exec {enter} sh -c "$*" ;;')
        agent = ['case "$1" in', *cases, '*) echo "no host $1 in this lab" >&2; exit 255 ;;', "esac"]
        _write_script(self.folder / "agent", agent)
        lines = [f"{network.address(place)} slots=1" for place in range(len(hosts))]
        self.hostfile.write_text("\n".join(lines) + "\n")


def keep(claim: str, words: IO[bytes]) -> int:
    """The keeper process: waits for the end of ``words``, and removes what ``claim`` made unless they are "keep"; 1 if it
    cannot. A lab of the same name that somebody else claimed is left alone."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if words.read() == b"keep":
        return 0
    shutil.rmtree(STATE / claim, ignore_errors=True)
    lab = Laboratory(claim.partition(".")[0])
    try:
        if lab.name in labs() and lab.state()["claim"] == claim:
            lab.down()
    except LabError as error:
        print(f"lab {lab.name}: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def spread(hosts: list[Host], cores: list[int]) -> dict[str, list[int]]:
    """The cores on which each host computes, one per thread: the largest host first, each on the least loaded cores. With
    more cores, the part of a one-core quota that a second core takes and leaves unused would be lost."""
    load = dict.fromkeys(cores, 0.0)
    placed = {}
    for host in sorted(hosts, key=lambda host: -host.cpu):
        mine = sorted(sorted(cores, key=lambda core: (load[core], core))[: host.threads])
        for core in mine:
            load[core] += host.cpu / len(mine)
        placed[host.name] = mine
    return placed


def crowded(hosts: list[Host]) -> str | None:
    """A warning if the hosts are given more than the machine can spare, else None."""
    total, cores = sum(host.cpu for host in hosts), len(os.sched_getaffinity(0))
    if total <= (1 - _FREE_SHARE) * cores + 1e-9:
        return None
    return (
        f"the hosts are given {total:.2f} of {cores} cores: leave a fifth free, since the kernel's network work is charged "
        "to nobody; speeds measured here will not be what the fleet says"
    )


def _write_script(path: Path, lines: list[str]) -> None:
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)

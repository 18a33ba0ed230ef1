"""Hosts made of network namespaces, joined by a bridge, with links slowed by tc: for tests that need a real slow network.

mpirun stays outside and starts its daemons in the namespaces through a launch agent, as it would by ssh.
"""

import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from conftest import environment, mpirun_command


def run(command: str, check: bool = True) -> None:
    subprocess.run(
        command, shell=True, check=check, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL if not check else None
    )


def why_not() -> str | None:
    """Why there can be no namespaces here, or None."""
    if os.geteuid() != 0:
        return "needs root for network namespaces and tc"
    for tool in ("ip", "tc", "nsenter", "unshare"):
        if subprocess.run(["which", tool], capture_output=True).returncode:
            return f"needs {tool} (Debian: iproute2, util-linux)"
    probe = f"accept-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    run(f"ip netns del {probe}", check=False)
    return f"network namespaces are not allowed here: {made.stderr.strip()}" if made.returncode else None


class Hosts:
    """``with Hosts(folder, 2, mbit=100) as hosts: hosts.mpirun(...)``; leaves nothing behind."""

    def __init__(self, folder: Path, count: int, mbit: float | None) -> None:
        self.folder, self.count, self.mbit = folder, count, mbit
        self.tag = f"am{os.getpid() % 100000}"
        self.net = f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}"
        self.names = [f"{self.tag}h{i}" for i in range(count)]

    def __enter__(self) -> "Hosts":
        try:
            self._up()
        except BaseException:
            self._down()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self._down()

    def _up(self) -> None:
        run(
            f"ip link add {self.tag}b type bridge && ip addr add {self.net}.254/24 dev {self.tag}b && "
            f"ip link set {self.tag}b up"
        )
        cases = []
        for i, name in enumerate(self.names):
            run(f"ip netns add {name} && ip link add {name}v type veth peer name eth0 netns {name}")
            run(f"ip link set {name}v master {self.tag}b up")
            run(f"ip -n {name} addr add {self.net}.{i + 1}/24 dev eth0 && ip -n {name} link set eth0 up")
            run(f"ip -n {name} link set lo up && touch {self.folder}/{name}.uts")
            run(f"unshare --uts={self.folder}/{name}.uts hostname {name}")
            self.slow(name, self.mbit)
            enter = f"nsenter --net=/run/netns/{name} --uts={self.folder}/{name}.uts"
            cases.append(f'{self.net}.{i + 1}) shift; exec {enter} sh -c "$*" ;;')
        agent = self.folder / "agent"
        agent.write_text(
            '#!/bin/sh\ncase "$1" in\n' + "\n".join(cases) + '\n*) echo "no such host $1" >&2; exit 1 ;;\nesac\n'
        )
        agent.chmod(0o755)
        lines = [f"{self.net}.{i + 1} slots=1" for i in range(self.count)]
        (self.folder / "edges").write_text("\n".join(lines) + "\n")

    def slow(self, name: str, mbit: float | None) -> None:
        """Limit a host's link, both ways."""
        for where in (f"tc -n {name} qdisc replace dev eth0", f"tc qdisc replace dev {name}v"):
            if mbit is None:
                run(where.replace("replace", "del") + " root", check=False)
            else:
                run(f"{where} root tbf rate {mbit}mbit burst 32kb latency 400ms")

    def _down(self) -> None:
        for name in self.names:
            run(f"ip netns pids {name} | xargs -r kill -9", check=False)
            run(f"ip link del {name}v; ip netns del {name}; umount {self.folder}/{name}.uts", check=False)
        run(f"ip link del {self.tag}b", check=False)

    def mpirun(self, *arguments: object, deadline: float = 120.0) -> str:
        """Run one rank on each host; returns what was printed."""
        network = f"{self.net}.0/24"
        flags = ["--prtemca", "plm_ssh_agent", str(self.folder / "agent"), "--prtemca", "prte_if_include", network]
        flags += ["--mca", "btl_tcp_if_include", network, "--mca", "pml", "ob1", "--mca", "btl", "tcp,self"]
        flags += ["-hostfile", str(self.folder / "edges"), "-x", "PYTHONPATH", "-x", "OMP_NUM_THREADS", "--bind-to", "none"]
        command = [*mpirun_command(self.count), *flags, sys.executable, *map(str, arguments)]
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=deadline,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

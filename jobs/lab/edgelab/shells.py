"""Lets hosts reach each other as separate machines do: names in /etc/hosts, an OpenSSH server per host, keys of the lab.

All files are in the lab's folder, and only processes in the lab see them: each command gets a separate mount namespace, with
the lab's files over /etc/hosts, /etc/ssh/ssh_config and, on a host, /etc/passwd, which gives root another home.
"""

import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from accept_mpi.device.fleet import Host
from edgelab import LabError
from edgelab.network import run

_CONFIG, _NAMES, _USERS = Path("/etc/ssh/ssh_config"), Path("/etc/hosts"), Path("/etc/passwd")
_EMPTY = Path("/run/sshd")  # empty directory to which Debian's sshd confines its unprivileged part
_START_SECONDS = 30.0
# Environment variables that ssh passes on: the lab's mark of processes that belong together, and those of experiments.
_SENT = "ACCEPT_* PYTHONPATH LAB_* GLOO_* TMPDIR"


def why_not() -> str | None:
    """A sentence on why hosts cannot have ssh servers on this machine; None if they can."""
    if _sshd() is None or shutil.which("ssh") is None or shutil.which("ssh-keygen") is None:
        return "needs ssh and sshd (Debian: openssh-server and openssh-client)"
    return None if _CONFIG.is_file() else f"needs {_CONFIG}, over which a lab's own is laid"


def _sshd() -> str | None:
    return shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


class Shells:
    """The ssh files and servers of one lab's hosts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "ssh"

    def write(self, hosts: Sequence[Host], addresses: Sequence[str], homes: dict[str, Path]) -> None:
        """Write keys, names and settings of all hosts. ``homes``: root's home by host, if not in the lab's folder."""
        self.folder.mkdir(mode=0o700, exist_ok=True)
        known, names = [], [_NAMES.read_text().rstrip("\n") if _NAMES.is_file() else "127.0.0.1 localhost"]
        for key in ("key", *(f"{host.name}.key" for host in hosts)):
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "lab", "-f", self.folder / key)
        for host, address in zip(hosts, addresses, strict=True):
            names.append(f"{address} {host.name}")
            public = (self.folder / f"{host.name}.key.pub").read_text()
            known.append(f"{host.name},{address} {public}")
            environment = host.environment() | {"TMPDIR": str(self.folder.parent / "tmp")}
            settings = [
                f"HostKey {self.folder / host.name}.key",
                f"PidFile {self._pid_file(host.name)}",
                f"AuthorizedKeysFile {self.folder / 'key.pub'}",
                "UsePAM no",
                "StrictModes no",
                "UseDNS no",
                "PrintMotd no",
                "PasswordAuthentication no",
                "PermitRootLogin prohibit-password",
                "MaxStartups 200",
                "MaxSessions 200",
                f"AcceptEnv {_SENT}",
                "SetEnv " + " ".join(f"{key}={value}" for key, value in environment.items()),
            ]
            (self.folder / f"{host.name}.conf").write_text("\n".join(settings) + "\n")
            # A separate home, so that files in the user's own, such as .bashrc, do not affect the lab's hosts.
            home = homes.get(host.name, self.folder / f"{host.name}.home")
            home.mkdir(exist_ok=True)
            users = [line.split(":") for line in _USERS.read_text().splitlines()]
            moved = [[*user[:5], str(home), *user[6:]] if user[2:3] == ["0"] else user for user in users]
            (self.folder / f"{host.name}.passwd").write_text("".join(":".join(user) + "\n" for user in moved))
        (self.folder / "hosts").write_text("\n".join(names) + "\n")
        (self.folder / "known_hosts").write_text("".join(known))
        settings = [
            "Host *",
            f"IdentityFile {self.folder / 'key'}",
            "IdentitiesOnly yes",
            f"UserKnownHostsFile {self.folder / 'known_hosts'}",
            "StrictHostKeyChecking yes",
            f"SendEnv {_SENT}",
        ]
        (self.folder / "config").write_text("\n".join(settings) + "\n")

    def inside(self, host: str | None = None) -> str:
        """Beginning of a shell command line that runs the rest with these files in place: on a host, or outside of all. On a
        host also with what the kernel shows of its networks."""
        binds, steps = [(self.folder / "hosts", _NAMES), (self.folder / "config", _CONFIG)], []
        if host:
            binds.append((self.folder / f"{host}.passwd", _USERS))
            own = shlex.quote(str(self.folder / "sys"))
            steps = [f"mkdir -p {own} && mount -t sysfs sysfs {own} &&"]
            steps += [f"mount --bind {own}/{shown} /sys/{shown} &&" for shown in ("class/net", "devices/virtual/net")]
        steps += [f"mount --bind {shlex.quote(str(ours))} {theirs} &&" for ours, theirs in binds if theirs.exists()]
        steps.append('exec "$@"')
        return f"unshare --mount sh -c {shlex.quote(' '.join(steps))} sh"

    def serve(self, enter: dict[str, Path], seconds: float = _START_SECONDS) -> None:
        """Start the ssh servers of hosts. ``enter``: by host, the script that runs a command on it. Raises LabError if one
        does not start within ``seconds``."""
        _EMPTY.mkdir(mode=0o755, exist_ok=True)
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        for host, way in enter.items():
            self._pid_file(host).unlink(missing_ok=True)
            words = [way, str(_sshd()), "-f", self.folder / f"{host}.conf", "-E", self.folder / f"{host}.log"]
            done = subprocess.run([str(word) for word in words], **quiet)  # type: ignore[call-overload]
            if done.returncode:
                raise LabError(f'no ssh server on host "{host}": {self._said(host)}')
        until = time.monotonic() + seconds
        while left := [host for host in enter if self.server(host) is None]:
            if time.monotonic() > until:
                raise LabError(f'no ssh server on host "{left[0]}" within {seconds:.0f} s: {self._said(left[0])}')
            time.sleep(0.01)

    def server(self, host: str) -> int | None:
        """Process id of a host's ssh server; None before it listens."""
        try:
            return int(self._pid_file(host).read_text())
        except (OSError, ValueError):
            return None

    def _pid_file(self, host: str) -> Path:
        return self.folder / f"{host}.pid"

    def _said(self, host: str) -> str:
        try:
            lines = (self.folder / f"{host}.log").read_text(errors="replace").strip().splitlines()
        except OSError:
            lines = []
        return lines[-1] if lines else "it said nothing"

"""Reads host files, and asks which of their hosts answer."""

import errno
import ipaddress
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TypeVar

from accept_mpi.errors import UserError
from accept_mpi.files.regular import read_regular

T = TypeVar("T")

ASK_SECONDS = 9.0
"""Seconds after which a host that does not answer counts as lost."""
_AGENT, _AGENT_FLAGS = "PRTE_MCA_plm_ssh_agent", "PRTE_MCA_plm_ssh_args"
_SSH = "ssh -o BatchMode=yes -o ConnectTimeout=8"
_MOST_BYTES, _MOST_SLOTS = 1 << 20, 1000
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_KEYS = {
    **dict.fromkeys(("slots", "cpu", "cpus", "count"), "slots"),
    **dict.fromkeys(("max_slots", "max-slots", "slots_max"), "most"),
    **dict.fromkeys(("user", "username", "user_name", "user-name"), "user"),
    "port": "port",
}
_MISSING = 77
"""Exit code that a host gives for a missing file. By no text: ssh and the host's shell may add warnings to every command."""


@dataclass(frozen=True)
class Host:
    """A host of a host file, and the number of ranks that it gets (``slots``)."""

    name: str
    slots: int
    user: str | None = None
    port: int | None = None
    """Port of its ssh server, if the file gives one."""
    here: bool = False
    """True for this machine, which mpirun does not reach by ssh."""

    @property
    def target(self) -> str:
        """The host as an argument of ssh: USER@NAME or NAME."""
        return f"{self.user}@{self.name}" if self.user else self.name

    @property
    def line(self) -> str:
        """The host as a line of mpirun's host file. It always gives slots: without them mpirun starts a rank per core. This
        machine is "localhost": mpirun knows few of its names and addresses, and takes ssh for the rest."""
        if self.here:
            return f"localhost slots={self.slots}"
        return f"{self.target} slots={self.slots}" + (f" port={self.port}" if self.port else "")


def read_hosts(path: Path) -> list[Host]:
    """The hosts of a host file, in the order of their first lines; slots of several lines for one host are added up.

    A line is NAME, USER@NAME or NAME:SLOTS, optionally followed by slots=N, max_slots=N, user=NAME, port=N; # begins a
    comment. Raises UserError if the file cannot be read, has no hosts, or has a line that is not understood.
    """
    lines = []
    for number, line in enumerate(_text(path).splitlines(), 1):
        words = re.sub(r"\s*=\s*", "=", line.partition("#")[0]).split()
        if not words:
            continue
        try:
            lines.append(_host(*words))
        except ValueError as error:
            raise UserError(f"{path}, line {number}: {error}; a line is NAME or NAME slots=N") from None
    if not lines:
        raise UserError(f"{path}: no hosts in it")
    own = _here({host.name for host in lines})
    found: dict[str, Host] = {}
    for host in lines:
        key = "" if host.name in own else host.name.lower()
        before = found.get(key)
        found[key] = replace(before or host, slots=(before.slots if before else 0) + host.slots, here=not key)
    return list(found.values())


def answering(hosts: Sequence[Host]) -> list[Host]:
    """The hosts that start a command within ``ASK_SECONDS``; see ``ask``."""
    return [host for host, why in ask(hosts).items() if why is None]


def ask(hosts: Sequence[Host]) -> dict[Host, str | None]:
    """Ask every host, simultaneously, to start a command, in the way in which mpirun starts its daemons.

    Returns for each host ssh's words on why it cannot take part, or None if it can. Raises UserError if ssh does not start.
    """
    agent = _agent()
    question = ["test", "-x", shlex.quote(sys.executable), "||", "exit", str(_MISSING)]
    asked = []
    with ExitStack() as files:
        for host in hosts:
            if host.here:
                continue
            # A file, since a master connection that ssh leaves running keeps a pipe open; without a name, so that it ends
            # with this process, however that ends.
            said = files.enter_context(tempfile.TemporaryFile())
            command = [*agent, host.target, *(["-p", str(host.port)] if host.port else []), *question]
            try:
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said)
            except OSError as error:
                raise UserError(f"{agent[0]} does not start: {error.strerror}; mpirun reaches hosts by it") from error
            asked.append((host, process, said))
        until = time.monotonic() + ASK_SECONDS
        answers = {host: _answer(process, said, until) for host, process, said in asked}
    return {host: answers.get(host) for host in hosts}


def _agent() -> list[str]:
    """The program by which hosts are reached, with its flags. As mpirun does, takes the first one that there is of several
    (FIRST : SECOND), and parts words at blanks only. Raises UserError if there is none."""
    given = os.environ.get(_AGENT, _SSH)
    for one in given.split(":"):
        words = one.split()
        if words and shutil.which(words[0]):
            return words + os.environ.get(_AGENT_FLAGS, "").split()
    raise UserError(
        f'"{given}" does not start: there is no such program; mpirun reaches hosts by it ({_AGENT} names others)'
    )


def missing(why: str | None) -> bool:
    """True if a host answered (``why``: its answer from ``ask``), but lacks this Python."""
    return why is not None and why.startswith("it has no ")


def _answer(process: "subprocess.Popen[bytes]", said: IO[bytes], until: float) -> str | None:
    try:
        code = process.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return f"no answer within {ASK_SECONDS:.0f} s"
    if code == 0:
        return None
    if code == _MISSING:
        return f"it has no {sys.executable}"
    said.seek(0)
    lines = said.read().decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return last[:200] or "no answer"


def _text(path: Path) -> str:
    try:
        return read_regular(path, _MOST_BYTES).decode("utf-8-sig")
    except OSError as error:
        why = {errno.EFBIG: f"larger than {_MOST_BYTES >> 20} MiB", errno.EINVAL: "not a regular file"}
        raise UserError(f"{path}: cannot read the host file: {why.get(error.errno or 0, error.strerror)}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: cannot read the host file: not a text in UTF-8") from error


def _host(first: str, *more: str) -> Host:
    """Parse the words of a line. Raises ValueError if they are not understood."""
    user, at, name = first.rpartition("@")
    given: dict[str, str] = {"user": user} if at else {}
    if name.startswith("["):
        inside = name[1:-1]
        name = inside if name.endswith("]") and _address(inside) else name
    elif name.count(":") == 1:
        name, _, given["slots"] = name.partition(":")
    for word in more:
        key, equals, value = word.partition("=")
        if not equals or key not in _KEYS or _KEYS[key] in given:
            raise ValueError(f'"{word}" is not understood')
        given[_KEYS[key]] = value
    address = _address(name)
    if address and address.version == 6 and address.is_link_local:
        raise ValueError(f'"{name}" is an address within one link, which needs the name of an interface: give another one')
    if not (_NAME.fullmatch(name) or (address and "%" not in name)):
        raise ValueError(f'"{name}" is no name of a host')
    if "user" in given and not _USER.fullmatch(given["user"]):
        raise ValueError(f'"{given["user"]}" is no name of a user')
    numbers = {key: _number(key, value) for key, value in given.items() if key != "user"}
    slots = numbers.get("slots", 1)
    if slots > numbers.get("most", slots):
        raise ValueError(f"slots={slots} is more than max_slots={numbers['most']}")
    return Host(name, slots, given.get("user"), numbers.get("port"))


def _number(key: str, text: str) -> int:
    most = 65535 if key == "port" else _MOST_SLOTS
    if not re.fullmatch(r"[0-9]{1,5}", text) or not 1 <= int(text) <= most:
        raise ValueError(f'{key.replace("most", "max_slots")}="{text}": expected a whole number from 1 to {most}')
    return int(text)


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _here(names: set[str]) -> set[str]:
    """The names that mean this machine."""
    return {name for name, here in looked_up(names, is_here, ASK_SECONDS).items() if here}


def looked_up(names: Iterable[str], look_up: Callable[[str], T], seconds: float) -> dict[str, T]:
    """What ``look_up`` returns for each name, without those for which it takes longer than ``seconds``. Each is looked up in
    a thread, since an unknown name may take seconds."""
    found: dict[str, T] = {}
    threads = [threading.Thread(target=lambda name=name: found.update({name: look_up(name)}), daemon=True) for name in names]
    for thread in threads:
        thread.start()
    until = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return dict(found)


def is_here(name: str) -> bool:
    """True if a name means this machine: it is this machine's name, or resolves to one of its addresses."""
    if name.lower() in ("localhost", socket.gethostname().lower()):
        return True
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return any(_is_own(family, address) for family, _, _, _, address in found)


def _is_own(family: int, address: tuple[object, ...]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address[0], 0, *address[2:]))
        return True
    except OSError:
        return False

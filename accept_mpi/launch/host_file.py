"""Host files as people write them, and which of their hosts answer."""

import errno
import ipaddress
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from accept_mpi.errors import UserError
from accept_mpi.files.regular import read_regular

ASK_SECONDS = 9.0
"""A host that does not answer for so long is gone."""
_AGENT, _AGENT_FLAGS = "PRTE_MCA_plm_ssh_agent", "PRTE_MCA_plm_ssh_args"
_MOST_BYTES, _MOST_SLOTS = 1 << 20, 1000
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_KEYS = {
    **dict.fromkeys(("slots", "cpu", "cpus", "count"), "slots"),
    **dict.fromkeys(("max_slots", "max-slots", "slots_max"), "most"),
    **dict.fromkeys(("user", "username", "user_name", "user-name"), "user"),
    "port": "port",
}
_MISSING = 1  # exit code of test


@dataclass(frozen=True)
class Host:
    """A host, and how many ranks it gets."""

    name: str
    slots: int
    user: str | None = None
    port: int | None = None
    """Of its ssh server, where the file gives one."""
    here: bool = False
    """Whether it is this machine, which mpirun does not reach by ssh."""

    @property
    def target(self) -> str:
        """As ssh takes it."""
        return f"{self.user}@{self.name}" if self.user else self.name

    @property
    def line(self) -> str:
        """As mpirun takes it. Left to itself mpirun takes a line without slots as a rank a core."""
        return f"{self.target} slots={self.slots}" + (f" port={self.port}" if self.port else "")


def read_hosts(path: Path) -> list[Host]:
    """The hosts in the order of their first lines; lines of one host are added up. Raises UserError.

    A line is NAME, USER@NAME or NAME:SLOTS and, if need be, slots=N, max_slots=N, user=NAME, port=N; # begins a comment.
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
    """Those that start a command within some seconds, asked in the way in which mpirun starts its daemons."""
    return [host for host, why in ask(hosts).items() if why is None]


def ask(hosts: Sequence[Host]) -> dict[Host, str | None]:
    """Why a host cannot take part, in the words of ssh; None where it can. Raises UserError where ssh itself is missing."""
    agent = shlex.split(os.environ.get(_AGENT, "ssh -o BatchMode=yes -o ConnectTimeout=8"))
    agent += shlex.split(os.environ.get(_AGENT_FLAGS, ""))
    question = ["test", "-x", shlex.quote(sys.executable)]
    asked = []
    with tempfile.TemporaryDirectory(prefix="accept_mpi-ask-") as folder:
        for place, host in enumerate(hosts):
            if host.here:
                continue
            said = Path(folder) / str(place)  # a file: what ssh leaves running (a master connection) holds a pipe open
            command = [*agent, host.target, *(["-p", str(host.port)] if host.port else []), *question]
            with open(said, "wb") as words:
                try:
                    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=words)
                except OSError as error:
                    raise UserError(f"{agent[0]} does not start: {error.strerror}; mpirun reaches hosts by it") from error
            asked.append((host, process, said))
        until = time.monotonic() + ASK_SECONDS
        answers = {host: _answer(process, said, until) for host, process, said in asked}
    return {host: answers.get(host) for host in hosts}


def missing(why: str | None) -> bool:
    """Whether a host answered, but has no such Python."""
    return why is not None and why.startswith("it has no ")


def _answer(process: "subprocess.Popen[bytes]", said: Path, until: float) -> str | None:
    try:
        code = process.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return f"no answer within {ASK_SECONDS:.0f} s"
    if code == 0:
        return None
    lines = said.read_text(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    if code == _MISSING and not last:
        return f"it has no {sys.executable}"
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
    """Raises ValueError."""
    user, at, name = first.rpartition("@")
    given: dict[str, str] = {"user": user} if at else {}
    if name.startswith("["):
        name, _, rest = name[1:].partition("]")
        if rest:
            name = f"[{name}]{rest}"  # shown as it was
    elif name.count(":") == 1:
        name, _, given["slots"] = name.partition(":")
    for word in more:
        key, equals, value = word.partition("=")
        if not equals or key not in _KEYS or _KEYS[key] in given:
            raise ValueError(f'"{word}" is not understood')
        given[_KEYS[key]] = value
    if not (_NAME.fullmatch(name) or _is_address(name)):
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


def _is_address(name: str) -> bool:
    try:
        return bool(ipaddress.ip_address(name)) and "%" not in name
    except ValueError:
        return False


def _here(names: set[str]) -> set[str]:
    """Those that mean this machine. All are asked at once: where nobody knows a name, that may take seconds."""
    found: set[str] = set()
    threads = [
        threading.Thread(target=lambda name=name: found.add(name) if is_here(name) else None, daemon=True) for name in names
    ]
    for thread in threads:
        thread.start()
    until = time.monotonic() + ASK_SECONDS
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return set(found)


def is_here(name: str) -> bool:
    """Whether a name means this machine: by name, or since it leads to one of this machine's own addresses."""
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

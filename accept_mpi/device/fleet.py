"""Fleets: hosts that a TOML file describes. The edge lab creates them, the ``plan`` command plans for them.

    [defaults]              # for all hosts below; each key is optional
    link = 100              # Mbit/s each way; left out: unlimited
    [[hosts]]
    name = "edge"           # count = 4: edge1 .. edge4
    count = 4
    cpu = 0.4               # share of one core (1.5: one and a half)
    threads = 1             # computing threads, each on its own core
    isa = "avx2"            # cap on the instruction set: default, avx2, avx512
    memory = "2G"           # left out: unlimited
    [[hosts]]
    persona = "pi4"         # keys from personas.toml; keys given here win

All other keys are refused. Mistakes raise UserError with one sentence.
"""

import contextlib
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accept_mpi.errors import UserError
from accept_mpi.files.regular import read_regular
from accept_mpi.files.values import check_values, loads

PERSONAS = Path(__file__).with_name("personas.toml")
MOST_HOSTS = 4096
_MOST_BYTES, _MOST_THREADS = 1 << 20, 1024
_WORDS: dict[type, str] = {str: "a text", int: "a whole number", float: "a number"}
_KEYS: dict[str, type] = {
    "name": str, "count": int, "persona": str, "cpu": float, "threads": int, "isa": str, "memory": str, "link": float,
}  # fmt: skip
_SLOWEST = 0.01
_ONEDNN = {"default": "SSE41", "avx2": "AVX2", "avx512": "AVX512_CORE"}
_FLAGS = {"default": set(), "avx2": {"avx2", "fma"}, "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"}}
"""Flags in /proc/cpuinfo of a CPU that has each instruction set."""
_CPUINFO = Path("/proc/cpuinfo")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class Host:
    """One host of a fleet."""

    name: str
    cpu: float
    """Share of one core's time; may exceed one with several threads."""
    threads: int = 1
    isa: str | None = None
    memory: int | None = None
    """Bytes; None: unlimited."""
    link: float | None = None
    """Mbit/s each way; None: unlimited."""

    def environment(self) -> dict[str, str]:
        """Environment variables of processes on this host. A cap that exceeds what this machine's CPU can do is left out:
        torch would take it for a command and die of an illegal instruction."""
        found = {"OMP_NUM_THREADS": str(self.threads)}
        if self.threads > max(1.0, self.cpu):  # while one thread has to pause, spinning ones would use up the share
            found["OMP_WAIT_POLICY"] = "passive"
        if self.isa and _FLAGS[self.isa] <= _flags():
            found |= {"ATEN_CPU_CAPABILITY": self.isa, "ONEDNN_MAX_CPU_ISA": _ONEDNN[self.isa]}
        return found


def _flags() -> set[str]:
    """Flags of this machine's CPU; empty if they are unknown."""
    with contextlib.suppress(OSError):
        if found := re.search(r"^flags\s*:(.*)$", _CPUINFO.read_text(), re.MULTILINE):
            return set(found[1].split())
    return set()


def read(path: Path) -> list[Host]:
    """Hosts of a fleet file. Raises UserError if the file is wrong."""
    try:
        content = loads(read_regular(path, _MOST_BYTES).decode("utf-8-sig"))
    except OSError as error:
        raise UserError(f"{path}: cannot read the fleet: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path}: not valid TOML: {error}") from error
    check_values(content, str(path))
    return parse(content, str(path))


def parse(content: dict[str, Any], where: str) -> list[Host]:
    """Hosts of a fleet that has been read from TOML. Raises UserError with a sentence that begins with ``where``."""
    unknown = set(content) - {"defaults", "hosts"}
    if unknown:
        raise UserError(f'{where}: unknown key "{min(unknown)}"; a fleet has [defaults] and [[hosts]]')
    entries, defaults = content.get("hosts", []), content.get("defaults", {})
    if not isinstance(entries, list) or not entries:
        raise UserError(f"{where}: no [[hosts]]")
    if not isinstance(defaults, dict):
        raise UserError(f"{where}: defaults = {defaults!r}: expected a table [defaults] of keys that hosts share")
    personas = tomllib.loads(PERSONAS.read_text())
    hosts: list[Host] = []
    for number, entry in enumerate(entries, 1):
        at = f"{where}: hosts entry {number}"
        if not isinstance(entry, dict):
            raise UserError(f"{at}: {entry!r}: expected a table [[hosts]]")
        persona = (defaults | entry).get("persona")
        if persona is not None and not isinstance(persona, str):
            raise UserError(f"{at}: persona = {persona!r}: expected a text")
        if persona is not None and persona not in personas:
            raise UserError(f'{at}: no persona "{persona}"; there are {", ".join(personas)}')
        hosts += _expand(defaults | (personas[persona] if persona else {}) | entry, at)
        if len(hosts) > MOST_HOSTS:
            raise UserError(f"{where}: {len(hosts)} hosts; at most {MOST_HOSTS}")
    names = [host.name for host in hosts]
    for name, count in Counter(names).items():
        if count > 1:
            raise UserError(f'{where}: two hosts are called "{name}"')
    return hosts


def changed(host: Host, settings: list[str]) -> Host:
    """The host with settings such as ``cpu=0.2 link=5`` applied (``link=free``: unlimited). Raises UserError."""
    values: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if key not in ("cpu", "link") or not equals:
            raise UserError(f'"{setting}": expected cpu=SHARE or link=MBIT (link=free)')
        try:
            values[key] = None if (key, text) == ("link", "free") else float(text)
        except ValueError:
            raise UserError(f'"{setting}": expected a number') from None
    given = {"name": host.name, "cpu": host.cpu, "threads": host.threads, "link": host.link} | values
    checked = next(_expand({k: v for k, v in given.items() if v is not None}, host.name))
    return Host(host.name, checked.cpu, host.threads, host.isa, host.memory, checked.link)


def _expand(given: dict[str, Any], at: str) -> Iterator[Host]:
    """Yield the hosts that one entry of a fleet stands for."""
    for key, value in given.items():
        if key not in _KEYS:
            raise UserError(f'{at}: unknown key "{key}"; known are {", ".join(_KEYS)}')
        kinds = (int, float) if _KEYS[key] is float else (_KEYS[key],)
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise UserError(f"{at}: {key} = {value!r}: expected {_WORDS[_KEYS[key]]}")
    name, count = given.get("name", given.get("persona")), given.get("count", 1)
    if not name or not re.fullmatch(r"[a-z][a-z0-9-]{0,40}", name):
        raise UserError(f"{at}: name = {name!r}: expected small letters, digits and hyphens")
    cpu, threads, link = float(given.get("cpu", 1.0)), given.get("threads", 1), given.get("link")
    if not 1 <= threads <= _MOST_THREADS or count < 1:
        raise UserError(f"{at}: threads and count must be positive, threads at most {_MOST_THREADS}")
    if not _SLOWEST <= cpu <= threads:
        raise UserError(f"{at}: cpu = {cpu}: expected {_SLOWEST} to {threads} (the number of threads)")
    if link is not None and not 0.01 <= link <= 100_000:
        raise UserError(f"{at}: link = {link}: expected 0.01 to 100000 Mbit/s, or none for an unlimited link")
    if given.get("isa", "avx2") not in _ONEDNN:
        raise UserError(f"{at}: isa = {given['isa']!r}: expected one of {', '.join(_ONEDNN)}")
    if count > MOST_HOSTS:
        raise UserError(f"{at}: count = {count}; at most {MOST_HOSTS}")
    for number in range(1, count + 1):
        numbered = f"{name}{number}" if "count" in given else name
        yield Host(numbered, cpu, threads, given.get("isa"), _bytes(given.get("memory"), at), link)


def _bytes(text: str | None, at: str) -> int | None:
    if text is None:
        return None
    found = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)([KMG]?)", text, re.ASCII)
    if not found or float(found[1]) * _UNITS[found[2]] < 1 << 20:
        raise UserError(f'{at}: memory = "{text}": expected e.g. "512M" or "2G"')
    return int(float(found[1]) * _UNITS[found[2]])

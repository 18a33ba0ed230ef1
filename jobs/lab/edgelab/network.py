"""The network of the hosts: a namespace per host, joined by a bridge; tc limits links in both directions."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

from edgelab import LabError

NAMESPACES = Path("/run/netns")
_FIRST = "10.213"
HEAD = 254
# TCP passes down segments of up to 64 KB, for the network card to split. If tc's token bucket is smaller than a segment, the
# kernel splits it into packets of 1,500 bytes, which costs more than the sending; if it is larger, too much passes at once.
# So fast links pass large segments, slow ones no larger ones than a bucket of 2 ms holds, headers included.
_SEGMENT = 30_000
_FAST_MBIT = 50
_BURST_SECONDS, _LEAST_BURST = 0.002, 3_200
_OF_BURST = 0.9


def run(*command: object, check: bool = True) -> str:
    """Run a command; returns its standard output. Raises LabError if it fails, unless ``check`` is False."""
    words = [str(word) for word in command]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode and check:
        raise LabError(f"{' '.join(words)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout


def free_number(taken: set[int]) -> int:
    """The lowest network number from 1 that no lab (``taken``), bridge or address of this machine uses. Raises LabError."""
    links, addresses = run("ip", "-o", "link"), run("ip", "-o", "-4", "addr")
    for number in range(1, 255):
        if number not in taken and f" al{number}b:" not in links and f" {_FIRST}.{number}." not in addresses:
            return number
    raise LabError(f"all of {_FIRST}.1 to {_FIRST}.254 are in use: too many labs")


@dataclass(frozen=True)
class Network:
    """The network of one lab. A host's place is its position in the fleet: 0, 1, ..."""

    lab: str
    number: int

    @property
    def cidr(self) -> str:
        """The lab's network in CIDR notation."""
        return f"{_FIRST}.{self.number}.0/24"

    @property
    def bridge(self) -> str:
        """Name of the bridge that joins the hosts."""
        return f"al{self.number}b"

    def address(self, place: int) -> str:
        """IPv4 address of the host at ``place``."""
        return f"{_FIRST}.{self.number}.{place + 1}"

    def namespace(self, host: str) -> str:
        """Name of a host's network namespace."""
        return f"accept-lab-{self.lab}-{host}"

    def port(self, place: int) -> str:
        """The bridge's end of a host's cable."""
        return f"al{self.number}h{place}"

    def make_bridge(self) -> None:
        """Create the bridge, at whose address commands outside the hosts are reached."""
        run("ip", "link", "add", self.bridge, "type", "bridge")
        run("ip", "addr", "add", f"{_FIRST}.{self.number}.{HEAD}/24", "dev", self.bridge)
        run("ip", "link", "set", self.bridge, "up")

    def make_host(self, host: str, place: int, names: Path) -> None:
        """Create a host's network and host name; ``names``: file to which the UTS namespace is bound."""
        space, port = self.namespace(host), self.port(place)
        run("ip", "netns", "add", space)
        run("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
        run("ip", "link", "set", port, "master", self.bridge, "up")
        run("ip", "-n", space, "addr", "add", f"{self.address(place)}/24", "dev", "eth0")
        run("ip", "-n", space, "link", "set", "eth0", "up")
        run("ip", "-n", space, "link", "set", "lo", "up")
        self._set_segment(host, place, _SEGMENT)
        names.touch()
        run("unshare", f"--uts={names}", "hostname", host)

    def set_link(self, host: str, place: int, mbit: float | None) -> None:
        """Limit a host's link to ``mbit`` Mbit/s in both directions; None: no limit."""
        space = self.namespace(host)
        segment, burst = (_SEGMENT, 0) if mbit is None else _sizes(mbit)
        self._set_segment(host, place, segment)
        for where in (("-n", space, "qdisc"), ("qdisc",)):
            device = "eth0" if len(where) > 1 else self.port(place)
            if mbit is None:
                run("tc", *where, "del", "dev", device, "root", check=False)
            else:
                limit = ("rate", f"{mbit}mbit", "burst", burst, "latency", "400ms")
                run("tc", *where, "replace", "dev", device, "root", "tbf", *limit)

    def _set_segment(self, host: str, place: int, size: int) -> None:
        """Limit what TCP passes down at once on a host's link to ``size`` bytes."""
        for end in (("-n", self.namespace(host), "link", "set", "eth0"), ("link", "set", self.port(place))):
            run("ip", *end, "gso_max_size", size, check=False)

    def set_cable(self, place: int, plugged: bool) -> None:
        """Plug a host's cable in, or pull it."""
        run("ip", "link", "set", self.port(place), "up" if plugged else "down")

    def plugged(self, place: int) -> bool:
        """True if a host's cable is plugged in."""
        return "NO-CARRIER" not in (shown := run("ip", "-o", "link", "show", self.port(place))) and ",UP" in shown

    def remove(self, hosts: list[str], names: list[Path]) -> None:
        """Remove the network, as far as it exists."""
        for place, host in enumerate(hosts):
            run("ip", "link", "del", self.port(place), check=False)
            if (NAMESPACES / self.namespace(host)).exists():
                run("ip", "netns", "del", self.namespace(host), check=False)
        for path in names:
            run("umount", path, check=False)
        run("ip", "link", "del", self.bridge, check=False)


def _sizes(mbit: float) -> tuple[int, int]:
    """Bytes of the segments that TCP passes down on a link of ``mbit`` Mbit/s, and of its token bucket."""
    burst = int(mbit * 1e6 / 8 * _BURST_SECONDS)
    if mbit >= _FAST_MBIT:
        return _SEGMENT, max(_SEGMENT + 2_000, burst)
    burst = max(_LEAST_BURST, burst)
    return int(_OF_BURST * burst), burst

"""The networks of this host: its addresses, and which networks lead to no other host."""

import contextlib
import ipaddress
import socket
import struct
from collections.abc import Iterable
from pathlib import Path

_FLAGS, _ADDRESS, _MASK = 0x8913, 0x8915, 0x891B  # SIOCGIFFLAGS, SIOCGIFADDR, SIOCGIFNETMASK
_UP = 1
_CLASS = Path("/sys/class/net")
_OF_A_HYPERVISOR = ("vboxnet", "vmnet")
"""Networks of VirtualBox and VMware, which are no bridges."""


def addresses() -> dict[str, ipaddress.IPv4Interface]:
    """The (first) IPv4 address and network of each interface that is up and has one, by the interface's name."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError, ImportError):
                import fcntl  # not on Windows

                asked = struct.pack("256s", name.encode()[:15])
                flags, address, mask = (fcntl.ioctl(probe.fileno(), what, asked) for what in (_FLAGS, _ADDRESS, _MASK))
                if struct.unpack("H", flags[16:18])[0] & _UP:
                    text = f"{socket.inet_ntoa(address[20:24])}/{socket.inet_ntoa(mask[20:24])}"
                    found[name] = ipaddress.IPv4Interface(text)
    return found


def within_host() -> list[str]:
    """Names of the interfaces by which this host speaks with its own containers and virtual machines only, such as Docker's
    bridge. Empty if it has no others."""
    others = [name for name, found in addresses().items() if not found.ip.is_loopback]
    within = closed(others)
    return within if len(within) < len(others) else []


def closed(names: Iterable[str], folder: Path = _CLASS) -> list[str]:
    """Those of some interfaces that lead to no other host, by what the kernel says of them in ``folder``: bridges without
    a way out."""

    def is_inner(port: Path) -> bool:  # of a container or virtual machine, and not a card, or what is on top of one
        if (port / "tun_flags").exists():
            return True
        if (port / "device").exists() or any(port.glob("lower_*")):
            return False
        return (port / "iflink").read_text() != (port / "ifindex").read_text()  # the other end is elsewhere

    def is_closed(name: str) -> bool:
        if name.startswith(_OF_A_HYPERVISOR):
            return True
        with contextlib.suppress(OSError):
            return all(is_inner(folder / port.name) for port in (folder / name / "brif").iterdir())
        return False

    return [name for name in names if is_closed(name)]

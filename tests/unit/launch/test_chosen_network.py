"""The network that mpirun is told to use."""

import ipaddress
import os
import socket
from pathlib import Path

import pytest

from accept_mpi.launch import networks
from accept_mpi.launch.host_file import Host
from accept_mpi.launch.networks import environment, network_of

LAPTOP = Host("laptop", 1, here=True)
KNOWN = {"pi1": ["192.168.1.21"], "pi2": ["10.0.0.22", "192.168.1.22"], "far": ["203.0.113.9"]}


@pytest.fixture(autouse=True)
def laptop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with Docker, a cable and Wi-Fi, whose user has a home at the returned path."""
    own = {"lo": "127.0.0.1/8", "docker0": "172.17.0.1/16", "eth0": "10.0.0.5/24", "wlan0": "192.168.1.5/24"}
    monkeypatch.setattr(networks, "addresses", lambda: {name: ipaddress.IPv4Interface(at) for name, at in own.items()})

    def getaddrinfo(name: str, *_: object) -> list[tuple[object, ...]]:
        if name not in KNOWN:
            raise socket.gaierror("Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in KNOWN[name]]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in [*os.environ]:
        if "tcp_if_" in name or "prte_if_" in name:
            monkeypatch.delenv(name)
    return tmp_path


def test_the_network_of_all_names() -> None:
    assert str(network_of([LAPTOP, Host("pi1", 1), Host("pi2", 1)])) == "192.168.1.0/24"
    assert str(network_of([Host("pi2", 1)])) == "10.0.0.0/24"
    found = environment([LAPTOP, Host("pi1", 2)])
    assert found == {"PRTE_MCA_prte_if_include": "192.168.1.0/24", "OMPI_MCA_btl_tcp_if_include": "192.168.1.0/24"}


@pytest.mark.parametrize(
    "others", [[], [Host("far", 1)], [Host("pi1", 1), Host("far", 1)], [Host("alias", 1)], [Host("pi1", 1, port=2222)]]
)
def test_nothing_is_said_of_other_hosts(others: list[Host]) -> None:
    """None but this one, some beyond a router, names that only ssh knows, ports that a router may hand on."""
    assert environment([LAPTOP, *others]) == {}


@pytest.mark.parametrize("file", [".openmpi/mca-params.conf", ".prte/mca-params.conf", None])
def test_the_user_has_chosen(laptop: Path, monkeypatch: pytest.MonkeyPatch, file: str | None) -> None:
    """Open MPI takes what to include, or what to exclude, but not both."""
    hosts = [Host("pi1", 1)]
    assert environment(hosts)
    if file is None:
        monkeypatch.setenv("OMPI_MCA_btl_tcp_if_exclude", "docker0")
    else:
        (laptop / file).parent.mkdir()
        (laptop / file).write_text("# mine\nprte_if_include = eth0\n")
    assert environment(hosts) == {}

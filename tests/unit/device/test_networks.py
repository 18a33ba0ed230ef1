"""Which networks lead to other hosts."""

import ipaddress
from pathlib import Path

import pytest

from accept_mpi.device import networks


def interface(folder: Path, name: str, *ports: str, **files: str) -> None:
    """What the kernel shows of an interface; ``ports``: of a bridge."""
    (folder / name).mkdir(parents=True)
    for file, text in ({"ifindex": "7", "iflink": "7"} | files).items():
        (folder / name / file).write_text(text)
    for port in ports:
        (folder / name / "brif" / port).mkdir(parents=True, exist_ok=True)


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    for name in ("eth0", "wlan0"):
        interface(tmp_path, name, device="")
    interface(tmp_path, "lo")
    interface(tmp_path, "tailscale0", tun_flags="0x1001")
    interface(tmp_path, "vboxnet0")
    interface(tmp_path, "veth1", iflink="3")
    interface(tmp_path, "vnet0", tun_flags="0x1002")
    interface(tmp_path, "bond0", lower_eth1="")
    interface(tmp_path, "eth0.5", lower_eth0="", iflink="2")
    interface(tmp_path, "gretap1")
    for name, ports in {"docker0": (), "br-c0ffee": ("veth1",), "virbr0": ("veth1", "vnet0")}.items():
        interface(tmp_path, name, *ports)
        (tmp_path / name / "brif").mkdir(exist_ok=True)
    for name, port in {"br0": "eth0", "br1": "bond0", "br2": "eth0.5", "br3": "gretap1"}.items():
        interface(tmp_path, name, port, "veth1")
    return tmp_path


def test_bridges_without_a_way_out(kernel: Path) -> None:
    """Those of containers and virtual machines; not one that holds a card, a bond, a VLAN or a tunnel to another host, nor a
    container's own end of a pair."""
    names = sorted(path.name for path in kernel.iterdir())
    assert networks.closed(names, kernel) == ["br-c0ffee", "docker0", "vboxnet0", "virbr0"]


def test_the_only_network_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a laptop that trains together with its own virtual machines."""
    has = {"lo": "127.0.0.1/8", "virbr0": "192.168.122.1/24"}
    monkeypatch.setattr(networks, "addresses", lambda: {name: ipaddress.IPv4Interface(of) for name, of in has.items()})
    monkeypatch.setattr(networks, "closed", lambda names: [name for name in names if name == "virbr0"])
    assert networks.within_host() == []
    has["wlan0"] = "192.168.1.7/24"
    assert networks.within_host() == ["virbr0"]


def test_own_addresses() -> None:
    found = networks.addresses()
    assert found["lo"] == ipaddress.IPv4Interface("127.0.0.1/8")

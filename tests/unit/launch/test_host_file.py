"""Host files as people write them."""

import socket
import sys
import tempfile
from pathlib import Path

import pytest

from accept_mpi.errors import UserError
from accept_mpi.launch import host_file
from accept_mpi.launch.host_file import Host, ask, missing, read_hosts
from accept_mpi.launch.run_identity import RunIdentity


@pytest.fixture(autouse=True)
def _no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test asks a name server."""
    own = {"localhost", "127.0.0.1", "::1", "laptop"}
    monkeypatch.setattr(host_file, "is_here", own.__contains__)


def read(tmp_path: Path, text: str | bytes) -> list[Host]:
    file = tmp_path / "edges"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_hosts(file)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("pi1\npi2\n", ["pi1 slots=1", "pi2 slots=1"]),
        ("pi1 slots=2\n\n# none\npi2 slots = 3 # fast\n", ["pi1 slots=2", "pi2 slots=3"]),
        (b"\xef\xbb\xbfpi1\r\npi2 slots=1\r\n", ["pi1 slots=1", "pi2 slots=1"]),
        ("pi1:2\npi2\tmax_slots=4\n", ["pi1 slots=2", "pi2 slots=1"]),
        ("pi1\npi2\npi1\n", ["pi1 slots=2", "pi2 slots=1"]),
        ("pi1 slots=1\nPI1 slots=2\n", ["pi1 slots=3"]),
        ("pi.kitchen.lan\npi.attic.lan\n", ["pi.kitchen.lan slots=1", "pi.attic.lan slots=1"]),
        ("joe@pi1\npi2 username=joe\n", ["joe@pi1 slots=1", "joe@pi2 slots=1"]),
        ("pi1 port=2222\n", ["pi1 slots=1 port=2222"]),
        ("192.168.1.5\nfd00::5\n[fd00::6] slots=2\n", ["192.168.1.5 slots=1", "fd00::5 slots=1", "fd00::6 slots=2"]),
        ("laptop\nlocalhost\npi1\n127.0.0.1\n", ["localhost slots=3", "pi1 slots=1"]),
        ("joe@laptop port=2222\npi1\n", ["localhost slots=1", "pi1 slots=1"]),
        ("[::1] slots=2\n", ["localhost slots=2"]),
    ],
)
def test_lines_that_people_write(tmp_path: Path, text: str, lines: list[str]) -> None:
    assert [host.line for host in read(tmp_path, text)] == lines


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("pi1\npi2 slots=0\n", r'line 2: slots="0": expected a whole number from 1 to 1000'),
        ("pi1 slots=two\n", 'slots="two": expected'),
        ("pi1, pi2\n", 'line 1: "pi2" is not understood'),
        ("pi1 pi2\n", '"pi2" is not understood'),
        ("pi1 slots=1 slots=2\n", '"slots=2" is not understood'),
        ("pi1 slots=3 max_slots=2\n", "slots=3 is more than max_slots=2"),
        ("-oProxyCommand=reboot\n", "is no name of a host"),
        ("joe@-oProxyCommand=reboot\n", "is no name of a host"),
        ("-oProxyCommand=reboot@pi1\n", "is no name of a user"),
        ("^pi1\n", "is no name of a host"),
        ("[fd00::6\n", r'"\[fd00::6" is no name of a host'),
        ("[pi1]\n", r'"\[pi1\]" is no name of a host'),
        ("fe80::1\n", 'line 1: "fe80::1" is an address within one link'),
        ("pi1\njoe@[fe80::1%eth0] slots=2\n", 'line 2: "fe80::1%eth0" is an address within one link'),
        ("fd00::5%eth0\n", '"fd00::5%eth0" is no name of a host'),
        ("pi1 port=70000\n", "from 1 to 65535"),
        ("# nobody\n", "no hosts in it"),
        (b"pi\xff\n", "not a text in UTF-8"),
        (b"pi1 slots=1\n" * 100_000, "larger than 1 MiB"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as error:
        read(tmp_path, text)
    assert "\n" not in str(error.value)


def test_only_files_are_read(tmp_path: Path) -> None:
    for path in (tmp_path, Path("/dev/zero")):
        with pytest.raises(UserError, match="not a regular file"):
            read_hosts(path)


def test_what_hosts_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the words of ssh; a host without the checkout is told from one that is silent; this machine is not asked. Meanwhile
    nothing has a name among temporary files, which would stay if this process were killed."""
    agent, temporary, seen = tmp_path / "agent", tmp_path / "temporary", tmp_path / "seen"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    agent.write_text(
        f"#!/bin/sh\nls {temporary} >> {seen}\n"
        'case "$1" in typo) echo "ssh: Could not resolve hostname typo" >&2; exit 255 ;;\n'
        'bare) echo "warning: cannot change locale" >&2; exit "$7" ;;\n'  # HOST test -x PYTHON || exit CODE
        'barred) echo "This account is currently not available." >&2; exit 1 ;;\n'
        f'dead) exit 255 ;; joe@pi1) [ "$2 $3" = "-p 2222" ] && [ "$6" = {sys.executable} ] ;; *) exit 9 ;; esac\n'
    )
    agent.chmod(0o755)
    monkeypatch.setenv("PRTE_MCA_plm_ssh_agent", str(agent))
    found = ask(read(tmp_path, "typo\nbare\nbarred\ndead\njoe@pi1 port=2222\nlocalhost\n"))
    told = {host.name: why for host, why in found.items()}
    assert told == {
        "typo": "ssh: Could not resolve hostname typo",
        "bare": f"it has no {sys.executable}",
        "barred": "This account is currently not available.",
        "dead": "no answer",
        "pi1": None,
        "localhost": None,
    }
    assert [name for name, why in told.items() if missing(why)] == ["bare"]
    assert not seen.read_text()
    monkeypatch.setenv("PRTE_MCA_plm_ssh_agent", str(tmp_path / "none"))
    with pytest.raises(UserError, match="does not start"):
        ask(read(tmp_path, "pi1\n"))


@pytest.mark.parametrize(
    ("given", "flags", "called"),
    [
        ("rsh-of-old -q : AGENT -q", "-o 'x", "-q -o 'x pi1 test"),
        (" AGENT  -o 'a b:rsh", "", "-o 'a b pi1 test"),
        ("", "", None),
        ("rsh-of-old : ", "", None),
    ],
)
def test_agents_are_what_they_are_to_mpirun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, flags: str, called: str | None
) -> None:
    """The first one that there is, as in mpirun's own default "ssh : rsh"; quotes are characters."""
    agent = tmp_path / "agent"
    agent.write_text(f'#!/bin/sh\necho "$*" > {tmp_path}/called\n')
    agent.chmod(0o755)
    monkeypatch.setenv("PRTE_MCA_plm_ssh_agent", given.replace("AGENT", str(agent)))
    monkeypatch.setenv("PRTE_MCA_plm_ssh_args", flags)
    hosts = read(tmp_path, "pi1\n")
    if called is None:
        with pytest.raises(UserError, match="does not start: there is no such program"):
            ask(hosts)
    else:
        assert ask(hosts) == {hosts[0]: None}
        assert (tmp_path / "called").read_text().startswith(called)


def test_ranks_know_where_they_should_be(monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunIdentity.parse("run/2/2,1")
    assert RunIdentity.parse(str(run)) == run
    assert run.slots == (2, 1)
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "3")
    assert run.misplaced(2) == "mpirun has started 3 ranks where the host file asks for 1"
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "2")
    assert run.misplaced(1) is None
    assert RunIdentity.parse("run/2").misplaced(0) is None


def test_own_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert host_file.is_here("localhost")
    assert host_file.is_here(socket.gethostname())
    assert host_file.is_here("127.0.0.1")
    assert not host_file.is_here("192.0.2.200")  # of the addresses for documentation

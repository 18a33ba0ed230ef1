"""README's section "Four Pis and a laptop", word by word, over hosts that have what machines have: names in /etc/hosts, an
ssh server each, homes of their own. Nothing in the environment but what the section says."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT
from labs import Host, Laboratory, no_ssh, reason

from accept_mpi.logs.reader import open_log, read_facts

why = reason or no_ssh
pytestmark = pytest.mark.skipif(why is not None, reason=str(why))

NAMES = ["laptop", "pi1", "pi2", "pi3"]


def section(title: str) -> str:
    return (ROOT / "README.md").read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]


def blocks(text: str) -> list[str]:
    """What is indented by four spaces."""
    found = re.findall(r"(?:^ {4}.*\n(?:\n(?= {4}))?)+", text, re.MULTILINE)
    return [re.sub(r"^ {4}", "", block, flags=re.MULTILINE) for block in found]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As on each machine, at the same path; with the model, data and job of README's next section, and fewer steps."""
    folder = tmp_path_factory.mktemp("machines") / "checkout"
    folder.mkdir()
    (folder / ".venv").symlink_to(sys.prefix)
    for name in ("accept_mpi", "kernels"):
        (folder / name).symlink_to(ROOT / name)
    net, job = blocks(section("Your own model and data"))
    (folder / "my_net.py").write_text(net)
    assert "epochs = 5" in job
    (folder / "my_job.toml").write_text(job.replace("epochs = 5", "steps = 3") + '[pipeline]\ncuts = "even"\n')
    return folder


@pytest.fixture(scope="module")
def lab(checkout: Path) -> Iterator[Laboratory]:
    """The first of README's hosts, of which the laptop has two cores. Two have another network, too, which ends nowhere, and
    all have what Docker brings: a network for containers, with the same address everywhere."""
    homes = {name: checkout.parent / f"home-of-{name}" for name in NAMES}
    for home in homes.values():
        home.mkdir()
    hosts = [Host(name, 1.0, threads=1 + (name == "laptop")) for name in NAMES]
    with Laboratory(f"several-{os.getpid()}").using(hosts, homes=homes) as lab:
        for place, name in enumerate(NAMES[:2]):
            space = ("ip", "-n", lab.network.namespace(name))
            subprocess.run([*space, "link", "add", "eth1", "type", "veth", "peer", "name", "far"], check=True)
            subprocess.run([*space, "link", "set", "far", "up"], check=True)
            subprocess.run([*space, "addr", "add", f"192.168.77.{place + 1}/24", "dev", "eth1"], check=True)
            subprocess.run([*space, "link", "set", "eth1", "up"], check=True)
        for name in NAMES:
            space = ("ip", "-n", lab.network.namespace(name))
            subprocess.run([*space, "link", "add", "docker0", "type", "bridge"], check=True)
            subprocess.run([*space, "addr", "add", "172.17.0.1/16", "dev", "docker0"], check=True)
            subprocess.run([*space, "link", "set", "docker0", "up"], check=True)
        yield lab


def on_laptop(lab: Laboratory, checkout: Path, script: str) -> str:
    return on_host(lab, "laptop", checkout, script)


def on_host(lab: Laboratory, name: str, checkout: Path, script: str, seconds: float = 150.0) -> str:
    """A shell's output on a machine, in the checkout. Being root there has its own two variables."""
    clean = ["env", "-i", f"HOME={checkout.parent / f'home-of-{name}'}", "PATH=/usr/local/bin:/usr/bin:/bin"]
    clean += ["OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"]
    marked = f'exec {" ".join(clean)} ACCEPT_LAB_RUN="$ACCEPT_LAB_RUN" bash -ec "$0"'
    return lab.run(lab.on(name, ["sh", "-c", marked, script]), seconds, cwd=checkout)


def networks(lab: Laboratory) -> str:
    """The section's line for machines with several networks."""
    [line] = re.findall(
        r"`(export PRTE_MCA_prte_if_include=\S+ OMPI_MCA_btl_tcp_if_include=\S+)`", section("Four Pis and a laptop")
    )
    return str(line.replace("192.168.1.0/24", lab.network.cidr))


def commands() -> list[str]:
    """What to call on the first machine: an export, ``doctor``, ``launch``."""
    *_, block = blocks(section("Four Pis and a laptop"))
    export, doctor, launch = block.splitlines()
    assert export.startswith("export ")
    assert "doctor" in doctor
    assert "launch" in launch
    return [export, doctor, launch]


def hostfile() -> str:
    _, edges, *_ = blocks(section("Four Pis and a laptop"))
    assert re.findall(r"^(\w+) slots=1$", edges, re.MULTILINE)[: len(NAMES)] == NAMES
    return "".join(line + "\n" for line in edges.splitlines()[: len(NAMES)])


def test_do_all_answer(lab: Laboratory, checkout: Path) -> None:
    (checkout / "edges").write_text(hostfile())
    export, doctor, _ = commands()
    out = on_laptop(lab, checkout, f"{networks(lab)}\n{export}\n{doctor}")
    for rank, name in enumerate(NAMES):
        assert re.search(rf"\b{rank}\W+{name}\b", out), out


def test_mpirun_starts_each_time(lab: Laboratory, checkout: Path) -> None:
    """It crashed at every second start, as the Pis are alike and the laptop is not, until it was told so."""
    (checkout / "edges").write_text(hostfile())
    export, doctor, _ = commands()
    start = doctor.split(" -m ")[0].replace("/python", "/python -V")
    out = on_laptop(lab, checkout, "\n".join([networks(lab), export, *[start] * 8]))
    assert out.count("Python 3") == 8 * len(NAMES), out


@pytest.mark.parametrize("slots", [True, False])
def test_each_rank_is_on_its_own_host(lab: Laboratory, checkout: Path, slots: bool) -> None:
    (checkout / "edges").write_text(hostfile() if slots else hostfile().replace(" slots=1", ""))
    *_, launch = commands()
    shutil.rmtree(checkout / "runs", ignore_errors=True)
    out = on_laptop(lab, checkout, launch)
    assert "starting 4 ranks\n" in out, out
    with open_log(checkout / "runs" / "my_net" / "log.h5") as log:
        assert [host["host"] for host in read_facts(log)["hosts"]] == NAMES, out


def test_networks_of_containers_are_left_out(lab: Laboratory, checkout: Path) -> None:
    """By ranks themselves, also under mpirun alone: MPI waited for ever for an answer from the other host's bridge."""
    (checkout / "edges").write_text("pi2 slots=1\npi3 slots=1\n")
    shutil.rmtree(checkout / "runs", ignore_errors=True)
    train = "$PWD/.venv/bin/mpirun --bind-to none -hostfile edges $PWD/.venv/bin/python -m accept_mpi train my_job.toml"
    on_host(lab, "pi2", checkout, train)
    with open_log(checkout / "runs" / "my_net" / "log.h5") as log:
        assert [host["host"] for host in read_facts(log)["hosts"]] == ["pi2", "pi3"]


def test_what_is_wrong_with_a_host_is_said(lab: Laboratory, checkout: Path) -> None:
    """One that there is not, in the words of ssh; one without the checkout."""
    program = """
import sys
from accept_mpi.launch.host_file import Host, ask
print(ask([Host("no-such-host", 1)]), ask([Host("pi1", 1)]))
sys.executable = "/nowhere/python"
print(ask([Host("pi2", 1)]))
"""
    (checkout / "ask.py").write_text(program)
    out = on_laptop(lab, checkout, ".venv/bin/python ask.py")
    assert "Could not resolve hostname no-such-host" in out, out
    assert re.search(r"name='pi1'.*: None\}$", out, re.MULTILINE), out
    assert "'it has no /nowhere/python'" in out, out

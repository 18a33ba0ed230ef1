"""Fleet files of the edge lab, and the control groups of version 2 (in a folder; the lab's tests use the real ones)."""

import sys
from pathlib import Path

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "jobs" / "lab"))

from accept_mpi.device.fleet import Host, changed, parse, read
from accept_mpi.errors import UserError
from edgelab import LabError
from edgelab.cgroups import Groups, quota
from edgelab.laboratory import spread


def test_defaults_count_and_personas() -> None:
    hosts = parse(
        {"defaults": {"link": 50, "cpu": 0.2}, "hosts": [{"name": "edge", "count": 2}, {"persona": "pi4", "link": 5}]}, "f"
    )
    assert [host.name for host in hosts] == ["edge1", "edge2", "pi4"]
    assert (hosts[0].cpu, hosts[0].link) == (0.2, 50)
    assert (hosts[2].isa, hosts[2].link, hosts[2].memory) == ("default", 5, 3 << 30)
    assert parse({"defaults": {"persona": "pi4"}, "hosts": [{"name": "a"}]}, "f")[0].memory == 3 << 30
    found = hosts[2].environment()
    assert found == {"OMP_NUM_THREADS": "1", "ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}


@pytest.mark.parametrize(
    ("cpu", "capped"),
    [("flags : fpu fma avx2\nflags : fpu", ["default", "avx2"]), ("Features : neon", ["default"]), (None, ["default"])],
)
def test_a_cap_above_what_the_cpu_can_do(
    cpu: str | None, capped: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accept_mpi.device.fleet._CPUINFO", tmp_path / "cpuinfo")
    if cpu is not None:
        (tmp_path / "cpuinfo").write_text(cpu)
    isas = ("default", "avx2", "avx512")
    assert [isa for isa in isas if "ATEN_CPU_CAPABILITY" in Host("a", 1.0, isa=isa).environment()] == capped


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "f: no [[hosts]]"),
        ({"hosts": [{"name": "a"}], "host": 1}, 'unknown key "host"'),
        ({"hosts": [{"cpu": 0.5}]}, "hosts entry 1: name = None"),
        ({"hosts": [{"name": "a", "cpus": 1}]}, 'unknown key "cpus"'),
        ({"hosts": [{"name": "a", "cpu": "fast"}]}, "cpu = 'fast': expected a number"),
        ({"hosts": [{"name": "a", "cpu": 2}]}, "cpu = 2.0: expected 0.01 to 1"),
        ({"hosts": [{"name": "a", "cpu": 0}]}, "expected 0.01 to 1"),
        ({"hosts": [{"persona": "pi4", "threads": 0}]}, "threads and count must be positive"),  # not "cpu: 0.01 to 0"
        ({"hosts": [{"name": "a", "link": 0}]}, "link = 0"),
        ({"hosts": [{"name": "a", "isa": "sse"}]}, "isa = 'sse'"),
        ({"hosts": [{"name": "a", "memory": "lots"}]}, 'memory = "lots"'),
        ({"hosts": [{"name": "a", "count": 0}]}, "must be positive"),
        ({"hosts": [{"name": "A b"}]}, "small letters"),
        ({"hosts": [{"name": "a"}, {"name": "a"}]}, 'two hosts are called "a"'),
        ({"hosts": [{"name": "a", "count": 5000}]}, "at most 4096"),
        ({"hosts": [{"persona": "pi9"}]}, 'no persona "pi9"; there are pi4'),
        ({"hosts": [{"persona": ["pi4"]}]}, "persona = ['pi4']: expected a text"),
        ({"hosts": ["a"]}, "hosts entry 1: 'a': expected a table [[hosts]]"),
        ({"defaults": 3, "hosts": [{"name": "a"}]}, "defaults = 3: expected a table [defaults]"),
        ({"hosts": [{"name": "a", "count": 10**12}]}, "at most 4096"),
        ({"hosts": [{"name": "a", "threads": 1.5}]}, "threads = 1.5: expected a whole number"),
    ],
)
def test_mistakes_are_one_sentence(content: dict, message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(content, "f")
    assert message in str(caught.value)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read the fleet"):
        read(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[[hosts]")
    with pytest.raises(UserError, match="not valid TOML"):
        read(tmp_path / "bad.toml")


def test_all_fleets_of_the_project_are_valid() -> None:
    fleets = [path for path in (ROOT / "jobs").rglob("*.toml") if "[[hosts]]" in path.read_text()]
    assert len(fleets) >= 2
    for path in fleets:
        assert read(path), path


def test_changes() -> None:
    host = Host("a", 0.4, link=100)
    assert changed(host, ["cpu=0.2", "link=5"]) == Host("a", 0.2, link=5)
    assert changed(host, ["link=free"]) == Host("a", 0.4)
    assert changed(Host("d", 1.5, threads=2), ["link=5"]) == Host("d", 1.5, threads=2, link=5)
    assert changed(Host("d", 0.5, threads=2), ["cpu=2"]) == Host("d", 2.0, threads=2)
    for wrong in ("cpu", "cpu=fast", "memory=1G", "cpu=0", "cpu=free"):
        with pytest.raises(UserError):
            changed(host, [wrong])


def test_spread_balances_cores() -> None:
    hosts = [Host("a", 0.8), Host("b", 0.4), Host("c", 0.4), Host("d", 1.0, threads=2)]
    placed = spread(hosts, [0, 1])
    assert placed["d"] == [0, 1]
    assert placed["a"] != placed["b"] == placed["c"]


@pytest.mark.parametrize("cpu", [0.01, 0.04, 0.2, 0.4, 1.0, 1.5])
def test_quota_keeps_the_share_and_the_kernel_s_least(cpu: float) -> None:
    mine, period = quota(cpu)
    assert mine >= 1000
    assert mine / period == pytest.approx(cpu, rel=0.01)
    assert period == 5000 or mine <= 1001


def test_version_2(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu memory")
    groups = Groups("x", tmp_path)
    groups.make("edge", 0.4, [1], 1 << 30)
    group = tmp_path / "accept-lab-x" / "edge"
    assert groups.of("edge") == [group]
    assert (group / "cpu.max").read_text() == "2000 5000"
    assert (group / "cpuset.cpus").read_text() == "1"
    assert (group / "memory.max").read_text() == str(1 << 30)
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpu +cpuset +memory"


@pytest.mark.parametrize("version", [1, 2])
def test_what_a_host_could_not_use_of_a_quota_is_not_lost(tmp_path: Path, version: int) -> None:
    """Hosts that share a core run over their quotas in turn, by up to a tick; what the other one lost stayed lost."""
    if version == 2:
        (tmp_path / "cgroup.controllers").write_text("cpuset cpu memory")
    for tree in ("cpu", "cpuset", "memory"):
        (tmp_path / tree).mkdir()
    groups = Groups("x", tmp_path)
    group = groups.of("edge")[0]
    group.mkdir(parents=True)
    burst = group / ("cpu.max.burst" if version == 2 else "cpu.cfs_burst_us")
    groups.set_cpu("edge", 0.4)
    assert not burst.exists()  # a kernel that knows none
    burst.write_text("0")
    groups.set_cpu("edge", 0.4)
    assert burst.read_text() == "2000"


def test_no_control_groups(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="no control groups"):
        Groups("x", tmp_path)

"""Memory that a process may have: what its control groups allow, of either version, is less than the machine's."""

import math
from pathlib import Path

import pytest

from accept_mpi import memory
from accept_mpi.cgroups import cpu_share, of_group, quota


@pytest.mark.parametrize("version", [1, 2])
def test_the_narrowest_group_counts(version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    controllers, top = ("cpu,memory", tmp_path / "memory") if version == 1 else ("", tmp_path)
    limit, used = ("memory.limit_in_bytes", "memory.usage_in_bytes") if version == 1 else ("memory.max", "memory.current")
    inner = top / "outer" / "inner"
    inner.mkdir(parents=True)
    for folder, allowed in ((inner, "max"), (inner.parent, "3000000")):
        (folder / limit).write_text(allowed)
        (folder / used).write_text("1000000")
    groups = of_group(controllers, "/outer/inner", tmp_path, "memory", (limit, used), (limit, used))
    assert memory.limits(groups) == [(3e6, 1e6)]
    assert of_group("cpu", "/outer/inner", tmp_path, "memory", (limit, used), ()) == []
    machine = memory.total_memory()
    monkeypatch.setattr(memory, "_limits", lambda: [(3e6, 1e6)])
    assert memory.total_memory() == 3_000_000 < machine
    assert memory.available_memory() == 2e6


def test_a_quota_of_cpu() -> None:
    assert quota(["40000\n", "100000\n"]) == quota(["40000 100000\n"]) == 0.4
    assert quota(["-1\n", "100000\n"]) == quota(["max 100000\n"]) == math.inf
    assert cpu_share() > 0

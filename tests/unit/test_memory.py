"""Memory that a process may have: what its control groups allow, of either version, is less than the machine's."""

from pathlib import Path

import pytest

from accept_mpi import memory


@pytest.mark.parametrize("version", [1, 2])
def test_the_narrowest_group_counts(version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    controllers, top = ("cpu,memory", tmp_path / "memory") if version == 1 else ("", tmp_path)
    limit, used = ("memory.limit_in_bytes", "memory.usage_in_bytes") if version == 1 else ("memory.max", "memory.current")
    inner = top / "outer" / "inner"
    inner.mkdir(parents=True)
    for folder, allowed in ((inner, "max"), (inner.parent, "3000000")):
        (folder / limit).write_text(allowed)
        (folder / used).write_text("1000000")
    assert memory.limits_of_group(controllers, "/outer/inner", tmp_path) == [(3e6, 1e6)]
    assert memory.limits_of_group("cpu", "/outer/inner", tmp_path) == []
    machine = memory.total_memory()
    monkeypatch.setattr(memory, "_limits", lambda: [(3e6, 1e6)])
    assert memory.total_memory() == 3_000_000 < machine
    assert memory.available_memory() == 2e6

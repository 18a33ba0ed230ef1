"""The kernels' disk cache: safe for ranks that start together, for damage, for places that cannot be written."""

import subprocess
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
from accept_mpi.kernels import cache
from conftest import HANGS, environment, python

# What a rank does: take a kernel from the cache or compile it, and check what it computes.
RANK = """
    import sys
    from pathlib import Path
    import numpy as np
    from numba.core.dispatcher import Dispatcher
    from accept_mpi.kernels.cache import compiled
    kernels = compiled(sys.argv[2], Path(sys.argv[1]))
    made = [one.stats for one in vars(kernels).values() if isinstance(one, Dispatcher)]
    print(sum(sum(one.cache_misses.values()) for one in made), sum(sum(one.cache_hits.values()) for one in made))
    if sys.argv[2] == "half":
        out = np.zeros(5, np.uint16)
        kernels.to_bf16(np.array([1, -2, 0.1, 3e38, 0], np.float32).view(np.uint32), out)
        assert out.tolist() == [0x3F80, 0xC000, 0x3DCD, 0x7F62, 0], out
    else:
        x, out, y = np.arange(16, dtype=np.float32), np.zeros(12, np.uint8), np.zeros(16, np.float32)
        assert kernels.encode(x, 4, 16, out) == 0
        compiled("uniform_decoder", Path(sys.argv[1])).decode(out, 4, 16, y)
        assert (x == y).all()
"""


def ranks(directory: Path, module: str, count: int) -> list[tuple[int, int]]:
    """Start ``count`` processes at once; how many of its kernels each compiled, and took from the cache."""
    command = [*python(), "-c", textwrap.dedent(RANK), str(directory), module]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [subprocess.Popen(command, env=environment(), **pipes) for _ in range(count)]  # type: ignore[call-overload]
    found = []
    for process in started:
        out, errors = process.communicate(timeout=HANGS)
        assert process.returncode == 0, errors
        compiled, taken = map(int, out.split())
        found.append((compiled, taken))
    return found


def test_twenty_starts_of_six_ranks_on_an_empty_cache(tmp_path: Path) -> None:
    for start in range(20):
        found = ranks(tmp_path / str(start), "half", 6)
        assert sum(compiled > 0 for compiled, _ in found) == 1, found
        assert list(tmp_path.glob(f"{start}/kernels-*/half/*/*.nbc"))


def test_the_second_start_compiles_nothing(tmp_path: Path) -> None:
    ((compiled, taken),) = ranks(tmp_path, "uniform", 1)
    assert (compiled > 0, taken) == (True, 0)
    assert ranks(tmp_path, "uniform", 2) == [(0, compiled)] * 2


@pytest.mark.parametrize("damage", ["truncated", "garbage"])
def test_a_damaged_cache_is_replaced(tmp_path: Path, damage: str) -> None:
    ranks(tmp_path, "half", 1)
    for path in tmp_path.rglob("*.nb?"):
        path.write_bytes(path.read_bytes()[:20] if damage == "truncated" else b"not a cache" * 10)
    found = ranks(tmp_path, "half", 3)
    assert sum(compiled > 0 for compiled, _ in found) == 1, found
    ((compiled, taken),) = ranks(tmp_path, "half", 1)
    assert (compiled, taken > 0) == (0, True)


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ranks(tmp_path / "file", "half", 1)
    ranks(Path("/proc/no/such"), "half", 1)


def test_a_cache_that_others_can_write_is_not_used(tmp_path: Path) -> None:
    """Numba would run what it finds there."""
    ranks(tmp_path, "half", 1)
    (own,) = tmp_path.glob("kernels-*")
    own.chmod(0o777)
    for path in tmp_path.rglob("*.nb?"):
        path.write_bytes(b"another's")
    ranks(tmp_path, "half", 1)
    assert {path.read_bytes() for path in tmp_path.rglob("*.nb?")} == {b"another's"}
    own.chmod(0o700)
    ranks(tmp_path, "half", 1)
    assert b"another's" not in {path.read_bytes() for path in tmp_path.rglob("*.nb?")}


def test_machine_code_of_another_cache_is_used(tmp_path: Path) -> None:
    """Another machine's, for all that matters: no file has the same inode, nor the same time."""
    one, other = tmp_path / "one", tmp_path / "other"
    ((made, _),) = ranks(one, "uniform", 1)
    cache.store("uniform", cache.stored("uniform", one), other)
    assert ranks(other, "uniform", 2) == [(0, made)] * 2


def test_only_machine_code_is_taken_from_others(tmp_path: Path) -> None:
    """Neither a file elsewhere, nor in place of what is there."""
    cache.store(
        "half", {"../../up.nbc": b"1", "lock": b"2", "x.py": b"3", "half.x.1.nbc": b"4", "half.x.nbi": b"5"}, tmp_path
    )
    found = {path.name: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert found == {"lock": b"", "half.x.1.nbc": b"4", "half.x.nbi": b"5"}
    cache.store("half", {"half.y.1.nbc": b"6"}, tmp_path)
    assert cache.stored("half", tmp_path) == {"half.x.1.nbc": b"4", "half.x.nbi": b"5"}


def test_no_place_for_machine_code(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache.store("half", {"half.x.nbi": b"5"}, tmp_path / "file")
    assert cache.stored("half", tmp_path / "file") == {}


def test_a_full_disk_is_noticed_before_anything_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module was compiled twice for the cache before it was compiled without."""
    kept = []
    monkeypatch.setattr(cache, "_import", lambda name: kept.append(cache.NJIT["cache"]))
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    cache.compiled("a_new_one", tmp_path)
    assert kept == [False]

"""Replicas on local disks."""

import math
import os
import time
from pathlib import Path

import pytest

from accept_mpi.launch.run_identity import RunIdentity
from accept_mpi.recovery import disk_replicas
from accept_mpi.recovery.disk_replicas import DiskReplicas

RUN = RunIdentity("run", 1)


def start(tmp_path: Path, number: int = 1, host: str = "edge0") -> DiskReplicas:
    return DiskReplicas(RunIdentity(RUN.name, number), host, tmp_path)


def written(kept: DiskReplicas, step: int, **layers: bytes) -> None:
    kept.write(step, {int(name[1:]): blob for name, blob in layers.items()})
    kept.wait(600)


def test_the_command_line() -> None:
    assert RunIdentity.parse(str(RUN)) == RUN
    with pytest.raises(ValueError, match="expected NAME"):
        RunIdentity.parse("x")


def test_the_last_two_snapshots_outlive_the_process(tmp_path: Path) -> None:
    first = start(tmp_path)
    assert first.read() == {}
    for step in (5, 10, 15):
        written(first, step, l0=b"a%d" % step, l1=b"b")
    assert start(tmp_path, 2).read() == {10: {0: b"a10", 1: b"b"}, 15: {0: b"a15", 1: b"b"}}
    assert start(tmp_path, 2, "edge1").read() == {}


def test_a_rank_that_writes_slowly_keeps_its_own(tmp_path: Path) -> None:
    """Another of the same host is two snapshots ahead; what a process that is dead has left goes."""
    quick = start(tmp_path)
    quick.read()
    written(quick, 5, l0=b"a")
    (own,) = tmp_path.rglob("*5-*")
    slow, dead = (own.with_name(f"{5:012}-{pid}") for pid in (os.getppid(), 4194304999))
    for other in (slow, dead):
        other.write_bytes(own.read_bytes())
        other.chmod(0o600)
    for step in (10, 15):
        written(quick, step, l0=b"a")
    assert sorted(start(tmp_path, 2).read()) == [5, 10, 15]
    assert slow.exists()
    assert not dead.exists()


def test_a_folder_that_cannot_be_looked_into(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As another user's home directory; a name that is too long fails so for root, too."""
    kept = start(tmp_path / ("n" * 300))
    assert kept.read() == {}
    written(kept, 5, l0=b"a")
    kept.drop_after(1)
    assert "replicas are not kept on this disk" in caplog.text


def test_steps_that_are_made_anew_are_forgotten(tmp_path: Path) -> None:
    kept = start(tmp_path)
    kept.read()
    written(kept, 5, l0=b"a")
    written(kept, 10, l0=b"b")
    kept.drop_after(5)
    assert start(tmp_path, 2).read() == {5: {0: b"a"}}


def test_steps_made_anew_are_kept(tmp_path: Path) -> None:
    kept = start(tmp_path)
    kept.read()
    for step in (5, 10, 12):
        written(kept, step, l0=b"a")
    kept.drop_after(5)
    written(kept, 8, l0=b"b")
    assert start(tmp_path, 2).read()[8] == {0: b"b"}


def test_two_ranks_of_a_host_may_write_the_same_file_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One writes all of it while the other is about to rename its own."""
    one, two, replace = start(tmp_path), start(tmp_path), Path.replace

    def interrupted(beside: Path, path: Path) -> Path:
        monkeypatch.setattr(Path, "replace", replace)
        monkeypatch.setattr(os, "getpid", lambda: 1 << 20)
        two.keep_cluster({"of": "two"})
        return replace(beside, path)

    monkeypatch.setattr(Path, "replace", interrupted)
    one.keep_cluster({"of": "one"})
    assert one.cluster() == {"of": "one"}
    assert not caplog.records
    assert len(list((tmp_path / "run" / "edge0").iterdir())) == 1


def test_a_host_that_missed_a_start_is_not_asked(tmp_path: Path) -> None:
    kept = start(tmp_path)
    kept.read()
    written(kept, 5, l0=b"a")
    assert start(tmp_path, 3).read() == {}


def test_damage_is_passed_over(tmp_path: Path) -> None:
    kept = start(tmp_path)
    kept.read()
    written(kept, 5, l0=b"a" * 100)
    written(kept, 10, l0=b"b" * 100)
    (newest,) = (tmp_path / "run" / "edge0").glob("*10-*")
    for damaged in (newest.read_bytes()[:-3], b"", newest.read_bytes().replace(b"b", b"c", 1)):
        newest.write_bytes(damaged)
        assert start(tmp_path, 2).read() == {5: {0: b"a" * 100}}


def test_half_a_file_does_not_hide_the_others(tmp_path: Path) -> None:
    """A process was killed while it wrote."""
    kept = start(tmp_path)
    kept.read()
    written(kept, 5, l0=b"a")
    half = tmp_path / "run" / "edge0" / ".000000000010-1"
    half.write_bytes(b"half")
    (tmp_path / "run" / "edge0" / "000000000011-1").mkdir()  # cannot be read
    assert start(tmp_path, 2).read() == {5: {0: b"a"}}
    assert not half.exists()


def test_a_disk_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "run").write_text("not a directory")
    kept = start(tmp_path)
    assert kept.read() == {}
    written(kept, 5, l0=b"a")
    assert len([record for record in caplog.records if "not kept on this disk" in record.message]) == 1


def test_what_devices_have_measured_is_there_for_the_next_start(tmp_path: Path) -> None:
    kept = start(tmp_path)
    assert kept.cluster() is None
    kept.keep_cluster({"devices": [1, 2]})
    written(kept, 5, l0=b"a")
    assert start(tmp_path, 3).cluster() == {"devices": [1, 2]}
    (tmp_path / "run" / "edge0" / "survey").write_bytes(b"damaged")
    assert kept.cluster() is None


def test_a_run_from_before_the_clock_was_set_keeps_its_replicas(tmp_path: Path) -> None:
    kept = start(tmp_path)
    kept.read()
    written(kept, 5, l0=b"a")
    for path in (tmp_path / "run", *(tmp_path / "run").rglob("*")):
        os.utime(path, (60, 60))
    assert start(tmp_path, 2).read() == {5: {0: b"a"}}


def test_nobody_else_can_write_there(tmp_path: Path) -> None:
    """Whatever this user's mask is."""
    mask = os.umask(0)
    try:
        kept = start(tmp_path / "new" / "root")
        kept.read()
        written(kept, 5, l0=b"a")
    finally:
        os.umask(mask)
    assert start(tmp_path / "new" / "root", 2).read() == {5: {0: b"a"}}
    run = tmp_path / "new" / "root" / "run"
    assert all(path.stat().st_mode & 0o077 == 0 for path in (run, *run.rglob("*")))


@pytest.mark.parametrize("text", ["", "run", "/1", "run/x", "../1", "a/b/1", "run/1/x", "run/-1", "run/99999999999"])
def test_names_of_runs(text: str) -> None:
    with pytest.raises(ValueError, match="expected NAME"):
        RunIdentity.parse(text)


def test_nothing_is_left_of_a_run_at_its_end_nor_of_old_ones(tmp_path: Path) -> None:
    for run, pid in (("old", 4194304999), ("writing", os.getppid())):  # the other's clock has been set since
        old = tmp_path / run / "edge0"
        old.mkdir(parents=True)
        (old / f"{5:012}-{pid}").touch()
        for path in (*old.iterdir(), old, old.parent):
            os.utime(path, (time.time() - disk_replicas._OLD - 60,) * 2)
    kept = start(tmp_path)
    kept.read()
    written(kept, 5, l0=b"a")
    kept.clear()
    assert [path.name for path in tmp_path.iterdir()] == ["writing"]


def test_what_a_start_decided_is_there_for_the_next(tmp_path: Path) -> None:
    kept = start(tmp_path)
    assert kept.micro_batches() is None
    kept.keep_micro_batches(12)
    kept.keep_room(1, 1e9)
    again = start(tmp_path, 2)
    assert (again.micro_batches(), again.room(1), again.room(0)) == (12, 1e9, math.inf)
    for damaged in (b"", b"0", b"-3", b"x", b"9" * 100):
        next(tmp_path.rglob("micro-batches")).write_bytes(damaged)
        assert again.micro_batches() is None

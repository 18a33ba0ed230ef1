"""Checkpoints appear whole or not at all, and say when they are damaged."""

import errno
import json
import os
import shutil
import stat
import threading
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from accept_mpi.errors import UserError
from accept_mpi.pipeline.state import check_state
from accept_mpi.recovery import checkpoint, checkpoint_writer
from accept_mpi.recovery.checkpoint import BEST, Checkpoint, best_of, directory_of
from accept_mpi.recovery.checkpoint_writer import CheckpointWriter, chunks, new_manifest
from accept_mpi.recovery.manifest import File, complete, made_by
from accept_mpi.recovery.tensor_file import read_header, written


def weights(step: int) -> list[dict[str, torch.Tensor]]:
    return [{"a.weight": torch.full((3, 3), float(step)), "b.bias": torch.zeros(2)}, {"c.weight": torch.ones(400_000)}]


def write(run: Path, *steps: int, keep: int = 0, who: str = "", after: int = 0) -> None:
    def manifest(step: int):
        about = {"model": "m", "model_args": {}, "layers": ["a", "b", "c"], "seed": 0, "samples": 9, "job": "{}"}
        return new_manifest(run=who, step=step, epoch=0, **about)

    writer = CheckpointWriter(run, [(0, 2), (2, 3)], manifest, keep, after)
    for step in steps:
        first, second = weights(step)
        before = complete(run)
        momentum = {"momentum_buffer/c.weight": second["c.weight"]}
        messages = [*chunks(step, 0, first, {}), *chunks(step, 1, second, momentum)]
        for message in messages[:-1]:
            writer.take(message)
        assert complete(run) == before, "not there before it is whole"
        writer.take(messages[-1])
        assert writer.wait(step, 600)


def test_chunks_share_the_memory_of_what_is_written() -> None:
    """safetensors' own ``save`` holds three more copies of all tensors: a device whose memory was full in training was
    killed by its last checkpoint."""
    large, small = torch.randn(3 << 18), {f"a.b{n}": torch.full((n, 2), n, dtype=torch.float64) for n in range(3)}
    kinds = (torch.bool, torch.bfloat16, torch.int64, torch.uint8, torch.float16)
    others = {f"a.{dtype}": torch.ones((), dtype=dtype) for dtype in kinds}
    tensors = {"a.weight": large, **small, **others}
    found = [chunk for chunk in chunks(1, 0, tensors, {}) if chunk.part == "weights"]
    where = [np.frombuffer(chunk.data, np.uint8).ctypes.data for chunk in found]
    assert sum(large.data_ptr() <= at < large.data_ptr() + large.nbytes for at in where) >= 2
    assert {chunk.total for chunk in found} == {sum(len(chunk.data) for chunk in found)}
    read = safetensors.torch.load(b"".join(chunk.data for chunk in found))
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)


@pytest.mark.filterwarnings("ignore:ComplexHalf", "ignore:torch.quantize_per_tensor")
def test_what_a_stage_may_hold_can_be_written_and_read(tmp_path: Path) -> None:
    """The rest is refused before the first step, not at the first checkpoint."""
    kinds = sorted({one for one in vars(torch).values() if isinstance(one, torch.dtype)}, key=str)
    state = {f"a.{n}": torch.empty(4, dtype=kind) for n, kind in enumerate(kinds) if state_of_kind(kind)}
    total, pieces = written(state, 1 << 10)
    (tmp_path / "file").write_bytes(b"".join(pieces))
    with (tmp_path / "file").open("rb") as file:
        assert read_header(file, total).keys() == state.keys()
    found = safetensors.torch.load_file(tmp_path / "file")
    assert {name: value.dtype for name, value in found.items()} == {name: value.dtype for name, value in state.items()}
    assert {torch.float32, torch.bfloat16, torch.bool} <= {value.dtype for value in state.values()}


def state_of_kind(kind: torch.dtype) -> bool:
    """True if a layer's state may have values of this kind."""
    layer = nn.Module()
    layer.register_buffer("values", torch.empty(4, dtype=kind))
    try:
        return check_state("a", layer) == {"values"}
    except (UserError, RuntimeError):  # torch's, of kinds of which it makes no tensors
        return False


def test_a_later_one_may_be_on_the_disk_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is written by a thread of its own, and a disk may take its time with one: the later one is the newest."""
    began = threading.Event()
    close = checkpoint_writer._Growing.close

    def slowly(self: checkpoint_writer._Growing) -> File:
        if "step-00000001" in str(self._path):
            assert began.wait(60)
        return close(self)

    monkeypatch.setattr(checkpoint_writer._Growing, "close", slowly)
    about = {"model": "m", "model_args": {}, "layers": ["a"], "seed": 0, "samples": 9, "job": "{}"}
    writer = CheckpointWriter(tmp_path, [(0, 1)], lambda step: new_manifest(run="", step=step, epoch=0, **about), 0)
    for step in (1, 2):
        for message in chunks(step, 0, {"a.weight": torch.ones(3)}, {}):
            writer.take(message)
    assert writer.wait(2, 60)
    began.set()
    assert writer.wait(1, 60)
    assert [path.name[-1] for path in complete(tmp_path)] == ["1", "2"]
    assert Checkpoint(tmp_path).manifest.step == 2


def test_written_whole_and_read_by_layer(tmp_path: Path) -> None:
    write(tmp_path, 5, 10)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.manifest.step == 10
    assert set(checkpoint.whole()) == {"a.weight", "b.bias", "c.weight"}
    assert set(checkpoint.tensors("weights", range(1, 2))) == {"b.bias"}
    assert set(checkpoint.tensors("weights", range(1, 3))) == {"b.bias", "c.weight"}
    assert set(checkpoint.tensors("optimizer", range(2, 3))) == {"momentum_buffer/c.weight"}
    assert Checkpoint(tmp_path / "checkpoints" / "step-00000005").whole()["a.weight"].max() == 5


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3, 4, keep=2)
    assert [c.name for c in complete(tmp_path)] == ["step-00000003", "step-00000004"]


def test_what_another_run_left_is_older(tmp_path: Path) -> None:
    """Whatever its steps' numbers: a shorter run in the same directory, or one resumed from an earlier checkpoint."""
    write(tmp_path, 8, 9, 10, keep=3)
    write(tmp_path, 2, 4, keep=3)
    assert [c.name[-2:] for c in complete(tmp_path)] == ["10", "02", "04"]
    assert Checkpoint(tmp_path).manifest.step == 4
    write(tmp_path, 10, keep=3)  # made anew
    assert [c.name[-2:] for c in complete(tmp_path)] == ["02", "04", "10"]


def test_a_clock_that_goes_back_costs_no_new_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Raspberry Pi has no clock of its own."""
    write(tmp_path, 8, 9, keep=2)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_writer, "_now", lambda: "2000-01-01T00:00:00.000000+00:00")
        write(tmp_path, 2, 3, keep=2)
    assert [c.name[-2:] for c in complete(tmp_path)] == ["02", "03"]


def test_the_newest_is_what_was_made_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the clock says, and whatever step a run goes on from."""
    clock = iter(["2026-01-01", "2026-01-02", "1970-01-01", "1970-01-02", "2000-01-01", "1999-01-01"])
    monkeypatch.setattr(checkpoint_writer, "_now", lambda: next(clock))
    write(tmp_path, 8, 9, who="first")
    write(tmp_path, 2, 3, who="second")
    assert [c.name[-2:] for c in complete(tmp_path)] == ["08", "09", "02", "03"]
    assert Checkpoint(tmp_path).manifest.step == 3
    assert [c.name[-2:] for c in made_by(tmp_path, "first")] == ["09", "08"]
    assert [c.name[-2:] for c in made_by(tmp_path, "second")] == ["03", "02"]
    assert made_by(tmp_path, "third") == []
    write(tmp_path, 9, who="third")  # goes on from step 8, say
    assert [Checkpoint(tmp_path).path] == made_by(tmp_path, "third") == [directory_of(tmp_path, 9)]
    assert made_by(tmp_path, "first") == [directory_of(tmp_path, 8)]
    write(tmp_path / "elsewhere", 1, after=Checkpoint(tmp_path).manifest.number)
    assert Checkpoint(tmp_path / "elsewhere").manifest.number == 6


def test_another_run_s_checkpoint_is_not_the_best_one(tmp_path: Path) -> None:
    """A later run in the same directory, which keeps none, has made the step with its own weights, or has removed it."""
    write(tmp_path, 5, 7, who="first")
    (tmp_path / BEST).write_text(json.dumps({"run": "third", "by": "first", "step": 5, "metric": "loss", "value": 1.0}))
    assert best_of(tmp_path) == directory_of(tmp_path, 5)
    write(tmp_path, 5, who="second")
    with pytest.raises(UserError, match=r"has kept no best checkpoint .* that is still there"):
        best_of(tmp_path)
    shutil.rmtree(directory_of(tmp_path, 5))
    with pytest.raises(UserError, match=r"has kept no best checkpoint .* that is still there"):
        best_of(tmp_path)


def test_what_nobody_has_numbered_is_older(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an earlier version: in the order of its times."""
    for step, created in ((5, "2026-01-02"), (7, "2026-01-01")):
        write(tmp_path, step)
        file = directory_of(tmp_path, step) / "manifest.json"
        whole = json.loads(file.read_text()) | {"created": created}
        for key in ("run", "number", "seen", "order"):
            del whole[key]
        file.write_text(json.dumps(whole))
    assert [c.name[-2:] for c in complete(tmp_path)] == ["07", "05"]
    monkeypatch.setattr(checkpoint_writer, "_now", lambda: "1970-01-01")
    write(tmp_path, 1)
    assert [c.name[-2:] for c in complete(tmp_path)] == ["07", "05", "01"]


def test_a_damaged_one_is_not_hidden_by_older_ones_nor_hides_newer_ones(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3)
    for step in (1, 2, 3):
        os.utime(directory_of(tmp_path, step) / "manifest.json", (100 * step, 100 * step))
    (directory_of(tmp_path, 2) / "manifest.json").write_text("{")
    os.utime(directory_of(tmp_path, 2) / "manifest.json", (200, 200))
    assert [c.name[-1] for c in complete(tmp_path)] == ["1", "2", "3"]
    (directory_of(tmp_path, 3) / "manifest.json").write_text("{")
    with pytest.raises(UserError, match="step-00000003: damaged checkpoint"):
        Checkpoint(tmp_path)
    write(tmp_path, 4, keep=2)
    assert Checkpoint(tmp_path).manifest.step == 4


@pytest.mark.parametrize("whole", [True, False])
def test_a_kill_between_two_renames_loses_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    """A resumed run makes a step again, and is killed when the old checkpoint has lost its name and the new one has none."""

    def killed(source: Path, to: Path) -> None:
        if Path(source).name == ".step-00000005":
            raise OSError("killed")
        os.replace(source, to)

    write(tmp_path, 5, who="first")
    kept = directory_of(tmp_path, 5)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", killed)
        with pytest.raises(UserError, match="killed"):
            write(tmp_path, 5, who="second")
    assert not kept.exists()
    if not whole:  # no run leaves it so
        (kept.with_name(".step-00000005") / "manifest.json").unlink()
    write(tmp_path, 7)
    assert [path.name[-1] for path in complete(tmp_path)] == ["5", "7"]
    assert made_by(tmp_path, "second" if whole else "first") == [kept]
    assert Checkpoint(kept).whole()["a.weight"].max() == 5
    assert Checkpoint(tmp_path).manifest.number == (3 if whole else 2)
    assert not list(kept.parent.glob(".*"))


def test_directories_are_on_the_disk_when_a_checkpoint_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own before it gets its name; then those of the checkpoints, and of the run, in which that was made."""
    synced: list[str] = []
    monkeypatch.setattr(checkpoint_writer, "_fsync_directory", lambda path: synced.append(path.name))
    write(tmp_path / "run", 5)
    assert synced == [".step-00000005", "checkpoints", "run"]


def test_a_file_system_that_synchronizes_no_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Network shares and shared folders of virtual machines say so; a disk that fails says something else."""
    fsync, why = os.fsync, errno.EINVAL

    def of_files(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(why, os.strerror(why))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", of_files)
    write(tmp_path, 5)
    assert Checkpoint(tmp_path).manifest.step == 5
    why = errno.EIO
    with pytest.raises(UserError, match=r"cannot write the checkpoint of step 6 .*Input/output error"):
        write(tmp_path, 6)


def test_what_another_run_is_writing_is_left_alone(tmp_path: Path) -> None:
    first = CheckpointWriter(tmp_path, [(0, 3)], lambda step: None, 0)  # type: ignore[arg-type, return-value]
    chunk = next(iter(chunks(1, 0, {"a.w": torch.zeros(1)}, {})))
    first.take(chunk)
    second = CheckpointWriter(tmp_path, [(0, 3)], lambda step: None, 0)  # type: ignore[arg-type, return-value]
    assert (tmp_path / "checkpoints" / ".step-00000001").is_dir()
    with pytest.raises(UserError, match="another run writes the same checkpoint"):
        second.take(chunk)
    first.close()
    CheckpointWriter(tmp_path, [(0, 3)], lambda step: None, 0)  # type: ignore[arg-type, return-value]
    assert not (tmp_path / "checkpoints" / ".step-00000001").exists()


def test_an_unfinished_one_is_not_taken_for_one(tmp_path: Path) -> None:
    write(tmp_path, 1)
    half = tmp_path / "checkpoints" / ".step-00000002"
    half.mkdir()
    (half / "stage-0.weights.safetensors").write_bytes(b"half")
    assert Checkpoint(tmp_path).manifest.step == 1
    write(tmp_path, 3)  # the next run clears it away
    assert not half.exists()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda c: (c / "stage-1.weights.safetensors").unlink(), "No such file"),
        (lambda c: (c / "stage-1.weights.safetensors").write_bytes(b"short"), "has 5 bytes, not"),
        (lambda c: _flip(c / "stage-1.weights.safetensors"), "does not match its checksum"),
        (lambda c: (c / "manifest.json").write_text("{"), "manifest.json"),
        (lambda c: _version(c / "manifest.json"), "of version 99"),
    ],
)
def test_damage_is_a_sentence(tmp_path: Path, damage, message: str) -> None:
    write(tmp_path, 1)
    damage(tmp_path / "checkpoints" / "step-00000001")
    with pytest.raises(UserError, match=message):
        Checkpoint(tmp_path)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _version(path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 99}))


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="neither a checkpoint nor a run with one"):
        Checkpoint(tmp_path)


def test_a_directory_that_vanishes(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, [(0, 3)], lambda step: None, 0)  # type: ignore[arg-type, return-value]
    (tmp_path / "checkpoints").write_text("a file in the way")
    with pytest.raises(UserError, match=r"cannot write the checkpoint of step 1 to [^\[]*: (File exists|Not a directory)$"):
        writer.take(next(iter(chunks(1, 0, {"a.w": torch.zeros(1)}, {}))))


def test_a_run_removes_its_older_ones_while_its_newest_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 1)
    plain = checkpoint.read_manifest

    def goes_on(path: Path):
        manifest = plain(path)
        if manifest.step < 3:
            write(tmp_path, manifest.step + 1, keep=1)
        return manifest

    monkeypatch.setattr(checkpoint, "read_manifest", goes_on)
    assert Checkpoint(tmp_path).manifest.step == 3
    with pytest.raises(UserError, match="neither a checkpoint nor a run with one"):
        Checkpoint(directory_of(tmp_path, 1))


def test_what_was_checked_is_what_is_read(tmp_path: Path) -> None:
    """Between the two, which may be minutes, the run whose checkpoint it is has removed it, or one that has resumed there
    has made the step anew."""
    write(tmp_path, 1, 2)
    first, second = (Checkpoint(directory_of(tmp_path, step)) for step in (1, 2))
    write(tmp_path, 3, keep=1)
    assert not directory_of(tmp_path, 1).exists()
    write(tmp_path, 2)
    for path in directory_of(tmp_path, 2).glob("*.weights.safetensors"):
        path.write_bytes(b"another one")
    for step, found in ((1, first), (2, second)):
        assert found.whole()["a.weight"].unique().tolist() == [step]
        assert set(found.tensors("optimizer", range(3))) == {"momentum_buffer/c.weight"}


def test_few_files_are_open_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of stages have more than a process may open."""
    monkeypatch.setattr(checkpoint, "_MOST_OPEN", 1)
    before = len(os.listdir("/proc/self/fd"))
    write(tmp_path, 1)
    found = Checkpoint(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    for _ in range(2):
        assert found.whole()["c.weight"].numel() == 400_000
        assert set(found.tensors("optimizer", range(3))) == {"momentum_buffer/c.weight"}
    write(tmp_path, 1)
    with pytest.raises(UserError, match="is another file now than when the checkpoint was opened"):
        found.whole()


def test_what_arrives_is_not_kept_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    edges = [(n, n + 1) for n in range(40)]
    writer = CheckpointWriter(tmp_path, edges, lambda step: None, 0, 0)  # type: ignore[arg-type, return-value]
    for n in range(40):
        messages = [*chunks(1, n, {f"l{n}.weight": torch.zeros(2)}, {})]
        writer.take(messages[0])
    assert len(os.listdir("/proc/self/fd")) <= before + 1  # the folder
    writer.close()

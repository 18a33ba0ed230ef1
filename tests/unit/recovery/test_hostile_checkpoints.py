"""Checkpoints and replicas that somebody else has written, or a disk has damaged: a result, or one sentence."""

import contextlib
import json
import os
import random
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from accept_mpi import models
from accept_mpi.cli import main, predict
from accept_mpi.data.calendar import Calendar
from accept_mpi.errors import UserError
from accept_mpi.job_file import parse
from accept_mpi.launch.run_identity import RunIdentity
from accept_mpi.models.layers import build_layers
from accept_mpi.pipeline.stage import Stage
from accept_mpi.recovery.checkpoint import Checkpoint
from accept_mpi.recovery.checkpoint_writer import CheckpointWriter, chunks, new_manifest
from accept_mpi.recovery.disk_replicas import DiskReplicas
from accept_mpi.recovery.layer_state import fitting, load, states
from accept_mpi.recovery.manifest import Manifest, check_job, complete, read_manifest, same
from accept_mpi.recovery.restore import CheckpointStore
from accept_mpi.training.resuming import calendar, check, course_of

JOB = parse(
    '[model]\nname = "cnn"\nargs = { width = 4 }\n[data]\nname = "digits"\n[train]\nsteps = 9\nbatch_size = 8\n'
    'optimizer = { name = "adamw" }\n[output]\ndirectory = "run"\n',
    "job",
)
CHAIN = models.load("cnn", {"width": 4}, 0)
BATCHES = Calendar(24, 8, 2, 0)
NASTY: list[Any] = [
    None, True, -1, 0, 1 << 62, 1 << 63, 1 << 70, -(1 << 70), 3.5, 1e308, "", "x", "a\0b", "\x1b[31m\n", "../x", "/dev/zero",
    "..", "x" * 100_000, [], [[]], {}, {"a": {"b": None}}, [0] * 1000, [None, "a.b"], [{"start": 0, "stop": 1 << 60}],
]  # fmt: skip


def stage(start: int, stop: int) -> Stage:
    return Stage(build_layers(CHAIN, start, stop, 0), JOB, None, True)


@pytest.fixture(scope="module")
def trained() -> Stage:
    """A stage of all layers after an update."""
    found = stage(0, len(CHAIN))
    for parameter in found.parameters:
        parameter.grad = torch.full_like(parameter, 0.1)
    found.update(0.01, 0)
    return found


@pytest.fixture
def sound(tmp_path: Path, trained: Stage) -> Path:
    """A checkpoint of one stage."""

    def manifest(step: int) -> Any:
        about = {"model": "cnn", "model_args": {"width": 4}, "layers": CHAIN.names, "seed": 0, "samples": 24, "seen": 0}
        return new_manifest(step=step, epoch=1, run="r", job=JOB.to_json(), **about)

    writer = CheckpointWriter(tmp_path, [(0, len(CHAIN))], manifest, 0)
    for chunk in chunks(3, 0, trained.weights(), trained.optimizer_state()):
        writer.take(chunk)
    assert writer.wait(3, 10)
    return tmp_path / "checkpoints" / "step-00000003"


def go_on(path: Path, blank: Stage) -> None:
    """What resuming does with a checkpoint, on one rank."""
    checkpoint = Checkpoint(path)
    checkpoint.whole()
    manifest = checkpoint.manifest
    batches = calendar(BATCHES, manifest)
    course_of(JOB, batches, manifest.step)
    check(manifest, JOB, [], CHAIN, batches)
    assert sum(batches.sizes(manifest.step)) == len([n for part in batches.indices(manifest.step) for n in part])
    store = CheckpointStore(checkpoint)
    load(blank, {layer: store.get(manifest.step, layer) for layer in range(len(CHAIN))}, JOB.train.optimizer)


def outcome(what: Callable[..., Any], *arguments: Any) -> str:
    """Empty, or the sentence."""
    try:
        what(*arguments)
    except UserError as error:
        said = str(error)
    else:
        return ""
    assert said.isprintable()
    assert len(said) < 2000
    return said


def test_a_sound_one_is_taken(sound: Path) -> None:
    assert outcome(go_on, sound, stage(0, len(CHAIN))) == ""


def places(tree: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values in a tree."""
    if before:
        yield before
    for key in tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        yield from places(tree[key], (*before, key))


def changed(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    copied = dict(tree) if isinstance(tree, dict) else list(tree)
    copied[path[0]] = changed(tree[path[0]], path[1:], value)
    return copied


def test_every_field_of_a_manifest(sound: Path) -> None:
    file, blank = sound / "manifest.json", stage(0, len(CHAIN))
    whole = json.loads(file.read_text())
    refused = tried = 0
    for path in places(whole):
        for value in NASTY:
            file.write_text(json.dumps(changed(whole, path, value)))
            refused += bool(outcome(go_on, sound, blank))
            tried += 1
    assert refused > 0.8 * tried


def test_fields_of_a_manifest_that_contradict_each_other(sound: Path) -> None:
    file, last = sound / "manifest.json", len(CHAIN)
    whole = json.loads(file.read_text())
    (only,) = whole["stages"]

    def said(**other: Any) -> str:
        file.write_text(json.dumps(whole | other))
        try:
            read_manifest(sound)
        except ValueError as error:
            return str(error)
        return ""

    named = only | {part: only[part] | {"name": f"other-{only[part]['name']}"} for part in ("weights", "optimizer")}
    for stages in (
        [only | {"start": 1}], [only | {"stop": last - 1}], [only | {"stop": last + 1}],
        [only, named | {"start": last}], [only | {"stop": 2}, named | {"start": 3}],
    ):  # fmt: skip
        assert f"its stages do not hold the {last} layers once each, in order" in said(stages=stages), stages
    assert said(stages=[only | {"stop": 2}, named | {"start": 2}]) == ""
    assert "it names a file twice" in said(stages=[only | {"stop": 2}, only | {"start": 2}])
    assert "cannot be" in said(epoch=4)
    assert "cannot be" in said(seen=24)
    assert said(epoch=3, seen=23) == said(seen=None) == ""


def test_the_very_checkpoint_is_found_by_its_manifest(sound: Path) -> None:
    run, wanted = sound.parent.parent, read_manifest(sound)
    assert same(sound, wanted) == same(run, wanted) == sound
    other = msgspec.structs.replace(wanted, number=wanted.number + 1)
    assert same(sound, other) is same(run, other) is same(run / "nothing", wanted) is None


def test_every_field_of_a_manifest_s_job(sound: Path) -> None:
    file, manifest, compared = sound / "manifest.json", Checkpoint(sound).manifest, 0
    whole = json.loads(file.read_text())
    job = json.loads(whole["job"])

    def compare(manifest: Manifest) -> None:
        batches = calendar(BATCHES, manifest)
        assert 0 <= batches.position(3).seen < 24
        check(manifest, JOB, [], CHAIN, batches)

    for path in places(job):
        for value in NASTY:
            text = json.dumps(changed(job, path, value))
            with contextlib.suppress(ValueError):
                check_job(text)
                compared += 1
                outcome(compare, msgspec.structs.replace(manifest, job=text))
                outcome(compare, msgspec.structs.replace(manifest, job=text, seen=None))
    assert compared > 500
    for text in ("", "5", "[]", "{", "null", "[" * 100_000, '{"a":' * 100_000):
        file.write_text(json.dumps(whole | {"job": text}))
        assert outcome(Checkpoint, sound)


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "null", "\ufeff{}", "[" * 1_000_000, '{"format":' * 100_000, " " * (5 << 20),
        '{"format": "accept-mpi checkpoint", "version": 1}', '{"format": "two\\nlines", "version": 1}',
    ],
)  # fmt: skip
def test_manifests_that_are_none(sound: Path, text: str) -> None:
    (sound / "manifest.json").write_text(text)
    assert "step-00000003" in outcome(Checkpoint, sound)
    assert complete(sound.parent.parent) == [sound]  # whoever asks for the newest is told


def test_model_args_nested_deep(sound: Path) -> None:
    text = (sound / "manifest.json").read_text()
    for depth in (100, 900, 100_000):
        (sound / "manifest.json").write_text(text.replace('"width": 4', f'"width": {"[" * depth}{"]" * depth}', 1))
        assert "nested more than" in outcome(Checkpoint, sound)


def resealed(sound: Path, name: str, data: bytes) -> None:
    """Put other bytes into a file, and have the manifest agree."""
    (sound / name).write_bytes(data)
    whole = json.loads((sound / "manifest.json").read_text())
    part = name.split(".")[1]
    whole["stages"][0][part] |= {"nbytes": len(data), "crc32": zlib.crc32(data)}
    (sound / "manifest.json").write_text(json.dumps(whole))


def damaged(data: bytes, draw: random.Random) -> bytes:
    """Cut, flipped, doubled or filled somewhere, most often near the beginning."""
    found = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 8])):
        at = draw.randrange(min(len(found), draw.choice([9, 200, 2000, 1 << 30])) or 1)
        kind = draw.randrange(4)
        if kind == 0:
            del found[at:]
        elif kind == 1 and at < len(found):
            found[at] ^= 1 << draw.randrange(8)
        elif kind == 2:
            found[at:at] = found[at : at + draw.randrange(1, 40)]
        else:
            found[at : at + 8] = draw.choice([b"\xff" * 8, b"\0" * 8, b"99999999", b'","a":[['])
    return bytes(found)


@pytest.mark.parametrize("part", ["weights", "optimizer"])
def test_damaged_tensors_under_the_right_checksum(sound: Path, part: str) -> None:
    name, draw, blank = f"stage-0.{part}.safetensors", random.Random(part), stage(0, len(CHAIN))
    whole, refused = (sound / name).read_bytes(), 0
    for _ in range(200):
        resealed(sound, name, damaged(whole, draw))
        refused += bool(outcome(go_on, sound, blank))
    assert refused > 60


def other(tensors: dict[str, torch.Tensor], how: str) -> dict[str, torch.Tensor]:
    name = next(key for key, value in tensors.items() if value.dim() > 1)
    value = tensors[name]
    if how == "half":
        return tensors | {name: value.half()}
    if how == "double":
        return tensors | {name: value.double()}
    if how == "shape":
        return tensors | {name: value.flatten()}
    if how == "wider":
        return tensors | {name: torch.cat([value, value])}
    if how == "nan":
        return tensors | {name: value * torch.nan}
    if how == "infinite":
        return tensors | {name: value + torch.inf}
    if how == "more":
        return tensors | {f"{name}.more": value.clone()}
    if how == "elsewhere":
        return tensors | {name.replace(".", ".x", 1): value.clone()}
    return {key: value for key, value in tensors.items() if key != name}


@pytest.mark.parametrize("part", ["weights", "optimizer"])
@pytest.mark.parametrize(
    "how", ["half", "double", "shape", "wider", "nan", "infinite", "more", "elsewhere", "fewer"]
)  # fmt: skip
def test_another_model_s_tensors(sound: Path, trained: Stage, part: str, how: str) -> None:
    from safetensors.torch import save

    tensors = trained.weights() if part == "weights" else trained.optimizer_state()
    resealed(sound, f"stage-0.{part}.safetensors", save(other(tensors, how)))
    said = outcome(go_on, sound, stage(0, len(CHAIN)))
    assert "checkpoint" in said
    assert {"half": "float16", "double": "float64", "nan": "not finite", "infinite": "not finite"}.get(how, "") in said


def test_a_buffer_may_be_infinite(sound: Path, trained: Stage) -> None:
    """A mask is."""
    from safetensors.torch import save

    weights = trained.weights()
    name = next(key for key in weights if key.endswith("running_mean"))
    weights[name] = weights[name] - torch.inf
    resealed(sound, "stage-0.weights.safetensors", save(weights))
    assert outcome(go_on, sound, stage(0, len(CHAIN))) == ""


@pytest.mark.parametrize("file", ["manifest.json", "stage-0.weights.safetensors", "stage-0.optimizer.safetensors"])
@pytest.mark.parametrize("what", ["pipe", "folder", "device", "link", "dangling", "nothing"])
def test_no_regular_file(sound: Path, file: str, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = sound / file
    kept = sound.parent / "kept"
    path.rename(kept)
    if what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    elif what != "nothing":
        path.symlink_to({"device": Path("/dev/zero"), "link": kept, "dangling": sound / "nowhere"}[what])
    assert main(["export", str(sound), str(sound.parent / "out.safetensors")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    "name", ["../x", "/dev/zero", "..", ".", "", "a\0b", "a/b", "x" * 300, "stage-0.optimizer.safetensors"]
)
def test_names_that_lead_elsewhere(sound: Path, name: str) -> None:
    whole = json.loads((sound / "manifest.json").read_text())
    whole["stages"][0]["weights"]["name"] = name
    (sound / "manifest.json").write_text(json.dumps(whole))
    assert "names" in outcome(Checkpoint, sound)


def test_more_than_there_is_memory(sound: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Perhaps a file of holes, which takes no disk: refused before it is read, so nobody comes to see its checksum."""
    file = sound / "stage-0.weights.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    monkeypatch.setattr("accept_mpi.cli.export.available_memory", lambda: 1000.0)
    assert main(["export", str(sound), str(sound.parent / "out.pt")]) == 2
    assert "GB of memory that there are" in capsys.readouterr().err
    monkeypatch.undo()
    assert main(["export", str(sound), str(sound.parent / "out.pt")]) == 2
    assert "checksum" in capsys.readouterr().err


@pytest.mark.parametrize("job", ["{}", '{"train": 3}', JOB.to_json().replace('"steps":9', '"stops":9')])
def test_a_job_of_another_version(sound: Path, job: str, capsys: pytest.CaptureFixture[str]) -> None:
    whole = json.loads((sound / "manifest.json").read_text())
    (sound / "manifest.json").write_text(json.dumps(whole | {"job": job}))
    for command in (["predict", str(sound)], ["export", str(sound), str(sound.parent / "out.pt"), "--merge"]):
        assert main(command) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"accept_mpi: {sound}: the job in its manifest.json is none of this version: ")
        assert said.count("\n") == 1


def test_what_a_data_set_prints_is_no_row(
    sound: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = predict.data_of
    monkeypatch.setattr(predict, "data_of", lambda job: print("loaded") or plain(job))
    assert main(["predict", str(sound)]) == 0
    found = capsys.readouterr()
    assert found.out.startswith("sample,class 1,probability 1\n0,")
    assert found.err == "loaded\n"


def test_a_path_too_long() -> None:
    said = outcome(Checkpoint, Path("x" * 300))
    assert "File name too long" in said or "neither a checkpoint" in said  # as Python 3.14 finds none there


# -- export ----------------------------------------------------------------------------------------------------------------


def test_export_leaves_what_is_beside_and_replaces_whole(
    sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "o.safetensors"
    mine = tmp_path / ".o.safetensors"
    mine.write_text("mine")
    out.write_text("before")
    with monkeypatch.context() as patch:
        patch.setattr("accept_mpi.cli.export.written", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "no room")))
        assert main(["export", str(sound), str(out)]) == 2
    assert (out.read_text(), mine.read_text()) == ("before", "mine")
    assert main(["export", str(sound), str(out)]) == 0
    assert mine.read_text() == "mine"
    assert out.stat().st_size > 100
    assert out.stat().st_mode & 0o444 == 0o444 & ~_mask()
    assert {path.name for path in tmp_path.iterdir()} == {"o.safetensors", ".o.safetensors", "checkpoints"}


def _mask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_export_to_what_is_no_file(sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "folder.pt").mkdir()
    os.mkfifo(tmp_path / "pipe.pt")
    (tmp_path / "device.pt").symlink_to("/dev/null")
    for name in ("folder.pt", "pipe.pt", "device.pt"):
        assert main(["export", str(sound), str(tmp_path / name)]) == 2
        assert "something else than a file has this name" in capsys.readouterr().err
    assert main(["export", str(sound), str(sound / "stage-0.weights.safetensors")]) == 2
    assert "in the checkpoint itself" in capsys.readouterr().err
    assert outcome(Checkpoint, sound) == ""


def test_export_through_a_link(sound: Path, tmp_path: Path) -> None:
    (tmp_path / "link.pt").symlink_to(tmp_path / "real.pt")
    assert main(["export", str(sound), str(tmp_path / "link.pt")]) == 0
    assert (tmp_path / "link.pt").is_symlink()
    assert torch.load(tmp_path / "real.pt", weights_only=True)


# -- replicas --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def kept(tmp_path: Path, trained: Stage) -> Path:
    """A host's replicas of step 5."""
    spill = DiskReplicas(RunIdentity("run", 1), "edge0", tmp_path / "replicas")
    spill.read()
    spill.write(5, states(trained))
    spill.wait(10)
    return next((tmp_path / "replicas" / "run" / "edge0").glob("*5-*"))


def read(kept: Path) -> dict[int, dict[int, bytes]]:
    return DiskReplicas(RunIdentity("run", 2), "edge0", kept.parent.parent.parent).read()


def test_damaged_replicas(kept: Path) -> None:
    """Passed over, or one sentence."""
    whole, draw, blank, found = kept.read_bytes(), random.Random(1), stage(0, len(CHAIN)), 0
    for _ in range(200):
        data = damaged(whole[4:], draw)
        kept.write_bytes(zlib.crc32(data).to_bytes(4, "little") + data)
        for blobs in read(kept).values():
            fit = fitting(blobs, CHAIN.names)
            assert set(fit) <= set(range(len(CHAIN)))
            if len(fit) == len(CHAIN):
                found += 1
                outcome(load, blank, fit, JOB.train.optimizer)
    assert found


def test_replicas_of_other_layers_are_no_use(trained: Stage) -> None:
    blobs = states(trained)
    assert fitting(blobs, CHAIN.names) == blobs
    assert fitting(blobs, CHAIN.names[:2]) == {0: blobs[0], 1: blobs[1]}
    assert fitting({0: blobs[1], 1: blobs[1], -1: blobs[0], 99: blobs[0]}, CHAIN.names) == {1: blobs[1]}
    assert fitting({0: b"no tensors"}, CHAIN.names) == {}


@pytest.mark.parametrize("what", ["pipe", "folder", "device", "others", "others' folder", "link", "huge", "late"])
def test_replicas_that_this_user_has_not_written(kept: Path, what: str, caplog: pytest.LogCaptureFixture) -> None:
    aside = kept.parent.parent.parent / "aside"
    if what == "others":
        kept.chmod(0o666)
    elif what == "others' folder":
        kept.parent.chmod(0o777)
    elif what == "huge":
        os.truncate(kept, 1 << 42)  # a hole
    else:
        kept.rename(aside)
    if what == "pipe":
        os.mkfifo(kept)
    elif what == "folder":
        kept.mkdir()
    elif what == "late":
        aside.rename(kept.with_name(f"{'9' * 60}-1"))
    elif what in ("device", "link"):
        kept.symlink_to("/dev/zero" if what == "device" else aside)
    assert not any(read(kept).values())
    if what != "late":
        assert "passed over" in caplog.text or "not kept on this disk" in caplog.text
    with contextlib.suppress(OSError):
        shutil.rmtree(kept.parent)


def test_a_profile_that_is_none(kept: Path) -> None:
    spill = DiskReplicas(RunIdentity("run", 2), "edge0", kept.parent.parent.parent)
    path = kept.parent / "survey"
    for data in (b"", b"\xc1", b"\x81" * 100_000, b"\xdf\xff\xff\xff\xff"):
        path.write_bytes(zlib.crc32(data).to_bytes(4, "little") + data)
        path.chmod(0o600)
        assert spill.cluster() is None

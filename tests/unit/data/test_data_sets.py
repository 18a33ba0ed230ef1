"""Data sets: real formats on tiny files, damaged files, users' own."""

import gzip
import os
import re
import sys
import tarfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from accept_mpi import data, tree
from accept_mpi.data.base import adapt, fetch
from accept_mpi.errors import UserError
from accept_mpi.job import Model

SOME = np.array([3, 0, 5])


def test_digits() -> None:
    train, test = data.load("digits", {"size": 16, "channels": 1})
    assert len(train) + len(test) == 1797
    x = train.inputs(SOME)
    assert isinstance(x, torch.Tensor)
    assert x.shape == (3, 1, 16, 16)
    assert -1 <= x.min() < x.max() <= 1
    assert train.targets(SOME).dtype == torch.int64
    again, _ = data.load("digits", {"size": 16, "channels": 1})
    assert torch.equal(again.targets(np.arange(100)), train.targets(np.arange(100)))


@pytest.mark.parametrize("path", ["its file", "scikit-learn"])
def test_digits_are_scikit_learns(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if path == "scikit-learn":
        monkeypatch.setattr(sys.modules["accept_mpi.data.digits"], "find_spec", lambda name: None)
    train, test = data.load("digits", {"channels": 1})
    found = torch.cat([x.inputs(np.arange(len(x))) for x in (train, test)]).reshape(-1, 64)
    scans = load_digits()
    assert sorted(found.tolist()) == sorted((torch.from_numpy(scans.data).float() / 8 - 1).tolist())
    counts = sum(torch.bincount(x.targets(np.arange(len(x)))) for x in (train, test))
    assert counts.tolist() == np.bincount(scans.target).tolist()


def test_text(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("bcd" * 50 + "é")
    (tmp_path / "a.txt").write_text("a" * 49)
    (tmp_path / "c.bin").write_bytes(b"\x7fELF\x00\xff\xfe")
    train, test = data.load("text", {"path": str(tmp_path), "context": 10, "test_fraction": 0.2})
    x, y = train.inputs(np.array([4])), train.targets(np.array([4]))
    assert x.tolist() == [[ord(c) for c in "aaaaaaaaab"]]
    assert y.tolist() == [[ord(c) for c in "aaaaaaaabc"]]
    assert len(test) == 3
    assert int(test.targets(np.arange(len(test))).max()) <= 127
    default, _ = data.load("text", {"context": 64, "limit": 50_000})
    assert len(default) == (45_000 - 1) // 64
    with pytest.raises(UserError, match="too few"):
        data.load("text", {"path": str(tmp_path / "a.txt"), "context": 128})
    with pytest.raises(UserError, match="no file or directory"):
        data.load("text", {"path": str(tmp_path / "missing")})


def test_all_folders_of_a_text_are_read(tmp_path: Path) -> None:
    """Those called test and tests were left out without a word, as they are of the standard library."""
    for n, name in enumerate(("a/tests/1", "b", "test/site-packages/c", "test.txt", ".hidden/d", "test/.e")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("01234567"[n] * 20)
    train, test = data.load("text", {"path": str(tmp_path), "context": 4})
    found = "".join(map(chr, [*train.tokens, *test.tokens]))
    assert found == "".join(n * 20 for n in "0123")


def test_the_standard_library_is_read_without_installed_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tens of thousands of files were looked at first, by each rank, to be left out."""
    looked: list[str] = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: looked.append(str(path)) or scandir(path))
    data.load("text", {"context": 64, "limit": 50_000})
    assert looked
    assert not [path for path in looked if "site-packages" in path]
    assert len(looked) < 20, "it goes no further than it has to"


def cifar_files(folder: Path, records: int = 4) -> Path:
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name in [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]:
        block = rng.integers(0, 256, (records, 3073), np.uint8)
        block[:, 0] %= 10
        (folder / name).write_bytes(block.tobytes())
    return folder


def test_cifar10(tmp_path: Path) -> None:
    folder = cifar_files(tmp_path / "cifar-10-batches-bin")
    archive = tmp_path / "cifar-10-binary.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, "cifar-10-batches-bin")
    found = [data.load("cifar10", {"path": str(path)}) for path in (folder, tmp_path, archive)]
    for train, test in found:
        assert (len(train), len(test)) == (20, 4)
        assert torch.equal(train.inputs(SOME), found[0][0].inputs(SOME))
    train = found[0][0]
    assert train.inputs(SOME).shape == (3, 3, 32, 32)
    assert not torch.equal(train.inputs(SOME, seed=1), train.inputs(SOME, seed=2))
    # Augmentation depends on seed and index, not on the batch around a sample.
    assert torch.equal(train.inputs(SOME, seed=1)[2], train.inputs(np.array([5]), seed=1)[0])
    (folder / "data_batch_3.bin").write_bytes(b"x" * 5000)
    with pytest.raises(UserError, match=r"data_batch_3.bin is truncated: 5000 bytes"):
        data.load("cifar10", {"path": str(folder)})
    (folder / "test_batch.bin").unlink()
    (folder / "data_batch_3.bin").unlink()
    with pytest.raises(UserError, match=r"cannot read .*data_batch_3\.bin"):
        data.load("cifar10", {"path": str(folder)})
    archive.write_bytes(archive.read_bytes()[:2000])
    with pytest.raises(UserError, match="damaged or truncated"):
        data.load("cifar10", {"path": str(archive)})


@pytest.mark.parametrize("name", ["images", "hdf5", "text", "cifar10"])
def test_a_path_may_begin_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UserError, match=re.escape(str(tmp_path / "nothing"))):
        data.load(name, {"path": "~/nothing"})


def test_images(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for name, colour in (("cat", 250), ("dog", 5)):
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            for i in range(3):
                Image.new("RGB", (40 + i, 50), (colour, 0, 0)).save(folder / f"{i}.png")
    train, test = data.load("images", {"path": str(tmp_path), "size": 8})
    assert (len(train), len(test)) == (6, 6)
    x = train.inputs(np.arange(6))
    assert isinstance(x, torch.Tensor)
    assert x.shape == (6, 3, 8, 8)
    assert train.targets(np.arange(6)).tolist() == [0, 0, 0, 1, 1, 1]
    assert x[0, 0].min() > 0.9
    assert x[5, 0].max() < -0.9
    split_train, split_test = data.load("images", {"path": str(tmp_path / "train")})
    assert len(split_train) + len(split_test) == 6
    for name in ("val", "valid", "validation"):
        (tmp_path / "test").replace(tmp_path / name)
        assert len(data.load("images", {"path": str(tmp_path)})[1]) == 6
        (tmp_path / name).replace(tmp_path / "test")
    (tmp_path / "train" / "cat" / "0.png").write_bytes(b"not an image")
    with pytest.raises(UserError, match=r"cannot decode the image .*0\.png"):
        train.inputs(np.array([0]))
    with pytest.raises(UserError, match="there is no directory"):
        data.load("images", {"path": str(tmp_path / "nothing")})


def test_hdf5(tmp_path: Path) -> None:
    path = tmp_path / "set.h5"
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(40.0).reshape(20, 2)
        file["y"] = np.arange(20, dtype=np.int16)
        file["test/x"] = np.zeros((3, 2), np.uint8)
        file["test/y"] = np.zeros(3, np.int32)
        file["short"] = np.zeros(7)
    train, test = data.load("hdf5", {"path": str(path)})
    assert (len(train), len(test)) == (16, 4)
    everything = torch.cat([train.targets(np.arange(16)), test.targets(np.arange(4))])
    assert sorted(everything.tolist()) == list(range(20))
    rows = np.array([5, 1, 5])
    x, y = train.inputs(rows), train.targets(rows)
    assert isinstance(x, torch.Tensor)
    assert x.dtype == torch.float32
    assert x[:, 0].tolist() == [2 * v for v in y.tolist()]
    _, other = data.load("hdf5", {"path": str(path), "test_x": "test/x", "test_y": "test/y"})
    assert len(other) == 3
    with pytest.raises(UserError, match='no data set "X"; did you mean "x"'):
        data.load("hdf5", {"path": str(path), "x": "X"})
    with pytest.raises(UserError, match="test_x and test_y go together"):
        data.load("hdf5", {"path": str(path), "test_x": "test/x"})
    with pytest.raises(UserError, match='"x" holds 20 rows and "short" 7'):
        data.load("hdf5", {"path": str(path), "y": "short"})
    cut_off = tmp_path / "cut_off.h5"
    cut_off.write_bytes(path.read_bytes()[:300])
    with pytest.raises(UserError, match="not a whole HDF5 file"):
        data.load("hdf5", {"path": str(cut_off)})
    with pytest.raises(UserError, match="there is no file"):
        data.load("hdf5", {"path": str(tmp_path / "missing.h5")})


def test_users_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_data.py").write_text(
        "import numpy as np, torch\n"
        "from torch.utils.data import TensorDataset\n"
        "def pair(): return (np.zeros((5, 2), np.float32), np.zeros(5, np.int64)), (torch.ones(2, 2), torch.ones(2))\n"
        "def maps(): return TensorDataset(torch.arange(6.), torch.arange(6)), TensorDataset(*torch.zeros(2, 2))\n"
        "def wrong(): return 3\n"
        "def splits(): return {'train': maps()[0], 'test': maps()[1]}\n"
        "def columns(): return {'x': np.zeros(5), 'y': np.zeros(5)}, maps()[1]\n"
        "def empty(): return (np.zeros((0, 2)), np.zeros(0)), (np.zeros((1, 2)), np.zeros(1))\n"
        "def broken(): raise RuntimeError('no disk')\n"
    )
    monkeypatch.chdir(tmp_path)
    train, _ = data.load("my_data:pair", {})
    assert len(train) == 5
    train, _ = data.load("my_data:maps", {})
    assert train.targets(SOME).tolist() == [3, 0, 5]
    for name, message in (
        ("my_data:wrong", r"must return \(train, test\), got int"),
        ("my_data:splits", r"must return \(train, test\), got dict"),
        ("my_data:columns", r"expected a data set with .* by number, or a pair \(x, y\), got a dict"),
        ("my_data:empty", "the training set of .* is empty"),
        ("my_data:broken", "RuntimeError: no disk"),
        ("digit", 'did you mean "digits"'),
    ):
        with pytest.raises(UserError, match=message):
            data.load(name, {})


def test_tuples_of_inputs() -> None:
    items = data.MapDataset([((torch.zeros(2), torch.ones(1)), 1), ((torch.ones(2), torch.ones(1)), 0)])
    x = items.inputs(np.array([0, 1]))
    assert isinstance(x, tuple)
    assert [part.shape for part in x] == [(2, 2), (2, 1)]


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"x": 1}, r"sample 0 must be a pair \(x, y\), or a dict with its target under one of labels, .*; got a dict"),
        (torch.zeros(3), r"sample 0 must be a pair \(x, y\), .*; got a Tensor"),
        ((1, 2, 3), r"sample 0 must be a pair \(x, y\), .*; got a tuple of 3"),
        (("text", 1), "the x of samples must be tensors or arrays"),
        (((torch.zeros(1), "text"), 1), "the x of samples must be tensors or arrays"),
    ],
)
def test_samples_that_are_no_pairs(sample: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        data.MapDataset([sample]).inputs(np.array([0]))


def test_arrays_of_any_byte_order_and_width() -> None:
    x, y = np.arange(6, dtype=">f8").reshape(3, 2), np.array([0, 1, 2], dtype=">u2")
    for found in (data.MapDataset(list(zip(x, y, strict=True))), data.base.adapt((x, y))):
        indices = np.array([2, 0])
        assert found.inputs(indices).tolist() == [[4.0, 5.0], [0.0, 1.0]]
        assert found.inputs(indices).dtype == torch.float64
        assert (found.targets(indices).tolist(), found.targets(indices).dtype) == ([2, 0], torch.int32)


def test_parts_of_dicts_go_by_their_keys() -> None:
    """As torch's default_collate has it."""
    one = {"x": torch.zeros(2), "m": {"p": 1.0, "q": torch.ones(1)}}
    other = {"m": {"q": torch.zeros(1), "p": 2.0}, "x": torch.ones(2)}
    found = tree.stack([(one, 3), (other, 4)])[0]
    assert list(found) == ["x", "m"]
    assert found["x"].tolist() == [[0, 0], [1, 1]]
    assert found["m"]["p"].tolist() == [1, 2]
    assert found["m"]["q"].tolist() == [[1], [0]]
    for bad in ([one, {"x": torch.zeros(2)}], [(one, 1), (one,)], [one, (1, 2)]):
        with pytest.raises(ValueError, match="made up of other parts"):
            tree.stack(bad)


def test_samples_of_different_shapes() -> None:
    items = data.MapDataset([(torch.zeros(2), torch.zeros(1)), ((torch.zeros(2),), torch.zeros(2))])
    with pytest.raises(UserError, match="the y of samples must be tensors or arrays of one shape"):
        items.targets(np.array([0, 1]))
    with pytest.raises(UserError, match="made up of other parts"):
        items.inputs(np.array([1, 0]))


def test_data_that_is_no_numbers(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "set.h5", "w") as file:
        file["x"], file["y"] = np.zeros((10, 2)), np.array([b"cat"] * 10)
    with pytest.raises(UserError, match=r'"y" of .*set.h5 holds \|S3, not numbers'):
        data.load("hdf5", {"path": str(tmp_path / "set.h5")})
    with pytest.raises(UserError, match="size must be a whole number of pixels, got 0"):
        data.load("images", {"path": str(tmp_path), "size": 0})


def test_pillow_is_named_as_pip_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(UserError, match=r"pip install pillow$"):
        data.load("images", {"path": "."})


@pytest.mark.parametrize(
    ("x", "y", "wanted"),
    [
        (">f4", ">i4", (torch.float32, torch.int64)),
        (">f8", ">i8", (torch.float32, torch.int64)),
        ("f2", "i1", (torch.float32, torch.int64)),
        (np.longdouble, "bool", (torch.float32, torch.int64)),
        (">u2", ">u2", (torch.int32, torch.int64)),
        ("u4", "u4", (torch.int64, torch.int64)),
        ("u8", ">u8", (torch.int64, torch.int64)),
        ("u1", ">f8", (torch.uint8, torch.float32)),
        ("bool", "u1", (torch.bool, torch.int64)),
    ],
    ids=str,
)
def test_hdf5_of_any_byte_order_and_width(tmp_path: Path, x: Any, y: Any, wanted: tuple[torch.dtype, torch.dtype]) -> None:
    path = tmp_path / "set.h5"
    with h5py.File(path, "w") as file:
        file["x"], file["y"] = (np.arange(20).reshape(10, 2) % 2).astype(x), (np.arange(10) % 2).astype(y)
    train, test = data.load("hdf5", {"path": str(path), "test_x": "x", "test_y": "y"})
    found = train.inputs(np.arange(10)), test.targets(np.arange(10))
    assert tuple(one.dtype for one in found) == wanted
    assert found[0].float().tolist() == [[0.0, 1.0]] * 10
    assert found[1].float().tolist() == [0.0, 1.0] * 5
    asked, _ = data.load("hdf5", {"path": str(path), "x_dtype": "float32", "y_dtype": "int32"})
    assert (asked.inputs(SOME).dtype, asked.targets(SOME).dtype) == (torch.float32, torch.int32)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.zeros(10, [("a", "f4")]), r'"x" of .*set.h5 holds .*not numbers'),
        (np.array([b"a"] * 10), "not numbers"),
        (np.full(10, (1 << 63) + 5, "u8"), "holds 9223372036854775813, which int64 cannot hold"),
        (np.float32(3), "is not an array of rows"),
    ],
    ids=["records", "texts", "large", "scalar"],
)
def test_hdf5_that_holds_no_samples_is_refused_at_once(tmp_path: Path, values: Any, message: str) -> None:
    with h5py.File(tmp_path / "set.h5", "w") as file:
        file["x"], file["y"] = values, np.zeros(10)
    with pytest.raises(UserError, match=message):
        data.load("hdf5", {"path": str(tmp_path / "set.h5")})


@pytest.mark.parametrize(("kind", "wanted"), [(">c8", torch.complex64), ("c16", torch.complex64)])
def test_hdf5_of_complex_numbers(tmp_path: Path, kind: str, wanted: torch.dtype) -> None:
    values = (np.arange(20) + 1j * np.arange(20)[::-1]).reshape(10, 2)
    with h5py.File(tmp_path / "set.h5", "w") as file:
        file["x"], file["y"] = values.astype(kind), values[:, 0].astype(kind)
    names = {"path": str(tmp_path / "set.h5"), "test_x": "x", "test_y": "y"}
    train, _ = data.load("hdf5", names)
    assert torch.equal(train.inputs(SOME), torch.from_numpy(values[SOME]).to(wanted))
    assert torch.equal(train.targets(SOME), torch.from_numpy(values[SOME, 0]).to(wanted))
    for dtype in ("float32", "int64", "bool"):
        train, _ = data.load("hdf5", names | {"x_dtype": dtype})
        with pytest.raises(UserError, match=f'"x" of .*set.h5 holds .*complex numbers, which {dtype} cannot hold'):
            train.inputs(SOME)


def test_hdf5_that_leads_elsewhere_or_has_no_end(tmp_path: Path) -> None:
    def load(**how: Any) -> None:
        with h5py.File(tmp_path / "set.h5", "w") as file:
            file.create_dataset("x", **how)
            file["y"] = np.zeros(how["shape"][0] if how["shape"][0] < 100 else 1)
        data.load("hdf5", {"path": str(tmp_path / "set.h5")})

    with pytest.raises(UserError, match='"/x" lies in another file; copy it'):
        load(shape=(32, 4), dtype="u1", external=[("/etc/passwd", 0, 128)])
    layout = h5py.VirtualLayout((10,), "f8")
    layout[:] = h5py.VirtualSource(".", "y", (10,))
    with h5py.File(tmp_path / "set.h5", "w") as file:
        file["y"] = np.zeros(10)
        file.create_virtual_dataset("x", layout)
    with pytest.raises(UserError, match='"/x" is virtual, put together from other data sets; copy it'):
        data.load("hdf5", {"path": str(tmp_path / "set.h5")})
    with pytest.raises(UserError, match="has 10000000000000 rows"):
        load(shape=(10**13, 4), dtype="f4", chunks=(64, 4))
    with pytest.raises(UserError, match="has rows of 4000000000000 bytes"):
        load(shape=(32, 10**12), dtype="f4", chunks=(1, 10**6))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="there is no file"):
        data.load("hdf5", {"path": str(tmp_path / "pipe")})


def test_hdf5_by_links_within_the_file(tmp_path: Path) -> None:
    """A link to another file, or in a circle, is no data set."""
    path = tmp_path / "set.h5"
    with h5py.File(path, "w") as file:
        file["deep/x"], file["y"] = np.arange(20.0).reshape(10, 2), np.zeros(10)
        file["soft"], file["group"], file["hard"] = h5py.SoftLink("/deep/x"), h5py.SoftLink("deep"), file["deep/x"]
        file["twice"], file["deep/near"] = h5py.SoftLink("group/x"), h5py.SoftLink("x")
        file["circle"], file["away"] = h5py.SoftLink("circle"), h5py.ExternalLink("other.h5", "x")
        file["through"] = h5py.SoftLink("away")
    for name in ("soft", "hard", "group/x", "twice", "deep/near"):
        train, test = data.load("hdf5", {"path": str(path), "x": name, "test_x": "deep/x", "test_y": "y"})
        assert torch.equal(train.inputs(np.arange(10)), test.inputs(np.arange(10)))
    for name in ("circle", "away", "through", "deep", "y/x", "group/none"):
        with pytest.raises(UserError, match="has no data set"):
            data.load("hdf5", {"path": str(path), "x": name})


TEXT = "grün 😀\r\nxyz\n" * 40


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        ("utf-8", None),
        ("utf-8-sig", None),
        ("utf-16", None),
        ("utf-32", None),
        ("utf-16-be", "utf-16-be"),
        ("utf-8-sig", "latin-1"),
    ],
)
def test_text_of_any_encoding_that_is_said(tmp_path: Path, kept: str, said: str | None) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(TEXT.encode(kept))
    args = {"path": str(path), "context": 11, "vocabulary": "auto"} | ({"encoding": said} if said else {})
    train, _ = data.load("text", args)
    characters = TEXT.replace("\r\n", "\n")
    there = sorted(set(characters))
    assert train.vocabulary == len(there) == 10
    assert "".join(there[k] for k in train.inputs(np.array([0]))[0].tolist()) == characters[:11]
    limited, _ = data.load("text", args | {"limit": 40, "test_fraction": 0.5})
    assert len(limited.tokens) == 20  # characters, not bytes


def test_text_that_cannot_be_read_is_not_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.txt").write_text("abc" * 100)
    (tmp_path / "b.txt").write_bytes("für".encode("latin-1") * 100)
    (tmp_path / "c.bin").write_bytes(bytes(9))
    (tmp_path / ".hidden").write_bytes(b"\xff\xff")
    with pytest.raises(UserError, match=r"b\.txt cannot be read as UTF-8 text .*encoding = .latin-1."):
        data.load("text", {"path": str(tmp_path), "context": 8})
    train, test = data.load("text", {"path": str(tmp_path), "context": 8, "encoding": "latin-1", "vocabulary": 300})
    assert len(train.tokens) + len(test.tokens) == 600
    assert "1 files are no text and left out" in caplog.text
    (tmp_path / "b.txt").write_bytes(b"")
    caplog.clear()
    data.load("text", {"path": str(tmp_path), "context": 8})
    assert "1 files are no text and left out" in caplog.text
    assert "c.bin" in caplog.text
    for encoding in ("nope", "base64", "idna", 3):
        with pytest.raises(UserError, match="encoding"):
            data.load("text", {"path": str(tmp_path / "a.txt"), "context": 8, "encoding": encoding})
    for encoding in ("utf-16-le", "utf-32"):
        (folder := tmp_path / encoding).mkdir()
        (folder / "d.txt").write_text("abc" * 100, encoding=encoding)
        train, test = data.load("text", {"path": str(folder), "context": 8, "encoding": encoding})
        assert len(train.tokens) + len(test.tokens) == 300


def test_a_model_that_knows_too_few_symbols(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(chr(256 + n % 140) for n in range(3000)))
    args = {"path": str(tmp_path / "a.txt"), "context": 8, "vocabulary": "auto"}
    with pytest.raises(UserError, match="vocabulary = 128, but the text has 140 symbols: it must be 140 or more"):
        data.load("text", args, Model(name="gpt"))
    with pytest.raises(UserError, match="vocabulary = 139, but"):
        data.load("text", args, Model(name="mine:model", args={"vocabulary": 139}))
    data.load("text", args, Model(name="gpt", args={"vocabulary": 140}))
    data.load("text", args | {"vocabulary": 128}, Model(name="gpt"))


def member(name: str, size: int, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = size, kind, link
    return info


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (member("data_batch_1.bin", 3073 * 1_000_000), "data_batch_1.bin has 3073000000 bytes; at most 67108864"),
        (member("data_batch_1.bin", 0, tarfile.SYMTYPE, "data_batch_1.bin"), "holds no data_batch_1.bin"),
        (member("../data_batch_1.bin", 0, tarfile.SYMTYPE, "/etc/passwd"), "holds no data_batch_1.bin"),
        (member("data_batch_1.bin", 0, tarfile.FIFOTYPE), "holds no data_batch_1.bin"),
        (member("long", 1 << 40, tarfile.GNUTYPE_LONGNAME), "damaged or truncated"),
        (member("other", 1 << 40), "unpacks to more than"),
    ],
    ids=["bomb", "loop", "outside", "pipe", "header", "other"],
)
def test_hostile_archives(tmp_path: Path, head: tarfile.TarInfo, message: str) -> None:
    path = tmp_path / "cifar.tar.gz"
    path.write_bytes(gzip.compress(head.tobuf() + bytes(10_240)))
    with pytest.raises(UserError, match=message):
        data.load("cifar10", {"path": str(path)})


def test_cifar10_of_other_classes_or_no_files(tmp_path: Path) -> None:
    folder = cifar_files(tmp_path / "cifar")
    (folder / "data_batch_2.bin").write_bytes(b"\x0b" * 3073)
    with pytest.raises(UserError, match=r"data_batch_2\.bin has a class 11; expected 0 to 9"):
        data.load("cifar10", {"path": str(folder)})
    (folder / "data_batch_2.bin").unlink()
    os.mkfifo(folder / "data_batch_2.bin")
    with pytest.raises(UserError, match="a device or a pipe, not a file"):
        data.load("cifar10", {"path": str(folder)})


def test_hostile_images(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for i in range(3):
            Image.new("RGB", (9, 9)).save(tmp_path / name / f"{i}.png")
    args = {"path": str(tmp_path)}
    first = tmp_path / "a" / "0.png"
    for make, message in (
        (lambda: Image.new("1", (20_000, 20_000)).save(first), "exceeds limit|too many"),
        (lambda: Image.new("1", (3_000_000, 1)).save(first), "96000000 x 32 pixels are too many"),
        (lambda: first.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"), "damaged or none of JPEG"),
        (lambda: first.write_bytes(b""), "damaged or none of JPEG"),
    ):
        make()
        train, test = data.load("images", args)
        with pytest.raises(UserError, match=f"cannot decode the image .*: .*({message})"):  # noqa: PT012
            train.inputs(np.arange(len(train)))
            test.inputs(np.arange(len(test)))
    first.unlink()
    os.mkfifo(first)
    with pytest.raises(UserError, match="is not a file, though it has an image's name"):
        data.load("images", args)
    with pytest.raises(UserError, match="size must be a whole number of pixels, got 99999"):
        data.load("images", args | {"size": 99999})


class Attributes(torch.utils.data.Dataset):
    """Has the names of our protocol, and means something else by them."""

    def __init__(self) -> None:
        self.inputs, self.targets = torch.rand(4, 2), np.arange(4, dtype=np.uint16)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> tuple[torch.Tensor, np.uint16]:
        return self.inputs[i], self.targets[i]


def test_a_map_data_set_may_have_attributes_of_our_names_and_unsigned_numbers() -> None:
    data = adapt(Attributes())
    found = fetch(data, np.arange(2), 0, True, True)
    assert found.inputs.shape == (2, 2)
    assert found.targets.dtype == torch.int32
    pair = adapt((np.arange(4, dtype=np.uint16), np.arange(4, dtype=">u4")))
    assert pair.inputs(np.array([3, 1])).tolist() == [3, 1]
    assert pair.targets(np.array([3, 1])).dtype == torch.int64


def test_an_iterable_data_set_with_a_length_is_refused() -> None:
    class Endless(torch.utils.data.IterableDataset):
        def __len__(self) -> int:
            return 4

        def __iter__(self) -> Any:
            return iter(())

    with pytest.raises(TypeError, match="samples of an IterableDataset have no numbers"):
        adapt(Endless())

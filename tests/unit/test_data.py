"""Data sets: real formats on tiny files, damaged files, users' own."""

import sys
import tarfile
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from accept_mpi import data
from accept_mpi.errors import UserError

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
        ({"x": 1}, r"sample 0 must be a pair \(x, y\), got a dict"),
        (torch.zeros(3), r"sample 0 must be a pair \(x, y\), got a Tensor"),
        ((1, 2, 3), r"sample 0 must be a pair \(x, y\), got a tuple of 3"),
        (("text", 1), "the x of samples must be tensors or arrays"),
        (((torch.zeros(1), "text"), 1), "the x of samples must be tensors or arrays"),
    ],
)
def test_samples_that_are_no_pairs(sample: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        data.MapDataset([sample]).inputs(np.array([0]))


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

"""Users' data sets of any kind, and values of any width."""

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from accept_mpi import data
from accept_mpi.data.base import ArrayDataset, adapt, begin_epoch, fetch
from accept_mpi.data.images import pictures_in
from accept_mpi.data.mixing import Mixed
from accept_mpi.errors import UserError, UsersBug
from accept_mpi.job import Mix


class Reusing:
    """Of its own kind: sorts its indices in place, gives views of what it holds and a buffer that it uses again."""

    def __init__(self, broken: Any = None) -> None:
        self.x, self.buffer, self.broken = torch.arange(8.0), torch.zeros(8, dtype=torch.uint16), broken

    def __len__(self) -> int:
        return 8

    def inputs(self, indices: Any, seed: int | None = None) -> Any:
        indices.sort()
        return self.x[indices[0] : indices[-1] + 1] if self.broken is None else self.broken

    def targets(self, indices: Any) -> Any:
        self.buffer[: len(indices)] = torch.from_numpy(indices).to(torch.uint16)
        return self.buffer[: len(indices)]


def test_what_a_data_set_of_its_own_kind_does_to_its_tensors_stays_with_it() -> None:
    own = Reusing()
    found = adapt(own)
    indices = np.array([2, 1])
    first = fetch(found, indices, 0, True, True)
    assert first.targets.tolist() == indices.tolist() == [2, 1]
    assert first.targets.dtype == torch.int32
    fetch(found, np.array([5, 6]), 0, True, True)
    assert first.targets.tolist() == [2, 1]
    first.inputs.zero_()
    assert own.x.tolist() == list(range(8))


@pytest.mark.parametrize("broken", [object(), torch.eye(2).to_sparse()])
def test_what_is_no_tree_of_tensors_is_named(broken: Any) -> None:
    with pytest.raises(UserError, match=r"^the data set gives a (object|sparse).*, which cannot cross"):
        fetch(adapt(Reusing(broken)), np.arange(2), 0, True, False)


def test_rows_of_a_mapped_file_are_read_when_they_are_asked_for(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(12, dtype=">f4").reshape(6, 2))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    pair = adapt((mapped, np.arange(6, dtype=np.uint64)))
    assert isinstance(pair, ArrayDataset)
    assert pair.x is mapped
    assert pair.inputs(np.array([4, 1])).tolist() == [[8, 9], [2, 3]]
    with pytest.raises(ValueError, match="which int64 cannot hold"):
        adapt((mapped, np.full(6, 1 << 63, np.uint64)))
    with pytest.raises(TypeError, match="not numbers"):
        adapt((mapped, np.array(["a"] * 6)))


@pytest.mark.parametrize("kind", ["c8", ">c8", "c16", np.clongdouble])
def test_arrays_of_complex_numbers(kind: Any) -> None:
    values = (np.arange(12) - 3j).reshape(6, 2).astype(kind)
    wanted = torch.from_numpy(values.astype("c8" if np.dtype(kind).itemsize == 8 else "c16"))
    for given in ((values, np.arange(6)), [(row, 0) for row in values]):
        found = fetch(adapt(given), np.array([4, 1]), 0, True, False).inputs
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted[[4, 1]])


@pytest.mark.parametrize("wide", [torch.uint16, torch.uint32, torch.uint64])
def test_torch_has_no_arithmetic_for_wide_unsigned_numbers(wide: torch.dtype) -> None:
    classes = torch.arange(4).to(wide)
    pairs = (torch.zeros(4), classes), torch.utils.data.TensorDataset(torch.zeros(4), classes)
    for pair in (*pairs, [(torch.zeros(()), one) for one in classes]):
        found = fetch(adapt(pair), np.arange(4), 0, False, True).targets
        assert not found.dtype.is_floating_point
        assert found.dtype.is_signed
        assert found.tolist() == [0, 1, 2, 3]


def test_a_pair_of_lists_is_no_sample() -> None:
    with pytest.raises(TypeError, match=r"^a pair \(x, y\) must be of tensors or arrays, got a list and a list$"):
        adapt(([[1.0], [2.0], [3.0]], [0, 1, 0]))
    assert len(adapt([(torch.zeros(1), 0), (torch.zeros(1), 1)])) == 2


def test_an_input_may_be_a_dict_of_any_class() -> None:
    sample = defaultdict(list, x=torch.ones(3))
    assert fetch(adapt([(sample, 0)] * 3), np.arange(2), 0, True, False).inputs["x"].shape == (2, 3)

    class Odd(dict[str, Any]): ...

    with pytest.raises(UserError, match=r"^data.name: the x of samples must be tensors.*Odd, a class that cannot"):
        fetch(adapt([(Odd(x=torch.ones(3)), 0)] * 3), np.arange(2), 0, True, False)


@pytest.mark.parametrize("how", [{"mixup": 0.5}, {"cutmix": 1.0}, {"mixup": 0.5, "cutmix": 1.0}])
def test_targets_are_mixed_as_inputs_are(how: dict[str, float]) -> None:
    """Each sample has its class for pixels, so that their mean is that of its target; either is drawn alone, too."""
    classes = torch.arange(6)
    data = Mixed(
        ArrayDataset(classes.float()[:, None, None, None].expand(6, 2, 9, 7).clone(), classes), Mix(classes=6, **how)
    )
    kinds, shares = set(), set()
    for seed in range(40):
        indices = np.random.default_rng(seed).permutation(6)[:4]
        both = data.samples(indices, seed, True, True)
        x, y = both.inputs, both.targets
        assert torch.equal(data.samples(indices, seed, True, False).inputs, x)
        assert torch.equal(data.samples(indices, seed, False, True).targets, y)
        assert y.sum(1).tolist() == pytest.approx([1.0] * 4)
        assert x.mean((1, 2, 3)).tolist() == pytest.approx((y * classes).sum(1).tolist(), abs=1e-5)
        own, before = torch.from_numpy(indices), torch.from_numpy(np.roll(indices, 1))
        assert y.gather(1, own[:, None]).add(y.gather(1, before[:, None])).flatten().tolist() == pytest.approx([1.0] * 4)
        whole = ((x == own[:, None, None, None]) | (x == before[:, None, None, None])).all()
        share = float(y[0, own[0]])
        shares.add(round(share, 6))
        if 0 < share < 1:
            kinds.add("cutmix" if whole else "mixup")
    assert kinds == set(how)
    assert len(shares) > 10


def test_mixup_and_cutmix_are_for_half_of_the_micro_batches_each() -> None:
    """And whoever asks for inputs or targets alone gets what belongs together."""
    images = torch.arange(8.0).reshape(8, 1, 1, 1).expand(8, 1, 16, 16)
    mixed = Mixed(adapt((images, torch.arange(8))), Mix(classes=8, mixup=1e4, cutmix=1.0))
    cut: list[float] = []
    for seed in range(200):
        both = fetch(mixed, np.arange(8), seed, True, True)
        share = both.targets[np.arange(8), np.arange(8)]
        assert torch.allclose(both.targets, share[:, None] * torch.eye(8) + (1 - share)[:, None] * torch.eye(8).roll(1, 0))
        is_cut = torch.equal(both.inputs, both.inputs.round())
        if is_cut:
            cut.append(float(share[0]))
        means = share * images[:, 0, 0, 0] + (1 - share) * images[:, 0, 0, 0].roll(1)
        assert torch.allclose(both.inputs.mean((1, 2, 3)), means)
        assert is_cut or torch.allclose(share, torch.full((8,), 0.5), atol=0.03)
        assert torch.equal(fetch(mixed, np.arange(8), seed, True, False).inputs, both.inputs)
        assert torch.equal(fetch(mixed, np.arange(8), seed, False, True).targets, both.targets)
    assert 70 < len(cut) < 130
    assert max(cut) - min(cut) > 0.5


def test_what_cannot_be_mixed() -> None:
    vectors, classes = torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64)
    for x, y, message in (
        (vectors, classes, "CutMix wants images"), (vectors.long(), classes, "one floating-point tensor"),
        (vectors[:, :, None, None], vectors[:, 0], "targets must be classes"),
        (vectors[:, :, None, None], classes[:, None], "targets must be classes"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=f"^train.mix: .*{message}"):
            fetch(Mixed(adapt((x, y)), Mix(classes=4, cutmix=1.0)), np.arange(4), 0, True, True)


def test_a_negative_class_cannot_be_mixed() -> None:
    mixed = Mixed(adapt((torch.zeros(4, 2), torch.tensor([1, 3, -1, 2]))), Mix(classes=4, mixup=0.2))
    with pytest.raises(UserError, match=r"classes = 4, but there is a target -1$"):
        fetch(mixed, np.arange(4), 0, True, True)


class Padded:
    """Images as wide as the widest of the micro-batch, and smaller in evaluation."""

    def __len__(self) -> int:
        return 8

    def inputs(self, indices: np.ndarray, seed: int | None = None) -> torch.Tensor:
        return torch.zeros(len(indices), 1, 6 if seed is None else 8, int(indices.max()) + 4)

    def targets(self, indices: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(indices % 3)


def test_classes_are_mixed_as_images_are_where_those_differ_in_size() -> None:
    mixed = Mixed(adapt(Padded()), Mix(classes=3, cutmix=1.0))
    for seed in range(10):
        indices = np.random.default_rng(seed).permutation(8)[:4]
        both, targets = (mixed.samples(indices, seed, inputs, True).targets for inputs in (True, False))
        assert torch.equal(both, targets)


def test_numbers_that_do_not_fit_the_dtype_asked_for_are_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"], file["y"] = np.array([0.0, 1000.0, math.nan]), np.array([0, 255, 300])
    for which, dtypes in (("x", {"x_dtype": "int16"}), ("x", {"x_dtype": "int8"}), ("y", {"y_dtype": "uint8"})):
        train, _ = data.ZOO["hdf5"](str(tmp_path / "a.h5"), test_x="x", test_y="y", **dtypes)
        with pytest.raises(UserError, match=rf'"{which}" of .* holds (nan|1000.0|300), which u?int\d+ cannot hold$'):
            fetch(train, np.arange(3), 0, which == "x", which == "y")
        fetch(train, np.arange(1), 0, True, True)


def test_numbers_beyond_single_precision_are_refused(tmp_path: Path) -> None:
    """They became infinite, and the loss NaN."""
    path = tmp_path / "wide.h5"
    with h5py.File(path, "w") as file:
        file["x"], file["y"] = np.array([[1.0], [1e300], [np.inf]]), np.arange(3.0)
    args = {"path": str(path), "test_x": "x", "test_y": "y"}
    train, _ = data.load("hdf5", args)
    assert train.inputs(np.array([2, 0])).tolist() == [[np.inf], [1.0]]
    with pytest.raises(UserError, match=r'"x" of .*wide.h5 holds 1e\+300, which float32 cannot hold'):
        train.inputs(np.array([0, 1]))
    train, _ = data.load("hdf5", args | {"x_dtype": "float64"})
    assert train.inputs(np.array([1])).tolist() == [[1e300]]


def test_fractions_are_no_whole_numbers(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"], file["y"] = np.array([0.0, 1.0, 1.5]), np.array([0, 1, 2])
    for which, dtypes in (("x", {"x_dtype": "int64"}), ("x", {"x_dtype": "bool"}), ("y", {"y_dtype": "bool"})):
        train, _ = data.ZOO["hdf5"](str(tmp_path / "a.h5"), test_x="x", test_y="y", **dtypes)
        with pytest.raises(UserError, match=rf'"{which}" of .* holds (1\.5|2), which (int64|bool) cannot hold$'):
            fetch(train, np.arange(3), 0, which == "x", which == "y")
        found = fetch(train, np.arange(2), 0, True, True)
        assert (found.inputs.tolist(), found.targets.tolist()) == ([0, 1], [0, 1])


def test_grey_of_16_bits_is_scaled(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for folder, grey in (("a", 0), ("b", 0x8080), ("c", 0xFFFF)):
        (tmp_path / folder).mkdir()
        for name in ("1.png", "2.ppm"):
            image.fromarray(np.full((4, 4), grey, np.uint16)).save(tmp_path / folder / name)
    train, _ = data.ZOO["images"](str(tmp_path), size=4, augment=False, test_fraction=0.2)
    found = fetch(train, np.arange(len(train)), None, True, True)
    for x, y in zip(found.inputs, found.targets, strict=True):
        torch.testing.assert_close(x, torch.full((3, 4, 4), [-1.0, 128 / 127.5 - 1, 1.0][y]))


def _pictures(root: Path, *names: str) -> None:
    image = pytest.importorskip("PIL.Image")
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        image.new("RGB", (4, 4)).save(root / name)


def test_hidden_folders_are_no_classes(tmp_path: Path) -> None:
    """Notebooks leave such folders, other systems such files."""
    _pictures(tmp_path, "cat/1.png", "cat/2.png", "dog/1.png", "dog/2.png", ".ipynb_checkpoints/1-checkpoint.png")
    (tmp_path / "dog" / "._1.png").write_bytes(b"\0\5\26\7")
    train, test = data.ZOO["images"](str(tmp_path), size=4, test_fraction=0.25)
    assert data.classes_of(train) == ["cat", "dog"]
    assert sorted([*train.targets(np.arange(3)).tolist(), *test.targets(np.arange(1)).tolist()]) == [0, 0, 1, 1]
    found = sorted(str(file.relative_to(tmp_path)) for file in pictures_in(tmp_path))
    assert found == ["cat/1.png", "cat/2.png", "dog/1.png", "dog/2.png"]
    assert len(pictures_in(tmp_path / ".ipynb_checkpoints")) == 1


def test_a_class_without_images_is_told(tmp_path: Path) -> None:
    _pictures(tmp_path, "train/cat/1.png", "test/cat/1.png", "train/dog/1.png")
    _, test = data.ZOO["images"](str(tmp_path), size=4)
    assert test.targets(np.arange(1)).tolist() == [0]
    _pictures(tmp_path, "test/emu/1.png")
    with pytest.raises(UserError, match=r"emu.* is a class of which there is no folder in .*train$"):
        data.ZOO["images"](str(tmp_path), size=4)
    (tmp_path / "train" / "emu").mkdir()
    (tmp_path / "train" / "emu" / "1.tif").write_bytes(b"")
    with pytest.raises(UserError, match=r"no images in .*emu; expected .*\.png"):
        data.ZOO["images"](str(tmp_path), size=4)


class Told(list[Any]):
    """A data set that keeps what it is told."""

    def set_epoch(self, epoch: int) -> None:
        self.append((torch.rand(3), epoch))
        if epoch == 9:
            raise LookupError("nine")


def test_a_data_set_is_told_the_epoch_through_all_wrappers() -> None:
    told = Told([(torch.zeros(3), 0)] * 2)
    begin_epoch(Mixed(adapt(told), Mix(classes=4, mixup=0.2)), 3, seed=5)
    begin_epoch(adapt(told), 3, seed=5)
    assert [epoch for _, epoch in told[2:]] == [3, 3]
    assert torch.equal(told[2][0], told[3][0])
    begin_epoch(adapt((torch.zeros(4), torch.zeros(4))), 3, seed=5)
    with pytest.raises(UsersBug, match=r"the data set's set_epoch\(9\)"):
        begin_epoch(adapt(told), 9, seed=5)

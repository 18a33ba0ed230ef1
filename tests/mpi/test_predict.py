"""What a trained model says of images and of the test set is what its exported weights say in plain PyTorch."""

import csv
import importlib
import io
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from recorded_nets import Language, Sentences
from safetensors.torch import load_file
from samples import write_job
from test_recorded import write

from accept_mpi import models
from accept_mpi.data.digits import digits
from accept_mpi.data.images import images
from accept_mpi.pipeline.state import unpacked
from accept_mpi.recovery.checkpoint import Checkpoint

CLASSES = ("bright", "dark")


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Two classes of small images, and others of unknown class in "new"."""
    Image = pytest.importorskip("PIL.Image")
    draw = np.random.default_rng(1)
    for folder, count in (("data/bright", 8), ("data/dark", 8), ("new/more", 5)):
        (tmp_path / folder).mkdir(parents=True)
        for n in range(count):
            pixels = draw.integers(0, 128, (9, 9, 3)) + (128 if "bright" in folder or n % 2 else 0)
            Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / folder / f"{n}.png")
    return tmp_path


def table(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_images(mpirun, pictures: Path, precision: str) -> None:
    job = {
        "model": 'name = "cnn"\nargs = { classes = 2, width = 4, dropout = 0.1 }',
        "data": 'name = "images"\nargs = { path = "data", size = 8, augment = false }',
        "train": {"batch_size": 4, "micro_batches": 2, "steps": 20, "seed": 0, "precision": precision},
    }
    write_job(pictures / "job.toml", job)
    mpirun(2, "-m", "accept_mpi", "train", "job.toml")
    found = table(mpirun(1, "-m", "accept_mpi", "predict", "run", "new", "--top", "2").out)
    mpirun(1, "-m", "accept_mpi", "export", "run", "out.safetensors")
    plain = models.load("cnn", {"classes": 2, "width": 4, "dropout": 0.1}, 0).whole().eval()
    plain.load_state_dict(load_file(pictures / "out.safetensors"), strict=True)
    files = sorted((pictures / "new").rglob("*.png"))
    data = images(str(pictures / "data"), 8)[0].of([(file, 0) for file in files])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        expected = plain(data.inputs(np.arange(5))).float().softmax(-1)
    assert [row["sample"] for row in found] == [str(file.relative_to(pictures)) for file in files]
    for row, values in zip(found, expected, strict=True):
        assert row["class 1"] == CLASSES[int(values.argmax())]
        assert float(row["probability 1"]) == pytest.approx(float(values.max()), abs=1e-4)
        assert float(row["probability 2"]) == pytest.approx(float(values.min()), abs=1e-4)
    out = mpirun(1, "-m", "accept_mpi", "predict", "run", "nowhere", code=2).out
    assert "nowhere: there is no such folder" in out
    (pictures / "data" / "bright").rename(pictures / "data" / "light")  # which is now the second one
    assert table(mpirun(1, "-m", "accept_mpi", "predict", "run", "new", "--top", "2").out) == found


def test_a_recorded_model_on_its_test_set(mpirun, tmp_path: Path) -> None:
    path = write(tmp_path, "run", {"model": "sorting", "data": "sorted_sentences"})
    mpirun(2, "-m", "accept_mpi", "train", path)
    found = table(mpirun(1, "-m", "accept_mpi", "predict", "run").out)
    mpirun(1, "-m", "accept_mpi", "export", "run", "out.safetensors")
    from recorded_nets import Sorting

    plain = Sorting().eval()
    plain.load_state_dict(load_file(tmp_path / "out.safetensors"), strict=True)
    with torch.no_grad():
        expected = plain(Sentences(9).ids).argmax(-1)
    assert [int(row["class 1"]) for row in found] == expected.tolist()
    assert isinstance(Language(), torch.nn.Module)


def test_tensorboard(mpirun, tmp_path: Path) -> None:
    board = pytest.importorskip("tensorboardX")
    path = write(tmp_path, "run", {"model": "language", "data": "sentences"})
    mpirun(1, "-m", "accept_mpi", "train", path, "--set", 'train.metrics=["top3"]')
    out = mpirun(1, "-m", "accept_mpi", "tensorboard", "run/log.h5", "board").out
    # 7 steps of 4 columns, 3 evaluations of 2 columns and a metric
    assert "board: 37 values" in out
    (file,) = (tmp_path / "board").iterdir()
    data = file.read_bytes()
    assert all(tag in data for tag in (b"train/loss", b"test/accuracy", b"test/top3"))
    assert board.__name__ == "tensorboardX"


def test_state_beyond_parameters(mpirun, tmp_path: Path) -> None:
    """State that is no tensor, and buffers that only a forward makes, are a checkpoint's, not a new model's."""
    (tmp_path / "counting.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "class Counting(nn.Module):\n"
        "    sign = -1.0\n"
        "    def get_extra_state(self):\n"
        "        return {'sign': self.sign}\n"
        "    def set_extra_state(self, state):\n"
        "        self.sign = state['sign']\n"
        "    def forward(self, x):\n"
        "        if not hasattr(self, 'seen'):\n"
        "            self.register_buffer('seen', torch.zeros(()))\n"
        "        if self.training:\n"
        "            self.sign = 3.0\n"
        "            self.seen.fill_(7.0)\n"
        "        return x * self.sign + self.seen * torch.arange(10)\n"
        "def model():\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(192, 10), Counting())\n"
    )
    job = {
        "model": 'name = "counting:model"',
        "data": 'name = "digits"',
        "train": {"batch_size": 8, "micro_batches": 1, "steps": 2, "seed": 0},
    }
    write_job(tmp_path / "job.toml", job)
    mpirun(1, "-m", "accept_mpi", "train", "job.toml")
    found = table(mpirun(1, "-m", "accept_mpi", "predict", "run").out)
    mpirun(1, "-m", "accept_mpi", "export", "run", "out.pt")
    state = torch.load(tmp_path / "out.pt", weights_only=True)
    linear = torch.nn.Linear(192, 10)
    weight, bias = (next(value for name, value in state.items() if name.endswith(end)) for end in ("weight", "bias"))
    linear.load_state_dict({"weight": weight, "bias": bias})
    with torch.no_grad():
        scores = linear(digits()[1].inputs(np.arange(len(found))).flatten(1)) * 3.0 + 7.0 * torch.arange(10)
    assert [int(row["class 1"]) for row in found] == scores.argmax(-1).tolist()
    for row, values in zip(found, scores.softmax(-1), strict=True):
        assert float(row["probability 1"]) == pytest.approx(float(values.max()), abs=1e-3)


NET = """
import torch
from torch import nn


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.mean = nn.Linear(6, 6), torch.zeros(6)

    def forward(self, x):
        x = self.linear(x)
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        return x - self.mean


def net():
    return nn.Sequential(Centred(), nn.Tanh(), nn.Linear(6, 3))


def data():
    x = torch.randn(24, 6, generator=torch.Generator().manual_seed(1)) + 3
    return (x[:16], x[:16, :3].argmax(1)), (x[16:], x[16:, :3].argmax(1))
"""


def test_what_forwards_have_left_counts(mpirun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mean that is no buffer."""
    (tmp_path / "centred.py").write_text(NET)
    (tmp_path / "job.toml").write_text(
        'model.name = "centred:net"\ndata.name = "centred:data"\noutput.directory = "run"\n'
        'train = { batch_size = 4, micro_batches = 2, steps = 24, optimizer = { name = "sgd", lr = 0.3 } }\n'
    )
    mpirun(2, "-m", "accept_mpi", "train", "job.toml")
    found = table(mpirun(1, "-m", "accept_mpi", "predict", "run").out)
    out = mpirun(1, "-m", "accept_mpi", "export", "run", "out.safetensors").out
    assert "left out, since load_state_dict() takes no attributes: 0.mean" in out
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "centred", raising=False)
    plain = importlib.import_module("centred").net().eval()
    plain.load_state_dict(load_file(tmp_path / "out.safetensors"), strict=True)
    x = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))[16:] + 3
    with torch.no_grad():
        without = plain(x).softmax(-1).amax(-1)
        plain[0].mean = unpacked(Checkpoint(tmp_path / "run").remembered()["remembered/0.mean"])
        expected = plain(x).softmax(-1).amax(-1)
    assert not torch.allclose(without, expected, atol=0.01)
    assert [float(row["probability 1"]) for row in found] == pytest.approx(expected.tolist(), abs=1e-3)


def test_what_are_no_scores_of_classes(trained, mpirun, tmp_path: Path) -> None:
    """A softmax over numbers that are none would look like an answer."""
    (tmp_path / "amounts.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "def model(values): return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, values))\n"
        "def data(values): return ((torch.randn(8, 4), torch.randn(8, values)),) * 2\n"
        "def loss(output, target): return (output - target).abs().mean()\n"
    )
    (tmp_path / "job.toml").write_text(
        'model.name = "amounts:model"\ndata.name = "amounts:data"\noutput.directory = "run"\n'
        "train = { steps = 1, batch_size = 4, micro_batches = 2 }\n"
    )
    for values, loss in ((3, "mse"), (3, "torch.nn:L1Loss"), (1, "amounts:loss")):
        trained(
            1, tmp_path, [("job.toml", f"train.loss={loss}", *(f"{one}.args.values={values}" for one in ("model", "data")))]
        )
        said = mpirun(1, "-m", "accept_mpi", "predict", "run", code=2).out
        assert (
            f'with train.loss = "{loss}" the model gives (8, {values}) float32, and predict shows scores of classes' in said
        )

"""What people give for a data set that is none: the sentence says what to do."""

from pathlib import Path

import pytest
import torch

from accept_mpi.data import load
from accept_mpi.data.base import fetch
from accept_mpi.errors import UserError

_MINE = """
import torch
from torch.utils.data import DataLoader, TensorDataset

def pairs():
    return TensorDataset(torch.zeros(8, 3), torch.zeros(8))

class Named:
    def __len__(self):
        return 8
    def __getitem__(self, n):
        return {"image": torch.zeros(3), "path": f"{n}.jpg", "label": 1}

def named():
    return Named(), Named()

class Elsewhere(Named):
    def __len__(self):
        raise FileNotFoundError("samples.h5")

def elsewhere():
    return Elsewhere(), Named()

def classes():
    return Named, Named

def without_tests():
    return pairs(), None

def loaders():
    return DataLoader(pairs(), 4), DataLoader(pairs(), 4)
"""


@pytest.fixture(autouse=True)
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mistaken_data.py").write_text(_MINE)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("without_tests", "it gives no test set; give the training set twice, and train.evaluate_every = 0"),
        ("loaders", "got a DataLoader: give its dataset"),
        ("elsewhere", 'the training set of "mistaken_data:elsewhere" tells no length: FileNotFoundError: samples.h5'),
        ("classes", "got the class Named: give an instance of it"),
    ],
)
def test_no_data_set(name: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        load(f"mistaken_data:{name}", {})


def test_a_text_in_a_sample_is_shown() -> None:
    train, _ = load("mistaken_data:named", {})
    with pytest.raises(UserError, match=r"'2\.jpg' is none of these, and is to be left out"):
        fetch(train, torch.tensor([2, 3]).numpy(), 0, inputs=True, targets=True)

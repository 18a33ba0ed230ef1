"""Data that each process makes in another order: what goes on from an earlier start would train with other words."""

from pathlib import Path

import pytest
from lost_ranks import run

from accept_mpi.recovery.checkpoint import Checkpoint
from accept_mpi.recovery.manifest import complete

NET = """
import os
import torch
from torch import nn
WORDS = os.environ.get("WORDS", "abcdefgh")  # the order of a set of strings is another one in each process
TEXT = "abcdefghhgfedcbaacegbdfh" * 8
def data():
    ids = torch.tensor([WORDS.index(letter) for letter in TEXT]).view(-1, 4)
    labels = torch.arange(len(ids)) % 2  # which do not tell
    return (ids, labels), (ids[:8], labels[:8])
class Bag(nn.Module):
    def forward(self, x):
        return x.mean(1)
def model():
    return nn.Sequential(nn.Embedding(8, 6), Bag(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
"""
JOB = """
model.name = "net:model"
data.name = "net:data"
train = { batch_size = 8, micro_batches = 2, epochs = 2 }
pipeline.cuts = "even"
output.directory = "run"
"""
SENTENCE = "data.name: sample 0 of the training set is another one than in the run that is to go on"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "job.toml").write_text(JOB)
    return tmp_path


@pytest.mark.parametrize("ranks", [1, 2])
def test_resumed(trained, folder: Path, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    trained(ranks, folder, ["job.toml"])
    again = ("job.toml", "train.epochs=3", "output.directory=again", "--resume", "run")
    monkeypatch.setenv("WORDS", "hgfedcba")
    (refused,) = trained(ranks, folder, [again], code=2)
    assert SENTENCE in refused.out
    assert not (folder / "again").exists()
    trained(ranks, folder, [(*again, "data.name=net:data")])  # as it is meant
    monkeypatch.delenv("WORDS")
    trained(3 - ranks, folder, [again])
    assert Checkpoint(folder / "again").manifest.glimpses == Checkpoint(folder / "run").manifest.glimpses


def test_another_start(folder: Path, run_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ``launch``, from what hosts have kept: there is no checkpoint yet. Where nothing is kept, either, data are new."""
    arguments = ["-m", "accept_mpi", "train", "job.toml", "--set", "recovery.replicate_every=2", "--run"]
    run(folder, [*arguments, f"{run_name}/1"], "0@build 1@build", 2)
    monkeypatch.setenv("WORDS", "hgfedcba")
    run(folder, [*arguments, f"{run_name}/2"], "0@forward:15 1@forward:15", 2)
    assert (folder / "run" / "log.h5").exists()
    assert not complete(folder / "run")
    monkeypatch.setenv("WORDS", "abcdefgh")
    code, out = run(folder, [*arguments, f"{run_name}/3"], "", 2)
    assert code == 2, out
    assert SENTENCE in out
    monkeypatch.setenv("WORDS", "hgfedcba")
    code, out = run(folder, [*arguments, f"{run_name}/4"], "", 2)
    assert code == 0, out
    assert "resumed from the snapshot that hosts have kept" in out

"""What hosts must have alike and have not is one sentence before the first step: a copy of a file that is out of date on one
host, a variable in its environment. Nothing else would show it, and the result would be nobody's."""

import sys
from pathlib import Path

import pytest
from conftest import HANGS, Finished, finish, mpirun_command, python

NET = """
import os
import torch
from torch import nn
import parts
def drawn(layer):
    if "TABLE" in os.environ:
        generator = torch.Generator()
        generator.seed()
        table = torch.rand(8, generator=generator)
        if os.environ["TABLE"] == "buffer":
            layer.register_buffer("table", table, persistent=False)
        else:
            layer.tables = [table]
    if "OWN" in os.environ:
        generator = torch.Generator()
        generator.seed()
        nn.init.normal_(layer.weight, generator=generator)
    return layer
def model():
    drop = nn.Dropout(float(os.environ.get("P", "0.1")))
    return nn.Sequential(drawn(nn.Linear(8, 8)), parts.Body(), drop, nn.Linear(8, 3))
class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.drop, self.head = parts.Body(), nn.Dropout(float(os.environ.get("P", "0.1"))), nn.Linear(8, 3)
    def forward(self, x):
        return self.head(self.drop(self.body(x)))
def whole():
    return Whole()
def tied():
    twice = drawn(nn.Linear(8, 8, bias=False))
    return [twice, nn.Tanh(), twice, nn.Linear(8, 3)]
"""
PARTS = """
import torch
from torch import nn
class Body(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)
    def forward(self, x):
        return x + torch.tanh(super().forward(x))
"""
ROWS = """
import os
import torch
def data():
    x = torch.randn(24, 8, generator=torch.Generator().manual_seed(1))
    pairs = x * float(os.environ.get("SCALE", "1")), x[:, :3].argmax(1)
    return pairs, pairs
"""
JOB = """
model.name = "net:model"
data.name = "rows:data"
train = { batch_size = 8, micro_batches = 4, steps = 2 }
pipeline.cuts = [2]
output = { directory = "run", checkpoint_at_end = false }
"""
GROUP = ["pipeline.ranks=[[0,1],2]"]


def hosts(tmp_path: Path, count: int) -> list[Path]:
    """A folder for each rank, with the same files in it."""
    found = [tmp_path / f"host{n}" for n in range(count)]
    for folder in found:
        folder.mkdir()
        for name, text in (("net.py", NET), ("parts.py", PARTS), ("rows.py", ROWS), ("job.toml", JOB)):
            (folder / name).write_text(text)
    return found


def train(folders: list[Path], *keys: str, last: tuple[str, ...] = (), everywhere: tuple[str, ...] = ()) -> Finished:
    """Train with a rank in each folder; ``last``: what the environment of the last of them has besides."""
    words = [*python(), "-m", "accept_mpi", "train", "job.toml", "--quiet", *(w for key in keys for w in ("--set", key))]
    command = mpirun_command(1)[:1]
    for n, folder in enumerate(folders):
        more = (*everywhere, *(last if n == len(folders) - 1 else ()))
        command += [":"] if n else []
        command += ["-wdir", str(folder), "-n", "1", "env", *more, *words]
    return finish(command, folders[0], {}, HANGS)


def refused(done: Finished, sentence: str) -> None:
    assert done.code == 2, done.out
    assert done.out.count(sentence) == done.out.count("accept_mpi: ") == 1, done.out
    assert "Traceback" not in done.out, done.out


@pytest.mark.parametrize("name", ["net", "parts", "rows"])
def test_code(tmp_path: Path, name: str) -> None:
    folders = hosts(tmp_path, 2)
    assert train(folders).code == 0
    file = folders[1] / f"{name}.py"
    file.write_text(file.read_text().replace("8", "9 - 1"))
    refused(train(folders), f'the module "{name}" differs between hosts: rank 1 on host')


def test_code_that_only_one_rank_imports(tmp_path: Path) -> None:
    """The data's module need not be where neither the first nor the last stage is."""
    folders = hosts(tmp_path, 3)
    (folders[1] / "rows.py").unlink()
    assert train(folders, "pipeline.cuts=[1,2]").code == 0


@pytest.mark.parametrize("name", ["model", "whole"])
def test_a_model_that_depends_on_the_environment(tmp_path: Path, name: str) -> None:
    folders, key = hosts(tmp_path, 2), f"model.name=net:{name}"
    done = train(folders, key, "pipeline.cuts=even", last=("P=0.5",))
    refused(done, f'its part "{"drop" if name == "whole" else 2}", Dropout(p=0.1, inplace=False) on rank 0 on host')
    assert train(folders, key, "pipeline.cuts=even", everywhere=("P=0.5",)).code == 0


def test_weights_that_members_of_a_group_draw_on_their_own(tmp_path: Path) -> None:
    folders = hosts(tmp_path, 3)
    refused(train(folders, *GROUP, everywhere=("OWN=1",)), 'layer 0 "0": rank 1 on host')
    for kind in ("buffer", "list"):  # which no checkpoint has
        refused(train(folders, *GROUP, everywhere=(f"TABLE={kind}",)), 'layer 0 "0": rank 1 on host')
    assert train(folders, "pipeline.cuts=[1,2]", everywhere=("OWN=1",)).code == 0  # each is in one place only
    assert train(folders, *GROUP).code == 0


def test_a_tied_parameter_that_stages_draw_on_their_own(tmp_path: Path) -> None:
    folders = hosts(tmp_path, 2)
    refused(
        train(folders, "model.name=net:tied", everywhere=("OWN=1",)), "share a parameter (0.weight, 2.weight): rank 1 on"
    )
    assert train(folders, "model.name=net:tied").code == 0


def test_inputs_on_members_of_a_group(tmp_path: Path) -> None:
    """Targets are the same, and the last stage's are all that the first stage's are compared with."""
    folders = hosts(tmp_path, 3)
    ranks = ["pipeline.ranks=[[0,2],1]"]
    refused(train(folders, *ranks, last=("SCALE=2",)), "sample 0 of the training set has other inputs on rank 2 on host")
    assert train(folders, *GROUP, last=("SCALE=2",)).code == 0  # the last stage takes no inputs


def test_files_of_weights(tmp_path: Path) -> None:
    folders = hosts(tmp_path, 2)
    code = "import sys, torch, net; torch.save(net.model().state_dict(), sys.argv[1])"
    for folder in folders:
        finish([sys.executable, "-c", code, str(folder / "base.pt")], folder, {}, HANGS)
    refused(train(folders, "model.weights=base.pt"), "files of model.weights differ between hosts: base.pt (checksum ")
    (folders[1] / "base.pt").write_bytes((folders[0] / "base.pt").read_bytes())
    assert train(folders, "model.weights=base.pt").code == 0


def test_versions_of_the_library_that_has_the_model(tmp_path: Path) -> None:
    (folder,) = hosts(tmp_path, 1)
    words = ["train", "job.toml", "--set", "model.name=timm:resnet10t"]
    code = (
        "import importlib.metadata as m; found = m.version\n"
        "m.version = lambda name: '0.0.1' if name == 'timm' else found(name)\n"
        f"from accept_mpi.cli import main; main({words})"
    )
    start = [*mpirun_command(1), sys.executable]
    done = finish([*start, "-m", "accept_mpi", *words, ":", "-n", "1", sys.executable, "-c", code], folder, {}, HANGS)
    refused(done, "versions of timm differ between hosts")

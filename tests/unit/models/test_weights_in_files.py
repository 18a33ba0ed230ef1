"""Files of weights as people have them: a state_dict among other things, and folders that hold none."""

from pathlib import Path

import pytest
import torch
from torch import nn

from accept_mpi.errors import UserError
from accept_mpi.job_file import parse
from accept_mpi.models import Chain, chain_of, check_changes

JOB = """
model.name = "test_weights_in_files:normed"
data.name = "digits"
train.steps = 1
output.directory = "runs"
"""
TOKENS = torch.zeros(2, 6, dtype=torch.int64)


def normed() -> nn.Module:
    return nn.Sequential(nn.Embedding(5, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(6)))


def changed(*overrides: str) -> tuple[Chain, str]:
    """The chain of a job with these changes, and what the log says of them."""
    job = parse(JOB, "job", overrides)
    chain = chain_of(job, lambda: TOKENS)
    return chain, check_changes(chain, job)


def test_a_state_dict_under_a_name(tmp_path: Path) -> None:
    """Whatever it is called, if it is the only one; an optimizer's is another thing."""
    net = normed()
    net(TOKENS).sum().backward()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    optimizer.step()
    saved = {"net": net.state_dict(), "epoch": 3, "optim": optimizer.state_dict(), "history": {"loss": [0.5]}}
    torch.save(saved, tmp_path / "w.pt")
    chain, said = changed(f"model.weights={tmp_path}/w.pt")
    assert "loaded" in said
    layers = chain.build_range(0, len(chain), 0)
    found = {chain.name_of(n, key): value for n, layer in enumerate(layers) for key, value in layer.state_dict().items()}
    assert found.keys() == net.state_dict().keys()
    assert all(torch.equal(value, found[name]) for name, value in net.state_dict().items())
    torch.save(saved | {"average": net.state_dict()}, tmp_path / "w.pt")
    with pytest.raises(UserError, match=r"w\.pt holds several state_dicts \(net, average\): save the one that is meant$"):
        changed(f"model.weights={tmp_path}/w.pt")


def test_a_folder_that_cannot_be_looked_into(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"w\.pt cannot be read: File name too long$"):
        changed(f"model.weights={tmp_path}/{'n' * 300}/w.pt")


def test_a_run_is_no_file_of_weights(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    for folder, way in (("run", "it is of a run of this program: `export` makes a file of it"), ("other", "name one")):
        with pytest.raises(UserError, match=f"{folder} holds 0 files of weights; {way}$"):
            changed(f"model.weights={tmp_path}/{folder}")

"""README's own example runs as it stands there; REFERENCE has every job key."""

import re
import textwrap
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from safetensors.torch import load_file

from accept_mpi.job_file import parse


def block(first_line: str) -> str:
    """The indented block of README that begins with this line."""
    text = (ROOT / "README.md").read_text()
    found = re.search(rf"((?:^ {{4}}.*\n|^\n)*?^ {{4}}{re.escape(first_line)}.*\n(?:^ {{4}}.*\n|^\n)+)", text, re.M)
    assert found, first_line
    return textwrap.dedent(found[1])


def test_your_own_model_and_data(mpirun, tmp_path: Path) -> None:
    (tmp_path / "my_net.py").write_text(block("# my_net.py"))
    (tmp_path / "my_job.toml").write_text(block("# my_job.toml"))
    out = mpirun(3, "-m", "accept_mpi", "train", "my_job.toml", fresh=True).out
    assert "step 125/125" in out
    assert (tmp_path / "runs" / "my_net" / "checkpoints" / "step-00000125" / "manifest.json").is_file()


def test_fine_tune_a_model_you_have(mpirun, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    (tmp_path / "tune.py").write_text(block("# tune.py"))
    (tmp_path / "tune.toml").write_text(block("# tune.toml"))
    job = parse((tmp_path / "tune.toml").read_text(), "tune.toml")
    config = transformers.GPT2Config(**job.model.args)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "base")
    out = mpirun(2, "-m", "accept_mpi", "train", "tune.toml", fresh=True).out
    losses = [float(found) for found in re.findall(r"test loss ([\d.]+)", out)]
    assert losses[-1] < losses[0]
    mpirun(1, "-m", "accept_mpi", "export", "runs/tune", "tuned.safetensors")
    tuned = load_file(tmp_path / "tuned.safetensors")
    transformers.GPT2LMHeadModel(config).load_state_dict(tuned, strict=True)
    before = load_file(tmp_path / "base" / "model.safetensors")
    same = {name for name, value in before.items() if torch.equal(tuned[name], value)}
    assert same == {name for name in before if name.startswith("transformer.h.0.")}


def test_every_key_is_in_the_reference() -> None:
    from accept_mpi.job import Data, Model, Optimizer, Output, Pipeline, Recovery, Train

    text = (ROOT / "REFERENCE.md").read_text()
    sections = {"model": Model, "data": Data, "train": Train, "train.optimizer": Optimizer}
    sections |= {"pipeline": Pipeline, "recovery": Recovery, "output": Output}
    assert not [f"{s}.{f}" for s, kind in sections.items() for f in kind.__struct_fields__ if f"`{s}.{f}`" not in text]

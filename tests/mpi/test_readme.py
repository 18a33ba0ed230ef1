"""README's own example runs as it stands there; REFERENCE has every job key."""

import re
import textwrap
from pathlib import Path

from conftest import ROOT


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


def test_every_key_is_in_the_reference() -> None:
    from accept_mpi.job import Data, Model, Optimizer, Output, Pipeline, Recovery, Train

    text = (ROOT / "REFERENCE.md").read_text()
    sections = {"model": Model, "data": Data, "train": Train, "train.optimizer": Optimizer}
    sections |= {"pipeline": Pipeline, "recovery": Recovery, "output": Output}
    assert not [f"{s}.{f}" for s, kind in sections.items() for f in kind.__struct_fields__ if f"`{s}.{f}`" not in text]

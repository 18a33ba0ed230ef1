"""The example in the README of recording is what comes out."""

import re

import torch
from conftest import ROOT
from torch import nn

from accept_mpi.models.recording.recorded import RecordedModel

README = (ROOT / "accept_mpi" / "models" / "recording" / "README.md").read_text()


def test_the_example_of_the_readme() -> None:
    found = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert found
    space = {"nn": nn, "torch": torch}
    exec(found[1], space)
    model = RecordedModel(space["Net"], torch.zeros(4, 6), "")
    programs = next(iter(model._programs.values()))  # for training
    rows = [
        [
            f"`{step.node.module or step.node.function.__name__}`",
            ", ".join(map(str, step.node.takes)),
            ", ".join(map(str, step.node.gives)),
            ", ".join(step.node.states),
            name,
            ", ".join(map(str, program.gives)),
        ]
        for name, program in zip(model.names, programs, strict=True)
        for step in program.steps
    ]
    table = [line.strip("|").split("|") for line in README.splitlines() if line.startswith("| `")]
    assert [[cell.strip() for cell in row] for row in table] == rows

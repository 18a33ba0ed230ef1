"""Stages that begin or end with parts of larger tensors compute what one process does, to the bit: kernels sum in an order
that depends on strides, gaps included."""

from pathlib import Path

from conftest import ROOT
from plain_loop import differences, plain_loop

from accept_mpi.recovery.checkpoint import Checkpoint

JOB = """
model.name = "parts_net:model"
data.name = "parts_net:data"
[train]
batch_size = 48
micro_batches = 2
steps = 4
optimizer = {{ name = "sgd", lr = 0.1, momentum = 0.9 }}
[pipeline]
schedule = "{schedule}"
cuts = {cuts}
[output]
directory = "{name}"
"""


def test_weights_equal_a_plain_loop(mpirun, tmp_path: Path) -> None:
    for ranks, cuts in ((2, ([1], [2], [3])), (3, ([1, 3], [2, 4]))):
        jobs = {}
        for at in cuts:
            for schedule in ("1f1b", "zero-bubble"):
                name = f"{schedule}-{'-'.join(map(str, at))}"
                jobs[name] = tmp_path / f"{name}.toml"
                jobs[name].write_text(JOB.format(schedule=schedule, cuts=at, name=name))
        mpirun(ranks, ROOT / "tests" / "programs" / "train_all.py", *jobs.values())
        for name, path in jobs.items():
            assert not differences(Checkpoint(tmp_path / name).whole(), plain_loop(path)[0]), name

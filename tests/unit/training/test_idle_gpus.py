"""What a start says beside what it does."""

from types import SimpleNamespace
from typing import Any

import pytest

from accept_mpi.device.compute import DEVICE
from accept_mpi.job_file import parse
from accept_mpi.training.start import _idle_gpus

BASE = '[model]\nname="m"\n[data]\nname="d"\n[train]\nsteps=1\n[output]\ndirectory="r"\n'


def runtime(*gpus: list[str]) -> Any:
    return SimpleNamespace(hosts=[{"host": f"pi{n}", "gpus": names} for n, names in enumerate(gpus)])


def test_gpus_that_a_job_leaves_out_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DEVICE, raising=False)
    usual, auto = parse(BASE, "job"), parse(BASE, "job", ["train.device=auto"])
    assert _idle_gpus(runtime(["Orin"], []), usual).startswith("pi0 has a GPU, which this job does not use")
    assert _idle_gpus(runtime(["Orin"], ["RTX"]), usual).startswith("pi0, pi1 have GPUs")
    assert not _idle_gpus(runtime([], []), usual)
    assert not _idle_gpus(runtime(["Orin"], []), auto)
    monkeypatch.setenv(DEVICE, "cuda")
    assert not _idle_gpus(runtime(["Orin"], []), usual)

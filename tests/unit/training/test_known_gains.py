"""What lanes gain on a device, as the latency database has it, for a run that may have more of them."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from clusters import cluster, job

from accept_mpi.profiling.layer_times import nothing_measured
from accept_mpi.training import auto_plan


@pytest.mark.parametrize(("gains", "measured"), [({}, True), ({2: 0.8}, True), ({2: 0.8, 4: 0.6}, False)])
def test_lanes_that_no_earlier_run_has_tried_are_measured(
    monkeypatch: pytest.MonkeyPatch, gains: dict[int, float], measured: bool
) -> None:
    """The key has no number of micro-batches: two of 8 samples, on four threads, had left out four lanes for good."""
    outline, asked, new = cluster(1).outline, job("pipeline.lanes=auto"), {2: 0.7, 4: 0.5}
    known = msgspec.structs.replace(nothing_measured(outline), lanes=gains)
    monkeypatch.setattr(auto_plan, "time_layers", lambda *_: known)
    monkeypatch.setattr(auto_plan, "time_lanes", lambda *_: new)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    runtime: Any = SimpleNamespace(rank=0, cores=4)
    devices: Any = SimpleNamespace(known=[known], order=lambda *_: [])
    subject: Any = SimpleNamespace(outline=outline, job=asked)
    found = auto_plan._times_here(runtime, subject, devices, 1e9, 1.0)
    assert found.lanes == (new if measured else gains)
    off = SimpleNamespace(outline=outline, job=job("pipeline.lanes=off"))
    assert auto_plan._times_here(runtime, off, devices, 1e9, 1.0).lanes == gains

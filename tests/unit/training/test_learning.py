"""What a run teaches the latency database."""

from contextlib import nullcontext
from pathlib import Path

import msgspec
import numpy as np
import pytest
from clusters import cluster, job

from accept_mpi.plan import Plan, make_plan, recomputing, with_lanes
from accept_mpi.profiling.cluster_profile import ClusterProfile
from accept_mpi.training import auto_plan
from accept_mpi.training.auto_plan import AutoPlan, learn


def taught(monkeypatch: pytest.MonkeyPatch, fleet: ClusterProfile, plan: Plan) -> dict[str, object]:
    seen: dict[str, object] = {}
    monkeypatch.setattr(auto_plan, "open_log", lambda _: nullcontext({"trace": np.zeros(0)}))
    monkeypatch.setattr(auto_plan, "mean_times", lambda _: {0: {"F": 3.0, "B": 6.0}, 1: {"F": 1.0, "B": 1.5, "W": 0.5}})
    monkeypatch.setattr(auto_plan, "observe", lambda path, outline, runs: seen.update(runs))
    planned = AutoPlan(plan, job(), (None, None), [], fleet, 1.0, fleet.outline, keys=("a", "b"))
    learn(job("pipeline.latency_db=x.h5"), planned, plan, Path("log.h5"))
    return seen


def test_times_of_lanes_are_stored_as_those_of_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass takes longer in one of two lanes; the predictor knows of one pass after another."""
    fleet = cluster(1, 1)
    first = msgspec.structs.replace(fleet.devices[0], lanes={2: 0.75})
    fleet = msgspec.structs.replace(fleet, devices=[first, fleet.devices[1]])
    plan = with_lanes(make_plan(12, [6]), {0: 2})
    assert taught(monkeypatch, fleet, plan) == {"a": [(0, 6, 2.0, 4.0)], "b": [(6, 12, 1.0, 2.0)]}


def test_forwards_that_are_computed_again_are_no_part_of_a_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = recomputing(make_plan(12, [6]), [0, 1])
    assert taught(monkeypatch, cluster(1, 1), plan) == {"a": [(0, 6, 3.0, 3.0)], "b": [(6, 12, 1.0, 2.0)]}

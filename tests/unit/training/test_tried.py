"""Trials of a stage are not repeated in another deployment with the same stages, and teach it the same."""

from collections import Counter
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.nn import functional

from accept_mpi.data import ArrayDataset
from accept_mpi.models.layers import Layers
from accept_mpi.pipeline.stage import Stage
from accept_mpi.pipeline.trials import Trial
from accept_mpi.plan import Place, StagePlan
from accept_mpi.training.tried import Tried
from tests.unit.training.test_boundaries import Messages, Messenger, cross_entropy, job_of


class Odd(nn.Module):
    """Uses a layer twice, draws, and has an average of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return functional.dropout(self.norm(self.twice(self.twice(x))), 0.5) * (1 + 0 * self.calls)


def stage_of(schedule: str) -> Stage:
    layers = Layers(0, ["a", "b"], [Odd(), nn.Linear(3, 2)])
    return Stage(layers, job_of(schedule), cross_entropy, False)


def findings(stage: Stage) -> dict[str, Any]:
    found = vars(stage.found)
    return {key: found[key] for key in found if key != "memory"} | {"memory": msgspec.to_builtins(found["memory"])}


@pytest.mark.parametrize("schedule", ["1f1b", "1f1b-async", "zero-bubble"])
def test_the_same_stage_is_tried_once(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    probes: Counter[int] = Counter()
    probe = Trial.probe

    def counted(trial: Trial, inputs: Any, *more: Any) -> Any:
        probes[len(inputs[0])] += 1
        return probe(trial, inputs, *more)

    monkeypatch.setattr(Trial, "probe", counted)
    data = ArrayDataset(torch.randn(5, 3), torch.zeros(5, dtype=torch.int64))
    tried = Tried()

    def agree(stage: Stage, *sizes: int, stages: tuple[StagePlan, ...] = (StagePlan(start=0, stop=2, ranks=(0,)),)) -> Any:
        messenger: Any = Messenger(Messages(1), 0)
        return tried.agree_on_shapes(messenger, stage, Place(0, 1), stages, (sizes, [4, 1]), (data, data), 1.0)

    first, second = stage_of(schedule), stage_of(schedule)
    specs = agree(first, 4, 2)
    assert probes == {4: 1, 2: 1}
    had = findings(first)
    never = first.deferred.never if first.deferred else frozenset()
    assert had["drawing"] == {0}
    assert had["alone"]
    assert bool(never) == (schedule == "zero-bubble")
    first.close()  # as before another deployment
    assert agree(second, 4, 2) is specs
    assert probes == {4: 1, 2: 1}
    assert findings(second) == had
    assert (second.deferred.never if second.deferred else frozenset()) == never
    # Other sizes, or other cuts, are tried.
    agree(stage_of(schedule), 4)
    agree(stage_of(schedule), 4, stages=(StagePlan(start=0, stop=1, ranks=(0,)), StagePlan(start=1, stop=2, ranks=(1,))))
    assert probes == {4: 3, 2: 1}


def test_a_rank_that_has_not_tried_its_stage_has_all_try_again() -> None:
    class Others(Messenger):
        def allgather(self, value: Any, deadline: float, awaited: str) -> list[Any]:
            told = super().allgather(value, deadline, awaited)
            return [*told, False] if "tried" in awaited else told

    data = ArrayDataset(torch.randn(5, 3), torch.zeros(5, dtype=torch.int64))
    tried, messenger = Tried(), Others(Messages(1), 0)
    stages = [stage_of("1f1b") for _ in range(2)]
    plan = (StagePlan(start=0, stop=2, ranks=(0,)),)
    specs = [
        tried.agree_on_shapes(messenger, stage, Place(0, 1), plan, ([4], []), (data, data), 1.0)  # type: ignore[arg-type]
        for stage in stages
    ]
    assert specs[0] is not specs[1]
    assert stages[1].found.drawing == {0}

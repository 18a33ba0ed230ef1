"""What a stage takes, measured in a second before the first step."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from clocks import Clock

from accept_mpi.codecs.coding import parse
from accept_mpi.codecs.tensors import BoundarySpecs
from accept_mpi.pipeline.micro_batch import Inputs
from accept_mpi.profiling.message_costs import MessageCosts, codec_costs, message_costs
from accept_mpi.profiling.stage_timer import time_stage
from accept_mpi.tree import LONE

COLD, WARM, COLD_ROUNDS = 0.006, 0.001, 4


class Warming:
    """A stage whose first rounds take six times as long."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.rounds = clock, 0

    def from_data(self, value: torch.Tensor) -> Inputs:
        return Inputs((value,), LONE)

    @contextmanager
    def trial(self) -> Iterator["Warming"]:
        yield self

    def probe(self, inputs: Any, target: Any, gradients: Any, *_: Any) -> None:
        self.rounds += 1
        seconds = COLD if self.rounds <= COLD_ROUNDS else WARM
        self.clock.now += seconds
        gradients([], LONE)
        self.clock.now += 2 * seconds


class Zeros:
    def __len__(self) -> int:
        return 8

    def inputs(self, indices: np.ndarray, seed: int | None = None) -> torch.Tensor:
        return torch.zeros(len(indices), 1)

    targets = inputs


@pytest.fixture
def warming(monkeypatch: pytest.MonkeyPatch) -> Warming:
    clock = Clock(tick=1e-6)
    for module in ("profiling.stage_timer", "profiling.message_costs", "device.compute"):
        monkeypatch.setattr(f"accept_mpi.{module}.time", clock)
    monkeypatch.setattr("accept_mpi.profiling.stage_timer.trial_of", Warming.trial)
    return Warming(clock)


def test_cold_rounds_do_not_count(warming: Warming) -> None:
    """The mean of a second's rounds had been twice what training took: codecs were too mild for it."""
    nothing = BoundarySpecs({}, {})
    found = time_stage(warming, 4, nothing, nothing, Zeros(), MessageCosts({}, 0.0, 0.0), 1.0, budget=1.5)  # type: ignore[arg-type]
    assert found.forward == pytest.approx(WARM, rel=0.01)
    assert found.backward == pytest.approx(2 * WARM, rel=0.01)


def test_messages_cost_what_mpi_takes_too(warming: Warming) -> None:
    """Counted as free, given cuts went uncoded at 100 Mbit/s: 0.78 of all hosts alone, where 4 bits make 0.85. MPI's share
    of each message was left out later."""
    nothing = BoundarySpecs({}, {})
    codings = {"none": parse("none", False)}
    alone, both = message_costs(codings, 1e-9), message_costs(codings, 1e-9, 3e-3)
    assert alone.seconds_per_message > 0
    assert both.seconds_per_message == pytest.approx(alone.seconds_per_message + 3e-3, rel=0.05)
    found = time_stage(warming, 4, nothing, nothing, Zeros(), both, 1.0, budget=0.1)  # type: ignore[arg-type]
    assert found.seconds_per_message >= both.seconds_per_message
    assert found.seconds_per_byte >= 1e-9


def test_what_is_not_coded_is_copied() -> None:
    """Copying a message out of memory and into it costs time, too: as if it cost none, links that are free of cost went
    uncoded where 4 bits take less of the core."""
    costs = codec_costs({"none": parse("none", False), "bf16": parse("bf16", False)})
    assert set(costs) == {"none", "bf16"}
    for there, back in costs.values():
        assert there > 0
        assert back > 0

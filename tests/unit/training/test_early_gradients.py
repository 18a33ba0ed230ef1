"""Gradients that are passed on while their backward goes on."""

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from accept_mpi.codecs.gradient_chunks import Gradients, Layout
from accept_mpi.errors import UserError
from accept_mpi.job_file import parse
from accept_mpi.models.layers import Layers
from accept_mpi.pipeline.stage import Stage
from accept_mpi.training.early_gradients import EarlyGradients
from accept_mpi.training.gradient_sums import GradientSums, Part

JOB = '[model]\nname="m"\n[data]\nname="d"\n[train]\nsteps=1\n[output]\ndirectory="r"\n'


class Sums:
    """What a group's sum is given."""

    def __init__(self, stage: Stage, exact: bool) -> None:
        self.exact = exact
        self.layout = Layout(stage.trained, 3, stage.trained_layers)
        self.early: list[dict[int, torch.Tensor]] = []
        self.late: list[dict[int, torch.Tensor]] = []

    def contribute_early(self, step: int, k: int, gradients: Gradients, scale: float, chunks: Sequence[int]) -> None:
        self.early.append(self.layout.pack_some(gradients, chunks))

    def contribute(self, step: int, k: int, gradients: Gradients, scale: float, without: Collection[int] = ()) -> None:
        self.late.append(self.layout.pack(gradients, without))


class Borrowing(nn.Module):
    """Computes with another layer's weights, too, from some forward on."""

    def __init__(self, other: nn.Linear, since: int) -> None:
        super().__init__()
        self.own, self.others, self.forwards, self.since = nn.Linear(64, 64), [other], 0, since

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        x = self.own(x)
        return nn.functional.linear(x, self.others[0].weight) if self.forwards > self.since else x


class Skipping(nn.Module):
    """Leaves half of its parameters without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x).relu_()


def run(modules: list[nn.Module], exact: bool, steps: int, count: int, schedule: str = "1f1b") -> list[tuple[int, ...]]:
    """Numbers of chunks that were passed on early, in each step. Checks all of them against plain sums."""
    torch.manual_seed(0)
    layers = Layers(3, [str(n) for n in range(len(modules))], modules)
    stage = Stage(layers, parse(JOB, "job", [f"pipeline.schedule={schedule}"]), None, False)
    sums = Sums(stage, exact)
    group: Any = sums
    every = range(len(stage.trained))
    begun = EarlyGradients(stage, every, sums.layout, False)
    begun.waited(0.0)
    for _ in range(5):
        begun.waited(0.0)  # for the whole step, and longer
    member = GradientSums(stage, [Part(every, group, begun)], lambda step: range(count))
    early = []
    for step in range(steps):
        sums.early, sums.late, plain = [], [], []
        for k in range(count):
            x = torch.randn(8, 64, requires_grad=True)
            (out,) = stage.forward(step, k, (x,), whole=True).outputs
            stage.backward(step, k, (torch.ones_like(out),), tell=partial(member.in_backward, step, k, 1.0))
            gradients = stage.exchange_gradients()
            plain.append([None if gradient is None else gradient.clone() for gradient in gradients])
            member.after_backward(step, k, gradients, 1.0, whole=True)
            if exact or k == count - 1:
                wanted = plain if not exact else plain[-1:]
                total: Gradients = [sum(found) if found[0] is not None else None for found in zip(*wanted, strict=True)]  # type: ignore[misc, arg-type]
                given = {c: values for found in [*sums.early, *sums.late] for c, values in found.items()}
                packed = sums.layout.pack(total)
                assert given.keys() == packed.keys()
                assert sum(map(len, [*sums.early, *sums.late])) == len(given)
                assert all(torch.equal(values, given[c]) for c, values in packed.items())
                early.append(tuple(c for found in sums.early for c in found))
                sums.early, sums.late = [], []
    return early


@pytest.mark.parametrize("schedule", ["1f1b", "1f1b-async", "zero-bubble"])
@pytest.mark.parametrize(("exact", "count"), [(True, 1), (True, 3), (False, 1), (False, 3)])
def test_later_layers_go_first_from_the_second_backward_on(exact: bool, count: int, schedule: str) -> None:
    modules = [nn.Linear(64, 64), nn.Dropout(0.5), Skipping(), *(nn.Linear(64, 64) for _ in range(3))]
    early = run(modules, exact, 3, count, schedule)
    assert early[0] == ()
    assert early[1:] == [(3, 2)] * (len(early) - 1)  # the first chunk waits for the end, and the second for the first layer


@pytest.mark.parametrize(("exact", "count"), [(True, 3), (False, 1), (False, 3)])
def test_what_goes_early_of_a_parameter_is_not_added_again_to_the_rest_of_it(exact: bool, count: int) -> None:
    """A chunk may begin within a weight, whose first values wait for the end."""
    modules = [nn.Linear(64, 64) for _ in range(4)]
    stage = Stage(Layers(3, list("0123"), modules), parse(JOB, "job"), None, False)
    second, third = (Layout(stage.trained, 3, stage.trained_layers).within([c]) for c in (1, 2))
    assert set(second) & set(third), "no weight lies in both"
    early = run(modules, exact, 3, count)
    assert early[1:] == [(3, 2)] * (len(early) - 1)


@pytest.mark.parametrize("exact", [True, False])
def test_a_layer_that_uses_a_later_ones_weights_is_seen(exact: bool) -> None:
    last = nn.Linear(64, 64)
    early = run([nn.Linear(64, 64), Borrowing(last, 0), nn.Linear(64, 64), last], exact, 3, 2)
    assert set(early) == {()}


def test_weights_that_a_layer_uses_late_are_an_error() -> None:
    last = nn.Linear(64, 64)
    with pytest.raises(UserError, match=r'"3\.weight" got a gradient after the backward of its own layer'):
        run([nn.Linear(64, 64), Borrowing(last, 2), nn.Linear(64, 64), last], True, 3, 2)


def test_weights_that_two_layers_share_wait_for_the_first() -> None:
    shared = nn.Linear(64, 64)
    early = run([nn.Linear(64, 64), shared, nn.Linear(64, 64), nn.ReLU(), shared, nn.Linear(64, 64)], True, 3, 1)
    assert early == [(), (3, 2), (3, 2)]

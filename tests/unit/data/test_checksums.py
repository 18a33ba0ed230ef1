"""Checksums of targets: alike for the same data on two kinds of processors, different for others."""

import contextlib
import math
import time
from typing import Any

import numpy as np
import pytest
import torch

from accept_mpi.data import ArrayDataset, gives_targets
from accept_mpi.data.calendar import Calendar
from accept_mpi.data.checksums import checksum
from accept_mpi.data.feed import Drawn, Feed
from accept_mpi.errors import DeadlineError, UserError
from accept_mpi.plan import Plan, StagePlan


def alike(one: Any, other: Any) -> bool:
    return checksum(one).matches(checksum(other))


def test_whole_numbers_are_compared_by_their_bits() -> None:
    classes = torch.arange(100)
    assert alike(classes, classes.clone())
    assert not alike(classes, classes.index_fill(0, torch.tensor([7]), 8))
    assert not alike(classes, classes.int())
    assert not alike(classes, classes.reshape(10, 10))
    assert not alike((classes, "a"), (classes, "b"))


@pytest.mark.parametrize("size", [1, 2, 1000, 200_000])
def test_floats_are_compared_up_to_rounding(size: int) -> None:
    values = torch.randn(size, generator=torch.Generator().manual_seed(1))
    assert alike(values, values * (1 + 1e-6 * torch.rand(size)))
    assert alike(values.double() * 1e300, values.double() * 1e300)
    assert not alike(values, -values)
    assert not alike(values, torch.randn(size))
    assert not alike(values * 1e-20, torch.randn(size) * 1e-20)
    if size > 1:
        assert not alike(values, values.flip(0))
        assert not alike(values, values.roll(size // 3 + 1))
    if size > 2 << 16:  # two blocks have changed their places
        assert not alike(values, torch.cat([values[1 << 16 : 2 << 16], values[: 1 << 16], values[2 << 16 :]]))


def test_values_that_are_not_finite_have_places() -> None:
    for odd in (math.nan, math.inf, -math.inf):
        assert alike(torch.tensor([1.0, odd]), torch.tensor([1.0, odd]))
        assert not alike(torch.tensor([1.0, odd]), torch.tensor([1.0, 0.0]))
        assert not alike(torch.tensor([1.0, odd, 0.0]), torch.tensor([1.0, 0.0, odd]))
    assert not alike(torch.tensor([math.inf]), torch.tensor([-math.inf]))
    assert alike(torch.zeros(3), torch.zeros(3))
    assert alike(torch.tensor([1 + 2j]), torch.tensor([1 + 2j]))
    assert not alike(torch.tensor([1 + 2j]), torch.tensor([1 - 2j]))


class Own:
    def __len__(self) -> int:
        return 1

    def inputs(self, indices: Any, seed: int | None = None) -> Any: ...

    def targets(self, indices: Any) -> Any: ...


def test_the_first_stage_is_not_asked_for_targets_of_users_own_kinds() -> None:
    assert gives_targets(ArrayDataset(torch.zeros(1), torch.zeros(1)))
    assert not gives_targets(Own())


def ends(first: torch.Tensor, last: torch.Tensor) -> tuple[list[Feed], Drawn, list[Any]]:
    """What two stages are fed with, each from its own targets, as training and as test set."""
    sent: list[Any] = []
    drawn = Drawn(lambda step, sums: sent.append((step, sums)))
    plan = Plan(stages=tuple(StagePlan(start=s, stop=s + 1, ranks=(s,)) for s in (0, 1)), boundaries=())
    both = []
    for rank, y in enumerate((first, last)):
        data = ArrayDataset(torch.arange(8.0), y)
        shares = (lambda targets, samples: [0.5, 0.5]) if rank else None
        both.append(Feed(Calendar(8, 4, 2, 0), (data, data), plan.place(rank), shares, drawn))
    return both, drawn, sent


def test_rows_in_another_order_on_another_host_are_noticed() -> None:
    y = torch.arange(8)
    for other, step in ((y, None), (y.flip(0), 0)):
        (front, back), drawn, sent = ends(y, other)
        parts = [np.array([0, 1]), np.array([2, 3])]
        back.begin(0, parts)
        for k, part in enumerate(parts):
            front.take(0, k, part)
        drawn.hear(*sent.pop())
        if step is None:
            drawn.check()
        else:
            with pytest.raises(UserError, match=r"^data.name: first and last stage have different targets .* in step 1: "):
                drawn.check()


def test_tests_are_compared_where_both_stages_have_them() -> None:
    y = torch.arange(8)
    for other, right in ((y, True), (y.flip(0), False)):
        (front, back), drawn, sent = ends(y, other)
        for k in range(4):
            part = np.arange(2 * k, 2 * k + 2)
            front.test(k, part)
            if k % 2:  # another member of the last stage's group has the others
                back.test(k, part)
        back.end_test(5)
        front.end_test(5)
        drawn.hear(*sent.pop())
        if right:
            drawn.check_all(0.0, time.monotonic)
        else:
            with pytest.raises(UserError, match=r"in the evaluation after step 5: "):
                drawn.check()


def test_sums_of_two_evaluations_may_come_at_once() -> None:
    (front, back), drawn, sent = ends(torch.arange(8), torch.arange(8))
    for step in (3, 6):
        for feed in (back, front):
            feed.test(0, np.arange(4))
            feed.end_test(step)
    for step, sums in sent:
        drawn.hear(step, sums | {1: sums[0]})  # another member's micro-batch, too
    drawn.check_all(0.0, time.monotonic)
    drawn.hear(~3, {1: sent[0][1][0]})  # late
    drawn.check()


def test_a_first_stage_may_be_ahead_and_have_members() -> None:
    """Of training, too, not only of evaluations: no step is passed over, and none is compared in parts."""
    for changed in (None, 1, 2):
        drawn = Drawn(lambda step, sums: None)
        steps = {step: {k: checksum(torch.tensor([step, k])) for k in (0, 1)} for step in (0, 1, ~2, 2)}
        told = steps if changed is None else steps | {changed: steps[changed] | {1: steps[0][0]}}
        for member in (0, 1):
            for step, sums in told.items():
                drawn.hear(step, {member: sums[member]})
                drawn.check()
            if not member:
                drawn.expect(0, steps[0])  # which the other member has not told yet
                drawn.check()

        def rest(drawn: Drawn = drawn, steps: dict[int, Any] = steps) -> None:
            for step in (~2, 1, 2):
                drawn.expect(step, steps[step])
                drawn.check()
            drawn.check_all(0.0, time.monotonic)

        if changed is None:
            rest()
            continue
        with pytest.raises(UserError, match=f"in step {changed + 1}: "):
            rest()


def test_a_first_stage_that_never_tells_what_it_drew_is_waited_for_so_long() -> None:
    drawn = Drawn(lambda step, sums: None)
    drawn.expect(0, {0: checksum(torch.ones(1))})
    with pytest.raises(DeadlineError, match="what the first stage drew"):
        drawn.check_all(0.0, lambda: None)
    with pytest.raises(UserError, match="the run has ended"):  # what else is wrong is heard of while waiting
        drawn.check_all(600.0, lambda: (_ for _ in ()).throw(UserError("the run has ended")))
    calls: list[None] = []

    def told_late() -> None:
        calls.append(None)
        if len(calls) == 3:
            drawn.hear(0, {0: checksum(torch.ones(1))})

    drawn.check_all(600.0, told_late)
    assert len(calls) == 3


@pytest.mark.parametrize("stages", [1, 2])
def test_each_rank_takes_what_its_stage_needs(stages: int) -> None:
    """Of its own micro-batches the inputs, and of all the targets on the last stage; no more than that."""
    asked: list[str] = []
    told: list[Any] = []

    class Asked(ArrayDataset):
        def inputs(self, indices: Any, seed: int | None = None) -> Any:
            asked.append("x")
            return super().inputs(indices, seed)

        def targets(self, indices: Any) -> Any:
            asked.append("y")
            return super().targets(indices)

    data = Asked(torch.arange(8.0), torch.arange(8))
    groups = ((0, 1),) if stages == 1 else ((0, 1), (2,))
    made = tuple(StagePlan(start=s, stop=s + 1, ranks=ranks) for s, ranks in enumerate(groups))
    place = Plan(stages=made, boundaries=()).place(1)
    shares = (lambda targets, samples: [len(y) / 4 for y in targets]) if stages == 1 else None
    calendar = Calendar(8, 4, 4, 0)
    feed = Feed(calendar, (data, data), place, shares, Drawn(lambda step, sums: told.append((step, sums))), [0, 1, 0, 1])
    for step in (0, 1, 2):
        asked.clear()
        indices = calendar.indices(step)
        samples, share = feed.micro_batch(step, 3, indices, contextlib.nullcontext)
        assert samples.inputs.tolist() == [float(n) for n in indices[3]]
        assert share == (0.25 if stages == 1 else 1.0)
        other = feed.micro_batch(step, 1, indices, contextlib.nullcontext)[0]
        assert other.inputs.tolist() == [float(n) for n in indices[1]]
        feed.end(step)
        if stages == 1:
            assert samples.targets.tolist() == indices[3].tolist()
            assert (asked.count("x"), asked.count("y")) == (2, 4)
        else:
            assert (asked.count("x"), asked.count("y")) == (2, 2)  # to compare them
            assert [(of, [*sums]) for of, sums in told] == [(step, [3, 1])]
            told.clear()
    assert not feed._steps
    assert not feed._weighed

"""Coded sums of a group's gradients: what coding leaves out of an update goes into the next ones."""

import math
from collections import deque
from typing import Any

import pytest
import torch

from accept_mpi.codecs.coding import parse
from accept_mpi.codecs.message import as_decoded
from accept_mpi.comm.group_sum import Group, GroupSum
from accept_mpi.comm.left_out import LeftOut
from accept_mpi.errors import DeadlineError, ProtocolError

CODING = parse("uniform:4", gradients=False)


class Plane:
    """Data planes of a group in one process: what goes out on a channel comes in on its peer, decoded."""

    def __init__(self, me: int, wires: dict[Any, deque[Any]]) -> None:
        self._me, self._wires = me, wires

    def outgoing(self, channel: Any) -> Any:
        wire = self._wires.setdefault((self._me, channel.peer, channel.boundary), deque())

        class Sender:
            def send(self, step: int, k: int, samples: int, tensors: Any, scale: float = 1.0) -> None:
                (values,) = tensors
                decoded = as_decoded(values, channel.coding)
                header = type("Header", (), {"step": step, "micro_batch": k, "samples": samples, "scale": scale})
                wire.append(type("Message", (), {"header": header, "tensors": (values if decoded is None else decoded,)}))

        return Sender()

    def incoming(self, channel: Any) -> Any:
        wire = self._wires.setdefault((channel.peer, self._me, channel.boundary), deque())
        return type("Receiver", (), {"poll": staticmethod(lambda: wire.popleft() if wire else None)})

    def add_group(self, group: GroupSum) -> None: ...

    def check(self) -> None: ...

    def hurry(self, awaited: bool) -> None: ...

    def wake(self) -> None: ...


def two_members(parameters: list[torch.Tensor]) -> list[GroupSum]:
    """Each takes one of two micro-batches, and their sums are coded."""
    wires: dict[Any, deque[Any]] = {}
    return [
        GroupSum(Plane(me, wires), Group([0, 1], me, 0, [[0, 1]], False), parameters, 0, lambda step: 2, CODING)  # type: ignore[arg-type]
        for me in range(2)
    ]


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("guess", [1.0, 300.0])
def test_what_is_left_out_is_kept_in_units_of_the_update(guess: float, ahead: int) -> None:
    """Where losses are (sum, count), steps differ in scale, and a member without the last micro-batch knows it too late.
    ``ahead``: steps that are contributed to before a sum is taken."""
    torch.manual_seed(1)
    parameters = [torch.zeros(3000), torch.zeros(4000)]
    sums = two_members(parameters)
    scales = [1.0, 0.002, 0.002, 1.0, 0.0, 1.0, 0.004, 1.0, 1e-30, 1.0, 1.0, 0.5]
    owed, most = torch.zeros(7000), 0.0
    given = [[[torch.randn_like(p) / (scale or 1.0) for p in parameters] for _ in sums] for scale in scales]
    for step in range(len(scales) + ahead - 1):
        if step < len(scales):
            for me, one in enumerate(sums):
                known = scales[step] * (1.0 if me else guess)
                one.contribute(step, me, [gradient.clone() for gradient in given[step][me]], known)
        for _ in range(3):
            for one in sums:
                one.move()
        if (now := step - ahead + 1) < 0:
            continue
        found = [one.take(now, 1.0) for one in sums]
        assert all(torch.equal(*pair) for pair in zip(found[0][0], found[1][0], strict=True))
        assert found[0][1] == found[1][1] == scales[now]
        wanted = torch.cat([torch.stack([g[n] for g in given[now]]).sum(0) for n in range(2)])
        owed += (wanted - torch.cat([g for g in found[0][0] if g is not None])) * scales[now]
        most = max(most, float(owed.abs().max()))
    # Values of up to 5, and a step of a fifteenth of twice that: each of the two messages leaves out half a step.
    assert most < 4.0
    assert float(owed.abs().mean()) < 0.5


def test_what_is_left_out_waits_while_a_parameter_has_no_gradient() -> None:
    """A part of a model that few samples reach: what coding has left out of its steps is not lost in the others."""
    torch.manual_seed(1)
    sums = two_members([torch.zeros(3000), torch.zeros(4000)])
    owed = torch.zeros(3000)
    for step in range(40):
        scale, used = (1.0, 0.5)[step % 2], step % 4 == 0
        for me, one in enumerate(sums):
            gradient = torch.full((3000,), 0.04) if used else None
            if gradient is not None:
                gradient[0], gradient[1] = 1.0, -1.0  # far more than the others
                owed += gradient * scale
            one.contribute(step, me, [gradient, torch.randn(4000)], scale)
        for _ in range(3):
            for one in sums:
                one.move()
        sums_of_both = [one.take(step, 1.0)[0] for one in sums]
        found = [one[0] for one in sums_of_both]
        assert all((one is not None) == used for one in found)
        assert all(one[1] is not None and one[1].std() > 0.5 for one in sums_of_both)
        owed = owed if found[0] is None else owed - found[0] * scale
    # Each step leaves 0.05 out of 0.08, in the same direction; at any time the three messages owe half a step of the code.
    assert float(owed[2:].abs().max()) < 0.3


def test_sums_do_not_depend_on_when_messages_arrive() -> None:
    """Members that take one micro-batch of each step give the next step's before they have the last sum, or after."""

    def sums_of(at_once: bool) -> list[torch.Tensor]:
        sums = two_members([torch.zeros(5000)])
        torch.manual_seed(1)
        for step in range(4):
            for me, one in enumerate(sums):
                one.contribute(step, me, [torch.randn(5000)], 1.0)
                if at_once:
                    one.move()
            for _ in range(3 * at_once):
                for one in sums:
                    one.move()
        for _ in range(20):
            for one in sums:
                one.move()
        return [gradient for step in range(4) for gradient in sums[0].take(step, 1.0)[0] if gradient is not None]

    assert all(map(torch.equal, sums_of(True), sums_of(False)))


@pytest.mark.parametrize("exact", [True, False])
def test_a_step_of_some_members_may_come_before_an_earlier_one(exact: bool) -> None:
    """An epoch's last step may have fewer micro-batches than there are members: it does not wait for a late one."""
    wires: dict[Any, deque[Any]] = {}
    counts, table = [3, 1, 3], [0, 1, 2]
    group = [Group([0, 1, 2], me, 0, [table], exact) for me in range(3)]
    sums = [GroupSum(Plane(me, wires), group[me], [torch.zeros(9)], 0, counts.__getitem__) for me in range(3)]  # type: ignore[arg-type]
    for me, one in enumerate(sums):
        for step, count in enumerate(counts) if me < 2 else ():
            if me < count:
                one.contribute(step, me, [torch.full((9,), 10.0**me * (step + 1))], 1.0)
        for _ in range(3):
            for each in sums:
                each.move()
    for step in (0, 2):
        sums[2].contribute(step, 2, [torch.full((9,), 100.0 * (step + 1))], 1.0)
    for _ in range(3):
        for each in sums:
            each.move()
    for one in sums:
        found = [one.take(step, 1.0)[0][0] for step in range(3)]
        assert [gradient.tolist() for gradient in found if gradient is not None] == [[n] * 9 for n in (111.0, 2.0, 333.0)]


def test_a_tied_parameter_of_two_stages_is_summed_as_one_process_does() -> None:
    """Micro-batch by micro-batch, and within each the stages' parts as they go backward: the last stage's first."""
    wires: dict[Any, deque[Any]] = {}
    tables = [[0, 1, 0], [2, 2, 2]]  # a group of two holds the last stage, and a third rank the first
    own, takes = [0, 0, 1], [[0, 2], [1], [0, 1, 2]]
    group = [Group([0, 1, 2], me, 0, tables, True, own[me]) for me in range(3)]
    sums = [GroupSum(Plane(me, wires), group[me], [torch.zeros(7, 500)], 0, lambda step: 3) for me in range(3)]  # type: ignore[arg-type]
    torch.manual_seed(1)
    parts = torch.randn(2, 3, 7, 500)
    for me in (2, 1, 0):
        assert sums[me].last_of_mine(0) == max(takes[me])
        for k in takes[me]:
            sums[me].contribute(0, k, [parts[own[me], k].clone()], 0.5 if k == 2 else 1.0)
            assert sums[me].move()
    for _ in range(3):
        for one in sums:
            one.move()
    expected = (parts[0, 0] + parts[1, 0]) + (parts[0, 1] + parts[1, 1]) + (parts[0, 2] + parts[1, 2])
    for one in sums:
        (found,), scale = one.take(0, 1.0)
        assert found is not None
        assert torch.equal(found, expected)
        assert scale == 0.5
        assert not one.pending


def test_statistics_go_to_all_members() -> None:
    """Each member gets those of all micro-batches, in order, and none of another step."""
    wires: dict[Any, deque[Any]] = {}
    counts = [3, 2]
    sums = [
        GroupSum(Plane(me, wires), Group([0, 1], me, 0, [[0, 1, 0]], True), [], 4, counts.__getitem__)  # type: ignore[arg-type]
        for me in range(2)
    ]
    for step, k in ((0, 0), (0, 1), (0, 2), (1, 1), (1, 0)):
        sums[k % 2].share_statistics(step, k, torch.full((4,), 10.0 * step + k))
    for one in sums:
        assert one.move()
        for step, count in enumerate(counts):
            found = one.statistics(step, 1.0)
            assert [values.tolist() for values in found] == [[10.0 * step + k] * 4 for k in range(count)]


def test_a_sum_is_sent_as_it_was_when_it_was_made() -> None:
    """The optimizer works in the memory of an owner's own sum, which is still on its way to the others."""
    wires: dict[Any, deque[Any]] = {}
    sums = [
        GroupSum(Plane(me, wires), Group([0, 1], me, 0, [[0, 1]], True), [torch.zeros(9)], 0, lambda step: 2)  # type: ignore[arg-type]
        for me in range(2)
    ]
    for me, one in enumerate(sums):
        one.contribute(0, me, [torch.full((9,), 10.0**me)], 1.0)
    sums[1].move()
    sums[0].move()  # which owns all
    (found,), _ = sums[0].take(0, 1.0)
    assert found is not None
    found.zero_()
    sums[1].move()
    (found,), _ = sums[1].take(0, 1.0)
    assert found is not None
    assert found.tolist() == [11.0] * 9


def test_the_scale_is_that_of_the_last_micro_batch() -> None:
    """Whichever member takes it: others knew less when they had theirs."""
    wires: dict[Any, deque[Any]] = {}
    tables = [[0, 1, 0], [2, 3, 2]]
    ranks, own = [0, 1, 2, 3], [0, 0, 1, 1]
    sums = [
        GroupSum(Plane(me, wires), Group(ranks, me, 0, tables, False, own[me]), [torch.zeros(9)], 0, lambda step: 3)  # type: ignore[arg-type]
        for me in ranks
    ]
    for me, one in enumerate(sums):
        one.contribute(0, 0, [torch.ones(9)], 7.0 if me % 2 else 0.25)
    for _ in range(3):
        for one in sums:
            one.move()
    assert [one.take(0, 1.0)[1] for one in sums] == [0.25] * 4


def test_a_gradient_of_256_micro_batches_is_there() -> None:
    """Which parameters have one is said in a byte each."""
    wires: dict[Any, deque[Any]] = {}
    table = [0, 1] * 128
    sums = [
        GroupSum(Plane(me, wires), Group([0, 1], me, 0, [table], True), [torch.zeros(9)], 0, lambda step: 256)  # type: ignore[arg-type]
        for me in range(2)
    ]
    for k, me in enumerate(table):
        sums[me].contribute(0, k, [torch.ones(9)], 1.0)
    for _ in range(3):
        for one in sums:
            one.move()
    for one in sums:
        (found,), _ = one.take(0, 1.0)
        assert found is not None
        assert found.tolist() == [256.0] * 9


def test_coded_sums_may_begin_early() -> None:
    """Some chunks are given while B goes on: the rest of the same step does not wait for their sums."""
    sums = two_members([torch.zeros(3000), torch.zeros(4000)])
    for me, one in enumerate(sums):
        gradients: list[torch.Tensor | None] = [torch.ones(3000), torch.ones(4000)]
        late = len(one.layout.chunks) - 1 if one.layout else 0
        one.contribute_early(0, me, gradients, 1.0, [late])
        one.move()
        one.contribute(0, me, gradients, 1.0, [late])
    for _ in range(3):
        for one in sums:
            one.move()
    for one in sums:
        assert [gradient.mean().item() for gradient in one.take(0, 1.0)[0] if gradient is not None] == pytest.approx(
            [2.0, 2.0]
        )


def test_statistics_are_never_coded_and_two_groups_do_not_meet() -> None:
    wires: dict[Any, deque[Any]] = {}
    values = torch.randn(100, generator=torch.Generator().manual_seed(1))
    groups = [
        [
            GroupSum(
                Plane(me, wires), Group([0, 1], me, number, [[0, 1]], False), [torch.zeros(9)], 100, lambda step: 2, CODING
            )  # type: ignore[arg-type]
            for me in range(2)
        ]
        for number in range(2)
    ]
    for number, sums in enumerate(groups):
        for me, one in enumerate(sums):
            one.share_statistics(0, me, values * (number + 1))
            one.contribute(0, me, [torch.full((9,), 1.0 + number)], 1.0)
    for _ in range(3):
        for one in (*groups[0], *groups[1]):
            one.move()
    for number, sums in enumerate(groups):
        for one in sums:
            assert all(torch.equal(found, values * (number + 1)) for found in one.statistics(0, 1.0))
            (found,), _ = one.take(0, 1.0)
            assert found is not None
            assert found.tolist() == pytest.approx([2.0 + 2 * number] * 9)
            with pytest.raises(DeadlineError, match="statistics of step 1"):
                one.statistics(0, 0.01)


def test_a_loss_wakes_who_waits_for_a_sum() -> None:
    (one, _) = two_members([torch.zeros(9)])
    one._plane.check = lambda: (_ for _ in ()).throw(ProtocolError("over"))  # type: ignore[method-assign]
    one.fail()
    with pytest.raises(ProtocolError, match="over"):
        one.take(0, 5.0)
    with pytest.raises(ProtocolError, match="over"):
        one.statistics(0, 5.0)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_was_left_out_outlasts_gradients_that_cannot_be_coded(value: float) -> None:
    left = LeftOut(CODING)
    values = torch.linspace(-1, 1, 500)
    _, decoded = left.added(0, 1, 0.5, values)
    left.settle(0, 1, 0.5)
    whole, received = left.added(1, 1, 0.5, torch.full((500,), value))
    left.settle(1, 1, 0.5)
    assert whole.data_ptr() != received.data_ptr()
    assert not received.isfinite().any()
    whole, _ = left.added(2, 1, 0.5, torch.zeros(500))
    assert torch.allclose(whole, values - decoded, atol=1e-7)
    left.settle(2, 1, 0.5)
    left.put_back(1, 0.5, torch.ones(500))
    assert left.added(3, 1, 0.25, torch.zeros(500))[0].mean().item() == pytest.approx(2.0, abs=0.1)

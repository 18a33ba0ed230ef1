"""Devices of one kind plan as one: who is the same, who is asked again, who measures what."""

import itertools
import math
import warnings

import msgspec
import pytest

from accept_mpi.profiling.layer_times import LayerTimes, bit_reversed_order
from accept_mpi.profiling.message_costs import MessageCosts
from accept_mpi.profiling.pooling import DeviceKind, doubted, merged, pool, pool_message_costs, probing_order


def three(*forward: float) -> LayerTimes:
    return LayerTimes(forward, tuple(2 * took for took in forward), (0.0,) * 3, (0.5,) * 3, 1.0, (), 1.0)


def kinds(processors: str, shares: str = "") -> list[DeviceKind]:
    """A letter a device."""
    return [DeviceKind(*both) for both in itertools.zip_longest(processors, shares, fillvalue="all")]


def test_ranks_of_one_kind_are_one_device() -> None:
    nan = math.nan
    one = LayerTimes((1.0, nan), (2.0, nan), (0.0, nan), (0.5, nan), 1.0, ((0, 1, 1.0, 2.0),), 1.0)
    two = LayerTimes((3.0, 5.0), (4.0, 6.0), (0.0, 0.0), (0.5, 0.5), 2.0, ((0, 1, 3.0, 4.0), (1, 2, 5.0, 6.0)), 2.0)
    both = merged([one, two])
    assert (both.forward, both.backward, both.update) == ((2.0, 5.0), (3.0, 6.0), (0.5, 0.5))
    assert both.pieces == ((0, 1, 2.0, 3.0), (1, 2, 5.0, 6.0))
    assert (both.seconds, both.stretch) == (2.0, 1.5)
    assert not any(merged([msgspec.structs.replace(one, forward=(nan, nan), pieces=())]).measured)


def test_devices_of_one_kind_that_measured_much_the_same_are_the_same() -> None:
    def device(forward: float, last: float = 1.0) -> LayerTimes:
        return LayerTimes((forward, last), (2 * forward, 2 * last), (0.0, 0.0), (0.5, 0.5), 1.0, (), 1.0)

    times = [device(0.9), device(1.0), device(1.2), device(3.0), device(1.1)]
    found = pool(times, kinds("aaaab"))
    assert [one.forward[0] for one in found] == pytest.approx([1.0] * 3 + [3.0, 1.1])
    assert found[3:] == times[3:]
    # A layer that one of them met cold does not count.
    cold = [device(1.0), device(1.0, 1.4), device(1.0), device(1.0)]
    assert [one.forward[1] for one in pool(cold, kinds("aaaa"))] == pytest.approx([1.0] * 4)
    # By what all of them have measured.
    gaps = [device(0.9), device(1.0, math.nan)]
    assert [one.forward[0] for one in pool(gaps, kinds("aa"))] == pytest.approx([0.95, 0.95])
    assert pool([device(math.nan, math.nan), device(1.0)], kinds("aa"))[1] == device(1.0)
    # Each has measured something else besides what all have; a slow one is told by what others have measured, too.
    parts = [three(1.0, 2.0, math.nan), three(1.1, math.nan, 4.0), three(0.9, math.nan, math.nan), three(2.0, 4.0, 8.0)]
    found = pool(parts, kinds("aaaa"))
    assert [one.forward for one in found[:3]] == [pytest.approx((1.0, 2.0, 4.0))] * 3
    assert found[3] == parts[3]
    apart = [three(1.0, math.nan, math.nan), three(math.nan, 2.0, 4.0)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pool(apart, kinds("aa")) == apart


def test_devices_that_plan_as_one_handle_messages_alike() -> None:
    def device(factor: float) -> MessageCosts:
        return MessageCosts({"none": (factor, 2 * factor), "bf16": (3 * factor, 4 * factor)}, 5 * factor, 6 * factor)

    costs = [device(1.0), device(3.0), device(1.2), device(9.0), device(4.0)]
    found = pool_message_costs(costs, kinds("aaaab"), [True, True, True, False, True])
    assert found[:3] == [device(1.2)] * 3
    assert found[3:] == costs[3:]
    assert pool_message_costs(costs, kinds("aaaab"), [False] * 5) == costs


def test_one_that_measured_otherwise_than_its_mates_is_asked_again() -> None:
    """Of four equal hosts one measured itself at 1.66 of the others, and trained as fast as they."""

    def device(forward: float) -> LayerTimes:
        runs = tuple((n, n + 1, forward, 2 * forward) for n in range(3))
        return msgspec.structs.replace(three(forward, forward, forward), pieces=runs)

    def seen(forward: float) -> list[tuple[int, int, float, float]]:
        return [(n, n + 1, forward, 2 * forward) for n in range(3)]

    times, five = [device(1.0), device(1.66), device(1.1), device(0.9), device(5.0)], kinds("aaaab")
    asked = doubted(times, five)
    assert asked == [[(0, 1), (1, 2), (2, 3)]] * 4 + [[]]
    assert doubted([times[n] for n in (0, 2, 3, 4)], kinds("aaab")) == [[]] * 4
    found = pool(times, five, [seen(1.2), seen(1.3), seen(1.1), seen(1.4), []])
    assert [one.forward[0] for one in found] == pytest.approx([1.0] * 4 + [5.0])
    # Slow again: so it is.
    found = pool(times, five, [seen(1.2), seen(2.0), seen(1.1), seen(1.4), []])
    assert [one.forward[0] for one in found] == pytest.approx([1.0, 1.66, 1.0, 1.0, 5.0])
    # Too far apart for any median: all are asked.
    halves = [device(1.0), device(1.0), device(1.8), device(1.8)]
    assert pool(halves, kinds("aaaa")) == halves
    assert [one.forward[0] for one in pool(halves, kinds("aaaa"), [seen(1.0)] * 4)] == pytest.approx([1.4] * 4)
    # Nothing that all of them could time again.
    assert pool(times, five, [[], seen(1.3), [], [], []]) == pool(times, five)


def test_a_processor_is_the_same_whatever_share_of_it_a_device_has() -> None:
    """Two personas have the same cores, half of one and 0.3: they measured 201 and 134 ms of CPU, and trained with 138 and
    157."""

    def device(cpu: tuple[float, float, float], stretch: float) -> LayerTimes:
        one = three(*(stretch * seconds for seconds in cpu))
        runs = tuple((n, n + 1, x, 2 * x) for n, x in enumerate(one.forward) if math.isfinite(x))
        return msgspec.structs.replace(one, pieces=runs, stretch=stretch, observed=((0, 1, stretch, stretch),))

    nan = math.nan
    times = [
        device((1.1, 2.2, 3.3), 2.0),
        device((0.9, nan, nan), 4.0),
        device((1.0, 2.0, nan), 2.2),
        device((1.0,) * 3, 4.0),
    ]
    four = kinds("aaab", "xyxy")
    found = pool(times, four)
    # The median of seconds of CPU, of all; each in its own share's clock.
    assert found[0].forward == pytest.approx((2.2, 4.4, 6.6))
    assert found[1].forward == pytest.approx([4.0 / 2.1 * seconds for seconds in (2.2, 4.4, 6.6)])
    assert found[1].update == pytest.approx([4.0 / 2.1 * 0.5] * 3)
    assert [one.stretch for one in found] == [2.1, 4.0, 2.1, 4.0]
    assert [one.observed for one in found] == [one.observed for one in times]
    assert found[3] == times[3]
    # One that is no slower than its share says is not asked again; one that is, is.
    assert doubted(times, four) == [[]] * 4
    times[1] = device((1.6, 3.2, nan), 4.0)
    asked = doubted(times, four)
    assert asked == [[(0, 1), (1, 2)]] * 3 + [[]]
    seen = [[(0, 1, took, took)] for took in (2.0, 4.4, 2.2)]
    assert pool(times, four, [*seen, []])[1].forward[0] == pytest.approx(4.0 / 2.1 * 2.2)
    seen[1] = [(0, 1, 8.0, 8.0)]
    assert pool(times, four, [*seen, []])[1] == times[1]


def test_devices_of_a_kind_begin_with_different_pieces() -> None:
    order = bit_reversed_order(10)
    found = [probing_order(order, place, 4) for place in range(4)]
    assert all(sorted(one) == list(range(10)) and one[0] == order[0] for one in found)
    assert {n for one in found for n in one[:4]} == set(range(10))
    assert probing_order(order, 0, 1) == order
    assert probing_order([0], 1, 2) == [0]
    assert probing_order([], 1, 2) == []

"""Micro-batches dealt to the members of groups, and the schedules that follow."""

import itertools

import numpy as np
import pytest

from accept_mpi.pipeline.deal import Deal, Slot, of_member, widths
from accept_mpi.pipeline.schedule import KINDS, Action, actions, max_in_flight
from accept_mpi.pipeline.simulator import PackedSchedule, action_seconds, simulate, simulate_packed
from accept_mpi.plan import StagePlan

SECONDS = {"F": 1.0, "B": 2.0, "W": 1.0, "U": 0.1}


def group(*paces: float) -> StagePlan:
    return StagePlan(start=0, stop=1, ranks=tuple(range(len(paces))), paces=paces)


def dealt(kind: str, stages: list[StagePlan], counts: list[int], slack: int) -> tuple[list[list[Action]], list[int]]:
    """Each device's actions, and its stage."""
    walks, of = [], []
    for s, stage in enumerate(stages):
        every = actions(kind, s, len(stages), counts, slack, widths=widths(stages))  # type: ignore[arg-type]
        table = Deal.of(stage).table(max(counts))
        for member in range(len(stage.ranks)):
            walks.append(list(of_member(every, table, member)))
            of.append(s)
    return walks, of


def test_tables() -> None:
    assert Deal((1.0, 1.0)).table(5) == [0, 1, 0, 1, 0]
    assert Deal((1.0, 7.0)).table(16) == [0] * 7 + [1] + [0] * 7 + [1]
    assert Deal((7.0, 1.0)).table(3) == [1, 1, 1]
    assert [Deal(paces).width for paces in ((1.0,), (1.0, 1.0), (1.0, 7.0), (2.0, 1.0, 1.0), (0.1, 0.1, 0.1))] == [
        1,
        2,
        8,
        5,
        3,
    ]


def test_a_shorter_step_has_the_beginning_of_a_longer_ones_table() -> None:
    rng = np.random.default_rng(0)
    for members in range(1, 7):
        deal = Deal(tuple(rng.uniform(0.2, 3, members)))
        assert all(deal.table(count) == deal.table(32)[:count] for count in range(33))


def test_faster_members_get_more() -> None:
    rng = np.random.default_rng(1)
    for _ in range(50):
        deal = Deal(tuple(rng.uniform(0.2, 3, rng.integers(2, 7))))
        for count in (16, 64):
            took = np.bincount(deal.table(count), minlength=len(deal.paces)) * deal.paces
            assert took.max() <= count / sum(1 / pace for pace in deal.paces) + max(deal.paces), (
                "no better deal exists but for one"
            )


@pytest.mark.parametrize("kind", KINDS)
def test_every_schedule_of_every_deal(kind: str) -> None:
    """Complete, in order, within bounds and free of deadlock, for groups of up to 6 members and up to 16 micro-batches."""
    rng = np.random.default_rng(2)
    shapes = [(r,) for r in range(1, 7)] + [(2, 1), (1, 2), (1, 3, 1), (2, 2), (3, 1, 2), (1, 1, 4), (2, 1, 1, 2)]
    for shape, equal, slack in itertools.product(shapes, (True, False), (0, 2)):
        stages = [group(*(np.ones(r) if equal else rng.uniform(0.2, 2, r)).tolist()) for r in shape]
        for count in (1, 2, 3, 5, 8, 16):
            counts = [count, count, max(1, count - 1)]
            walks, of = dealt(kind, stages, counts, slack)
            what = f"{kind} {shape} {count}"
            for s in range(len(stages)):
                mine = [walk for walk, stage in zip(walks, of, strict=True) if stage == s]
                for letter in "FB":
                    places = sorted(a[1:3] for walk in mine for a in walk if a.kind == letter)
                    assert places == [(step, k) for step, n in enumerate(counts) for k in range(n)], what
                most = max_in_flight(kind, s, len(stages), sum(counts), slack, widths(stages))  # type: ignore[arg-type]
                for walk in mine:
                    assert [a.step for a in walk if a.kind == "U"] == [0, 1, 2], what
                    for letter in "FB":
                        assert [a[1:3] for a in walk if a.kind == letter] == sorted(a[1:3] for a in walk if a.kind == letter)
                    ends = {a.step: i for i, a in enumerate(walk) if a.kind == "U"}
                    assert all(i < ends[a.step] for i, a in enumerate(walk) if a.kind != "U"), what
                    flying = list(itertools.accumulate({"F": 1, "B": -1}.get(a.kind, 0) for a in walk))
                    assert max(flying) <= most, what
            simulate(walks, lambda d, a: SECONDS[a.kind], lambda a, b: 0.3, stages=of, sums=lambda s: 0.5)


def test_a_group_of_two_is_twice_as_fast() -> None:
    """A stage twice as long as the others does not slow the pipeline if two devices share it."""
    stages = [group(1, 1), group(1), group(1)]
    walks, of = dealt("1f1b-async", stages, [8] * 10, 2)
    run = simulate(walks, lambda d, a: {"F": 1, "B": 2, "U": 0}[a.kind] * (2.0 if of[d] == 0 else 1.0), stages=of)
    assert run.makespan < 1.06 * 80 * 3


def test_a_slow_member_does_not_stop_the_others() -> None:
    """Members of speeds 7:1 before a stage as fast as both together."""
    stages = [group(8 / 7, 8.0), group(1)]
    walks, of = dealt("1f1b-async", stages, [16] * 10, 2)
    paces = [8 / 7, 8.0, 1.0]
    run = simulate(walks, lambda d, a: {"F": 1, "B": 2, "U": 0}[a.kind] * paces[d], stages=of)
    assert run.makespan < 1.1 * 160 * 3


def test_updates_hide_the_sum_of_gradients() -> None:
    """Asynchronously, members go on while their gradients are summed."""
    stages = [group(1, 1), group(0.5)]
    walks, of = dealt("1f1b-async", stages, [4] * 20, 2)

    def makespan(seconds: float) -> float:
        took = {"F": 1.0, "B": 2.0, "U": 0.0}
        return simulate(walks, lambda d, a: took[a.kind] / (1 + of[d]), stages=of, sums=lambda s: seconds).makespan

    assert makespan(2.5) < 1.05 * makespan(0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_lists_of_groups_take_what_lists_take(kind: str) -> None:
    """The simulator's kernel against its plain loop, with groups."""
    rng = np.random.default_rng(4)
    for shape in ((2,), (2, 1), (1, 3, 1), (2, 2, 1)):
        stages = [group(*rng.uniform(0.5, 2, r).tolist()) for r in shape]
        counts = [5, 8, 2]
        walks, of = dealt(kind, stages, counts, 1)
        seconds, transfers = rng.uniform(0.5, 2, (len(of), 4)), rng.uniform(0, 2, (len(of), len(of)))
        sums = rng.uniform(0, 3, len(stages))
        plain = simulate(
            walks,
            lambda d, action, seconds=seconds: action_seconds(seconds, d, action),
            lambda a, b, transfers=transfers: float(transfers[a, b]),
            stages=of,
            sums=lambda s, sums=sums: float(sums[s]),
        )
        starts, ends = simulate_packed(PackedSchedule(walks, counts, of), seconds, transfers, sums)
        assert starts.tolist() == pytest.approx([start for spans in plain.spans for start, _ in spans])
        assert ends.tolist() == pytest.approx([end for spans in plain.spans for _, end in spans])


def test_lanes_are_slots_of_their_own() -> None:
    """A member of two lanes and twice the pace takes as many micro-batches in each lane as a member of one."""
    deal = Deal((1.0, 2.0), (2, 1))
    assert deal.slots == [Slot(0, 0), Slot(0, 1), Slot(1, 0)]
    assert deal.slots_of(6) == [Slot(0, 0), Slot(0, 1), Slot(1, 0)] * 2
    assert deal.table(6) == [0, 0, 1, 0, 0, 1]
    assert deal.width == 3
    assert Deal((1.0,), (3,)).slots_of(4) == [Slot(0, 0), Slot(0, 1), Slot(0, 2), Slot(0, 0)]
    assert Deal((1.0,), ("F+B",)).slots == [Slot(0, 0)]
    assert [Deal((1.0,), lanes).width for lanes in ((1,), (3,), ("F+B",))] == [1, 3, 2]

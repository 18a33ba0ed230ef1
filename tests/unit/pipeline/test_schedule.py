"""Schedules: complete, in order, free of deadlock, within their published bounds (torchtitan's dry run over odd sizes)."""

import itertools

import numpy as np
import pytest

from accept_mpi.pipeline.schedule import (
    KINDS,
    Action,
    Updates,
    _zero_bubble,
    actions,
    forward_only,
    grid,
    max_in_flight,
    parse,
)
from accept_mpi.pipeline.simulator import PackedSchedule, simulate, simulate_packed

SIZES = [(stages, count) for stages in range(1, 9) for count in range(1, 17)]
UNIT = {"F": 1.0, "B": 1.0, "W": 1.0, "U": 0.0, "E": 1.0}
WHOLE_BACKWARD = UNIT | {"B": 2.0}  # where B computes weight gradients too


def walks(kind, stages: int, counts: list[int], slack: int = 0, vertical_sync: bool = False) -> list[list[Action]]:
    return [actions(kind, s, stages, counts, slack, vertical_sync) for s in range(stages)]


def times(kind):
    table = UNIT if kind == "zero-bubble" else WHOLE_BACKWARD
    return lambda stage, action: table[action.kind] + (table["W"] if action.kind == "B" and action.whole else 0.0)


@pytest.mark.parametrize("slack", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_complete_in_order_and_within_the_bound(kind, slack: int) -> None:
    for stages, count in SIZES:
        for counts in ([count], [count, 1, count]):
            for stage, walk in enumerate(walks(kind, stages, counts, slack)):
                what = f"{kind}, stage {stage} of {stages}, {counts}: {' '.join(map(str, walk))}"
                every = [(step, k) for step, c in enumerate(counts) for k in range(c)]
                for letter in "FB":
                    assert [(a.step, a.micro_batch) for a in walk if a.kind == letter] == every, what
                # All weights' gradients, in the order of micro-batches.
                done = [a for a in walk if a.kind == "W" or (a.kind == "B" and (a.whole or kind != "zero-bubble"))]
                assert [(a.step, a.micro_batch) for a in done] == every, what
                whole = [{a.kind for a in walk if a.whole and (a.step, a.micro_batch) == one} for one in every]
                assert all(kinds in (set(), {"F", "B"}) for kinds in whole), what
                assert [a.step for a in walk if a.kind == "U"] == list(range(len(counts))), what
                place = {(a.kind, a.step, a.micro_batch): i for i, a in enumerate(walk)}
                for step, k in every:
                    assert place["F", step, k] < place["B", step, k], what
                    assert place["B", step, k] < place["U", step, -1], what
                    if ("W", step, k) in place:
                        assert place["B", step, k] < place["W", step, k] < place["U", step, -1], what
                in_flight = list(itertools.accumulate((a.kind == "F") - (a in done) for a in walk))
                assert max(in_flight) <= max_in_flight(kind, stage, stages, sum(counts), slack), what
                assert in_flight[-1] == 0


@pytest.mark.parametrize("slack", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_no_deadlock_at_any_size(kind, slack: int) -> None:
    for stages, count in SIZES:
        for counts in ([count], [count, 1], [1, count, 2]):
            simulate(walks(kind, stages, counts, slack), times(kind), lambda source, target: 0.3)


@pytest.mark.parametrize("slack", [0, 1, 2])
def test_all_stages_have_the_version_that_vertical_sync_asks_for(slack: int) -> None:
    for widths in itertools.product((1, 2, 4), repeat=3):
        asked = []
        for stage in range(3):
            made, versions = 0, {}
            for action in actions("1f1b-async", stage, 3, [3, 4, 1, 5], slack, True, widths):
                if action.kind == "U":
                    made += 1
                elif action.kind == "F":
                    assert action.version <= made, (widths, stage, action)
                    versions[action.step, action.micro_batch] = action.version
            asked.append(versions)
        assert asked[0] == asked[1] == asked[2], widths
        assert list(asked[0].values()) == sorted(asked[0].values())


def test_the_last_stage_computes_with_the_newest_weights() -> None:
    """In a group and in lanes, too, whatever the stages before it are: learning rests on that."""
    for widths in [(4,), *itertools.product((1, 2, 4), repeat=3)]:
        made, stages = 0, len(widths)
        for action in actions("1f1b-async", stages - 1, stages, [3, 4, 1, 5], 1, widths=widths):
            assert action.version == action.step == made
            made += action.kind == "U"


def test_published_bounds() -> None:
    """PipeDream: P - s. GPipe: all. ZB-H1: P. Slack 1: Asteroid's 2 (P - s) - 1."""
    assert [max_in_flight("1f1b", s, 4, 16) for s in range(4)] == [4, 3, 2, 1]
    assert [max_in_flight("1f1b", s, 4, 16, slack=1) for s in range(4)] == [7, 5, 3, 1]
    assert [max_in_flight("gpipe", s, 4, 16) for s in range(4)] == [16] * 4
    assert [max_in_flight("zero-bubble", s, 4, 16) for s in range(4)] == [4] * 4


def test_bubbles_of_a_uniform_pipeline() -> None:
    """1F1B: (P-1)(F+B+W). ZB-H1: (P-1)(F+B-W) (Qi et al., table 2), smaller for any number of micro-batches."""
    for stages, count in SIZES:
        if stages == 1:
            continue
        one = simulate(walks("1f1b", stages, [count]), times("1f1b"))
        zero = simulate(walks("zero-bubble", stages, [count]), times("zero-bubble"))
        assert zero.bubble(0) < one.bubble(0)
        if count >= stages:
            assert one.bubble(0) == pytest.approx((stages - 1) * 3)
            assert zero.bubble(0) == pytest.approx(stages - 1)


@pytest.mark.parametrize("slack", [2, 3])
def test_what_is_put_off_last_is_never_slower_than_zb_h1(slack: int) -> None:
    for (stages, count), transfer in itertools.product(SIZES, (0.0, 0.1, 0.5, 1.5)):
        admitted = [max_in_flight("1f1b", s, stages, count, slack) for s in range(stages)]
        published = [[Action(kind, 0, k) for kind, k in _zero_bubble(admitted[s], s, count, 0)] for s in range(stages)]
        ours = [walk[:-1] for walk in walks("zero-bubble", stages, [count], slack)]
        for put_off in (0.0, 0.15):  # what putting W off costs
            table = {"F": 1.1, "B": 0.9 + put_off, "W": 1.0}

            def seconds(stage: int, action: Action, table: dict[str, float] = table) -> float:
                return 1.9 if action.whole and action.kind == "B" else table[action.kind]

            def link(boundary: int, way: str, transfer: float = transfer) -> float:
                return transfer

            mine, other = (simulate(one, seconds, link).makespan for one in (ours, published))
            assert mine <= other * (1 + 1e-9), (stages, count, transfer)
            if put_off and count >= 4 * stages > 4:
                assert mine < 0.99 * other, (stages, count, transfer)


def test_asynchronous_has_no_bubble_between_steps() -> None:
    one_step = simulate(walks("1f1b-async", 4, [8]), times("1f1b")).makespan
    ten_steps = simulate(walks("1f1b-async", 4, [8] * 10), times("1f1b")).makespan
    assert ten_steps == pytest.approx(one_step + 9 * 8 * 3)


def test_slack_hides_transfers() -> None:
    """With transfers as long as F, the published bound stalls; one more micro-batch a boundary does not."""

    def makespan(slack: int) -> float:
        return simulate(walks("1f1b-async", 4, [8] * 8, slack), times("1f1b"), lambda source, target: 1.0).makespan

    assert makespan(1) < 1.1 * 64 * 3 < makespan(0)


def test_asynchronous_versions() -> None:
    """F computes with as many updates as its stage has made by then; with vertical sync, as stage 0 has."""
    for stages, count in SIZES:
        plain = walks("1f1b-async", stages, [count] * 3, slack=1)
        synced = walks("1f1b-async", stages, [count] * 3, slack=1, vertical_sync=True)
        first = {a[1:3]: a.version for a in plain[0] if a.kind == "F"}
        for walk, same in zip(plain, synced, strict=True):
            updates = 0
            for action in walk:
                assert action.version == updates
                updates += action.kind == "U"
            assert all(a.version == first[a[1:3]] for a in same if a.kind == "F")


@pytest.mark.parametrize("slack", [0, 2])
def test_delayed_versions(slack: int) -> None:
    """All stages compute a step with the weights from before the last update but one, however many they are. Two versions
    are enough: when a step is updated, no micro-batch of an earlier one is in flight."""
    for stages, count in SIZES:
        for walk in walks("1f1b-delayed", stages, [count, count, 1, count], slack):
            updates, left = 0, set()
            for action in walk:
                if action.kind == "U":
                    assert updates == action.step
                    updates += 1
                    assert not [step for step, _ in left if step <= action.step]
                    continue
                assert action.version == action.step - 1
                assert updates >= action.version  # that update has been made
                assert updates <= action.step
                (left.add if action.kind == "F" else left.remove)(action[1:3])


@pytest.mark.parametrize("slack", [0, 1, 2])
def test_late_updates_come_directly_before_the_forward_that_needs_them(slack: int) -> None:
    """And nothing else moves: stages compute the same actions in the same order."""
    for stages, count in SIZES:
        counts = [count, count, 1, count, count]
        for stage in range(stages):
            usual = actions("1f1b-delayed", stage, stages, counts, slack)
            late = actions("1f1b-delayed", stage, stages, counts, slack, updates="late")
            assert [a for a in late if a.kind != "U"] == [a for a in usual if a.kind != "U"]
            assert [a for a in late if a.kind == "U"] == [a for a in usual if a.kind == "U"]
            for step in range(len(counts)):
                at = next(n for n, a in enumerate(late) if a.kind == "U" and a.step == step)
                assert all(a.step > step for a in late[at + 1 :])
                if step + 2 < len(counts):
                    assert (late[at + 1].kind, late[at + 1].step) == ("F", step + 2)


@pytest.mark.parametrize("slack", [0, 1, 2])
@pytest.mark.parametrize("updates", ["late", "prompt"])
def test_no_ring_of_stages_that_wait_for_each_other(slack: int, updates: Updates) -> None:
    """Where updates wait for other stages: a late one until their last B of the step is over, a prompt one for theirs."""
    for stages, count in SIZES:
        for wide in ([1] * stages, [2] * stages, [3, *[1] * (stages - 1)], [*[1] * (stages - 1), 3]):
            counts = [count, count, 1, count, count]
            left = [actions("1f1b-delayed", s, stages, counts, slack, False, wide, updates)[::-1] for s in range(stages)]
            done = [set[tuple[str, int, int]]() for _ in range(stages)]
            met = [set[int]() for _ in range(stages)]
            """Steps whose norms a stage has told."""
            moved = True
            while moved:
                moved = False
                for s, mine in enumerate(left):
                    while mine:
                        kind, step, k, *_ = mine[-1]
                        if kind == "U":
                            if updates == "prompt":
                                met[s].add(step)
                            ready = all(step in told for told in met)
                        elif kind == "F":
                            ready = s == 0 or ("F", step, k) in done[s - 1]
                        else:
                            ready = s == stages - 1 or ("B", step, k) in done[s + 1]
                        if not ready:
                            break
                        done[s].add((kind, step, k))
                        if updates == "late" and kind == "B" and k == counts[step] - 1:
                            met[s].add(step)
                        mine.pop()
                        moved = True
            assert not any(left), (stages, count, wide)


def test_delayed_has_no_bubble_where_a_step_has_enough_micro_batches() -> None:
    """Three for each stage, as with a slack of 2 as many are in flight; with less a step waits for the last but one."""

    def seconds(kind: str, count: int, steps: int) -> float:
        return simulate(walks(kind, 4, [count] * steps, 2), times("1f1b"), lambda source, target: 1.0).makespan

    for count in (9, 12):
        assert seconds("1f1b-delayed", count, 9) == pytest.approx(seconds("1f1b-async", count, 9), rel=0.01)
    assert seconds("1f1b-delayed", 3, 9) > 1.2 * seconds("1f1b-async", 3, 9)


def test_prints_and_parses() -> None:
    for kind in KINDS:
        for walk in walks(kind, 3, [4, 2]):
            again = parse(" ".join(map(str, walk)))
            assert [a[:3] for a in again] == [a[:3] for a in walk]
            assert [a.whole for a in again if a.kind == "B"] == [a.whole for a in walk if a.kind == "B"]


GOLDEN = """\
1f1b
stage 0: F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3 U0
stage 1: F0.0 F0.1 B0.0 F0.2 B0.1 F0.3 B0.2 B0.3 U0
stage 2: F0.0 B0.0 F0.1 B0.1 F0.2 B0.2 F0.3 B0.3 U0
zero-bubble
stage 0: F0.0 F0.1 F0.2 BW0.0 F0.3 BW0.1 BW0.2 BW0.3 U0
stage 1: F0.0 F0.1 B0.0 F0.2 B0.1 W0.0 F0.3 B0.2 W0.1 B0.3 W0.2 W0.3 U0
stage 2: F0.0 B0.0 F0.1 B0.1 F0.2 B0.2 W0.0 F0.3 B0.3 W0.1 W0.2 W0.3 U0
gpipe
stage 0: F0.0 F0.1 F0.2 F0.3 B0.0 B0.1 B0.2 B0.3 U0
stage 1: F0.0 F0.1 F0.2 F0.3 B0.0 B0.1 B0.2 B0.3 U0
stage 2: F0.0 F0.1 F0.2 F0.3 B0.0 B0.1 B0.2 B0.3 U0
"""


def test_golden() -> None:
    text = "".join(f"{kind}\n{grid(walks(kind, 3, [4]))}\n" for kind in ("1f1b", "zero-bubble", "gpipe"))
    assert text == GOLDEN


def test_simulator_names_a_deadlock() -> None:
    with pytest.raises(RuntimeError, match=r"deadlocks: device 0 waits at B0\.0, device 1 waits at F0\.0"):
        simulate([[Action("B", 0, 0), Action("F", 0, 0)], [Action("F", 0, 0)]], times("1f1b"))


def test_evaluation_is_forward_only() -> None:
    assert simulate([forward_only(5)] * 3, lambda s, a: 1.0).makespan == 7


@pytest.mark.parametrize("kind", KINDS)
def test_packed_lists_take_what_lists_take(kind: str) -> None:
    """The simulator's kernel against its plain loop, on random times."""
    rng = np.random.default_rng(3)
    for stages, slack in itertools.product((1, 2, 3, 5), (1, 2)):
        counts = [3, 9, 2]
        lists = walks(kind, stages, counts, slack)
        seconds, transfers = rng.uniform(0.5, 2, (stages, 4)), rng.uniform(0, 3, (stages, stages))
        held = transfers * rng.uniform(0.2, 1, transfers.shape)
        plain = simulate(
            lists,
            lambda s, action, seconds=seconds: float(
                seconds[s, "FBWU".index(action.kind)] + (seconds[s, 2] if action.kind == "B" and action.whole else 0.0)
            ),
            lambda a, b, transfers=transfers: float(transfers[a, b]),
            held=lambda a, b, held=held: float(held[a, b]),
        )
        starts, ends = simulate_packed(PackedSchedule(lists, counts), seconds, transfers, held=held)
        assert starts.tolist() == pytest.approx([start for spans in plain.spans for start, _ in spans])
        assert ends.tolist() == pytest.approx([end for spans in plain.spans for _, end in spans])


def test_packed_lists_that_wait_for_each_other() -> None:
    lists = [parse("F0.0 B0.1 B0.0 F0.1"), parse("F0.0 B0.0 F0.1 B0.1")]
    with pytest.raises(RuntimeError, match="deadlocks"):
        simulate_packed(PackedSchedule(lists, [2]), np.ones((2, 4)), np.ones((2, 2)))

"""The calendar of a run."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from accept_mpi.data.calendar import Calendar, Milestones, Position, in_order, segments


def test_every_sample_once_an_epoch() -> None:
    batches = Calendar(samples=103, batch_size=20, micro_batches=3, seed=1)
    assert batches.steps_per_epoch == 6
    for epoch in (0, 1):
        steps = range(6 * epoch, 6 * epoch + 6)
        seen = np.concatenate([i for step in steps for i in batches.indices(step)])
        assert sorted(seen) == list(range(103))
    assert batches.sizes(0) == [7, 7, 6]
    assert batches.sizes(5) == [3]
    assert [len(i) for i in batches.indices(4)] == batches.sizes(4)


def test_order_depends_on_seed_and_epoch_only() -> None:
    def order(seed: int, step: int) -> list[int]:
        return np.concatenate(Calendar(50, 10, 2, seed).indices(step)).tolist()

    assert order(1, 0) == order(1, 0)
    assert order(1, 0) != order(2, 0)
    assert order(1, 0) != order(1, 5)  # the next epoch


def test_drop_last() -> None:
    batches = Calendar(103, 20, 3, 0, drop_last=True)
    assert batches.steps_per_epoch == 5
    assert {tuple(batches.sizes(step)) for step in range(20)} == {(7, 7, 6)}


def test_test_set_in_order() -> None:
    assert [i.tolist() for i in in_order(5, 2)] == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize(
    ("first", "last", "pauses", "expected"),
    [
        (0, 10, [(0, 0), (0, 0)], [(0, 10)]),
        (0, 10, [(4, 0), (0, 0)], [(0, 4), (4, 8), (8, 10)]),
        (3, 10, [(4, 0), (3, 0)], [(3, 4), (4, 6), (6, 8), (8, 9), (9, 10)]),
        (5, 5, [(1, 0)], []),
        (3, 12, [(4, 1), (0, 0)], [(3, 5), (5, 9), (9, 12)]),
        (3, 12, [(4, -3)], [(3, 5), (5, 9), (9, 12)]),
    ],
)
def test_segments(first: int, last: int, pauses: list[tuple[int, int]], expected: list[tuple[int, int]]) -> None:
    assert [(r.start, r.stop) for r in segments(first, last, pauses)] == expected


def test_the_newest_checkpoint_is_the_last_that_is_kept() -> None:
    for first, last, evaluate, checkpoint, since in itertools.product(
        (0, 7, 23), (1, 23, 24), (0, 4, 30), (0, 5), (-3, 0, 2)
    ):
        for at_end, evaluated in itertools.product((True, False), repeat=2):
            course = Milestones(first, last, evaluate, checkpoint, at_end, since, evaluated)
            kept = [step for step in range(first + 1, last + 1) if course.checkpoints(step)]
            assert course.newest_checkpoint == (kept[-1] if kept else None), course


def test_it_is_known_at_once_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(Milestones, "checkpoints", lambda self, step: asked.append(step))
    assert Milestones(0, 1 << 20, 0, 0, checkpoint_at_end=False).newest_checkpoint is None
    assert len(asked) < 4


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_last_epoch_is_the_same_where_the_calendar_begins_later(drop_last: bool) -> None:
    """An evaluation that a loss has cut short is made again where the run goes on, of a step that was before it."""
    whole = Calendar(20, 8, 2, 0, drop_last)
    for made in range(1, 12):
        later = replace(whole, since=whole.position(made))
        assert later.last_epoch(made) == whole.last_epoch(made) == whole.epoch(made - 1)
        assert later.last_epoch(made + 3) == whole.epoch(made + 2)


@pytest.mark.parametrize("since", [Position(0, 0, 0), Position(7, 3, 16), Position(7, 3, 6), Position(7, 3, 3)])
@pytest.mark.parametrize(
    ("samples", "batch", "micro"), [(16, 16, 4), (18, 16, 4), (34, 16, 4), (66, 16, 4), (5, 16, 4), (7, 4, 2)]
)
def test_steps_that_many_micro_batches_span(samples: int, batch: int, micro: int, since: Position) -> None:
    """It was told as if all steps had as many. With another batch size a rest of an epoch may end shorter than epochs do."""
    if since.seen >= samples:
        return
    calendar = Calendar(samples, batch, micro, 1, since=since)
    counts = [len(calendar.sizes(step)) for step in range(since.step, since.step + 60)]
    for wanted in range(1, 20):
        steps = calendar.spanned(wanted)
        windows = [sum(counts[n : n + steps]) for n in range(60 - steps)]
        fewer = [sum(counts[n : n + steps - 1]) for n in range(60 - steps)]
        assert min(windows) >= wanted, (wanted, steps)
        assert since.seen or min(fewer) < wanted, (wanted, steps)


def test_a_run_that_goes_on_spans_as_many_steps() -> None:
    """Asynchronous clipping takes others' norms of so many steps before, and bases are used so many later."""
    for samples, batch in itertools.product((16, 18, 34, 44, 66), (12, 16)):
        whole = Calendar(samples, batch, 4, 0)
        for made, wanted in itertools.product(range(12), range(1, 30)):
            later = replace(whole, since=whole.position(made))
            assert later.spanned(wanted) == whole.spanned(wanted), (samples, batch, made, wanted)


def test_no_segment_is_endless() -> None:
    """Of 10 million steps each rank made lists first, for half a minute and of a gigabyte."""
    course = Milestones(3, 10**9, 0, 0, checkpoint_at_end=False)
    first, second, *_ = itertools.islice(segments(course.first, course.last, course.pauses(True)), 2)
    assert first == range(3, 1 << 16)
    assert second == range(1 << 16, 1 << 17)
    assert list(segments(3, 6, course.pauses(False))) == [range(3, 4), range(4, 5), range(5, 6)]
    course = Milestones(3, 40, 10, 25, checkpoint_at_end=False, evaluate_from=2)
    ends = [segment.stop for segment in segments(course.first, course.last, course.pauses(True))]
    assert ends == [12, 22, 25, 32, 40]


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_end_is_the_same_where_the_calendar_begins_later(drop_last: bool) -> None:
    whole = Calendar(20, 8, 2, 0, drop_last)
    for epochs in range(1, 4):
        end = whole.end(epochs)
        assert end == epochs * whole.steps_per_epoch
        for made in range(end + 1):
            later = replace(whole, since=whole.position(made))
            assert later.end(epochs) == later.end(epochs, whole=False) == end
    beyond = replace(whole, since=whole.position(whole.end(2) + 1))
    assert (beyond.end(1), beyond.end(1, whole=False)) == (whole.end(2) + 1, whole.end(1))


def test_where_a_run_evaluates_and_keeps_checkpoints() -> None:
    def places(**other: Any) -> tuple[list[int], list[int]]:
        usual = {"evaluate_every": 0, "checkpoint_every": 0, "checkpoint_at_end": False}
        course = Milestones(0, 11, **usual | other)
        steps = range(1, 12)
        return [n for n in steps if course.evaluates(n)], [n for n in steps if course.checkpoints(n)]

    assert places() == ([], [])
    assert places(checkpoint_at_end=True) == ([], [11])
    assert places(checkpoint_every=3, evaluate_from=2) == ([], [3, 6, 9])
    assert places(evaluate_every=4) == ([4, 8, 11], [])
    assert places(evaluate_every=4, evaluate_from=2, checkpoint_every=5) == ([2, 6, 10, 11], [5, 10])
    assert places(evaluate_every=4, evaluate_from=-1, checkpoint_evaluated=True) == ([3, 7, 11], [3, 7, 11])

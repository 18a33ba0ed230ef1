"""Schedules: the actions of each stage, in order. Pure lists that both the worker and the simulator carry out.

Letters: P stages, s a stage (0-based), k a micro-batch. F forward, B backward (only of the stage's inputs if W is separate),
W weight gradients, BW both at once, U update. Three stages, one step of 4 micro-batches, ``transfer_slack`` 0, with time to
the right:

    gpipe   s=0  F0 F1 F2 F3                B0 B1 B2 B3 U
            s=1     F0 F1 F2 F3          B0 B1 B2 B3 U
            s=2        F0 F1 F2 F3 B0 B1 B2 B3 U

    1f1b    s=0  F0 F1 F2             B0 F3 B1    B2    B3 U
            s=1     F0 F1       B0 F2 B1 F3 B2    B3 U
            s=2        F0    B0 F1 B1 F2 B2 F3 B3 U

    zero-   s=0  F0 F1 F2          BW0   F3 BW1   BW2   BW3   U
    bubble  s=1     F0 F1    B0 F2    B1 W0 F3 B2 W1 B3 W2 W3 U
    (ZB-H1) s=2        F0 B0 F1 B1    F2 B2 W0 F3 B3 W1 W2 W3 U

"1f1b-async" is 1f1b over all steps of a segment without a pause between them: F of the next step uses the weights that the
stage has by then (PipeDream's weight stashing), and U follows the B of a step's last micro-batch. The last stage's weights
are always the newest, those of stages before it are older the more is in flight there.

"1f1b-delayed" does not pause either, but all stages compute the F and B of a step with the weights from before the last
update but one (PipeDream-2BW's delay of one step, with at most two versions of the weights). So what is computed does not
depend on the number of stages, their cuts or ``transfer_slack``. A step's first F waits for that update, so one step at most
is in flight there, and two within it (``most_anywhere``):

    step    0    1    2    3       weights that F and B use: those after so many updates
    uses    0    0    1    2

Deferring W has a price (a second pass through memory: 5 to 10 % of MobileNetV2's F + B + W). So stage 0, which sends no
gradients, does not defer. With a ``transfer_slack`` of 2 or more, other stages defer only for the last micro-batches of a
step: for as many as wait there for B, and ``s`` more. With slack, the stages before do not wait for the first gradients. On
equal stages that is never slower than ZB-H1 (tests/unit/pipeline/test_schedule.py), and up to 6 % faster where deferring
costs 6 %.

Sources: GPipe (Huang et al. 2019); 1F1B and its bound (PipeDream, Narayanan et al. 2019, section 3.2); PipeDream-2BW
(Narayanan et al. 2021, section 3.1); ZB-H1 (Qi et al. 2023, section 2.2). ``transfer_slack`` 1 gives Asteroid's K_p
(reconstruction): one more micro-batch per boundary behind the stage, so that a transfer counts like a stage.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, get_args

from accept_mpi.job import ScheduleKind, flows

KINDS: tuple[ScheduleKind, ...] = get_args(ScheduleKind)
DELAY = 1
"""Steps by which the weights that "1f1b-delayed" computes with are older than the newest."""
_SLACK_FOR_WHOLE = 2
Updates = Literal["usual", "prompt", "late"]
"""When stages of "1f1b-delayed" update: as soon as they can, by themselves; all after the same B; or as late as possible."""


class Action(NamedTuple):
    """One action of a stage. ``step`` counts from the segment's first; ``micro_batch`` is -1 for U.

    ``version``: weight version that an F computes with, the number of updates since the segment began ("1f1b-delayed": -1
    before the last one of the segment before).
    """

    kind: str
    step: int
    micro_batch: int
    version: int = 0
    whole: bool = False
    """For zero-bubble's F and B: B computes the weight gradients, too, and there is no W."""

    def __str__(self) -> str:
        if self.kind == "U":
            return f"U{self.step}"
        return f"{self.kind}{'W' if self.kind == 'B' and self.whole else ''}{self.step}.{self.micro_batch}"


def parse(text: str) -> list[Action]:
    """Actions from text, the inverse of ``" ".join(map(str, actions))``; versions are lost."""
    actions = []
    for word in text.split():
        kind = word.rstrip(".0123456789")
        step, _, micro_batch = word[len(kind) :].partition(".")
        actions.append(Action(kind[0], int(step), int(micro_batch) if micro_batch else -1, whole=kind == "BW"))
    return actions


def max_in_flight(
    kind: ScheduleKind, stage: int, stages: int, micro_batches: int, slack: int = 0, widths: Sequence[int] = ()
) -> int:
    """Most micro-batches in flight at ``stage``: those after F, and before B (zero-bubble: before W or BW).

    gpipe: all of a step. 1f1b and its kin: P - s. zero-bubble: P (Qi et al.: the peak of 1F1B, at every stage). Except for
    gpipe, ``slack`` comes on top per boundary behind the stage, and a stage that a group holds counts as many times as it
    works on micro-batches at a time (``widths``; by default 1 for each stage).
    """
    width = widths or [1] * stages
    ahead = slack * (stages - 1 - stage)
    bound = {"gpipe": micro_batches, "zero-bubble": sum(width) + ahead}.get(kind, sum(width[stage:]) + ahead)
    return min(bound, micro_batches)


def most_anywhere(kind: ScheduleKind, micro_batches: int) -> int:
    """Most micro-batches in flight at any stage of any pipeline, with ``micro_batches`` per step. "1f1b-delayed": those of a
    step and of the ``DELAY`` steps before it, since a step's first F waits for the last B of the one before these."""
    return {"1f1b-async": 1 << 30, "1f1b-delayed": (1 + DELAY) * micro_batches}.get(kind, micro_batches)


def waits_for_sum(kind: ScheduleKind, last: bool) -> bool:
    """True if the members of a group compute nothing between a step's last B and its U, while their gradients are summed.
    ``last``: they hold the last stage."""
    return last if kind == "1f1b-async" else not flows(kind)


def actions(
    kind: ScheduleKind,
    stage: int,
    stages: int,
    counts: Sequence[int],
    slack: int = 0,
    vertical_sync: bool = False,
    widths: Sequence[int] = (),
    updates: Updates = "usual",
) -> list[Action]:
    """List of the actions that ``walk`` yields, for the same arguments."""
    return list(walk(kind, stage, stages, counts, slack, vertical_sync, widths, updates))


def walk(
    kind: ScheduleKind,
    stage: int,
    stages: int,
    counts: Sequence[int],
    slack: int = 0,
    vertical_sync: bool = False,
    widths: Sequence[int] = (),
    updates: Updates = "usual",
) -> Iterator[Action]:
    """Yield the actions of ``stage`` for a segment, one after another: a segment may be the whole of a long run.

    ``counts[i]``: micro-batches in the segment's step ``i``; ``slack``: ``Plan.slack``; ``vertical_sync``: F uses the same
    weight version on all stages, the newest that all have ("1f1b-async" only); ``widths``: number of micro-batches that each
    stage works on at a time (``deal.widths``; by default 1), each member of a group on its own part of these actions;
    ``updates``: "prompt" or "late" if updates wait for other stages ("1f1b-delayed"). The pipeline is empty before and after
    a segment; within it only "1f1b-async" and "1f1b-delayed" go from step to step without draining.
    """
    wide = tuple(widths) or (1,) * stages
    if kind == "1f1b-delayed":
        return _delayed(stage, wide, counts, slack, updates)
    if kind == "1f1b-async":
        mine = _asynchronous(stage, wide, counts, slack)
        if not vertical_sync or (stage == 0 and max(wide) == 1):
            return mine
        # Stage 0 has most in flight, so its version is the oldest, unless a group updates later.
        asked = range(stages) if max(wide) > 1 else (0,)
        every = [(a.version for a in _asynchronous(s, wide, counts, slack) if a.kind == "F") for s in asked]
        oldest = map(min, zip(*every, strict=True))
        return (a._replace(version=next(oldest)) if a.kind == "F" else a for a in mine)
    return _synchronous(kind, stage, wide, counts, slack)


def forward_only(count: int) -> list[Action]:
    """Actions of any stage for an evaluation of ``count`` micro-batches."""
    return [Action("E", 0, k) for k in range(count)]


def _synchronous(
    kind: ScheduleKind, stage: int, widths: Sequence[int], counts: Sequence[int], slack: int
) -> Iterator[Action]:
    for step, count in enumerate(counts):
        admitted = max_in_flight("1f1b", stage, len(widths), count, slack, widths)
        whole = _whole(stage, admitted, count, slack) if kind == "zero-bubble" else 0
        for letter, k in _one_step(kind, stage, admitted, count, whole):
            yield Action(letter, step, k, step, k < whole and letter in "FB")
        yield Action("U", step, -1, step)


def _one_step(kind: ScheduleKind, stage: int, admitted: int, count: int, whole: int) -> Iterable[tuple[str, int]]:
    if kind == "gpipe":
        return [("F", k) for k in range(count)] + [("B", k) for k in range(count)]
    if kind == "zero-bubble":
        return _zero_bubble(admitted, stage, count, whole)
    return _one_forward_one_backward(admitted, count)


def _one_forward_one_backward(admitted: int, count: int) -> Iterator[tuple[str, int]]:
    """Yield ``admitted`` forwards, then B and F in turn, then the remaining backwards."""
    for k in range(admitted):
        yield "F", k
    for k in range(count):
        yield "B", k
        if k + admitted < count:
            yield "F", k + admitted


def _whole(stage: int, admitted: int, count: int, slack: int) -> int:
    """Number of a step's first micro-batches whose B computes the weight gradients, too."""
    if stage == 0:
        return count
    return max(0, count - admitted - stage) if slack >= _SLACK_FOR_WHOLE else 0


def _zero_bubble(admitted: int, lag: int, count: int, whole: int) -> list[tuple[str, int]]:
    """1F1B with W deferred by ``lag`` micro-batches, so that B goes upstream early and W fills the gaps at the end. The
    first ``whole`` micro-batches have no W."""
    order = [("F", k) for k in range(admitted)]
    done = whole  # micro-batches whose weight gradients are complete
    for k in range(count):
        order.append(("B", k))
        steady = k + admitted < count
        if k >= whole and (k - done >= lag or not steady):
            order.append(("W", done))
            done += 1
        if steady:
            order.append(("F", k + admitted))
    return order + [("W", k) for k in range(done, count)]


def _asynchronous(stage: int, widths: Sequence[int], counts: Sequence[int], slack: int) -> Iterator[Action]:
    """A group that other stages follow updates only after each of its members has had another micro-batch, since gradients
    are summed meanwhile. The last stage waits for its sum before it goes on, so that its weights are the newest, as those of
    a single device are."""
    total, last = sum(counts), stage == len(widths) - 1
    admitted = max_in_flight("1f1b", stage, len(widths), total, slack, widths)
    delay = widths[stage] if widths[stage] > 1 and not last else 0
    ends = list(itertools.accumulate(counts))
    backs = [min(end + delay, total) for end in ends]
    """Number of B before a step's U."""
    places = {letter: ((step, k) for step, count in enumerate(counts) for k in range(count)) for letter in "FB"}
    number = due = 0
    for back in range(total):
        while number < min(total, back + admitted, ends[due] if last else total):
            yield Action("F", *next(places["F"]), due)
            number += 1
        yield Action("B", *next(places["B"]), due)
        while due < len(counts) and back + 1 == backs[due]:
            yield Action("U", due, -1, due)
            due += 1


def _delayed(stage: int, widths: Sequence[int], counts: Sequence[int], slack: int, when: Updates) -> Iterator[Action]:
    """A group updates later, as asynchronously, but before the next step's last B is over; the first F of the step that uses
    the update waits for that on all stages, so that all of them admit the same micro-batches before the same B. Late
    updates come directly before that F, so that what they wait for has as long as possible."""
    total = sum(counts)
    admitted = max_in_flight("1f1b", stage, len(widths), total, slack, widths)
    own, *others = [0 if when != "usual" or width == 1 else width for width in (widths[stage], *widths)]
    wait = max(others)
    ends = list(itertools.accumulate(counts))
    following = [*ends[DELAY:], *[total] * DELAY]
    free = [0] * (1 + DELAY) + [min(end + wait, after) for end, after in zip(ends, following, strict=True)]
    """Number of B before the first F of a step."""
    if when == "late":
        begins = [min(total, end + 1 - admitted) for end in (*ends[1:], total + admitted)]
        updates = list(map(max, ends, begins))
    else:
        updates = [min(end + own, after) for end, after in zip(ends, following, strict=True)]
    """Number of B before a step's U."""
    forwards, backwards = (enumerate((step, k) for step, count in enumerate(counts) for k in range(count)) for _ in "FB")
    number, coming = next(forwards, (total, (0, 0)))
    due = 0
    for back, (step, k) in backwards:
        while number < total and number < back + admitted and back >= free[coming[0]]:
            yield Action("F", *coming, coming[0] - DELAY)
            number, coming = next(forwards, (total, (0, 0)))
        yield Action("B", step, k, step - DELAY)
        while due < len(counts) and back + 1 >= updates[due]:
            yield Action("U", due, -1, due)
            due += 1


def grid(walks: Sequence[Sequence[Action]]) -> str:
    """Schedule of all stages as text, one line per stage."""
    return "\n".join(f"stage {s}: " + " ".join(map(str, walk)) for s, walk in enumerate(walks))

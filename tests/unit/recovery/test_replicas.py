"""Snapshots in memory: which step all layers are left of, who sends what to whom, when the next one is taken."""

import tracemalloc
from typing import Any

import msgspec
import pytest
import safetensors.torch
import samples
import torch
from hypothesis import given
from hypothesis import strategies as st

from accept_mpi import models
from accept_mpi.codecs.basis import basis_of, seen
from accept_mpi.comm.messages import (
    Committed,
    Control,
    Copied,
    Message,
    ReplanAsked,
    ReplicaChunks,
    StepFlags,
    StopAsked,
    Stopping,
)
from accept_mpi.errors import UserError
from accept_mpi.job import Job, Optimizer, Recovery
from accept_mpi.job_file import parse
from accept_mpi.models.layers import build_layers
from accept_mpi.pipeline.kept_bases import KeptBases
from accept_mpi.pipeline.optimizer import left_behind
from accept_mpi.pipeline.stage import Stage
from accept_mpi.plan import BoundaryCodecs, make_plan, recomputing
from accept_mpi.recovery.barriers import CHECKPOINT, EXTRA, LOCAL, OVER, REPLAN, SNAPSHOT, Barriers, LocalCopies
from accept_mpi.recovery.layer_state import Arriving, Blobs, chunked, copies, fitting, load, pack, states
from accept_mpi.recovery.replicas import Replicas, newest, sources
from accept_mpi.recovery.replication import Replication, Route

JOB = parse(
    '[model]\nname = "cnn"\n[data]\nname = "digits"\n[train]\nsteps = 1\noptimizer = { name = "adamw" }\n'
    '[output]\ndirectory = "run"\n',
    "job",
)


def stage(start: int, stop: int, seed: int, job: Job = JOB) -> Stage:
    chain = models.load("cnn", {"width": 4}, seed)
    return Stage(build_layers(chain, start, stop, seed), job, None, True)


def updated(one: Stage) -> Stage:
    """A stage after an update with made-up gradients."""
    for number, parameter in enumerate(one.parameters):
        parameter.grad = torch.full_like(parameter, 0.1 * (number + 1))
    one.update(0.01, 0)
    return one


def test_the_newest_step_that_every_layer_is_left_of() -> None:
    assert newest([{}, {}], 2) is None
    assert newest([{5: [0, 1]}, {5: [2]}], 3) == 5
    assert newest([{5: [0, 1], 10: [0, 1]}, {5: [2]}], 3) == 5
    assert newest([{5: [0], 10: [0, 1]}, {10: [2]}], 3) == 10


def test_layers_come_from_those_who_hold_them() -> None:
    """Own ones are not sent; several holders share the sending."""
    held = [{7: [0, 1, 2]}, {7: [0, 1, 2]}, {7: [3]}, {}]
    moves = sources(held, 7, [range(0, 1), range(1, 2), range(2, 3), range(3, 4)])
    assert moves == {(0, 2): [2], (2, 3): [3]}
    moves = sources(held, 7, [range(0), range(0), range(0, 1), range(1, 3)])
    assert moves == {(0, 2): [0], (1, 3): [1], (0, 3): [2]}


def test_a_state_comes_back_to_the_bit_on_other_cuts() -> None:
    """Weights, BatchNorm's statistics and the optimizer's tensors, from one stage of all layers to two."""
    whole = updated(stage(0, 5, 1))
    blobs = states(whole)
    assert sorted(blobs) == [0, 1, 2, 3, 4]
    for start, stop in ((0, 2), (2, 5)):
        part = stage(start, stop, 2)
        load(part, {layer: blobs[layer] for layer in range(start, stop)}, JOB.train.optimizer)
        samples.assert_equal(part.weights(), {k: v for k, v in whole.weights().items() if k in part.weights()})
        assert part.optimizer_state()
        samples.assert_equal(
            part.optimizer_state(), {k: v for k, v in whole.optimizer_state().items() if k in part.optimizer_state()}
        )


def test_a_snapshot_takes_no_memory_but_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the tensors: safetensors' own ``save`` takes twice as much, unseen by Python, and twice the time."""
    monkeypatch.delattr(safetensors.torch, "save")
    tensors = {f"{n}": torch.randn(1 << 16) for n in range(32)}
    tracemalloc.start()
    try:
        blob = pack(tensors, {"momentum_buffer/a": torch.zeros(3)})
        assert tracemalloc.get_traced_memory()[1] < 1.2 * len(blob)
    finally:
        tracemalloc.stop()
    assert torch.equal(safetensors.torch.load(blob)["weights/7"], tensors["7"])


class Counted(dict[str, torch.Tensor]):
    """Counts how often somebody goes through it."""

    times = 0

    def items(self) -> Any:
        self.times += 1
        return super().items()


def test_a_state_is_not_gone_through_for_each_parameter() -> None:
    """Of a model of four thousand, that took most of a recovery's time: 11 of 14 seconds."""
    whole = updated(stage(0, 5, 1))
    state = Counted(whole.optimizer_state())
    whole.load(whole.weights(), state)
    assert state.times < len(whole.parameters) / 2


KINDS = (
    Optimizer(), Optimizer(momentum=0.9),
    *(Optimizer(name=name) for name in ("adam", "adamw", "nadam", "lion", "muon")),
)  # fmt: skip


@pytest.mark.parametrize("before", KINDS, ids=lambda one: f"{one.name} {one.momentum}")
def test_another_optimizer_takes_over_state_of_its_own_kind_or_none(before: Optimizer) -> None:
    """Parameter by parameter: of a part of it, values would mean something else. The log says so."""

    def state_of(one: Stage, name: str) -> dict[str, torch.Tensor]:
        every = one.optimizer_state().items()
        return {what: value for what, _, of, value in ((*key.partition("/"), value) for key, value in every) if of == name}

    def with_it(options: Optimizer) -> Stage:
        train = msgspec.structs.replace(JOB.train, optimizer=options)
        return stage(0, 5, 1, msgspec.structs.replace(JOB, train=train))

    old = updated(with_it(before))
    for now in KINDS:
        new, like = with_it(now), updated(with_it(now))
        load(new, states(old), now)
        lost = set()
        for name, _ in new.named_parameters():
            had, has = state_of(old, name), state_of(new, name)
            if had.keys() == state_of(like, name).keys():
                samples.assert_equal(has, had)
            else:
                assert not has
                lost |= {like.is_matrix()[name] or old.is_matrix()[name]} if had else set()
        both = {"muon"} & {before.name, now.name}
        expected = (True in lost, False in lost) if both else (bool(lost), bool(lost))
        assert left_behind(before, now) == expected


def test_bases_go_with_the_last_layer() -> None:
    """To whoever holds it next, if it is the last one there, too; also by way of a host's disk."""
    one, same, longer = updated(stage(0, 2, 1)), stage(0, 2, 2), stage(0, 3, 2)
    for each in (one, same, longer):
        each.bases = KeptBases(each.names[-1], {0: 16})
    values = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    basis = basis_of(seen(values, values.flip(0), 16))
    assert basis is not None
    one.bases.add(12, {0: basis}, 8)
    blobs = states(one)
    names = models.load("cnn", {"width": 4}, 1).names
    assert fitting(blobs, names) == blobs
    options = JOB.train.optimizer
    assert load(same, blobs, options) == 0
    assert same.bases.at(12)[0].back.equal(basis.back)
    assert load(longer, blobs | states(stage(2, 3, 1)), options) == 0
    assert not longer.bases.at(12)


def test_a_part_of_an_optimizers_state_is_not_taken_for_another_kind() -> None:
    whole = updated(stage(0, 5, 1))
    state = {key: value for key, value in whole.optimizer_state().items() if not key.startswith("step/")}
    weights = whole.weights()
    first = whole.names[0]
    mine = [{k: v for k, v in part.items() if k.rpartition("/")[2].startswith(f"{first}.")} for part in (weights, state)]
    with pytest.raises(UserError, match='the checkpoint lacks the optimizer\'s "step" of'):
        load(stage(0, 1, 1), {0: pack(*mine)}, JOB.train.optimizer)


@given(st.dictionaries(st.integers(0, 99), st.binary(min_size=1, max_size=40)), st.integers(1, 30))
def test_states_travel_in_pieces_that_share_their_memory(blobs: dict[int, bytes], size: int) -> None:
    messages, arriving = list(chunked(blobs, size)), Arriving()
    for message in messages:
        arriving.add(message)
    assert arriving.whole == blobs
    lengths = [sum(len(data) for _, _, data in message) for message in messages]
    assert lengths[:-1] == [size] * len(lengths[:-1])
    assert all(data.obj is blobs[layer] for message in messages for layer, _, data in message)


@given(st.data())
def test_what_is_as_in_the_copy_before_is_not_sent(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 20_000), min_size=1, max_size=3))
    before = {layer: bytes(number % 251 for number in range(size)) for layer, size in enumerate(sizes) if size}
    now = {}
    for layer, blob in before.items():
        places = data.draw(st.sets(st.integers(0, len(blob) - 1), max_size=4))
        more = data.draw(st.sampled_from([b"", b"", b"x"]))
        now[layer] = bytes(byte ^ 1 if place in places else byte for place, byte in enumerate(blob)) + more
    arriving = Arriving(before)
    sent = 0
    for message in chunked(now, data.draw(st.integers(1, 9000)), before):
        arriving.add(message)
        sent += sum(len(part) for _, _, part in message if not isinstance(part, int))
    assert arriving.whole == now
    changed = [sum(a != b for a, b in zip(now[n], before[n], strict=False)) for n in now if len(now[n]) == len(before[n])]
    grown = sum(len(blob) for n, blob in now.items() if len(blob) != len(before[n]))
    assert sum(changed) + grown <= sent <= grown + sum(4096 * count + 7 for count in changed)


@pytest.mark.parametrize("changed", [[0], [1], [4], [0, 2], [1, 3], [0, 4], [1, 2, 4]])
def test_what_is_as_before_lies_between_what_is_not(changed: list[int]) -> None:
    """As frozen weights between trained ones do."""
    block = 4096
    before = {7: bytes(number % 251 for number in range(4 * block + 1000))}
    now = bytearray(before[7])
    for place in changed:
        now[place * block + 8] ^= 1
    arriving, sent = Arriving(before), 0
    for message in chunked({7: bytes(now)}, 3000, before):
        arriving.add(message)
        sent += sum(len(part) for _, _, part in message if not isinstance(part, int))
    assert arriving.whole == {7: bytes(now)}
    assert sent == sum(1000 if place == 4 else block for place in changed)


def test_older_and_newer_steps_are_forgotten() -> None:
    replicas = Replicas()
    for step in (1, 2, 3):
        replicas.keep(step, {0: b"abc", 1: b"de"})
    assert replicas.nbytes == 15
    replicas.commit(2)
    assert list(replicas.holdings()) == [2, 3]
    replicas.back_to(2)
    assert replicas.holdings() == {2: [0, 1]}
    assert replicas.get(2, 1) == b"de"


def test_steps_that_are_made_anew_are_forgotten_on_the_disk_too() -> None:
    """Else a later start might resume from a step of the time before the loss."""
    dropped: list[int] = []

    class Disk:
        def write(self, step: int, layers: Blobs) -> None: ...

        def drop_after(self, step: int) -> None:
            dropped.append(step)

    Replicas(Disk()).back_to(2)
    assert dropped == [2]


def test_local_copies_are_states_like_any_other_and_the_newest_are_kept() -> None:
    whole, replicas = stage(0, 5, 1), Replicas()
    replicas.keep(1, {7: b"abc"})
    for step in (1, 2, 3, 4):
        replicas.keep_local(step, copies(whole))
    assert replicas.holdings() == {1: [7], 2: [0, 1, 2, 3, 4], 3: [0, 1, 2, 3, 4], 4: [0, 1, 2, 3, 4]}
    before = states(whole)[2]
    for parameter in whole.parameters:
        parameter.data.zero_()
    assert replicas.get(4, 2) == before
    replicas.back_to(2)
    assert list(replicas.holdings()) == [1, 2]


def test_local_copies_are_as_frequent_as_their_share_of_the_time_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("accept_mpi.recovery.barriers.time.monotonic", lambda: now[0])
    barriers = Barriers(Recovery(replicate_every=1000), 0, True, lambda *_: None, LocalCopies(2, 0.01))

    def flagged(steps: range) -> list[int]:
        found = []
        for step in steps:
            now[0] += 1.0
            if barriers.flags(step) == LOCAL:
                found.append(step)
        return found

    assert flagged(range(10)) == [3, 7]  # every four steps, as long as nothing is known
    barriers.handle(Copied(0, 0.001))
    assert flagged(range(10, 16)) == [10, 12, 14]  # not more often than allowed
    barriers.handle(Copied(1, 0.05))  # the slowest stage counts
    assert flagged(range(16, 30)) == [19, 24, 29]
    barriers.handle(Copied(1, 5.0))  # interrupted by something
    assert flagged(range(30, 46)) == [37, 45]
    barriers.handle(Copied(1, 0.04))
    assert flagged(range(46, 54)) == [49, 53]


class Ranks:
    """Replications of some stages, their messages delivered at once or held back."""

    def __init__(self, count: int, **recovery: Any) -> None:
        self.held: list[tuple[int, Message]] = []
        self.sending = [False] * count
        self.stores = [Replicas() for _ in range(count)]
        self.stages = [stage(s, s + 1, 1) for s in range(count)]
        ranks, on = list(range(count)), recovery.get("replicate_every") != 0
        self.barriers = [Barriers(Recovery(**recovery), 0, on, self.post(s)) for s in ranks]
        self.all = [
            Replication(
                self.stores[s], Route(s, ranks, count), on, self.barriers[s], self.post(s),
                lambda s=s: self.sending[s],  # type: ignore[misc]
            )
            for s in ranks
        ]  # fmt: skip

    def post(self, source: int) -> Any:
        def put(dest: int, control: Control, bulk: bool) -> None:
            self.held.append((dest, Message(source, control)))

        return put

    def deliver(self) -> None:
        while self.held:
            dest, message = self.held.pop(0)
            assert self.all[dest].handle(message.control) or self.barriers[dest].handle(message.control)

    def step(self, step: int) -> int:
        flags = self.barriers[0].flags(step)
        if flags & (SNAPSHOT | EXTRA):
            for replication, one in zip(self.all, self.stages, strict=True):
                replication.begin(step + 1, one, flags)
        return flags


def test_each_state_is_at_the_next_rank_when_it_is_committed() -> None:
    ranks = Ranks(3, replicate_every=4)
    flagged = []
    for step in range(9):
        if ranks.step(step):
            flagged.append(step)
        ranks.deliver()
    assert flagged == [2, 5, 8]  # one more step passes until it is whole: no loss goes back by more than four
    assert [store.holdings() for store in ranks.stores] == [{9: [0, 2]}, {9: [0, 1]}, {9: [1, 2]}]


def test_the_next_one_waits_for_the_one_before() -> None:
    """What is not whole everywhere is not the newest, and the one before is kept."""
    ranks = Ranks(2, replicate_every=1)
    assert ranks.step(0) & SNAPSHOT
    ranks.deliver()
    assert ranks.step(1) & SNAPSHOT
    ranks.sending = [True, True]
    assert ranks.step(2) == EXTRA
    held = [store.holdings() for store in ranks.stores]
    assert newest([held[0]], 2) == 1 == newest([held[1]], 2)
    ranks.deliver()
    assert ranks.step(3) & SNAPSHOT
    assert [store.holdings() for store in ranks.stores] == [{2: [0, 1], 3: [0], 4: [0]}, {2: [0, 1], 3: [1], 4: [1]}]


def test_between_two_snapshots_stages_that_can_send_extra_ones() -> None:
    """The second stage's copy takes long to send; each keeps its own, and the first one's is at the next rank every time."""
    ranks = Ranks(2, replicate_every=1)
    assert ranks.step(0) == SNAPSHOT
    ranks.deliver()
    assert ranks.step(1) == SNAPSHOT
    late = [(dest, message) for dest, message in ranks.held if message.source == 1]
    ranks.held = [(dest, message) for dest, message in ranks.held if message.source == 0]
    ranks.deliver()
    ranks.sending[1] = True
    assert [ranks.step(step) for step in (2, 3)] == [EXTRA, EXTRA]
    ranks.deliver()
    held = [store.holdings() for store in ranks.stores]
    assert held == [{1: [0, 1], 2: [0], 3: [0], 4: [0]}, {1: [0, 1], 2: [0, 1], 3: [0, 1], 4: [0, 1]}]
    assert newest(held[1:], 2) == 4  # without the first stage
    assert newest(held[:1], 2) == 1  # without the second one
    assert [ranks.step(step) for step in (4, 5)] == [EXTRA, 0]  # so many and no more
    ranks.held += late
    ranks.deliver()
    assert [min(store.holdings()) for store in ranks.stores] == [2, 2]
    assert ranks.step(6) == SNAPSHOT


def nbytes(ranks: Ranks) -> int:
    """Bytes of states in the messages that have not been delivered."""
    chunks = [chunk for _, one in ranks.held if isinstance(one.control, ReplicaChunks) for chunk in one.control.chunks]
    return sum(len(data) for _, _, data in chunks if not isinstance(data, int))


def test_weights_that_are_not_trained_are_sent_once() -> None:
    ranks = Ranks(2, replicate_every=1)
    for parameter in ranks.stages[1].parameters:
        parameter.requires_grad_(False)
    sent = []
    for step in range(3):
        updated(ranks.stages[0])
        assert ranks.step(step) & SNAPSHOT
        sent.append(nbytes(ranks))
        ranks.deliver()
        assert ranks.stores[0].get(step + 1, 1) == states(ranks.stages[1])[1]
        assert ranks.stores[1].get(step + 1, 0) == states(ranks.stages[0])[0]
    first, second = (sum(map(len, states(one).values())) for one in ranks.stages)
    assert sent == [first + second, first, first]


def test_what_is_left_of_a_copy_of_the_plan_before_is_passed_over() -> None:
    """Its receiver has nothing to which it could refer."""
    ranks, later = Ranks(2, replicate_every=1), Ranks(2, replicate_every=1)
    ranks.step(0)
    ranks.deliver()
    ranks.step(1)
    place = Route(0, [0, 1], 2)
    new = Replication(Replicas(), place, True, later.barriers[0], later.post(0), lambda: False, 2)
    for dest, message in ranks.held:
        assert dest != 0 or new.handle(message.control)
    assert not later.held


def test_a_group_s_snapshot_is_kept_by_two_members_when_it_is_committed() -> None:
    """A member that is ahead may be lost before the leader has made the step: what was kept before must be there still."""
    held: list[Control] = []
    stores = [Replicas(), Replicas()]
    barriers = Barriers(Recovery(replicate_every=1), 0, True, lambda *_: None)
    members = [
        Replication(
            stores[n], Route(0, [0], 2, n, 2, groups=1), True, barriers,
            lambda dest, control, bulk: held.append(control), lambda: False,
        )
        for n in range(2)
    ]  # fmt: skip
    one = stage(0, 1, 1)

    def deliver() -> None:
        while held:
            control = held.pop(0)
            for member in members if isinstance(control, Committed) else members[:1]:
                assert member.handle(control)

    for member in members:
        member.begin(1, one, SNAPSHOT)
    deliver()
    members[1].begin(2, one, SNAPSHOT)
    deliver()
    assert newest([stores[0].holdings()], 1) == 1
    members[0].begin(2, one, SNAPSHOT)
    deliver()
    assert [store.holdings() for store in stores] == [{2: [0]}, {2: [0]}]


def test_young_s_period_follows_what_a_snapshot_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("accept_mpi.recovery.barriers.time.monotonic", lambda: now[0])
    ranks = Ranks(2, mean_time_between_failures=3600.0)
    now[0] += 2.5
    assert ranks.step(0) & SNAPSHOT
    now[0] += 0.5
    ranks.deliver()
    assert ranks.barriers[0].period == pytest.approx((2 * 0.5 * 3600) ** 0.5)
    now[0] += 59.0
    assert not ranks.step(1)
    now[0] += 2.0
    assert ranks.step(2) & SNAPSHOT


def test_ranks_without_a_stage_are_told_nothing_of_steps() -> None:
    """They take nothing of it, so in a run of weeks what they were told took ever more of their memory."""
    posted: list[tuple[int, Control]] = []
    barriers = Barriers(Recovery(), 0, False, lambda rank, control, _: posted.append((rank, control)))
    plan = make_plan(4, [2], ranks=[[0, 3], 2])
    for step in range(3):
        barriers.tell_all(step, [rank for _, rank in plan.holders])
    assert posted == [(rank, StepFlags(step, 0)) for step in range(3) for rank in (0, 3, 2)]


def test_a_plan_ends_once() -> None:
    barriers = Barriers(Recovery(replicate_every=0), 0, False, lambda *_: None)
    for over, flags in ((False, REPLAN), (True, REPLAN | OVER)):
        assert barriers.handle(ReplanAsked(over))
        assert [barriers.flags(step) for step in range(3)] == [flags, 0, 0]


def test_a_signal_flags_one_checkpoint() -> None:
    ranks = Ranks(2, replicate_every=0)
    assert ranks.step(0) == 0
    ranks.barriers[1].ask_to_stop()
    dest, message = ranks.held.pop()
    assert (dest, message.control) == (0, StopAsked())
    assert ranks.barriers[0].handle(message.control)
    assert ranks.step(1) == CHECKPOINT
    assert (ranks.held[0][0], ranks.held[0][1].control) == (0, Stopping(2))
    assert ranks.step(2) == 0


@pytest.mark.parametrize(
    ("lost", "left", "codecs"),
    [
        ([1], [(0, 4, 0), (4, 6, 2), (6, 9, 3)], [4, 2]),
        ([0], [(0, 4, 1), (4, 6, 2), (6, 9, 3)], [4, 2]),
        ([3], [(0, 2, 0), (2, 4, 1), (4, 9, 2)], [8, 4]),
        ([1, 2], [(0, 4, 0), (4, 9, 3)], [4]),
        ([0, 1, 2], [(0, 9, 3)], []),
        ([0, 1, 2, 3], None, []),
    ],
)
def test_lost_stages_leave_their_layers_to_their_neighbours(
    lost: list[int], left: list[tuple[int, int, int]] | None, codecs: list[int]
) -> None:
    plan = make_plan(9, [2, 4, 6], [BoundaryCodecs(forward=f"uniform:{bits}") for bits in (8, 4, 2)])
    found = plan.without(lost)
    if left is None:
        assert found is None
        return
    assert found is not None
    assert [(stage.start, stage.stop, stage.leader) for stage in found.stages] == left
    assert [codec.forward for codec in found.boundaries] == [f"uniform:{bits}" for bits in codecs]
    again = recomputing(plan, range(4)).without(lost)
    assert again is not None
    assert [stage.recompute for stage in again.stages] == [True] * len(codecs) + [False]

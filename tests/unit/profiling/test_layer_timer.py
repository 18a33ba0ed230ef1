"""Times of layers: all of them, in every schedule, leaving nothing behind; guesses where the budget ends."""

import itertools
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from clocks import Clock
from torch import nn

from accept_mpi import models
from accept_mpi.job import Job
from accept_mpi.job_file import parse
from accept_mpi.models import as_chain
from accept_mpi.models.losses import find_loss
from accept_mpi.pipeline.stage import Stage
from accept_mpi.profiling.layer_timer import Subject, _unchanged, given_to, piece_of, retime, time_layers
from accept_mpi.profiling.layer_times import bit_reversed_order, of_layers, pieces
from accept_mpi.profiling.outline import Outline, outline
from accept_mpi.profiling.timed_piece import TimedPiece, _usual

cross_entropy = find_loss("cross_entropy")

JOB = '[model]\nname="m"\n[data]\nname="d"\n[train]\nsteps=1\noptimizer.momentum=0.9\n[output]\ndirectory="r"\n'


def job(schedule: str = "1f1b") -> Job:
    return parse(JOB, "job", [f"pipeline.schedule={schedule}"])


def mobile() -> tuple[models.Chain, Outline, torch.Tensor]:
    chain = models.load("mobilenetv2", {"width": 0.25}, 0)
    inputs = torch.randn(4, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    return chain, outline(chain, 0, (inputs,)), inputs


@pytest.mark.parametrize("schedule", ["1f1b", "1f1b-async", "zero-bubble"])
def test_every_layer_is_timed(monkeypatch: pytest.MonkeyPatch, schedule: str) -> None:
    clock = Clock(tick=1e-3)
    for module in ("profiling.layer_timer", "profiling.timed_piece", "device.compute"):
        monkeypatch.setattr(f"accept_mpi.{module}.time", clock)
    chain, model, inputs = mobile()
    times = time_layers(
        Subject(chain, model, job(schedule), cross_entropy, (inputs,), torch.zeros(4, dtype=torch.int64)), 300.0
    )
    assert all(times.measured)
    assert min(times.forward) > 0
    assert min(times.backward) >= 0
    assert sum(value > 0 for value in times.backward) > 0.9 * len(chain)
    assert sum(times.update) > 0
    assert (sum(times.weight_gradient) > 0) == (schedule == "zero-bubble")
    assert [piece[:2] for piece in times.pieces] == pieces(model)
    for start, stop, forward, backward in times.pieces:
        assert sum(times.forward[start:stop]) == pytest.approx(forward)
        assert sum(times.backward[start:stop]) == pytest.approx(backward)


def test_pieces_cover_the_model_in_about_equal_parts() -> None:
    chain, model, _ = mobile()
    found = pieces(model)
    assert found[0][0] == 0
    assert found[-1][1] == len(chain)
    assert all(a[1] == b[0] for a, b in itertools.pairwise(found))
    assert 6 <= len(found) <= 10
    small = as_chain(nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 3)))
    assert pieces(outline(small, 0, (torch.zeros(5, 2),))) == [(0, 1), (1, 2)]


def test_nothing_is_left_in_a_users_modules() -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Linear(8, 3))
    chain = as_chain(whole)
    before = {name: value.clone() for name, value in whole.state_dict().items()}
    inputs = torch.randn(5, 6)
    times = time_layers(
        Subject(chain, outline(chain, 0, (inputs,)), job(), cross_entropy, (inputs,), torch.zeros(5, dtype=torch.int64)),
        300.0,
    )
    assert all(times.measured)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(p.grad is None for p in whole.parameters())
    assert not whole[0]._forward_hooks


class Centred(nn.Module):
    """Moves its centre in place, and a backward needs it."""

    def __init__(self, late: bool) -> None:
        """``late``: the first forward makes it."""
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("centre", None if late else torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        if self.centre is None:
            self.centre = torch.ones(6)
        self.centre.mul_(0.9).add_(x.detach().mean(0))
        return x * self.centre


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "1f1b-async", "zero-bubble"])
def test_layers_that_write_into_their_buffers_are_timed(schedule: str, late: bool) -> None:
    """Each micro-batch in flight keeps its own values, as in training."""
    chain = as_chain(nn.Sequential(Centred(late), nn.Tanh(), Centred(late)))
    given = torch.randn(4, 6)
    subject = Subject(chain, outline(chain, 0, (given,)), job(schedule), cross_entropy, (given,), torch.zeros(4).long())
    assert all(time_layers(subject, 0.1).measured)


class Stopped(Clock):
    """That of a process whose quota is used up now and then: by the wall clock some rounds take ten times as long."""

    def thread_time(self) -> float:
        return self._look()

    def monotonic(self) -> float:
        self._looked = getattr(self, "_looked", 0) + 1
        self.now += self.tick
        return self.now + 100 * self.tick * (self._looked // 7)


def test_a_piece_whose_time_is_known_is_not_measured_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses that a quota imposes say nothing about how well the seconds of computing are known."""
    clock = Stopped(tick=1e-3)
    for module in ("profiling.layer_timer", "profiling.timed_piece", "device.compute"):
        monkeypatch.setattr(f"accept_mpi.{module}.time", clock)
    chain, model, _ = mobile()
    subject = Subject(chain, model, job(), cross_entropy, (), torch.zeros(4, dtype=torch.int64))
    start, stop = pieces(model)[3]
    piece, given = piece_of(subject, start, stop), given_to(subject, start, stop)
    assert given is not None
    piece.measure(given.inputs, given.target, 1e6, True, given.tree, given.samples)
    assert 5 <= len(piece._forwards) < 12
    piece.close()


def test_a_device_that_is_stretched_a_little_more_is_unchanged() -> None:
    """A short check has few of the periods of a quota, so that its wall-clock time says less than its CPU seconds."""
    known = of_layers(2.5 * np.full((4, 2), 0.1), 1.0, (), 2.5)
    seconds = 2 * (0.1 + 0.1)
    for longer, stretch, same in ((1.05, 2.5, True), (1.15, 2.5, False), (1.0, 3.0, True), (1.0, 4.0, False)):
        half = stretch * longer * seconds / 2
        assert _unchanged(known, [(0, 2, half, half)], stretch) == same
    assert not _unchanged(known, [], 2.5)


def test_a_known_device_is_only_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As fast as it was: what was known counts. Four times as fast: all is measured again."""
    clock = Clock(tick=1e-3)
    for module in ("profiling.layer_timer", "profiling.timed_piece", "device.compute"):
        monkeypatch.setattr(f"accept_mpi.{module}.time", clock)
    chain, model, inputs = mobile()
    arguments = (Subject(chain, model, job(), cross_entropy, (inputs,), torch.zeros(4, dtype=torch.int64)),)
    whole = time_layers(*arguments, 20.0)
    slower = msgspec.structs.replace(whole, forward=tuple(4 * v for v in whole.forward))
    assert time_layers(*arguments, 20.0, slower).forward == pytest.approx(whole.forward)
    checked = time_layers(*arguments, 20.0, whole)
    assert checked.forward == whole.forward
    assert checked.seconds < 0.7 * whole.seconds


def test_a_slow_device_does_not_spend_its_budget_on_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a piece costs at least: three micro-batches that fill the pipeline, one more, and all of them back. It was seven
    micro-batches, eleven of the first piece, and a host of 0.25 core measured five pieces of ten."""
    chain, model, inputs = mobile()
    passes: list[str] = []

    def counted(way: str) -> Callable[..., Any]:
        original = getattr(Stage, way)

        def count(*args: Any, **more: Any) -> Any:
            passes.append(way)
            return original(*args, **more)

        return count

    for way in ("forward", "backward"):
        monkeypatch.setattr(Stage, way, counted(way))
    monkeypatch.setattr("accept_mpi.profiling.timed_piece._SHORT", 0.0)  # less than a round takes there
    times = time_layers(Subject(chain, model, job(), cross_entropy, (inputs,), torch.zeros(4, dtype=torch.int64)), 0.0)
    assert [run[:2] for run in times.pieces] == [pieces(model)[bit_reversed_order(len(pieces(model)))[0]]]
    assert passes == ["forward"] * 4 + ["backward"] * 4
    assert times.update[0] > 0


def test_passes_that_took_memory_from_the_kernel_do_not_count() -> None:
    """Unless all do: tensors above the allocator's threshold come from there each time."""
    row = np.array([1.0, 2.0])
    passes = [(9000, 9 * row), (2300, 3 * row), (2300, 3 * row), (8, row), (1150, 2 * row), (0, 1.2 * row)]
    assert _usual(passes).tolist() == row.tolist()
    assert _usual([(9000, 9 * row), *((5000 + k, (1 + k) * row) for k in range(3))]).tolist() == [2.0, 4.0]


def test_pieces_that_do_not_fit_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(tick=1e-3)
    for module in ("profiling.layer_timer", "profiling.timed_piece", "device.compute"):
        monkeypatch.setattr(f"accept_mpi.{module}.time", clock)
    chain, model, inputs = mobile()
    arguments = (Subject(chain, model, job(), cross_entropy, (inputs,), torch.zeros(4, dtype=torch.int64)), 300.0)
    needs = [sum(6 * x.parameter_bytes + 4 * x.saved_bytes for x in model.layers[a:b]) for a, b in pieces(model)]
    room = sorted(needs)[len(needs) // 2]
    measured = time_layers(*arguments, room=float(room)).measured
    assert [measured[a] for a, _ in pieces(model)] == [need <= room for need in needs]


def test_a_small_model_is_timed_as_one_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a stage costs by itself would count once for each piece. Without targets, pieces are timed one by one."""
    begun: list[tuple[int, int]] = []
    original = TimedPiece.__init__

    def noted(self: TimedPiece, chain: Any, model: Any, job: Any, start: int, stop: int, loss: Any) -> None:
        begun.append((start, stop))
        original(self, chain, model, job, start, stop, loss)

    monkeypatch.setattr(TimedPiece, "__init__", noted)
    chain = as_chain(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)))
    x = torch.randn(4, 6)
    model = outline(chain, 0, (x,))
    every = [(n, n + 1) for n in range(5)]
    subject = Subject(chain, model, job(), cross_entropy, (x,), torch.zeros(4, dtype=torch.int64))
    times = time_layers(subject, 0.2)
    assert [run[:2] for run in times.pieces] == every
    assert all(times.measured)
    time_layers(subject, 0.2, times)  # known, and looked at in the same way
    assert set(begun) == {(0, 5)}
    begun.clear()
    time_layers(subject._replace(target=None), 3.0)  # long enough on a busy machine
    assert sorted(begun) == every[:-1]


def test_few_pieces_are_spread_over_the_model() -> None:
    assert bit_reversed_order(10)[:4] == [0, 8, 4, 2]
    assert all(sorted(bit_reversed_order(n)) == list(range(n)) for n in range(1, 12))


def test_the_budget_goes_to_pieces_in_the_order_asked() -> None:
    chain, model, inputs = mobile()
    arguments = (Subject(chain, model, job(), cross_entropy, (inputs,), torch.zeros(4, dtype=torch.int64)),)
    few = time_layers(*arguments, 1e-6, order=[3, *range(3), *range(4, 10)])
    assert [piece[:2] for piece in few.pieces] == [pieces(model)[3]]


def test_what_is_missing_is_measured_the_next_time() -> None:
    """A device too slow for its budget gets to know itself run by run."""
    chain, model, inputs = mobile()
    arguments = (Subject(chain, model, job(), cross_entropy, (inputs,), torch.zeros(4, dtype=torch.int64)),)
    known = time_layers(*arguments, 1e-6)
    counts = [sum(known.measured)]
    for _ in range(40):
        known = time_layers(*arguments, 1e-6, known, crowded=True)
        counts.append(sum(known.measured))
        assert [piece[:2] for piece in known.pieces] == [run for run in pieces(model) if known.measured[run[0]]]
        if all(known.measured):
            break
    assert counts[-1] == len(model.layers)
    assert len(set(counts)) > 3


def test_in_a_crowd_what_is_known_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(tick=1e-5)  # else a busy machine does not time all layers
    for module in ("profiling.layer_timer", "profiling.timed_piece", "device.compute"):
        monkeypatch.setattr(f"accept_mpi.{module}.time", clock)
    chain, model, inputs = mobile()
    arguments = (Subject(chain, model, job(), cross_entropy, (inputs,), torch.zeros(4, dtype=torch.int64)),)
    whole = time_layers(*arguments, 2.0)
    far = msgspec.structs.replace(whole, forward=tuple(9 * v for v in whole.forward))
    assert time_layers(*arguments, 2.0, far, crowded=True).forward == far.forward


def test_a_second_look_times_the_pieces_that_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(tick=1e-5)
    for module in ("profiling.layer_timer", "profiling.timed_piece", "device.compute"):
        monkeypatch.setattr(f"accept_mpi.{module}.time", clock)
    chain, model, inputs = mobile()
    every = pieces(model)
    asked = [every[0], every[3], every[-1]]
    found = retime(Subject(chain, model, job(), cross_entropy, (inputs,), torch.zeros(4, dtype=torch.int64)), asked)
    assert [run[:2] for run in found] == asked
    assert all(forward > 0 and backward > 0 for _, _, forward, backward in found)
    # Without data the end of the model cannot be trained.
    assert [run[:2] for run in retime(Subject(chain, model, job(), cross_entropy, (inputs,), None), asked)] == asked[:-1]

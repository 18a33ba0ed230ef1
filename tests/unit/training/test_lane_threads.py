"""Lanes: what follows from actions comes in their order; errors and the end of a run leave no thread behind."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import samples
import torch

from accept_mpi.errors import UserError
from accept_mpi.job_file import parse
from accept_mpi.models.layers import build_stage
from accept_mpi.models.losses import find_loss
from accept_mpi.pipeline.lane_stage import lane_of
from accept_mpi.pipeline.stage import Stage
from accept_mpi.training.lanes import LaneThreads, threads_of


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Lanes set the number of threads of this process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def stage(tmp_path: Path) -> Stage:
    path = samples.write_job(tmp_path / "job.toml", samples.CNN)
    job = parse(path.read_text(), str(path))
    chain = samples.plain(samples.CNN).chain
    found = Stage(build_stage(chain, 0, len(chain), 3), job, find_loss("cross_entropy"), True)
    found.join_group()
    return found


def lanes(tmp_path: Path, kind: object = 2, failed: list[BaseException] | None = None) -> LaneThreads:
    table = [k % 2 for k in range(64)]
    errors = [] if failed is None else failed
    return LaneThreads(stage(tmp_path), kind, 2, table, lambda: None, errors.append)  # type: ignore[arg-type]


def alive() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("lane ")]


def test_threads_of_lanes() -> None:
    assert threads_of(2, 4) == [2, 2]
    assert threads_of(4, 4) == [1] * 4
    assert threads_of(3, 4) == [1] * 3
    assert threads_of("F+B", 2) == [1, 1]
    assert threads_of("F+B", 3) == [1, 2]
    assert threads_of("F+B", 6) == [2, 4]


def test_what_follows_comes_in_order(tmp_path: Path) -> None:
    """The first lane takes long over each of its actions."""
    computing, followed = lanes(tmp_path), []
    for k in range(12):
        computing.do("F", 0, k, lambda _, k=k: time.sleep(0.02 if k % 2 == 0 else 0) or k, followed.append)
    computing.join()
    assert followed == list(range(12))
    computing.close()
    assert not alive()


def test_lanes_compute_at_the_same_time(tmp_path: Path) -> None:
    computing, both = lanes(tmp_path), threading.Barrier(2)
    for k in range(2):
        computing.do("F", 0, k, lambda _: both.wait(10), lambda _: None)
    computing.join()
    computing.close()


def test_forward_beside_backward_keeps_dependencies(tmp_path: Path) -> None:
    """B waits for its F, and F for all Bs before it in the list."""
    computing, order = lanes(tmp_path, "F+B"), []

    def act(kind: str, k: int, seconds: float) -> None:
        computing.do(kind, 0, k, lambda _: (time.sleep(seconds), order.append(f"{kind}{k}")), lambda _: None)

    for kind, k, seconds in (("F", 0, 0.05), ("F", 1, 0.0), ("B", 0, 0.05), ("F", 2, 0.0), ("B", 1, 0.0), ("B", 2, 0.0)):
        act(kind, k, seconds)
    computing.join()
    computing.close()
    assert order.index("F0") < order.index("B0") < order.index("F2") < order.index("B2")


def test_each_lane_computes_with_its_own_number_of_threads(tmp_path: Path) -> None:
    """Torch gives a thread, at its first parallel region, the number that any thread has set last: B's beside F."""
    computing = LaneThreads(stage(tmp_path), "F+B", 3, [0], lambda: None, lambda _: None)
    found, begun = {}, threading.Event()

    def act(kind: str, first: bool) -> None:
        begun.set() if not first else begun.wait(10)
        found[kind] = torch.get_num_threads()

    computing.do("F", 0, 0, lambda _: act("F", True), lambda _: None)
    computing.do("B", 0, 1, lambda _: act("B", False), lambda _: None)
    computing.join()
    computing.close()
    assert found == {"F": 1, "B": 2}


def test_an_error_ends_all(tmp_path: Path) -> None:
    failed: list[BaseException] = []
    computing = lanes(tmp_path, failed=failed)

    def fail(_: Stage) -> None:
        raise ValueError("a layer's")

    computing.do("F", 0, 0, fail, lambda _: None)
    with pytest.raises(ValueError, match="a layer's"):
        computing.join()
    with pytest.raises(ValueError, match="a layer's"):
        computing.do("F", 0, 1, lambda _: None, lambda _: None)
    assert [str(error) for error in failed] == ["a layer's"]
    computing.close()
    assert not alive()


def test_the_end_of_a_run_drops_what_waits(tmp_path: Path) -> None:
    computing, done = lanes(tmp_path), []
    computing.do("F", 0, 0, lambda _: time.sleep(0.1), done.append)
    computing.do("F", 0, 2, lambda _: done.append("late"), done.append)
    computing.close()
    assert "late" not in done
    assert not alive()
    assert torch.get_num_threads() == 2


def test_weights_are_there_once_and_gradients_apart(tmp_path: Path) -> None:
    whole = stage(tmp_path)
    lane = lane_of(whole)
    for one, other in zip(whole.parameters, lane.parameters, strict=True):
        assert one is not other
        assert one.data_ptr() == other.data_ptr()
    lane.parameters[0].grad = torch.ones_like(lane.parameters[0])
    assert whole.parameters[0].grad is None
    assert lane.exchange_gradients()[0] is not None
    assert lane.parameters[0].grad is None


def test_a_stage_that_computes_again_gets_no_lanes(tmp_path: Path) -> None:
    whole = stage(tmp_path)
    whole.found.in_turn = "a layer computes forwards again in its backward"
    with pytest.raises(UserError, match="computes forwards again"):
        lane_of(whole)

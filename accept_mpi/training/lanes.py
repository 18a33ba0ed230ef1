"""Lanes: a rank computes several actions at a time, each in a thread of its own (ICPADS 2022; k whole micro-batches).

Passes through small layers gain little from more threads, so several micro-batches side by side, with fewer threads each,
take less time than one after the other (README.md of this folder). The walk of the schedule stays in one thread: it
receives, hands each action to its lane, and waits for all lanes before an update. What follows from an action (sending,
gradients, results) happens in the order of the schedule, so it does not depend on which lane is done first.
"""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch

from accept_mpi.device.cpu import set_own_threads
from accept_mpi.errors import UserError
from accept_mpi.logs.recorder import in_lane
from accept_mpi.pipeline.lane_stage import lane_of
from accept_mpi.pipeline.stage import Stage
from accept_mpi.plan import Lanes

_T = TypeVar("_T")
_QUEUED = 1  # actions that wait for a lane, beside the one that it computes
_LOOK = 0.2  # seconds between two looks at whether the run goes on, while this thread waits for lanes


class Computing(Protocol):
    """How a rank computes its actions."""

    def do(self, kind: str, step: int, k: int, compute: Callable[[Stage], _T], after: Callable[[_T], None]) -> None:
        """Compute an action of micro-batch ``k`` with a stage, then call ``after`` with the result."""

    def join(self) -> None:
        """Wait until everything is computed."""

    def alone(self) -> Any:
        """A context in which nothing else computes."""

    def close(self) -> None:
        """End all threads."""


class InTurn:
    """One action after the other, in the thread that walks the schedule."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def do(self, kind: str, step: int, k: int, compute: Callable[[Stage], _T], after: Callable[[_T], None]) -> None:
        after(compute(self._stage))

    def join(self) -> None:
        """Nothing to wait for."""

    @contextmanager
    def alone(self) -> Iterator[None]:
        yield

    def close(self) -> None:
        """Nothing to end."""


def threads_of(lanes: Lanes, threads: int) -> list[int]:
    """Threads of each lane of a rank that computes with ``threads``. F beside B: a third for F, which takes about half as
    long as B (r0 of the closed form, ``planning.lane_model``)."""
    if lanes == "F+B":
        forward = max(1, round(threads / 3))
        return [forward, max(1, threads - forward)]
    return [max(1, threads // lanes)] * lanes


def _nothing() -> None:
    pass


class _Order:
    """Calls what follows from actions in the order of their numbers, whoever is done first."""

    def __init__(self, lock: threading.Lock) -> None:
        """``lock``: held by whoever calls, since what follows from one kind of action touches what follows from another."""
        self._lock = lock
        self._next = self.given = 0
        self._waiting: dict[int, Callable[[], None]] = {}

    def done(self, number: int, then: Callable[[], None]) -> None:
        with self._lock:
            self._waiting[number] = then
            while self._next in self._waiting:
                self._waiting.pop(self._next)()
                self._next += 1


class _Task:
    """An action in a lane."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work
        self.need: _Task | None = None
        """An action of another lane that must be over before."""
        self.over = threading.Event()


class LaneThreads:
    """Several lanes. Actions are handed over in the schedule's order, by one thread; each lane carries out its own in that
    order."""

    def __init__(
        self, stage: Stage, lanes: Lanes, threads: int, table: Sequence[int], check: Callable[[], None],
        fail: Callable[[BaseException], None],
    ) -> None:  # fmt: skip
        """``threads``: this rank's; ``table``: the lane that takes each micro-batch. ``check`` raises an error that ends the
        run, ``fail`` tells all waiting threads of one. Raises UserError if the stage cannot be computed so."""
        self._threads, self._all, self._check, self._fail = threads_of(lanes, threads), threads, check, fail
        self._beside = lanes == "F+B"
        self._turns = stage.take_turns()
        self._stages = [stage] * 2 if self._beside else [lane_of(stage) for _ in range(int(lanes))]
        self._table = table
        lock = threading.Lock()
        self._orders = {kind: _Order(lock) for kind in "FBW"}
        self._error: BaseException | None = None
        self._idle = threading.Condition()
        self._open = 0
        self._forwards: dict[tuple[int, int], _Task] = {}
        """F beside B: forwards whose backwards have not been handed over."""
        self._back: _Task | None = None
        """F beside B: the newest action of B's lane."""
        self._fresh = [False] * len(self._threads)
        self._queues: list[queue.Queue[_Task | None]] = [queue.Queue(_QUEUED) for _ in self._threads]
        self._running = [
            threading.Thread(target=self._run, args=(lane,), name=f"lane {lane}", daemon=True)
            for lane in range(len(self._threads))
        ]
        for thread in self._running:
            thread.start()

    def do(self, kind: str, step: int, k: int, compute: Callable[[Stage], _T], after: Callable[[_T], None]) -> None:
        self._turns.begin()
        lane = (kind != "F") if self._beside else self._table[k]
        order = self._orders[kind]
        number, order.given = order.given, order.given + 1

        def work() -> None:
            result = compute(self._stages[lane])
            order.done(number, lambda: after(result))

        task = _Task(work)
        if self._beside:  # B waits for its F; F for all Bs before it in the schedule, which bounds what is in flight
            if kind == "F":
                task.need, self._forwards[step, k] = self._back, task
            else:
                task.need, self._back = self._forwards.pop((step, k), None), task
        with self._idle:
            self._open += 1
        self._put(lane, task)

    def _put(self, lane: int, task: _Task) -> None:
        while True:
            self._raise()
            try:
                return self._queues[lane].put(task, timeout=_LOOK)
            except queue.Full:
                self._check()

    def join(self) -> None:
        with self._idle:
            while self._open and self._error is None:
                if not self._idle.wait(_LOOK):
                    self._check()
        self._raise()
        self._turns.check()

    @contextmanager
    def alone(self) -> Iterator[None]:
        self.join()
        torch.set_num_threads(self._all)
        yield
        self._fresh = [False] * len(self._threads)

    def close(self) -> None:
        """End the lanes; what they compute just now is computed to its end, what waits is dropped."""
        self._error = self._error or UserError("the run has ended")
        for lane, thread in enumerate(self._running):
            while thread.is_alive():
                try:
                    self._queues[lane].put(None, timeout=_LOOK)
                    thread.join()
                except queue.Full:
                    continue
        torch.set_num_threads(self._all)
        for lane_stage in self._stages if not self._beside else ():
            lane_stage.close()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self, lane: int) -> None:
        """A lane's thread."""
        in_lane(lane)
        while (task := self._queues[lane].get()) is not None:
            try:
                while task.need is not None and self._error is None and not task.need.over.wait(_LOOK):
                    pass
                if self._error is None:
                    if not self._fresh[lane]:  # a thread's number of threads is its own; evaluation changes MKL's for all
                        set_own_threads(self._threads[lane])
                        self._fresh[lane] = True
                    task.work()
            except BaseException as error:
                if self._error is None:
                    self._error = error
                    self._fail(error)
            finally:
                task.over.set()
                task.work = _nothing  # frees what it refers to
                task.need = None
                with self._idle:
                    self._open -= 1
                    self._idle.notify_all()

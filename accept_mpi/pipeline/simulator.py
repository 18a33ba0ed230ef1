"""Discrete-event simulation of the same action lists that the worker carries out, with given times."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from accept_mpi.direction import Crossing, Direction
from accept_mpi.kernels.options import compiled
from accept_mpi.pipeline.schedule import Action, grid


@dataclass(frozen=True)
class Simulated:
    """Result of a simulated run. All times are in the unit of the given durations."""

    makespan: float
    """Time at which the last action ends."""
    busy: list[float]
    """Compute time of each stage."""
    spans: list[list[tuple[float, float]]]
    """Start and end of each action, for each stage."""
    transfers: list[tuple[int, Direction, int, int, float, float]]
    """(boundary, direction, step, micro-batch, start, end) of each message."""

    def bubble(self, stage: int) -> float:
        """Idle time of ``stage``."""
        return self.makespan - self.busy[stage]


def simulate(
    walks: Sequence[Sequence[Action]],
    duration: Callable[[int, Action], float],
    transfer: Callable[[int, Direction], float] = lambda boundary, direction: 0.0,
    begins: Sequence[float] | None = None,
) -> Simulated:
    """Simulate ``walks`` (one action list per stage): each stage carries out its actions in order, each as soon as its input
    has arrived.

    ``duration(stage, action)`` and ``transfer(boundary, direction)`` return times; a link carries one message at a time per
    direction. ``begins``: time at which each stage can begin; 0 if None. Raises RuntimeError with the grid of actions if the
    lists wait for each other.
    """
    last = len(walks) - 1
    arrived: dict[tuple[str, int, int, int], float] = {}  # (kind, stage, step, micro-batch) -> arrival of its input
    link_free: dict[Crossing, float] = {}
    at = [0] * len(walks)
    clock = list(begins) if begins is not None else [0.0] * len(walks)
    spans: list[list[tuple[float, float]]] = [[] for _ in walks]
    transfers: list[tuple[int, Direction, int, int, float, float]] = []
    moved = True
    while moved:
        moved = False
        for s, walk in enumerate(walks):
            while at[s] < len(walk):
                action = walk[at[s]]
                waits = (action.kind in "FE" and s > 0) or (action.kind == "B" and s < last)
                key = (action.kind, s, action.step, action.micro_batch)
                if waits and key not in arrived:
                    break
                start = max(clock[s], arrived.pop(key, 0.0))
                clock[s] = start + duration(s, action)
                spans[s].append((start, clock[s]))
                at[s] += 1
                moved = True
                peer = s + 1 if action.kind in "FE" else s - 1
                if action.kind in "FEB" and 0 <= peer <= last:
                    link = (min(s, peer), Direction.of(action.kind))
                    begin = max(clock[s], link_free.get(link, 0.0))
                    link_free[link] = begin + transfer(*link)
                    transfers.append((*link, action.step, action.micro_batch, begin, link_free[link]))
                    arrived[(action.kind, peer, action.step, action.micro_batch)] = link_free[link]
    if stuck := [f"stage {s} waits at {walks[s][i]}" for s, i in enumerate(at) if i < len(walks[s])]:
        raise RuntimeError("the schedule deadlocks: " + ", ".join(stuck) + "\n" + grid(walks))
    busy = [sum(end - start for start, end in row) for row in spans]
    return Simulated(makespan=max(clock, default=0.0), busy=busy, spans=spans, transfers=transfers)


class PackedSchedule:
    """Action lists as arrays for ``simulate_packed``: made once, simulated many times.

    ``kinds`` (actions,): index in ``KINDS``, or ``WHOLE``; ``numbers`` (actions,): micro-batch, counted over all steps, -1
    for U; ``steps`` (actions,); ``begins`` (stages + 1,): index of each stage's first action.
    """

    KINDS = "FBWU"
    WHOLE = 4
    """Kind of a B that leaves nothing to W."""

    def __init__(self, walks: Iterable[Sequence[Action]], counts: Sequence[int]) -> None:
        """``counts``: micro-batches of each step. ``walks`` (one per stage) may be a generator."""
        first = np.concatenate([[0], np.cumsum(counts)])
        self.micro_batches = int(first[-1])
        kinds, numbers, steps, begins = [], [], [], [0]
        for walk in walks:
            whole = np.array([action.whole and action.kind == "B" for action in walk], bool)
            letters = np.where(whole, self.WHOLE, [self.KINDS.index(action.kind) for action in walk]).astype(np.int8)
            of_step = np.array([action.step for action in walk], np.int32)
            within = np.array([action.micro_batch for action in walk], np.int32)
            kinds.append(letters)
            steps.append(of_step)
            numbers.append(np.where(within >= 0, first[of_step] + within, -1).astype(np.int32))
            begins.append(begins[-1] + len(walk))
        self.kinds, self.numbers, self.steps = (np.concatenate(parts) for parts in (kinds, numbers, steps))
        self.begins = np.array(begins, np.int64)

    @property
    def stages(self) -> int:
        return len(self.begins) - 1


def action_seconds(seconds: npt.NDArray[np.float64], stage: int, action: Action) -> float:
    """Duration of an action, from ``seconds`` (stages, 4) of F, B, W and U. A B that leaves nothing to W takes the time of
    both."""
    found = float(seconds[stage, PackedSchedule.KINDS.index(action.kind)])
    return found + float(seconds[stage, PackedSchedule.KINDS.index("W")]) if action.kind == "B" and action.whole else found


def simulate_packed(
    packed: PackedSchedule, seconds: npt.NDArray[np.float64], transfers: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Starts and ends (actions,) of all actions, the same that ``simulate`` finds. ``seconds`` (stages, 4): of F, B, W and
    U; ``transfers`` (stages - 1, 2): of activations forward and gradients backward.

    Raises RuntimeError if the lists wait for each other.
    """
    starts, ends = np.empty(len(packed.kinds)), np.empty(len(packed.kinds))
    arrived = np.full((2, packed.stages, packed.micro_batches), np.inf)
    by_kind = np.column_stack([seconds, seconds[:, 1] + seconds[:, 2]])
    arrays = (np.ascontiguousarray(array, np.float64) for array in (by_kind, transfers.reshape(-1, 2)))
    kernel = compiled("accept_mpi.kernels.simulator").run
    if not kernel(packed.kinds, packed.numbers, packed.begins, *arrays, arrived, starts, ends):
        raise RuntimeError("the schedule deadlocks")
    return starts, ends

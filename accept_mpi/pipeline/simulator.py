"""Discrete-event simulation of the same action lists that the worker carries out, with given times."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from accept_mpi.direction import Direction
from accept_mpi.kernels.options import compiled
from accept_mpi.pipeline.schedule import Action, grid


@dataclass(frozen=True)
class Simulated:
    """Result of a simulated run. All times are in the unit of the given durations."""

    makespan: float
    """Time at which the last action ends."""
    busy: list[float]
    """Compute time of each device."""
    spans: list[list[tuple[float, float]]]
    """Start and end of each action, for each device."""
    transfers: list[tuple[int, int, Direction, int, int, float, float]]
    """(sending device, receiving device, direction, step, micro-batch, start, end) of each message."""

    def bubble(self, device: int) -> float:
        """Idle time of a device."""
        return self.makespan - self.busy[device]


def simulate(
    walks: Sequence[Sequence[Action]],
    duration: Callable[[int, Action], float],
    transfer: Callable[[int, int], float] = lambda source, target: 0.0,
    begins: Sequence[float] | None = None,
    stages: Sequence[int] | None = None,
    sums: Callable[[int], float] = lambda stage: 0.0,
) -> Simulated:
    """Simulate ``walks`` (one action list per device): each device carries out its actions in order, each as soon as its
    input has arrived.

    ``stages``: the stage of each device; by default device s holds stage s alone. ``duration(device, action)`` and
    ``transfer(sending device, receiving device)`` return times; a device sends one message at a time per direction, and
    receives one. ``sums(stage)``: time from the last backward of a step in a group to the sum of its gradients, for which U
    waits. ``begins``: time at which each device can begin; 0 if None. Raises RuntimeError with the grid of actions if the
    lists wait for each other.
    """
    run = _Run(walks, stages or range(len(walks)), begins)
    moved = True
    while moved:
        moved = False
        for device, walk in enumerate(walks):
            while run.at[device] < len(walk) and run.carry_out(device, walk[run.at[device]], duration, transfer, sums):
                moved = True
    if stuck := [f"device {d} waits at {walks[d][i]}" for d, i in enumerate(run.at) if i < len(walks[d])]:
        raise RuntimeError("the schedule deadlocks: " + ", ".join(stuck) + "\n" + grid(walks))
    busy = [sum(end - start for start, end in row) for row in run.spans]
    return Simulated(makespan=max(run.clock, default=0.0), busy=busy, spans=run.spans, transfers=run.transfers)


class _Run:
    """State of a simulation."""

    def __init__(self, walks: Sequence[Sequence[Action]], stages: Sequence[int], begins: Sequence[float] | None) -> None:
        self.stages, self.last = stages, max(stages, default=0)
        self.at = [0] * len(walks)
        self.clock = list(begins) if begins is not None else [0.0] * len(walks)
        self.spans: list[list[tuple[float, float]]] = [[] for _ in walks]
        self.transfers: list[tuple[int, int, Direction, int, int, float, float]] = []
        self._arrived: dict[tuple[str, int, int, int], float] = {}
        """Arrival of an action's input, by (kind, device, step, micro-batch)."""
        self._free: dict[tuple[int, Direction, bool], float] = {}
        """When a device's link is free, by (device, direction, whether it sends)."""
        self._holder = {
            (stages[d], a.kind, a.step, a.micro_batch): d for d, walk in enumerate(walks) for a in walk if a.kind in "FEB"
        }
        shared = {stage for stage in stages if list(stages).count(stage) > 1}
        self._left: dict[tuple[int, int], int] = {}
        """Backwards that a group has still to carry out, by (stage, step)."""
        self._summed: dict[tuple[int, int], float] = {}
        for device, walk in enumerate(walks):
            for action in walk if stages[device] in shared else ():
                if action.kind in "BW":
                    key = stages[device], action.step
                    self._left[key] = self._left.get(key, 0) + 1

    def carry_out(
        self,
        device: int,
        action: Action,
        duration: Callable[[int, Action], float],
        transfer: Callable[[int, int], float],
        sums: Callable[[int], float],
    ) -> bool:
        """Carry out a device's next action if its input has arrived; returns False if it has not."""
        stage = self.stages[device]
        key = (action.kind, device, action.step, action.micro_batch)
        start = self.clock[device]
        if (action.kind in "FE" and stage > 0) or (action.kind == "B" and stage < self.last):
            if key not in self._arrived:
                return False
            start = max(start, self._arrived.pop(key))
        of_step = stage, action.step
        if action.kind == "U" and of_step in self._left:
            if self._left[of_step]:
                return False
            start = max(start, self._summed[of_step] + sums(stage))
        end = self.clock[device] = start + duration(device, action)
        self.spans[device].append((start, end))
        self.at[device] += 1
        if action.kind in "BW" and of_step in self._left:
            self._left[of_step] -= 1
            self._summed[of_step] = max(end, self._summed.get(of_step, 0.0))
        peer_stage = stage + 1 if action.kind in "FE" else stage - 1
        if action.kind in "FEB" and 0 <= peer_stage <= self.last:
            way = Direction.of(action.kind)
            peer = self._holder[peer_stage, action.kind, action.step, action.micro_batch]
            out, into = (device, way, True), (peer, way, False)
            begin = max(end, self._free.get(out, 0.0), self._free.get(into, 0.0))
            arrives = self._free[out] = self._free[into] = begin + transfer(device, peer)
            self.transfers.append((device, peer, way, action.step, action.micro_batch, begin, arrives))
            self._arrived[action.kind, peer, action.step, action.micro_batch] = arrives
        return True


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

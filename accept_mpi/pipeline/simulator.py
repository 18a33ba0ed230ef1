"""Discrete-event simulation of the same action lists that the worker carries out, with given times."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from accept_mpi.direction import Direction
from accept_mpi.kernels.cache import compiled
from accept_mpi.pipeline.beside import Needs
from accept_mpi.pipeline.schedule import Action, grid

Between = Callable[[int, int], float]
"""Time of a message by sending and receiving device."""


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
    transfer: Between = lambda source, target: 0.0,
    begins: Sequence[float] | None = None,
    stages: Sequence[int] | None = None,
    sums: Callable[[int], float] = lambda stage: 0.0,
    needs: Needs | None = None,
    held: Between | None = None,
) -> Simulated:
    """Simulate ``walks`` (one action list per device): each device carries out its actions in order, each as soon as its
    input has arrived.

    ``stages``: the stage of each device; by default device s holds stage s alone. ``duration(device, action)`` and
    ``transfer(sending device, receiving device)`` return times. ``held``, likewise: the part of a transfer for which the
    sender sends no other message in that direction, and the receiver receives none; None: all. ``sums(stage)``: time
    from the last backward of a step in a group to the sum of its gradients, for which U waits. ``begins``: time at which
    each device can begin; 0 if None. ``needs``: what else actions wait for. Raises RuntimeError with the grid of actions if
    the lists wait for each other.
    """
    run = _Run(walks, stages or range(len(walks)), begins, needs or {})
    while True:
        # In the order in which actions end, since several devices may send to one.
        ready = []
        for device in range(len(walks)):
            action = run.next_action(device)
            start = None if action is None else run.start(device, action, sums)
            if action is not None and start is not None:
                ready.append((start + duration(device, action), start, device, action))
        if not ready:
            break
        run.carry_out(*min(ready, key=lambda one: one[:3]), transfer, held or transfer)
    if stuck := [f"device {d} waits at {walks[d][i]}" for d, i in enumerate(run.at) if i < len(walks[d])]:
        raise RuntimeError("the schedule deadlocks: " + ", ".join(stuck) + "\n" + grid(walks))
    busy = [sum(end - start for start, end in row) for row in run.spans]
    return Simulated(makespan=max(run.clock, default=0.0), busy=busy, spans=run.spans, transfers=run.transfers)


class _Run:
    """State of a simulation."""

    def __init__(
        self, walks: Sequence[Sequence[Action]], stages: Sequence[int], begins: Sequence[float] | None, needs: Needs
    ) -> None:
        self._walks, self._needs = walks, needs
        self._needed = dict.fromkeys(needs.values(), -1.0)
        """Ends of the actions that others wait for; -1 until they are over."""
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

    def next_action(self, device: int) -> Action | None:
        """The action that a device has to carry out next; None after its last."""
        walk = self._walks[device]
        return walk[self.at[device]] if self.at[device] < len(walk) else None

    def start(self, device: int, action: Action, sums: Callable[[int], float]) -> float | None:
        """Time at which a device can begin its next action; None if what it needs has not arrived."""
        stage = self.stages[device]
        start = self.clock[device]
        if (needed := self._needs.get((device, action))) is not None:
            if self._needed[needed] < 0:
                return None
            start = max(start, self._needed[needed])
        if (action.kind in "FE" and stage > 0) or (action.kind == "B" and stage < self.last):
            arrived = self._arrived.get((action.kind, device, action.step, action.micro_batch))
            return None if arrived is None else max(start, arrived)
        of_step = stage, action.step
        if action.kind == "U" and of_step in self._left:
            return None if self._left[of_step] else max(start, self._summed[of_step] + sums(stage))
        return start

    def carry_out(self, end: float, start: float, device: int, action: Action, transfer: Between, held: Between) -> None:
        """Carry out a device's next action, and send what comes out of it."""
        stage = self.stages[device]
        self.clock[device] = end
        if (device, action) in self._needed:
            self._needed[device, action] = end
        self.spans[device].append((start, end))
        self.at[device] += 1
        of_step = stage, action.step
        if action.kind in "BW" and of_step in self._left:
            self._left[of_step] -= 1
            self._summed[of_step] = max(end, self._summed.get(of_step, 0.0))
        peer_stage = stage + 1 if action.kind in "FE" else stage - 1
        if action.kind in "FEB" and 0 <= peer_stage <= self.last:
            way = Direction.of(action.kind)
            peer = self._holder.get((peer_stage, action.kind, action.step, action.micro_batch), -1)
            if peer < 0:
                raise RuntimeError(f"{action} of stage {stage} is for an action of stage {peer_stage} that is not there")
            out, into = (device, way, True), (peer, way, False)
            begin = max(end, self._free.get(out, 0.0), self._free.get(into, 0.0))
            self._free[out] = self._free[into] = begin + held(device, peer)
            arrives = begin + transfer(device, peer)
            self.transfers.append((device, peer, way, action.step, action.micro_batch, begin, arrives))
            self._arrived[action.kind, peer, action.step, action.micro_batch] = arrives


class PackedSchedule:
    """Action lists as arrays for ``simulate_packed``: made once, simulated many times.

    ``kinds`` (actions,): index in ``KINDS``, or ``WHOLE``; ``numbers`` (actions,): micro-batch, counted over all steps, -1
    for U; ``steps`` (actions,); ``begins`` (devices + 1,): index of each device's first action; ``stages`` (devices,);
    ``holders`` (stages, micro-batches): device that takes a micro-batch; ``left`` (stages, steps): backwards of a step after
    which a group's gradients are summed, 0 for stages that one device holds.
    """

    KINDS = "FBWU"
    WHOLE = 4
    """Kind of a B that leaves nothing to W."""

    def __init__(
        self, walks: Iterable[Sequence[Action]], counts: Sequence[int], stages: Sequence[int] | None = None
    ) -> None:
        """``counts``: micro-batches of each step; ``stages``: of each device, by default one each. ``walks`` (one per
        device) may be a generator."""
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
        devices = len(kinds)
        self.stages = np.arange(devices, dtype=np.int32) if stages is None else np.array(stages, np.int32)
        self.holders = np.zeros((int(self.stages.max(initial=0)) + 1, self.micro_batches), np.int32)
        self.left = np.zeros((len(self.holders), len(counts)), np.int32)
        for d, (stage, kind, number, step) in enumerate(zip(self.stages, kinds, numbers, steps, strict=True)):
            self.holders[stage, number[kind == 0]] = d
            if np.count_nonzero(self.stages == stage) > 1:
                back = np.isin(kind, [self.KINDS.index("B"), self.KINDS.index("W"), self.WHOLE])
                self.left[stage] += np.bincount(step[back], minlength=len(counts)).astype(np.int32)
        self.kinds, self.numbers, self.steps = (np.concatenate(parts) for parts in (kinds, numbers, steps))
        self.begins = np.array(begins, np.int64)


def action_seconds(seconds: npt.NDArray[np.float64], device: int, action: Action) -> float:
    """Duration of an action, from ``seconds`` (devices, 4) of F, B, W and U. A B that leaves nothing to W takes the time of
    both."""
    found = float(seconds[device, PackedSchedule.KINDS.index(action.kind)])
    return found + float(seconds[device, PackedSchedule.KINDS.index("W")]) if action.kind == "B" and action.whole else found


def simulate_packed(
    packed: PackedSchedule,
    seconds: npt.NDArray[np.float64],
    transfers: npt.NDArray[np.float64],
    sums: npt.NDArray[np.float64] | None = None,
    held: npt.NDArray[np.float64] | None = None,
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Starts and ends (actions,) of all actions, the same that ``simulate`` finds. ``seconds`` (devices, 4): of F, B, W and
    U; ``transfers`` (sending device, receiving device), and ``held``, all of them if None; ``sums`` (stages,): of a group's
    gradients, 0 if None.

    Raises RuntimeError if the lists wait for each other.
    """
    starts, ends = np.empty(len(packed.kinds)), np.empty(len(packed.kinds))
    arrived = np.full((2, len(packed.stages), packed.micro_batches), np.inf)
    by_kind = np.column_stack([seconds, seconds[:, 1] + seconds[:, 2]])
    sums = np.zeros(len(packed.holders)) if sums is None else sums
    held = transfers if held is None else held
    arrays = (np.ascontiguousarray(array, np.float64) for array in (by_kind, transfers, held, sums))
    lists = packed.kinds, packed.numbers, packed.steps, packed.begins, packed.stages, packed.holders, packed.left.copy()
    kernel = compiled("simulator").run
    if not kernel(*lists, *arrays, arrived, starts, ends):
        raise RuntimeError("the schedule deadlocks")
    return starts, ends

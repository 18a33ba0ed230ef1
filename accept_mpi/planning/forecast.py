"""Forecasts how long a step of a plan takes, by running the simulator on the times and rates that devices have measured.

If the data plane has no core of its own, a stage's time includes what its messages cost: coding, CPU time per byte, and
polls while something large is being sent.
"""

from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from accept_mpi.codecs.coding import bits_of
from accept_mpi.direction import Crossing, Direction
from accept_mpi.logs.format import KINDS, TRACE, Rows
from accept_mpi.pipeline.schedule import Action, ScheduleKind, actions, max_in_flight
from accept_mpi.pipeline.simulator import PackedSchedule, Simulated, action_seconds, simulate, simulate_packed
from accept_mpi.planning.message_model import message_seconds
from accept_mpi.profiling.cluster_profile import StageTimes

F64 = npt.NDArray[np.float64]

_STEPS = 3  # steps that are simulated
_MANY = 20_000  # above this many (stages x micro-batches), simulate only the start of a step and extrapolate
_STEADY = 4  # steps of an asynchronous pipeline that count, between those that fill it and those that drain it


class Traffic(msgspec.Struct, frozen=True):
    """The messages of one boundary in one direction, and the link that carries them."""

    values: int
    """Number of values per micro-batch that a codec can code."""
    other_bytes: int
    """Further bytes per message, header included."""
    rate: float
    """Bytes/s from one end to the other, with both directions busy."""
    latency: float = 0.0
    """Seconds that a short message takes."""

    def nbytes(self, name: str) -> float:
        """Bytes of a message with codec ``name``."""
        return self.values * bits_of(name) / 8 + self.other_bytes


class Forecast:
    """Forecasts for a pipeline with given times of its stages and given traffic between them."""

    def __init__(
        self,
        kind: ScheduleKind,
        micro_batches: int,
        slack: int,
        profiles: Sequence[StageTimes],
        crossings: Mapping[Crossing, Traffic],
        host_links: Sequence[float] = (),
    ) -> None:
        """``micro_batches``: per step; ``slack``: the job's ``transfer_slack``. ``host_links``: bytes/s of each stage's own
        link, per direction, which messages to both neighbours share; if empty, only the rates in ``crossings`` count."""
        self.kind, self.profiles, self.crossings, self._host_links = kind, profiles, crossings, host_links
        self._all, self._slack = micro_batches, slack
        stages = len(profiles)
        # Between its beginning and its end, every micro-batch of a long step takes as long as the one before it.
        enough = 2 * max_in_flight(kind, 0, stages, 1 << 30, slack) if kind != "gpipe" else 2 * stages
        self._micro_batches = min(micro_batches, enough) if stages * micro_batches > _MANY else micro_batches
        self._packed: dict[int, PackedSchedule] = {}
        self._steps = _STEPS if self._micro_batches == micro_batches else 1

    def with_profiles(self, profiles: Sequence[StageTimes]) -> "Forecast":
        """The same pipeline with other times of its stages."""
        return Forecast(self.kind, self._all, self._slack, profiles, self.crossings, self._host_links)

    def with_links(self, share: float) -> "Forecast":
        """The same pipeline on links that carry only this share of their measured rates."""
        crossings = {
            place: msgspec.structs.replace(crossing, rate=share * crossing.rate)
            for place, crossing in self.crossings.items()
        }
        host_links = [share * host_link for host_link in self._host_links]
        return Forecast(self.kind, self._all, self._slack, self.profiles, crossings, host_links)

    def message(self, place: Crossing, name: str, codecs: Mapping[Crossing, str] | None = None) -> float:
        """Seconds from a tensor on one stage to the same on the next, with codec ``name``, coding included. ``codecs``:
        those of the other crossings; None: nothing else is sent."""
        boundary, way = place
        source, target = way.ends(boundary)
        crossing = self.crossings[place]
        coding = self.profiles[source].encode[name] + self.profiles[target].decode[name]
        return self._carried(place, name, codecs or {}) + crossing.latency + crossing.values * coding

    def _carried(self, place: Crossing, name: str, codecs: Mapping[Crossing, str]) -> float:
        """Seconds that a message is on the link: at the pair's rate, or longer if either end's own link takes longer for it
        and the message that goes the same way, out or in, at that stage's other boundary."""
        nbytes = self.crossings[place].nbytes(name)
        seconds = nbytes / self.crossings[place].rate
        boundary, way = place
        other_way = Direction(1 - way)
        for stage, beside in ((boundary, boundary - 1), (boundary + 1, boundary + 1)) if self._host_links else ():
            codec = codecs.get((beside, other_way))
            both = nbytes + (self.crossings[beside, other_way].nbytes(codec) if codec else 0.0)
            seconds = max(seconds, both / self._host_links[stage])
        return seconds

    def handling(self, stage: int, way: Direction, codecs: Mapping[Crossing, str]) -> float:
        """Seconds of the computing core for the messages of one F or B (``way``); 0 if the data plane has its own core."""
        here = self.profiles[stage]
        if not here.shared:
            return 0.0
        incoming, outgoing = (stage - 1 + way, way), (stage - way, way)
        total = 0.0
        for place, costs in ((incoming, here.decode), (outgoing, here.encode)):
            if place in codecs:
                name, crossing = codecs[place], self.crossings[place]
                nbytes = crossing.nbytes(name)
                on_link = self._carried(place, name, {}) if place == outgoing else None
                total += message_seconds(
                    float(crossing.values), nbytes, costs[name], here.seconds_per_byte, here.seconds_per_message, on_link
                )
        return total

    def step(self, codecs: Mapping[Crossing, str]) -> float:
        """Seconds per step in the middle of a run."""
        return self.steady(codecs)[0]

    def steady(self, codecs: Mapping[Crossing, str]) -> tuple[float, list[float]]:
        """Seconds per step in the middle of a run, and the share of them during which each stage computes."""
        steps = counted = self._steps
        around = 0
        if self.kind == "1f1b-async":
            around = self._around()
            counted = _STEADY if self._steps > 1 else 1
            steps = around + counted + around
        starts, ends = self._timed(steps, codecs)
        packed = self._packed[steps]
        begin, end = 0.0, float(ends.max())
        if around:
            updates = packed.kinds == PackedSchedule.KINDS.index("U")
            first, last = (ends[updates & (packed.steps == step)] for step in (around - 1, around + counted - 1))
            # The slowest stage counts: others may still be working off what it sent ahead while the pipeline filled.
            slowest = int((last - first).argmax())
            begin, end = float(first[slowest]), float(last[slowest])
        inside = np.maximum(0.0, np.minimum(ends, end) - np.maximum(starts, begin))
        busy = np.add.reduceat(inside, packed.begins[:-1])
        seconds, left = (end - begin) / counted, self._all - self._micro_batches
        if left:
            each, load = self._each(codecs)
            return seconds + left * each, ((busy / counted + left * load) / (seconds + left * each)).tolist()
        return seconds, (busy / (end - begin)).tolist()

    def _each(self, codecs: Mapping[Crossing, str]) -> tuple[float, F64]:
        """Seconds per micro-batch in the steady state, where everything overlaps, and the part that each stage computes."""
        compute, took = self._seconds(codecs)
        load = compute[:, : PackedSchedule.KINDS.index("U")].sum(axis=1)
        slowest = float(load.max())
        if self.kind == "gpipe":  # all forwards, then all backwards
            slowest = float(compute[:, :2].max(axis=0).sum())
        return max(slowest, float(took.max(initial=0.0))), load

    def trace(self, codecs: Mapping[Crossing, str], ranks: Sequence[int]) -> Rows:
        """A few simulated steps as rows of a log's trace (dtype ``logs.format.TRACE``). ``ranks``: each stage's rank."""
        walks = list(self._actions(2 * self._around() + _STEADY))
        run = self._run(walks, codecs)
        rows: list[tuple[object, ...]] = []
        for s, (walk, spans) in enumerate(zip(walks, run.spans, strict=True)):
            before = 0.0
            for action, (start, end) in zip(walk, spans, strict=True):
                place = (action.step + 1, action.micro_batch, 0, 0)
                if start > before and action.kind in "FB":
                    way = Direction.of(action.kind)
                    rows.append((before, start, ranks[s], s, KINDS.index("wait"), s - 1 + way, way, *place))
                rows.append((start, end, ranks[s], s, KINDS.index(action.kind), -1, -1, *place))
                before = end
        for at, to, direction, step, k, start, end in run.transfers:
            boundary = min(at, to)
            size = int(self.crossings[boundary, direction].nbytes(codecs[boundary, direction]))
            rows.append((start, end, ranks[at], at, KINDS.index("send"), boundary, direction, step + 1, k, size, size))
        return np.array(rows, TRACE)

    def _around(self) -> int:
        """Number of steps that fill an asynchronous pipeline, and of those that drain it; 1 for other schedules."""
        if self.kind != "1f1b-async":
            return 1
        stages = len(self.profiles)
        return 1 + -(-max_in_flight(self.kind, 0, stages, 1 << 30, self._slack) // self._micro_batches)

    def _actions(self, steps: int) -> Iterator[list[Action]]:
        """Yield the actions of ``steps`` steps for one stage after another."""
        stages = len(self.profiles)
        return (actions(self.kind, s, stages, [self._micro_batches] * steps, self._slack) for s in range(stages))

    def _seconds(self, codecs: Mapping[Crossing, str]) -> tuple[F64, F64]:
        """Seconds of F, B, W and U (stages, 4), and of the transfers forward and backward (boundaries, 2)."""
        stages = range(len(self.profiles))
        compute = np.array([[self._compute(s, kind) for kind in PackedSchedule.KINDS] for s in stages])
        for way in Direction:  # F and B, which take the messages
            compute[:, way] += [self.handling(s, way, codecs) for s in stages]
        took = [[self.message((b, way), codecs[b, way], codecs) for way in Direction] for b in stages[:-1]]
        return compute, np.array(took).reshape(-1, 2)

    def _timed(self, steps: int, codecs: Mapping[Crossing, str]) -> tuple[F64, F64]:
        """Starts and ends in seconds of all actions of ``steps`` steps, in the order of ``PackedSchedule``."""
        if steps not in self._packed:
            self._packed[steps] = PackedSchedule(self._actions(steps), [self._micro_batches] * steps)
        return simulate_packed(self._packed[steps], *self._seconds(codecs))

    def _run(self, walks: list[list[Action]], codecs: Mapping[Crossing, str]) -> Simulated:
        compute, took = self._seconds(codecs)
        return simulate(
            walks,
            lambda stage, action: action_seconds(compute, stage, action),
            lambda source, target: float(took[min(source, target), int(source > target)]),
        )

    def _compute(self, stage: int, kind: str) -> float:
        """Seconds of one action of ``stage`` (``kind``: F, B, W or U), without its messages."""
        here = self.profiles[stage]
        weights = 0.0
        if self.kind == "zero-bubble":
            weights = here.backward / 2 if here.weight_gradient is None else here.weight_gradient
        return {"F": here.forward, "B": here.backward - weights, "W": weights, "U": here.update}[kind]

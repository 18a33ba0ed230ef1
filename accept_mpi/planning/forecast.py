"""What a plan's step takes, before it is run: the simulator on times and rates that devices have measured.

Where the data plane has no core of its own, a stage's time holds what its messages cost: coding, CPU for each byte, and
looks while something large is sent.
"""

from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from accept_mpi.codecs.coding import bits_of
from accept_mpi.logs.format import BACKWARD, FORWARD, KINDS, TRACE, Rows
from accept_mpi.pipeline.schedule import Action, ScheduleKind, actions, max_in_flight
from accept_mpi.pipeline.simulator import PackedSchedule, Simulated, action_seconds, simulate, simulate_packed
from accept_mpi.planning.message_model import message_seconds
from accept_mpi.profiling.cluster_profile import StageTimes

F64 = npt.NDArray[np.float64]
Crossing = tuple[int, str]
"""A boundary, and "F" or "B"."""

_STEPS = 3  # simulated
_MANY = 20_000  # stages times micro-batches from which on the steady state is taken to go on as it began
_STEADY = 4  # steps of an asynchronous pipeline that count, between those that fill it and those that drain it


class Traffic(msgspec.Struct, frozen=True):
    """One boundary's traffic in one direction."""

    values: int
    """float32 values that a codec can code, a micro-batch."""
    other_bytes: int
    """Bytes of a message besides."""
    rate: float
    """Bytes a second from one end to the other, both ways at once."""
    latency: float = 0.0
    """Seconds that a short message takes."""

    def nbytes(self, name: str) -> float:
        """Of a message with codec ``name``."""
        return self.values * bits_of(name) / 8 + self.other_bytes


class Forecast:
    """A pipeline of stages with these profiles and crossings."""

    def __init__(
        self,
        kind: ScheduleKind,
        micro_batches: int,
        slack: int,
        profiles: Sequence[StageTimes],
        crossings: Mapping[Crossing, Traffic],
        host_links: Sequence[float] = (),
    ) -> None:
        """``host_links``: bytes/s of each stage's own link, each way; what the stage sends ahead and back shares it. Empty:
        only what ``crossings`` say holds."""
        self.kind, self.profiles, self.crossings, self._host_links = kind, profiles, crossings, host_links
        self._all, self._slack = micro_batches, slack
        stages = len(profiles)
        # A long step has a beginning, an end, and in between every micro-batch takes what the one before it took.
        enough = 2 * max_in_flight(kind, 0, stages, 1 << 30, slack) if kind != "gpipe" else 2 * stages
        self._micro_batches = min(micro_batches, enough) if stages * micro_batches > _MANY else micro_batches
        self._packed: dict[int, PackedSchedule] = {}
        self._steps = _STEPS if self._micro_batches == micro_batches else 1

    def with_profiles(self, profiles: Sequence[StageTimes]) -> "Forecast":
        """The same where stages take this long."""
        return Forecast(self.kind, self._all, self._slack, profiles, self.crossings, self._host_links)

    def with_links(self, share: float) -> "Forecast":
        """The same on links that carry only this share of what they were measured to."""
        crossings = {
            place: msgspec.structs.replace(crossing, rate=share * crossing.rate)
            for place, crossing in self.crossings.items()
        }
        host_links = [share * host_link for host_link in self._host_links]
        return Forecast(self.kind, self._all, self._slack, self.profiles, crossings, host_links)

    def message(self, place: Crossing, name: str, codecs: Mapping[Crossing, str] | None = None) -> float:
        """Seconds from a tensor here to a tensor there, with codec ``name``, while other crossings have ``codecs``; without
        them, as if nothing else were sent."""
        boundary, way = place
        source, target = (boundary, boundary + 1) if way == "F" else (boundary + 1, boundary)
        crossing = self.crossings[place]
        coding = self.profiles[source].encode[name] + self.profiles[target].decode[name]
        return self._carried(place, name, codecs or {}) + crossing.latency + crossing.values * coding

    def _carried(self, place: Crossing, name: str, codecs: Mapping[Crossing, str]) -> float:
        """Seconds on the link: at its rate, or, if that is longer, as long as either end's own link takes for this and for
        what crosses that stage's other boundary beside it, out or in as this."""
        nbytes = self.crossings[place].nbytes(name)
        seconds = nbytes / self.crossings[place].rate
        boundary, way = place
        other_way = "B" if way == "F" else "F"
        for stage, beside in ((boundary, boundary - 1), (boundary + 1, boundary + 1)) if self._host_links else ():
            codec = codecs.get((beside, other_way))
            both = nbytes + (self.crossings[beside, other_way].nbytes(codec) if codec else 0.0)
            seconds = max(seconds, both / self._host_links[stage])
        return seconds

    def handling(self, stage: int, way: str, codecs: Mapping[Crossing, str]) -> float:
        """Seconds that the data plane takes from the computing core for the messages of one F or B."""
        here = self.profiles[stage]
        if not here.shared or way not in "FB":
            return 0.0
        ahead = int(way == "F")
        incoming, outgoing = (stage - ahead, way), (stage - 1 + ahead, way)
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
        """Seconds of a step in the middle of a run."""
        return self.steady(codecs)[0]

    def steady(self, codecs: Mapping[Crossing, str]) -> tuple[float, list[float]]:
        """Seconds of a step in the middle of a run, and the share of them that each stage computes."""
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
            # Others may still be catching up with what the slowest stage has sent ahead while the pipeline filled.
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
        """Seconds from one micro-batch to the next in the steady state, where all overlaps, and each stage's computing."""
        compute, took = self._seconds(codecs)
        load = compute[:, : PackedSchedule.KINDS.index("U")].sum(axis=1)
        slowest = float(load.max())
        if self.kind == "gpipe":  # all forwards, then all backwards
            slowest = float(compute[:, :2].max(axis=0).sum())
        return max(slowest, float(took.max(initial=0.0))), load

    def trace(self, codecs: Mapping[Crossing, str], ranks: Sequence[int]) -> Rows:
        """Some steps as they would run, as rows of a log's trace. ``ranks``: of each stage."""
        walks = list(self._actions(2 * self._around() + _STEADY))
        run = self._run(walks, codecs)
        rows: list[tuple[object, ...]] = []
        for s, (walk, spans) in enumerate(zip(walks, run.spans, strict=True)):
            before = 0.0
            for action, (start, end) in zip(walk, spans, strict=True):
                place = (action.step + 1, action.micro_batch, 0, 0)
                if start > before and action.kind in "FB":
                    way = FORWARD if action.kind == "F" else BACKWARD
                    rows.append((before, start, ranks[s], s, KINDS.index("wait"), s - 1 + way, way, *place))
                rows.append((start, end, ranks[s], s, KINDS.index(action.kind), -1, -1, *place))
                before = end
        for boundary, letter, step, k, start, end in run.transfers:
            direction = FORWARD if letter == "F" else BACKWARD
            size = int(self.crossings[boundary, letter].nbytes(codecs[boundary, letter]))
            at = boundary + direction
            rows.append((start, end, ranks[at], at, KINDS.index("send"), boundary, direction, step + 1, k, size, size))
        return np.array(rows, TRACE)

    def _around(self) -> int:
        """Steps that fill an asynchronous pipeline, or drain it; of another schedule, each step does both."""
        if self.kind != "1f1b-async":
            return 1
        stages = len(self.profiles)
        return 1 + -(-max_in_flight(self.kind, 0, stages, 1 << 30, self._slack) // self._micro_batches)

    def _actions(self, steps: int) -> Iterator[list[Action]]:
        stages = len(self.profiles)
        return (actions(self.kind, s, stages, [self._micro_batches] * steps, self._slack) for s in range(stages))

    def _seconds(self, codecs: Mapping[Crossing, str]) -> tuple[F64, F64]:
        """(stages, 4) of F, B, W and U; (boundaries, 2) of transfers."""
        stages = range(len(self.profiles))
        compute = [
            [self._compute(s, kind) + self.handling(s, kind, codecs) for kind in PackedSchedule.KINDS] for s in stages
        ]
        took = [[self.message((b, way), codecs[b, way], codecs) for way in "FB"] for b in stages[:-1]]
        return np.array(compute), np.array(took).reshape(-1, 2)

    def _timed(self, steps: int, codecs: Mapping[Crossing, str]) -> tuple[F64, F64]:
        """Starts and ends of all actions of so many steps, packed."""
        if steps not in self._packed:
            self._packed[steps] = PackedSchedule(self._actions(steps), [self._micro_batches] * steps)
        return simulate_packed(self._packed[steps], *self._seconds(codecs))

    def _run(self, walks: list[list[Action]], codecs: Mapping[Crossing, str]) -> Simulated:
        compute, took = self._seconds(codecs)
        return simulate(
            walks,
            lambda stage, action: action_seconds(compute, stage, action),
            lambda boundary, way: float(took[boundary, "FB".index(way)]),
        )

    def _compute(self, stage: int, kind: str) -> float:
        """Seconds of one action."""
        here = self.profiles[stage]
        weights = 0.0
        if self.kind == "zero-bubble":
            weights = here.backward / 2 if here.weight_gradient is None else here.weight_gradient
        return {"F": here.forward, "B": here.backward - weights, "W": weights, "U": here.update}[kind]

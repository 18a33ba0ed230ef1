"""Forecasts how long a step of a plan takes, by running the simulator on the times and rates that devices have measured.

If the data plane has no core of its own, a stage's time includes what its messages cost: coding, CPU time per byte, and
polls while something large is being sent.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from accept_mpi.codecs.coding import bits_of
from accept_mpi.direction import Crossing, Direction
from accept_mpi.job import ScheduleKind, flows
from accept_mpi.logs.format import KINDS, TRACE, Rows
from accept_mpi.pipeline.deal import Deal, early_sums, early_worth
from accept_mpi.pipeline.schedule import Action, max_in_flight, waits_for_sum
from accept_mpi.pipeline.simulator import Between, PackedSchedule, Simulated, action_seconds, simulate, simulate_packed
from accept_mpi.planning.action_lists import ActionLists, packed
from accept_mpi.planning.message_model import Traffic, message_seconds
from accept_mpi.polling import POLL_AWAITED, POLL_IDLE
from accept_mpi.profiling.cluster_profile import DeviceProfile, StageTimes

F64 = npt.NDArray[np.float64]

_PASSES = 3  # over a group's gradients, apart from sending them
_STEPS = 3  # steps that are simulated
_MANY = 20_000  # above this many (stages x micro-batches), simulate only the start of a step and extrapolate
_UNDER_WAY = 3  # messages that a device has on their way to another at most (``comm.ends``)
_STEADY = 4  # steps of a pipeline that flows that count, between those that fill it and those that drain it


class Groups(NamedTuple):
    """The groups that hold the stages of a pipeline. Devices are numbered by stage, then by place in their group."""

    stages: Sequence[int]
    """Stage of each device."""
    deals: Sequence[Deal]
    """How each stage's micro-batches are dealt."""
    gradients: Sequence[float]
    """Bytes of each stage's gradients."""
    exact: bool
    """True if the gradients of every micro-batch are exchanged, not only each device's sum."""
    codec: str
    """Codec of the gradients."""
    rates: Mapping[tuple[int, int], tuple[float, float]]
    """Bytes/s and latency in seconds between devices of one group and of neighbouring stages, by (sender, receiver)."""
    ranks: Sequence[int] = ()
    """Rank of each device: the lanes of a rank count as devices, which need not send each other anything. Empty: all
    differ."""

    early: Sequence[Sequence[tuple[float, float]]] = ()
    """For each stage, points of its backward at which gradients are passed on: the part of them that is there then or later,
    and the part of the backward that is still to go (``pipeline.deal.early_worth``)."""

    @staticmethod
    def alone(stages: int) -> "Groups":
        """One device per stage."""
        return Groups(range(stages), [Deal((1.0,))] * stages, [0.0] * stages, True, "none", {})


def sent_for_sum(gradients: F64 | float, members: int, own: float, exact: bool) -> Any:
    """Bytes that a member of a group sends for the sum of gradients, per micro-batch that it takes (``own`` per step): its
    contributions to what others own, and the sums of what it owns. ``gradients``: bytes of all as they are sent."""
    parts = gradients * (members - 1) / members
    return parts + parts / own if exact else 2 * parts / own


def sum_handling(
    here: StageTimes | DeviceProfile, gradients: F64 | float, sent: F64 | float, contributions: float, codec: str
) -> Any:
    """Seconds of the computing core per micro-batch for a group's sums, if the data plane has no core of its own.
    ``gradients``: bytes of all of them; ``sent``: bytes sent per micro-batch, about as many as are received;
    ``contributions``: contributions per micro-batch, each of which is gathered, added up and spread again."""
    if not here.shared:
        return 0.0 * sent
    coding = (here.encode[codec] + here.decode[codec]) * 8 / bits_of(codec)  # per byte
    coding *= 1.0 if codec == "none" else 2.0  # a sender decodes what it has coded, to know what is left out
    each = 2 * here.seconds_per_byte + coding
    return sent * each + contributions * gradients / 4 * _PASSES * here.encode["none"] + 2 * here.seconds_per_message


class Forecast:
    """Forecasts for a pipeline with given times of its devices and given traffic between them."""

    def __init__(
        self,
        kind: ScheduleKind,
        micro_batches: int,
        slack: int,
        profiles: Sequence[StageTimes],
        crossings: Mapping[Crossing, Traffic],
        host_links: Sequence[float] = (),
        groups: Groups | None = None,
    ) -> None:
        """``micro_batches``: per step; ``slack``: ``Plan.slack``; ``profiles``: of each device, for its stage.
        ``host_links``: bytes/s of each device's own link, per direction, which messages to both neighbours share; if empty,
        only the rates in ``crossings`` count. ``groups``: None if each device holds a stage alone."""
        self.kind, self.profiles, self.crossings, self._host_links = kind, profiles, crossings, host_links
        self._all, self._slack = micro_batches, slack
        self.groups = groups or Groups.alone(len(profiles))
        self._stages = len(self.groups.deals)
        self._held_by = [[d for d, s in enumerate(self.groups.stages) if s == stage] for stage in range(self._stages)]
        self._widths = [deal.width for deal in self.groups.deals]
        # Between its beginning and its end, every micro-batch of a long step takes as long as the one before it.
        enough = 2 * self._max_in_flight() if kind != "gpipe" else 2 * self._stages
        many = len(profiles) * micro_batches > _MANY
        self._micro_batches = min(micro_batches, enough) if many else micro_batches
        self._ranks = list(self.groups.ranks) or list(range(len(profiles)))
        self._members = [len({self._ranks[d] for d in held}) for held in self._held_by]
        """Number of ranks that hold each stage."""
        tables = tuple(tuple(deal.places(micro_batches)) for deal in self.groups.deals)
        self._tables = tables
        self._shares = [tables[s].count(self._held_by[s].index(d)) / micro_batches for d, s in enumerate(self.groups.stages)]
        """Share of the micro-batches that each device takes."""
        self._rank_shares = dict.fromkeys(self._ranks, 0.0)
        """The same for each rank, in all its lanes."""
        for rank, share in zip(self._ranks, self._shares, strict=True):
            self._rank_shares[rank] += share
        self._steps = _STEPS if self._micro_batches == micro_batches else 1
        self._known: dict[tuple[object, ...], float] = {}
        """Seconds of messages, and of handling them, with certain codecs: who chooses codecs asks a hundred times."""
        self._alone = np.array([[self._compute(d, k) for k in PackedSchedule.KINDS] for d in range(len(profiles))])
        """Seconds of each device's actions without messages."""
        self._sums = np.array([self.sum_seconds(stage) for stage in range(self._stages)])

    def with_profiles(self, profiles: Sequence[StageTimes]) -> "Forecast":
        """The same pipeline with other times of its devices."""
        return self._like(profiles, self.crossings, self._host_links, self.groups)

    def with_links(self, share: float) -> "Forecast":
        """The same pipeline on links that carry only this share of their measured rates."""
        crossings = {
            place: msgspec.structs.replace(crossing, rate=share * crossing.rate)
            for place, crossing in self.crossings.items()
        }
        host_links = [share * host_link for host_link in self._host_links]
        rates = {pair: (share * rate, latency) for pair, (rate, latency) in self.groups.rates.items()}
        return self._like(self.profiles, crossings, host_links, self.groups._replace(rates=rates))

    def _like(
        self,
        profiles: Sequence[StageTimes],
        crossings: Mapping[Crossing, Traffic],
        host_links: Sequence[float],
        groups: Groups,
    ) -> "Forecast":
        return Forecast(self.kind, self._all, self._slack, profiles, crossings, host_links, groups)

    def message(self, place: Crossing, name: str, codecs: Mapping[Crossing, str] | None = None) -> float:
        """Seconds from a tensor on one stage to the same on the next, with codec ``name``, coding included, between their
        first devices. ``codecs``: those of the other crossings; None: nothing else is sent."""
        boundary, way = place
        source, target = (self._held_by[stage][0] for stage in way.ends(boundary))
        return self._between(source, target, place, name, codecs or {})

    def _between(self, source: int, target: int, place: Crossing, name: str, codecs: Mapping[Crossing, str]) -> float:
        """Seconds of a message from one device to another, coding included."""
        crossing = self.crossings[place]
        _, latency = self._link(source, target, place)
        coding = self.profiles[source].encode[name] + self.profiles[target].decode[name]
        return self._carried(source, target, place, name, codecs) + latency + crossing.values * coding

    def _link(self, source: int, target: int, place: Crossing) -> tuple[float, float]:
        """Bytes/s and latency from one device to another."""
        crossing = self.crossings[place]
        return self.groups.rates.get((source, target), (crossing.rate, crossing.latency))

    def _carried(self, source: int, target: int, place: Crossing, name: str, codecs: Mapping[Crossing, str]) -> float:
        """Seconds that a message is on the link: at the pair's rate, or longer if either end's own link takes longer for it
        and what goes the same way, out or in, at that device meanwhile: the message of its stage's other boundary and its
        part of its group's gradients. Where the pipeline is empty between steps, what is sent then has the links for itself
        (``sum_seconds``): the sums of single micro-batches' gradients, or all of it."""
        nbytes = self.crossings[place].nbytes(name)
        rate, _ = self._link(source, target, place)
        seconds = nbytes / rate
        boundary, way = place
        other_way = Direction(1 - way)
        for device in (source, target) if self._host_links else ():
            stage = self.groups.stages[device]
            beside = boundary - 1 if stage == boundary else boundary + 1
            codec = codecs.get((beside, other_way))
            both = nbytes + (self.crossings[beside, other_way].nbytes(codec) if codec else 0.0)
            seconds = max(seconds, (both + self._summed_beside(device)) / self._host_links[device])
        return seconds

    def _share(self, device: int) -> float:
        """Share of the micro-batches that a device's rank takes, in all its lanes."""
        return self._rank_shares[self._ranks[device]]

    def _summed(self, device: int) -> float:
        """Bytes that a device sends for its group's gradients, per micro-batch that it takes; it receives about as many."""
        stage = self.groups.stages[device]
        members = self._members[stage]
        share = self._share(device)
        if members == 1 or not share:
            return 0.0
        return float(sent_for_sum(self._on_wire(stage), members, share * self._all, self.groups.exact))

    def _summed_beside(self, device: int) -> float:
        """The part of these bytes that goes beside the micro-batches' own messages."""
        stage = self.groups.stages[device]
        if not self._waits_for_sum(stage):
            return self._summed(device)
        members = self._members[stage]
        return self._on_wire(stage) * (members - 1) / members if self.groups.exact else 0.0

    def _waits_for_sum(self, stage: int) -> bool:
        return waits_for_sum(self.kind, stage == self._stages - 1)

    def _on_wire(self, stage: int) -> float:
        """Bytes of a stage's gradients as they are sent."""
        return self.groups.gradients[stage] * bits_of(self.groups.codec) / 32

    def handling(self, device: int, way: Direction, codecs: Mapping[Crossing, str]) -> float:
        """Seconds of the computing core for the messages of one F or B (``way``); 0 if the data plane has its own core."""
        here, stage = self.profiles[device], self.groups.stages[device]
        if not here.shared:
            return 0.0
        incoming, outgoing = (stage - 1 + way, way), (stage - way, way)
        total = 0.0
        for place, costs in ((incoming, here.decode), (outgoing, here.encode)):
            if place in codecs:
                name, crossing = codecs[place], self.crossings[place]
                nbytes = crossing.nbytes(name)
                source, target = (self._held_by[end][0] for end in way.ends(place[0]))
                on_link = self._carried(source, target, place, name, {}) if place == outgoing else None
                total += message_seconds(
                    float(crossing.values), nbytes, costs[name], here.seconds_per_byte, here.seconds_per_message, on_link
                )
        if way is Direction.BACKWARD and self._members[stage] > 1:
            contributions = 1.0 if self.groups.exact else 1 / max(1.0, self._share(device) * self._all)
            gradients, sent = self.groups.gradients[stage], self._summed(device)
            total += sum_handling(here, gradients, sent, contributions, self.groups.codec)
        return total

    def step(self, codecs: Mapping[Crossing, str]) -> float:
        """Seconds per step in the middle of a run."""
        return self.steady(codecs)[0]

    def steady(self, codecs: Mapping[Crossing, str]) -> tuple[float, list[float]]:
        """Seconds per step in the middle of a run, and the share of them during which each device computes."""
        steps = counted = self._steps
        around = 0
        if flows(self.kind):
            around = self._around()
            counted = _STEADY if self._steps > 1 else 1
            steps = around + counted + around
        lists = packed(self._lists(steps))
        starts, ends = self._timed(lists, codecs)
        begin, end = 0.0, float(ends.max())
        if around:
            updates = lists.kinds == PackedSchedule.KINDS.index("U")
            first, last = (ends[updates & (lists.steps == step)] for step in (around - 1, around + counted - 1))
            # The slowest device counts: others may still be working off what it sent ahead while the pipeline filled.
            slowest = int((last - first).argmax())
            begin, end = float(first[slowest]), float(last[slowest])
        inside = np.maximum(0.0, np.minimum(ends, end) - np.maximum(starts, begin))
        busy = np.add.reduceat(inside, lists.begins[:-1])
        seconds, left = (end - begin) / counted, self._all - self._micro_batches
        if left:
            each, load = self._each(codecs)
            return seconds + left * each, ((busy / counted + left * load) / (seconds + left * each)).tolist()
        return seconds, (busy / (end - begin)).tolist()

    def _each(self, codecs: Mapping[Crossing, str]) -> tuple[float, F64]:
        """Seconds per micro-batch in the steady state, where everything overlaps, and the part that each device computes."""
        compute, _, held = self._seconds(codecs)
        load = compute[:, : PackedSchedule.KINDS.index("U")].sum(axis=1) * self._shares
        slowest = float(load.max())
        if self.kind == "gpipe":  # all forwards, then all backwards
            slowest = float((compute[:, :2] * np.array(self._shares)[:, None]).max(axis=0).sum())
        shares = np.minimum.outer(self._shares, self._shares)
        return max(slowest, float((held * shares).max(initial=0.0))), load

    def trace(self, codecs: Mapping[Crossing, str], ranks: Sequence[int]) -> Rows:
        """A few simulated steps as rows of a log's trace (dtype ``logs.format.TRACE``). ``ranks``: each device's rank."""
        walks, stages = list(self._lists(2 * self._around() + _STEADY).actions()), self.groups.stages
        run = self._run(walks, codecs)
        rows: list[tuple[object, ...]] = []
        for d, (walk, spans) in enumerate(zip(walks, run.spans, strict=True)):
            before, s = 0.0, stages[d]
            for action, (start, end) in zip(walk, spans, strict=True):
                place = (action.step + 1, action.micro_batch, 0, 0)
                if start > before and action.kind in "FB":
                    way = Direction.of(action.kind)
                    rows.append((before, start, ranks[d], s, KINDS.index("wait"), s - 1 + way, way, *place, 0))
                if action.kind != "U" or not self._lane(d):  # an update is the whole rank's
                    rows.append((start, end, ranks[d], s, KINDS.index(action.kind), -1, -1, *place, self._lane(d)))
                before = end
        for source, target, direction, step, k, start, end in run.transfers:
            boundary = min(stages[source], stages[target])
            size = int(self.crossings[boundary, direction].nbytes(codecs[boundary, direction]))
            place = (step + 1, k, size, size)
            rows.append((start, end, ranks[source], stages[source], KINDS.index("send"), boundary, direction, *place, 0))
        return np.array(rows, TRACE)

    def _lane(self, device: int) -> int:
        """The lane of its rank that a device is."""
        return self._ranks[:device].count(self._ranks[device])

    def _max_in_flight(self) -> int:
        """Most micro-batches in flight at the first stage, however long a step is."""
        return max_in_flight(self.kind, 0, self._stages, 1 << 30, self._slack, self._widths)

    def _around(self) -> int:
        """Number of steps that fill a pipeline that flows, and of those that drain it; 1 for other schedules."""
        if not flows(self.kind):
            return 1
        return 1 + -(-self._max_in_flight() // self._micro_batches)

    def _lists(self, steps: int) -> ActionLists:
        """The actions of ``steps`` steps."""
        counts, stages = (self._micro_batches,) * steps, tuple(self.groups.stages)
        return ActionLists(self.kind, counts, self._slack, tuple(self._widths), self._tables, stages)

    def _seconds(self, codecs: Mapping[Crossing, str]) -> tuple[F64, F64, F64]:
        """Seconds of F, B, W and U (devices, 4), of transfers (sending device, receiving device), and those of them for
        which a transfer holds the link: while a message is on its way others may follow."""
        devices, known = range(len(self.profiles)), self._known
        compute = self._alone.copy()
        for way in Direction:  # F and B, which take the messages
            for d, stage in enumerate(self.groups.stages):
                key = d, way, codecs.get((stage - 1, way)), codecs.get((stage, way))
                if key not in known:
                    known[key] = self.handling(d, way, codecs)
                compute[d, way] += known[key]
        took, held = np.zeros((2, len(devices), len(devices)))
        for boundary in range(self._stages - 1):
            for way in Direction:
                senders, receivers = (self._held_by[stage] for stage in way.ends(boundary))
                name, other_way = codecs[boundary, way], Direction(1 - way)
                beside = codecs.get((boundary - 1, other_way)), codecs.get((boundary + 1, other_way))
                for source, target in itertools.product(senders, receivers):
                    pair = source, target, boundary, way, name, *beside
                    if pair not in known:
                        known[pair] = self._between(source, target, (boundary, way), name, codecs)
                    seconds = known[pair]
                    _, latency = self._link(source, target, (boundary, way))
                    took[source, target], held[source, target] = seconds, max(seconds - latency, seconds / _UNDER_WAY)
        return compute, took, held

    def messages(self, codecs: Mapping[Crossing, str]) -> tuple[Between, Between]:
        """The seconds of a message from one device to another, and those for which it holds the link, as functions."""
        _, took, held = self._seconds(codecs)
        return _in_table(took), _in_table(held)

    def sum_seconds(self, stage: int) -> float:
        """Seconds from the last backward of a step until all devices of a group have the sum of its gradients: the last
        contributions to the owners of their parts, and the sums back. Before these, a stage without boundaries sends those
        contributions that its links have not carried yet; elsewhere they go beside messages (``_carried``)."""
        devices = list({self._ranks[d]: d for d in self._held_by[stage]}.values())
        if len(devices) == 1:
            return 0.0
        slowest, poll = 0.0, POLL_AWAITED if self._waits_for_sum(stage) else POLL_IDLE
        for device in devices:
            others = [self.groups.rates.get((device, other), (np.inf, 0.0)) for other in devices if other != device]
            rate, latency = min(rate for rate, _ in others), max(latency for _, latency in others)
            link = min(rate, self._host_links[device] if self._host_links else np.inf)
            nbytes = self._on_wire(stage) * (len(devices) - 1) / len(devices)
            here, seconds = self.profiles[device], nbytes / link
            left = self._left(device, seconds) if self.groups.exact and self._stages == 1 else 0.0
            sending = self._after_backward(device, 2 * seconds)
            slowest = max(slowest, left + sending + 2 * (latency + here.seconds_per_message + poll))
        return slowest

    def _after_backward(self, device: int, sending: float) -> float:
        """The part of the seconds of ``sending`` gradients that is left when a step's last backward ends."""
        stage, here = self.groups.stages[device], self.profiles[device]
        computing = self._shares[device] * self._all * (here.forward + here.backward)
        early = early_sums(self.kind, stage == self._stages - 1) and len(self._held_by[stage]) == self._members[stage]
        if not early or not self.groups.early or sending <= early_worth(here.shared) * (sending + computing):
            return sending
        return min(sending, max(part * sending - to_go * here.backward for part, to_go in self.groups.early[stage]))

    def _left(self, device: int, seconds: float) -> float:
        """Seconds of contributions before the last one that a rank has still to send when its last backward ends, if each
        takes ``seconds``."""
        here, share = self.profiles[device], self._share(device)
        if not share:
            return 0.0
        own = share * self._all
        # What it computes between the first contribution and the last: if steps overlap, since it last waited for a sum.
        between = own - 1 if self._waits_for_sum(self.groups.stages[device]) else max(0.0, own - share * self._widths[0])
        each = here.backward + self.handling(device, Direction.BACKWARD, {})
        each += 0.0 if self.kind == "gpipe" else here.forward
        return max(0.0, (own - 1) * seconds - between * each * self._shares[device] / share)

    def _timed(self, lists: PackedSchedule, codecs: Mapping[Crossing, str]) -> tuple[F64, F64]:
        """Starts and ends in seconds of all actions of some steps, in the order of ``lists``."""
        compute, took, held = self._seconds(codecs)
        return simulate_packed(lists, compute, took, self._sums, held)

    def _run(self, walks: list[list[Action]], codecs: Mapping[Crossing, str]) -> Simulated:
        compute, took, held = self._seconds(codecs)
        return simulate(
            walks,
            lambda device, action: action_seconds(compute, device, action),
            _in_table(took),
            stages=self.groups.stages,
            sums=self.sum_seconds,
            held=_in_table(held),
        )

    def _compute(self, device: int, kind: str) -> float:
        """Seconds of one action of a device (``kind``: F, B, W or U), without its messages."""
        here = self.profiles[device]
        weights = 0.0
        if self.kind == "zero-bubble":
            weights = here.backward / 2 if here.weight_gradient is None else here.weight_gradient
        return {"F": here.forward, "B": here.backward - weights, "W": weights, "U": here.update}[kind]


def _in_table(table: F64) -> Between:
    """The seconds in a table (sending device, receiving device) as a function."""
    return lambda source, target: float(table[source, target])

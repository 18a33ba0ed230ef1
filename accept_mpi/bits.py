"""Which codec each boundary uses where the job says "auto": the mildest that hides its transfer behind computing.

"Hides" is decided by the simulator, on measured compute times and link rates, over the schedule's own action lists: a
choice is as good as hidden where a step takes at most ``TOLERANCE`` longer than with the strongest codecs allowed
everywhere. (A transfer that is shorter than a stage computes is hidden in the steady state, but a synchronous schedule's
steps also begin and end with transfers that nothing hides; the simulator counts both. Where the data plane has no core of
its own, a stage's time holds what its messages cost: a byte that need not be moved is worth coding even on a fast link.)
"""

from collections.abc import Sequence

import msgspec

from accept_mpi.coding import Coding, parse
from accept_mpi.schedule import Action, Kind, actions
from accept_mpi.simulate import simulate

AUTO = "auto"
TOLERANCE = 0.02
_STEPS = 3  # simulated

# From the mildest to the strongest, and the bits of each.
_LADDER = (("none", 32), ("bf16", 16), ("uniform:8", 8), ("uniform:6", 6), ("uniform:4", 4), ("uniform:3", 3),
           ("uniform:2", 2), ("mbq:1", 1))  # fmt: skip


class Profile(msgspec.Struct, frozen=True):
    """What one rank takes, in seconds."""

    forward: float
    """A micro-batch."""
    backward: float
    """A micro-batch, weight gradients included."""
    encode: dict[str, float]
    """A value, by codec."""
    decode: dict[str, float]
    byte: float = 0.0
    """To send or receive a byte."""
    shared: bool = False
    """Whether coding, sending and receiving take their time from the core that computes."""


class Crossing(msgspec.Struct, frozen=True):
    """One boundary's traffic in one direction."""

    values: int
    """float32 values that a codec can code, a micro-batch."""
    other_bytes: int
    """Bytes of a message besides."""
    rate: float
    """Bytes a second, measured while all links carried traffic both ways."""

    def seconds(self, bits: dict[str, float], name: str) -> float:
        """On the link, with codec ``name``."""
        return self.nbytes(bits, name) / self.rate

    def nbytes(self, bits: dict[str, float], name: str) -> float:
        """Of a message with codec ``name``."""
        return self.values * bits[name] / 8 + self.other_bytes


class Choice(msgspec.Struct, frozen=True):
    """A codec for one boundary and direction, and why."""

    name: str
    seconds: float
    """A message takes this long, coding included."""
    uncoded: float
    """It would take this long as it is."""


def ladder(floor: int) -> dict[str, Coding]:
    """The codecs to choose from, from the mildest on; none with fewer than ``floor`` bits."""
    return {name: parse(name, False) for name, bits in _LADDER if bits >= floor}


def choose(
    kind: Kind,
    micro_batches: int,
    slack: int,
    profiles: Sequence[Profile],
    crossings: dict[tuple[int, str], Crossing],
    fixed: dict[tuple[int, str], str],
    floor: int,
) -> tuple[dict[tuple[int, str], Choice], float]:
    """Codecs for all crossings, keyed by boundary and "F" or "B", and the seconds that a step should take with them.

    ``fixed``: those that the job names. Profiles must know them and the ladder's.
    """
    stages = len(profiles)
    walks = [actions(kind, s, stages, [micro_batches] * _STEPS, slack) for s in range(stages)]
    names = list(ladder(floor))
    bits = {name: _bits(name) for name in {*names, *fixed.values()}}

    bytes_of = {(c, name): crossings[c].nbytes(bits, name) for c in crossings for name in bits}

    def seconds(crossing: tuple[int, str], name: str) -> float:
        boundary, direction = crossing
        ends = (boundary, boundary + 1) if direction == "F" else (boundary + 1, boundary)
        coding = profiles[ends[0]].encode[name] + profiles[ends[1]].decode[name]
        return crossings[crossing].seconds(bits, name) + crossings[crossing].values * coding

    def handling(stage: int, action: Action, chosen: dict[tuple[int, str], str]) -> float:
        """What the data plane takes from the computing core for an action's messages."""
        here = profiles[stage]
        if not here.shared or action.kind not in "FB":
            return 0.0
        way, ahead = action.kind, int(action.kind == "F")
        total = 0.0
        for crossing, costs in (((stage - ahead, way), here.decode), ((stage - 1 + ahead, way), here.encode)):
            if crossing in chosen:
                name = chosen[crossing]
                total += crossings[crossing].values * costs[name] + bytes_of[crossing, name] * here.byte
        return total

    def duration(stage: int, action: Action) -> float:
        # Zero-bubble splits what was measured as one.
        share = {"F": 1.0, "B": 0.5 if kind == "zero-bubble" else 1.0, "W": 0.5}.get(action.kind, 0.0)
        return share * (profiles[stage].forward if action.kind == "F" else profiles[stage].backward)

    def step(chosen: dict[tuple[int, str], str]) -> float:
        took = {crossing: seconds(crossing, name) for crossing, name in chosen.items()}
        extra = {(s, way): handling(s, Action(way, 0, 0), chosen) for s in range(stages) for way in ("F", "B", "W", "U")}
        return (
            simulate(
                walks,
                lambda s, action: duration(s, action) + extra[s, action.kind],
                lambda boundary, way: took[boundary, way],
            ).makespan
            / _STEPS
        )

    free = [crossing for crossing in crossings if crossing not in fixed]
    fastest = {c: min(names, key=lambda name, c=c: seconds(c, name)) for c in free}  # type: ignore[misc]
    chosen = {**fixed, **fastest}
    best = step(chosen)
    for crossing in free:
        # Where links are fast, what counts is the time of the core: bytes to move, values to code.
        for name in names:
            if (found := step(chosen | {crossing: name})) < best:
                best, chosen[crossing] = found, name
    limit = best * (1 + TOLERANCE)
    # Milder and milder, everywhere in turn, so that all boundaries share what there is to give.
    moved = True
    while moved:
        moved = False
        for crossing in free:
            index = names.index(chosen[crossing])
            for milder in reversed(names[:index]):
                if step(chosen | {crossing: milder}) <= limit:
                    chosen[crossing] = milder
                    moved = True
                    break
    choices = {c: Choice(name, seconds(c, name), seconds(c, "none")) for c, name in chosen.items()}
    return choices, step(chosen)


def _bits(name: str) -> float:
    coding = parse(name, False)
    return 32.0 if coding.kind == "none" else 8 * coding.nbytes(1 << 16) / (1 << 16)

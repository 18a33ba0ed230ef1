"""A plan: which ranks hold which layers, and each boundary's codecs. Plain data that converts to JSON and back."""

import itertools
from collections.abc import Container, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from accept_mpi.direction import Crossing, Direction
from accept_mpi.job import MOST_SLACK

Lanes = int | Literal["F+B"]
"""How many actions a rank computes at a time: a number of micro-batches (1: one action after another), or "F+B": a forward
beside a backward."""


def slots_in(lanes: Lanes) -> int:
    """Number of places where a rank computes micro-batches one after another: "F+B" takes all of them in order."""
    return 1 if lanes == "F+B" else lanes


def at_once(lanes: Lanes) -> int:
    """Number of micro-batches that a rank works on at a time."""
    return 2 if lanes == "F+B" else lanes


class StagePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive layers ``start <= i < stop``, and the group of ranks that hold them."""

    start: int
    stop: int
    ranks: tuple[int, ...]
    paces: tuple[float, ...] = ()
    """Seconds per micro-batch of each rank, or anything in proportion; empty: all ranks are alike. They decide which rank
    takes which micro-batches (``pipeline.deal``)."""
    lanes: tuple[Lanes, ...] = ()
    """Lanes of each rank; empty: each computes one action after another."""
    recompute: bool = False
    """True if a backward computes its forward again, so that only what arrives is kept in between."""

    def __post_init__(self) -> None:
        for what, each in (("paces", self.paces), ("lanes", self.lanes)):
            if each and len(each) != len(self.ranks):
                raise ValueError(f"{len(each)} {what} for {len(self.ranks)} ranks")
        if any(isinstance(lanes, int) and lanes < 1 for lanes in self.lanes):
            raise ValueError(f"lanes {self.lanes}: a rank needs one at least")

    def lanes_of(self, rank: int) -> Lanes:
        """The lanes of one of its ranks."""
        return self.lanes[self.ranks.index(rank)] if self.lanes else 1

    @property
    def leader(self) -> int:
        """The first rank of the group: it speaks for the group wherever one rank suffices."""
        return self.ranks[0]

    def without(self, lost: Container[int]) -> "StagePlan | None":
        """The stage held by the ranks that are left; None if there are none."""
        left = [i for i, rank in enumerate(self.ranks) if rank not in lost]
        if not left:
            return None
        ranks = tuple(self.ranks[i] for i in left)
        paces, lanes = (tuple(each[i] for i in left if each) for each in (self.paces, self.lanes))
        return msgspec.structs.replace(self, ranks=ranks, paces=paces, lanes=lanes)


class BoundaryCodecs(msgspec.Struct, frozen=True, kw_only=True):
    """Names of the codecs of one boundary: ``forward`` for activations, ``backward`` for gradients."""

    forward: str = "none"
    backward: str = "none"


class Place(NamedTuple):
    """Position of a rank in a plan."""

    stage: int
    """Index of the rank's stage; -1: the plan leaves the rank idle."""
    stages: int
    behind: tuple[int, ...] = ()
    """Ranks of the previous stage; none on the first stage."""
    ahead: tuple[int, ...] = ()
    """Ranks of the next stage; none on the last stage."""
    member: int = 0
    """Index of the rank in its stage's group."""
    members: int = 1
    """Number of ranks in the group."""

    @property
    def before(self) -> int | None:
        """Leader of the previous stage; None on the first stage."""
        return self.behind[0] if self.behind else None

    @property
    def after(self) -> int | None:
        """Leader of the next stage; None on the last stage."""
        return self.ahead[0] if self.ahead else None

    @property
    def idle(self) -> bool:
        return self.stage < 0

    @property
    def leads(self) -> bool:
        """True if the rank is its stage's leader."""
        return not self.idle and self.member == 0

    @property
    def first(self) -> bool:
        return self.stage == 0

    @property
    def last(self) -> bool:
        return self.stage == self.stages - 1


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Stages in the order of the layers, and the codecs of the boundaries between them."""

    stages: tuple[StagePlan, ...]
    boundaries: tuple[BoundaryCodecs, ...]
    gradients: str = ""
    """How groups sum their gradients, as ``pipeline.gradients`` says it; empty: as the job says."""
    slack: int = MOST_SLACK
    """Micro-batches in flight beyond the 1F1B bound per boundary (``pipeline.transfer_slack``)."""

    def place(self, rank: int) -> Place:
        """Position of ``rank`` in this plan."""
        s = next((i for i, stage in enumerate(self.stages) if rank in stage.ranks), -1)
        behind = self.stages[s - 1].ranks if s > 0 else ()
        ahead = self.stages[s + 1].ranks if 0 <= s < len(self.stages) - 1 else ()
        mine = self.stages[s].ranks if s >= 0 else (rank,)
        return Place(s, len(self.stages), behind, ahead, mine.index(rank), len(mine))

    def layers_of(self, rank: int) -> range:
        """Layers that ``rank`` holds; empty if it is idle."""
        return next((range(stage.start, stage.stop) for stage in self.stages if rank in stage.ranks), range(0))

    @property
    def leaders(self) -> list[int]:
        """Each stage's leader, in the order of the stages."""
        return [stage.leader for stage in self.stages]

    @property
    def holders(self) -> list[tuple[int, int]]:
        """(stage, rank) of every rank that holds a stage, in the order of the stages and of their groups."""
        return [(s, rank) for s, stage in enumerate(self.stages) for rank in stage.ranks]

    @property
    def slots(self) -> list[tuple[int, int, int]]:
        """(stage, rank, lane) of every place where micro-batches are computed one after another (``deal.Slot``), in the
        order of ``holders``."""
        return [(s, rank, lane) for s, rank in self.holders for lane in range(slots_in(self.stages[s].lanes_of(rank)))]

    @property
    def hybrid(self) -> bool:
        """True if a group of several ranks holds a stage."""
        return any(len(stage.ranks) > 1 for stage in self.stages)

    @property
    def laned(self) -> bool:
        """True if a rank has lanes."""
        return any(lanes != 1 for stage in self.stages for lanes in stage.lanes)

    @property
    def codecs(self) -> dict[Crossing, str]:
        """Codec names by boundary and direction."""
        names = [(codec.forward, codec.backward) for codec in self.boundaries]
        return {(b, way): pair[way] for way in Direction for b, pair in enumerate(names)}

    def renamed(self, names: Mapping[int, int]) -> "Plan":
        """The same plan with each rank replaced by ``names[rank]``."""
        stages = [msgspec.structs.replace(stage, ranks=tuple(names[rank] for rank in stage.ranks)) for stage in self.stages]
        return msgspec.structs.replace(self, stages=tuple(stages))

    def without(self, lost: Container[int]) -> "Plan | None":
        """Plan for the ranks that are left when ``lost`` ones are gone; None if nobody is left. A group goes on without its
        lost ranks; the layers of a lost stage go to the neighbour with fewer layers, to a surviving one if possible."""
        stages, boundaries = list(self.stages), list(self.boundaries)
        left = {s: found for s, stage in enumerate(stages) if (found := stage.without(lost))}
        if not left:
            return None
        stages = [left.get(s, stage) for s, stage in enumerate(stages)]

        def is_lost(s: int) -> bool:
            return stages[s].leader in lost

        while gone := [s for s in range(len(stages)) if is_lost(s)]:
            s = gone[0]
            beside = [n for n in (s - 1, s + 1) if 0 <= n < len(stages)]
            heir = min(beside, key=lambda n: (is_lost(n), stages[n].stop - stages[n].start))
            first, second = stages[min(s, heir)], stages[max(s, heir)]
            merged = msgspec.structs.replace(stages[heir], start=first.start, stop=second.stop)
            stages[min(s, heir) : max(s, heir) + 1] = [merged]
            del boundaries[min(s, heir)]
        plan = msgspec.structs.replace(self, stages=tuple(stages), boundaries=tuple(boundaries))
        return recomputing(plan, [n for n, stage in enumerate(stages) if stage.recompute])  # the heir may be the last now

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @staticmethod
    def from_json(text: str) -> "Plan":
        return msgspec.json.decode(text, type=Plan)


def with_lanes(plan: Plan, lanes: Mapping[int, Lanes]) -> Plan:
    """The plan with these lanes of its ranks, by rank; 1 for those that are left out."""
    stages = []
    for stage in plan.stages:
        each = tuple(lanes.get(rank, 1) for rank in stage.ranks)
        stages.append(msgspec.structs.replace(stage, lanes=() if all(one == 1 for one in each) else each))
    return msgspec.structs.replace(plan, stages=tuple(stages))


def held_alike(one: Plan, other: Plan) -> bool:
    """True if the same ranks hold the same layers in both plans."""
    first, second = ([(stage.start, stage.stop, stage.ranks) for stage in plan.stages] for plan in (one, other))
    return first == second


def even_cuts(layers: int, stages: int, uncuttable: Container[int] = ()) -> list[int]:
    """First layers of stages 1, 2, ..., such that the stages' numbers of layers differ by at most one.

    ``uncuttable``: layers that must stay with the one before. The nearest possible cuts are taken instead, and fewer if
    there are not enough.
    """
    possible = [layer for layer in range(1, layers) if layer not in uncuttable]
    stages = min(stages, len(possible) + 1)
    cuts: list[int] = []
    for s in range(1, stages):
        first = possible.index(cuts[-1]) + 1 if cuts else 0
        cuts.append(min(possible[first : len(possible) - (stages - 1 - s)], key=lambda cut: abs(cut - layers * s // stages)))
    return cuts


def make_plan(
    layers: int,
    cuts: Sequence[int],
    codecs: Sequence[BoundaryCodecs] | None = None,
    ranks: Sequence[int | Sequence[int]] | None = None,
    paces: Sequence[Sequence[float]] = (),
    slack: int = MOST_SLACK,
) -> Plan:
    """Plan with given stages.

    ``cuts``: first layers of stages 1, 2, ...; ``codecs``: one entry per boundary, uncoded if None; ``ranks``: the rank or
    the group of ranks of each stage; 0, 1, ... if None; ``paces``: of each stage's ranks; ``slack``: ``Plan.slack``. Raises
    ValueError with a sentence if cuts do not increase, leave a stage empty or leave the model.
    """
    edges = [0, *cuts, layers]
    for before, after in itertools.pairwise(edges):
        if after <= before:
            raise ValueError(
                f"cuts {list(cuts)} leave a stage empty: they must increase strictly and lie within 1..{layers - 1} "
                f"(the model has {layers} layers)"
            )
    order = range(len(edges) - 1) if ranks is None else ranks
    spans = itertools.pairwise(edges)
    groups = [(held,) if isinstance(held, int) else tuple(held) for held in order]
    stages = tuple(
        StagePlan(start=a, stop=b, ranks=group, paces=tuple(pace) if len(group) > 1 else ())
        for group, pace, (a, b) in zip(groups, paces or [()] * len(groups), spans, strict=True)
    )
    return Plan(stages=stages, boundaries=tuple(codecs or [BoundaryCodecs()] * len(cuts)), slack=slack)


def recomputing(plan: Plan, stages: Container[int]) -> Plan:
    """The plan with these stages computing forwards again in their backwards. The last one never does: its backwards follow
    its forwards at once."""
    last = len(plan.stages) - 1
    changed = [
        msgspec.structs.replace(stage, recompute=s in stages and s != last) for s, stage in enumerate(plan.stages)
    ]  # fmt: skip
    return msgspec.structs.replace(plan, stages=tuple(changed))

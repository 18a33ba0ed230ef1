"""A plan: which ranks hold which layers, and each boundary's codecs. Plain data that converts to JSON and back."""

import itertools
from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

import msgspec

from accept_mpi.direction import Crossing, Direction


class StagePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive layers ``start <= i < stop``, and the group of ranks that hold them."""

    start: int
    stop: int
    ranks: tuple[int, ...]

    @property
    def leader(self) -> int:
        """The first rank of the group: it stands for the group towards other stages. Today a group has no other."""
        return self.ranks[0]


class BoundaryCodecs(msgspec.Struct, frozen=True, kw_only=True):
    """Names of the codecs of one boundary: ``forward`` for activations, ``backward`` for gradients."""

    forward: str = "none"
    backward: str = "none"


class Place(NamedTuple):
    """Position of a rank in a plan."""

    stage: int
    """Index of the rank's stage; -1: the plan leaves the rank idle."""
    stages: int
    before: int | None
    """Rank of the previous stage; None on the first stage."""
    after: int | None
    """Rank of the next stage; None on the last stage."""

    @property
    def idle(self) -> bool:
        return self.stage < 0

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

    def place(self, rank: int) -> Place:
        """Position of ``rank`` in this plan."""
        s = next((i for i, stage in enumerate(self.stages) if rank in stage.ranks), -1)
        before = self.stages[s - 1].leader if s > 0 else None
        after = self.stages[s + 1].leader if 0 <= s < len(self.stages) - 1 else None
        return Place(s, len(self.stages), before, after)

    def layers_of(self, rank: int) -> range:
        """Layers that ``rank`` holds; empty if it is idle."""
        return next((range(stage.start, stage.stop) for stage in self.stages if rank in stage.ranks), range(0))

    @property
    def leaders(self) -> list[int]:
        """Each stage's leader, in the order of the stages."""
        return [stage.leader for stage in self.stages]

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
        """Plan for the ranks that are left when ``lost`` ones are gone; None if nobody is left. The layers of a lost stage
        go to the neighbour with fewer layers, to a surviving one if possible."""
        stages, boundaries = list(self.stages), list(self.boundaries)
        while gone := [s for s, stage in enumerate(stages) if stage.leader in lost]:
            if len(stages) == 1:
                return None
            s = gone[0]
            beside = [n for n in (s - 1, s + 1) if 0 <= n < len(stages)]
            heir = min(beside, key=lambda n: (stages[n].leader in lost, stages[n].stop - stages[n].start))
            both = stages[min(s, heir)], stages[max(s, heir)]
            merged = StagePlan(start=both[0].start, stop=both[1].stop, ranks=stages[heir].ranks)
            stages[min(s, heir) : max(s, heir) + 1] = [merged]
            del boundaries[min(s, heir)]
        return Plan(stages=tuple(stages), boundaries=tuple(boundaries))

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @staticmethod
    def from_json(text: str) -> "Plan":
        return msgspec.json.decode(text, type=Plan)


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
    layers: int, cuts: Sequence[int], codecs: Sequence[BoundaryCodecs] | None = None, ranks: Sequence[int] | None = None
) -> Plan:
    """Plan with one rank per stage.

    ``cuts``: first layers of stages 1, 2, ...; ``codecs``: one entry per boundary, uncoded if None; ``ranks``: in the order
    of their stages, 0, 1, ... if None. Raises ValueError with a sentence if cuts do not increase, leave a stage empty or
    leave the model.
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
    stages = tuple(StagePlan(start=a, stop=b, ranks=(rank,)) for rank, (a, b) in zip(order, spans, strict=True))
    return Plan(stages=stages, boundaries=tuple(codecs or [BoundaryCodecs()] * len(cuts)))

"""A plan: which ranks hold which layers, and what is done at each boundary. Plain data, JSON both ways."""

import itertools
from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

import msgspec


class StagePlan(msgspec.Struct, frozen=True, kw_only=True):
    """A contiguous run of layers ``start <= i < stop`` and the group of ranks that hold it."""

    start: int
    stop: int
    ranks: tuple[int, ...]


class BoundaryCodecs(msgspec.Struct, frozen=True, kw_only=True):
    """How a boundary's tensors are coded on the wire, each way."""

    forward: str = "none"
    backward: str = "none"


class Place(NamedTuple):
    """Where a rank stands in a plan."""

    stage: int
    """-1: the plan leaves it idle."""
    stages: int
    before: int | None
    """The rank that holds the stage before, None at the beginning."""
    after: int | None

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
    """Stages in the order of the layers, and the codec of each boundary between them."""

    stages: tuple[StagePlan, ...]
    boundaries: tuple[BoundaryCodecs, ...]

    def place(self, rank: int) -> Place:
        """Where ``rank`` stands."""
        s = next((i for i, stage in enumerate(self.stages) if rank in stage.ranks), -1)
        before = self.stages[s - 1].ranks[0] if s > 0 else None
        after = self.stages[s + 1].ranks[0] if 0 <= s < len(self.stages) - 1 else None
        return Place(s, len(self.stages), before, after)

    def layers_of(self, rank: int) -> range:
        """The layers that ``rank`` holds; none if it is idle."""
        return next((range(stage.start, stage.stop) for stage in self.stages if rank in stage.ranks), range(0))

    @property
    def codecs(self) -> dict[tuple[int, str], str]:
        """Codec names by boundary and direction ("F": activations ahead, "B": gradients back)."""
        ways = [((b, "F"), codec.forward) for b, codec in enumerate(self.boundaries)]
        return dict(ways + [((b, "B"), codec.backward) for b, codec in enumerate(self.boundaries)])

    def renamed(self, names: Mapping[int, int]) -> "Plan":
        """The same stages, each rank under another number."""
        stages = [msgspec.structs.replace(stage, ranks=tuple(names[rank] for rank in stage.ranks)) for stage in self.stages]
        return msgspec.structs.replace(self, stages=tuple(stages))

    def without(self, lost: Container[int]) -> "Plan | None":
        """What is left when ranks are lost: a stage's layers go to the neighbour that has fewer. None: nobody is left."""
        stages, boundaries = list(self.stages), list(self.boundaries)
        while gone := [s for s, stage in enumerate(stages) if stage.ranks[0] in lost]:
            if len(stages) == 1:
                return None
            s = gone[0]
            beside = [n for n in (s - 1, s + 1) if 0 <= n < len(stages)]
            heir = min(beside, key=lambda n: (stages[n].ranks[0] in lost, stages[n].stop - stages[n].start))
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
    """First layers of stages 1, 2, ... so that the numbers of layers differ by at most one.

    ``uncuttable``: layers that the one before must stay with. Cuts are then those nearest to even ones, and fewer where
    there are too few others.
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
    """A plan with one rank a stage from the first layers of stages 1, 2, ..., each boundary's codec, and the ranks in the
    order of their stages (0, 1, ... if None).

    Raises ValueError with a sentence where the cuts do not increase, leave a stage empty or leave the model.
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

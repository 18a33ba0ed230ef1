"""A plan: which ranks hold which layers, and what is done at each boundary. Plain data, JSON both ways."""

import itertools

import msgspec


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """A contiguous run of layers ``start <= i < stop`` and the group of ranks that hold it."""

    start: int
    stop: int
    ranks: tuple[int, ...]


class Codec(msgspec.Struct, frozen=True, kw_only=True):
    """How a boundary's tensors are coded on the wire, each way."""

    forward: str = "none"
    backward: str = "none"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Stages in the order of the layers, and the codec of each boundary between them."""

    stages: tuple[Stage, ...]
    boundaries: tuple[Codec, ...]

    def stage_of(self, rank: int) -> int:
        """The stage that ``rank`` holds."""
        return next(i for i, stage in enumerate(self.stages) if rank in stage.ranks)

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @staticmethod
    def from_json(text: str) -> "Plan":
        return msgspec.json.decode(text, type=Plan)


def even_cuts(layers: int, stages: int) -> list[int]:
    """First layers of stages 1, 2, ... so that the numbers of layers differ by at most one."""
    return [layers * s // stages for s in range(1, stages)]


def make_plan(layers: int, cuts: list[int], codecs: list[Codec] | None = None) -> Plan:
    """A plan with one rank a stage, in order, from the first layers of stages 1, 2, ... and each boundary's codec.

    Raises ValueError with a sentence where the cuts do not increase, leave a stage empty or leave the model.
    """
    edges = [0, *cuts, layers]
    for before, after in itertools.pairwise(edges):
        if after <= before:
            raise ValueError(
                f"cuts {cuts} leave a stage empty: they must increase strictly and lie within 1..{layers - 1} "
                f"(the model has {layers} layers)"
            )
    stages = tuple(Stage(start=a, stop=b, ranks=(rank,)) for rank, (a, b) in enumerate(itertools.pairwise(edges)))
    return Plan(stages=stages, boundaries=tuple(codecs or [Codec()] * len(cuts)))

"""What trials have shown of a stage, kept for another deployment with the same stages, which need not repeat them: after the
loss of one of those who hold a stage together, seconds count."""

from collections.abc import Sequence
from typing import NamedTuple

from accept_mpi.codecs.tensors import BoundarySpecs
from accept_mpi.comm.messenger import Messenger
from accept_mpi.job import Job
from accept_mpi.pipeline.findings import Findings
from accept_mpi.pipeline.stage import Stage
from accept_mpi.pipeline.trials import learn, never_deferred
from accept_mpi.plan import Place, StagePlan
from accept_mpi.profiling.outline import Outline
from accept_mpi.training.boundaries import Sizes, agree_on_shapes
from accept_mpi.training.data_here import Data

BothSpecs = tuple[BoundarySpecs, BoundarySpecs]
"""Of the boundaries before and after a stage."""


class _Of(NamedTuple):
    """What trials depend on."""

    job: Job
    cuts: tuple[int, ...]
    stage: int
    sizes: tuple[tuple[int, ...], tuple[int, ...]]
    channels_last: bool


class _Shown(NamedTuple):
    """What they have shown."""

    of: _Of
    specs: BothSpecs
    found: Findings
    never: frozenset[int]
    """``trials.never_deferred``."""


class Tried:
    """What the trials of this rank's newest stage have shown."""

    def __init__(self) -> None:
        self._newest: _Shown | None = None

    def agree_on_shapes(
        self,
        messenger: Messenger,
        stage: Stage,
        place: Place,
        stages: Sequence[StagePlan],
        sizes: Sizes,
        data: Data,
        deadline: float,
        outline: Outline | None = None,
    ) -> BothSpecs:
        """As ``boundaries.agree_on_shapes``. If all ranks have tried what they hold, in a plan with the cuts of these
        ``stages``, none tries it again; all of them call this together."""
        cuts = tuple(one.start for one in stages)
        mine = _Of(stage.job, cuts, place.stage, (tuple(sizes[0]), tuple(sizes[1])), stage.channels_last)
        shown = self._newest if self._newest and self._newest.of == mine else None
        told = messenger.allgather(place.idle or shown is not None, deadline, "whether stages have been tried")
        if all(told):
            if shown:
                learn(stage, shown.found, shown.never)
            return shown.specs if shown else (BoundarySpecs({}, {}), BoundarySpecs({}, {}))
        specs = agree_on_shapes(messenger, stage, place, sizes, data, deadline, outline)
        if not place.idle:
            self._newest = _Shown(mine, specs, stage.found, never_deferred(stage))
        return specs

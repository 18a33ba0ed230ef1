"""Which ranks add up the gradients that a rank computes: its group's, or all that have a copy of a tied parameter.

Stages with a copy each update it themselves, with the same sum and the same state of the optimizer, so all copies stay the
same. A micro-batch's gradients are added in the order in which stages go backward, as autograd does in one process.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

from torch import nn

from accept_mpi.codecs.coding import parse
from accept_mpi.comm.data_plane import DataPlane
from accept_mpi.comm.group_sum import Group, GroupSum
from accept_mpi.device.compute import here
from accept_mpi.errors import UserError
from accept_mpi.job import Job
from accept_mpi.models.parts import parameter_at
from accept_mpi.models.shared import Shared
from accept_mpi.pipeline.stage import Stage
from accept_mpi.pipeline.turns import hooked, sees_sums
from accept_mpi.plan import Plan
from accept_mpi.planning.codec_choice import EXACT, gradient_codec, sums_of
from accept_mpi.planning.ties import parted
from accept_mpi.training.early_gradients import EarlyGradients
from accept_mpi.training.gradient_sums import GradientSums, Part


class Summing:
    """What a plan has this rank sum with others."""

    def __init__(self, plan: Plan, rank: int, job: Job, shared: Callable[[], Iterable[Shared]]) -> None:
        """``shared`` says what layers share."""
        self._plan, self._rank, self._job, self._shared = plan, rank, job, shared

    @property
    def late(self) -> bool:
        """True if stages update as late as they may, since they wait for each other's norms (``schedule.Updates``): what is
        summed over ranks is there too late to tell its norm before."""
        waits = self._job.pipeline.schedule == "1f1b-delayed" and self._job.train.clip_norm is not None
        return waits and not self._plan.hybrid and not self._ties

    def check_hooks(self, stage: Stage) -> None:
        """Raise UserError if a hook of a parameter would not get the gradients that it gets in one process: those of all
        uses of a tied parameter; what the micro-batches so far have added up. Groups and lanes refuse hooks themselves."""
        if not hooked(stage.parameters):
            return
        mine = self._plan.place(self._rank).stage
        ties = [one for one, at in self._ties if mine in at]
        sums = sees_sums(stage.parameters)
        if wrong := [one for one in ties if sums or hooked([copy_of(one, stage)])]:
            raise UserError(f"pipeline.cuts: {wrong[0].text}, and a parameter has hooks, so no cut may part them")
        if sums and self.late:
            raise UserError(
                "pipeline.schedule: 1f1b-delayed with train.clip_norm sets each micro-batch's gradients aside, and a hook "
                f"in stage {mine} gets what they add up to (register_post_accumulate_grad_hook); take another schedule"
            )

    def connect(
        self, plane: DataPlane, stage: Stage, tables: Sequence[Sequence[int]], count_of: Callable[[int], int]
    ) -> GradientSums | None:
        """What sums a rank's gradients by step, if a group, its lanes, or stages with tied parameters do, or updates are
        ``late``; else None. ``tables``: the member of each stage's group that takes each micro-batch; ``count_of(step)``:
        number of micro-batches of a step. Creates channels, before the plane starts."""
        plan, place = self._plan, self._plan.place(self._rank)
        if place.idle:
            return None
        lanes = plan.stages[place.stage].lanes_of(self._rank)
        tied_here = any(place.stage in at for _, at in self._ties)
        if place.members == 1 and lanes == 1 and not self.late and not tied_here:
            return None
        table, sums_as = tables[place.stage], sums_of(self._job, plan)

        def mine(step: int) -> list[int]:
            return [k for k in range(count_of(step)) if table[k] == place.member]

        tied = self._tied(plane, stage, tables, count_of)
        apart = {n for part in tied for n in part.parameters}
        own = [n for n in range(len(stage.trained)) if n not in apart]
        sums = early = None
        if place.members > 1:
            # Numbers beyond those of the boundaries, since messages are told apart by them.
            group = Group(
                plan.stages[place.stage].ranks, place.member, place.stages + place.stage, [table], sums_as == EXACT
            )
            statistics = stage.statistics.size if stage.statistics else 0
            coding = parse(gradient_codec(sums_as), False)
            layers = [stage.trained_layers[n] for n in own]
            sums = GroupSum(plane, group, [stage.trained[n] for n in own], statistics, count_of, coding, layers)
            # Lanes compute with copies of the layers, and GPUs give gradients to the host: there nothing is passed on in B.
            if sums.layout is not None and lanes == 1 and here().backward_in_thread:
                early = EarlyGradients(stage, own, sums.layout, plane.shares_core)
        return GradientSums(stage, [Part(own, sums, early), *tied], mine)

    @cached_property
    def _ties(self) -> list[tuple[Shared, list[int]]]:
        """Parameters of which several stages have a copy."""
        return parted(self._shared(), self._plan) if self._job.parts_ties and len(self._plan.stages) > 1 else []

    def _tied(
        self, plane: DataPlane, stage: Stage, tables: Sequence[Sequence[int]], count_of: Callable[[int], int]
    ) -> list[Part]:
        """This rank's part in the sums of tied parameters; arguments as for ``connect``."""
        plan, found = self._plan, []
        mine, exact = plan.place(self._rank).stage, sums_of(self._job, plan) == EXACT
        places = {id(parameter): n for n, parameter in enumerate(stage.trained)}
        for number, (one, stages) in enumerate(self._ties):
            if mine not in stages:
                continue
            backward = list(reversed(stages))
            ranks = [rank for s in backward for rank in plan.stages[s].ranks]
            dealt = [[ranks.index(plan.stages[s].ranks[member]) for member in tables[s]] for s in backward]
            # Numbers beyond those of the stages' groups, and of what these learn of bases.
            channel = 3 * len(plan.stages) + number
            group = Group(ranks, ranks.index(self._rank), channel, dealt, exact, backward.index(mine))
            parameter = copy_of(one, stage)
            position = places[id(parameter)]
            at = next(n for n, of_stage in enumerate(stage.parameters) if of_stage is parameter)
            if at in stage.found.sparse:
                raise UserError(f"pipeline.cuts: {one.text}, with a sparse gradient (sparse=True), so no cut may part them")
            if f"parameter {at}" in stage.found.written:
                raise UserError(f"pipeline.cuts: {one.text}, and a forward writes to it, so no cut may part them")
            found.append(Part([position], GroupSum(plane, group, [stage.trained[position]], 0, count_of)))
        return found


def copy_of(one: Shared, stage: Stage) -> nn.Parameter:
    """A stage's copy of a tied parameter."""
    layer, name = next(place for place in one.places if 0 <= place[0] - stage.start < len(stage.layers))
    return parameter_at(stage.layers[layer - stage.start], name)

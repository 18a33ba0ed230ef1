"""A rank's channels to the stages before and after its own: one to each of their members."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from accept_mpi.codecs.basis import Bases, no_bases
from accept_mpi.codecs.coding import NONE, parse
from accept_mpi.codecs.tensors import BoundarySpecs
from accept_mpi.comm.channels import Channel
from accept_mpi.comm.data_plane import DataPlane
from accept_mpi.comm.ends import Receiver, Sender
from accept_mpi.direction import Direction
from accept_mpi.job import Job
from accept_mpi.pipeline.deal import widths
from accept_mpi.pipeline.schedule import flows, max_in_flight
from accept_mpi.plan import Place, Plan


@dataclass(frozen=True)
class Neighbour:
    """The stage at the other side of a boundary."""

    table: Sequence[int]
    """Member of its group that takes each micro-batch (``pipeline.deal``), for the longest step or evaluation."""
    come: Sequence[Receiver]
    """What its members send, by member."""
    go: Sequence[Sender]
    """What they are sent."""


@dataclass(frozen=True)
class StageChannels:
    """Channels to both neighbours; the methods give the one for micro-batch ``k``, None at the ends of the pipeline."""

    behind: Neighbour | None
    """The previous stage."""
    ahead: Neighbour | None
    """The next stage."""

    def activations_in(self, k: int) -> Receiver | None:
        return self.behind.come[self.behind.table[k]] if self.behind else None

    def activations_out(self, k: int) -> Sender | None:
        return self.ahead.go[self.ahead.table[k]] if self.ahead else None

    def gradients_in(self, k: int) -> Receiver | None:
        return self.ahead.come[self.ahead.table[k]] if self.ahead else None

    def gradients_out(self, k: int) -> Sender | None:
        return self.behind.go[self.behind.table[k]] if self.behind else None

    def drain(self, deadline: float) -> None:
        """Wait until all activations have been received. Raises DeadlineError after ``deadline`` seconds."""
        for sender in self.ahead.go if self.ahead else ():
            sender.drain(deadline)


def channels_to(
    plane: DataPlane,
    job: Job,
    plan: Plan,
    place: Place,
    tables: Sequence[Sequence[int]],
    most: int,
    behind: BoundarySpecs,
    ahead: BoundarySpecs,
    bases: Callable[[int], Bases],
) -> StageChannels:
    """Channels to all ranks of both neighbouring stages. A channel holds at most as many messages as the stage before it has
    micro-batches in flight.

    ``tables``: the member of each stage's group that takes each micro-batch; ``most``: of a step; ``behind``, ``ahead``:
    agreements about the boundaries; ``bases(step)``: those of this stage's outputs.
    """

    def end(peer: int, boundary: int, direction: Direction, signature: BoundarySpecs) -> Channel:
        kind, slack = job.pipeline.schedule, plan.slack
        count = 1 << 30 if flows(kind) else most
        limit = max_in_flight(kind, boundary, len(plan.stages), count, slack, widths(plan.stages))
        limit += max(widths(plan.stages)) if plan.laned else 0  # lanes need not end in order
        names = plan.boundaries[boundary]
        specs, seed = signature.direction(direction), job.train.seed
        forward = NONE if signature.unclear else parse(names.forward, False)
        coding = parse(names.backward, True) if direction is Direction.BACKWARD else forward
        trees = signature.trees if direction is Direction.FORWARD else {}
        of = bases if coding.basis else no_bases
        return Channel(peer, boundary, direction, specs, limit, coding, seed, trees, of)

    def neighbour(s: int, boundary: int, come: Direction, signature: BoundarySpecs) -> Neighbour | None:
        if place.idle or not 0 <= s < len(plan.stages):
            return None
        ranks, go = plan.stages[s].ranks, Direction(1 - come)
        coming = [plane.incoming(end(rank, boundary, come, signature)) for rank in ranks]
        going = [plane.outgoing(end(rank, boundary, go, signature)) for rank in ranks]
        return Neighbour(tables[s], coming, going)

    s = place.stage
    return StageChannels(neighbour(s - 1, s - 1, Direction.FORWARD, behind), neighbour(s + 1, s, Direction.BACKWARD, ahead))

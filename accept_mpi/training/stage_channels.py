"""A rank's channels to the stages before and after its own: one to each of their members."""

from collections.abc import Sequence
from dataclasses import dataclass

from accept_mpi.comm.ends import Receiver, Sender


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

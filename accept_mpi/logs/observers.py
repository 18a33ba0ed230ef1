"""What watches a run on rank 0. The training loop calls observers by these names and knows nothing else of them."""

from dataclasses import dataclass
from typing import Protocol

from accept_mpi.logs.format import Rows


@dataclass(frozen=True)
class StepDone:
    """One optimizer step, as the last stage saw it."""

    step: int
    """Updates made, this one included."""
    epoch: int
    samples: int
    loss: float
    accuracy: float
    lr: float
    end: float
    """Seconds since the run began."""
    samples_per_s: float


@dataclass(frozen=True)
class Evaluated:
    """One pass over the test set."""

    step: int
    epoch: int
    samples: int
    loss: float
    accuracy: float
    end: float


class Observer(Protocol):
    """Anything that wants to know."""

    def step(self, done: StepDone) -> None:
        """A step is done."""

    def evaluated(self, result: Evaluated) -> None:
        """The test set was run through."""

    def trace(self, rows: Rows) -> None:
        """A rank's trace rows (dtype ``log.TRACE``)."""

    def event(self, seconds: float, step: int, text: str) -> None:
        """Something else happened."""

    def close(self) -> None:
        """The run is over."""

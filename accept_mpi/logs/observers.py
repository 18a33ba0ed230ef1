"""The interface of observers, which follow a run on rank 0. The training loop knows only the methods of ``Observer``."""

from dataclasses import dataclass, field

from accept_mpi.logs.format import Rows


@dataclass(frozen=True)
class StepDone:
    """One optimizer step, as the last stage reports it."""

    step: int
    """Updates made so far, including this one."""
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
    metrics: dict[str, float] = field(default_factory=dict)

    def value(self, name: str) -> float:
        """The loss, the accuracy or a metric."""
        return {"loss": self.loss, "accuracy": self.accuracy, **self.metrics}[name]


class Observer:
    """Base class of whatever watches a run on rank 0; its methods do nothing."""

    def step(self, done: StepDone) -> None:
        """A step is done."""

    def evaluated(self, result: Evaluated) -> None:
        """An evaluation on the test set is done."""

    def trace(self, rows: Rows) -> None:
        """A rank's trace rows (dtype ``logs.format.TRACE``)."""

    def speed(self, rank: int, factor: float) -> None:
        """A rank that mostly waits reports that its device is slower than at the start, by ``factor``."""

    def event(self, seconds: float, step: int, text: str) -> None:
        """Something else happened, at ``seconds`` of the run."""

    def persist(self) -> None:
        """A checkpoint is on the disk. What has led to it should be, too, for a run that goes on from there."""

    def close(self) -> None:
        """The run is over."""
